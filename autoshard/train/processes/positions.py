"""The positions of all processes' batches in one checkpoint, and back to each process its own.

Processes that read whole batches are at the same position, which is kept once and holds for any number of them. Where
each reads rows of its own, each has a position, which is of as many processes as there were.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np

from autoshard.errors import ConfigError
from autoshard.shared_folder import in_all, of_all
from autoshard.strict_files import shortened
from autoshard.train.sources import Source

_BLOCK = 256
"""Bytes by which what is exchanged grows, so that few sizes of it are compiled."""


def gathered(position: Any, *, parted: bool) -> dict[str, Any]:
    """What a checkpoint keeps, the same in all processes, each of which calls this with its position.

    Args:
      position: strict JSON.
      parted: whether this process reads rows of its own, as `BatchPlacer.parted` says.

    Raises:
      ConfigError: it is no JSON; in the other processes `CheckpointError`.
    """
    if jax.process_count() == 1:
        return {"of_all": position}
    text = b""

    def encode() -> None:
        nonlocal text
        try:
            text = json.dumps([position, parted], sort_keys=True, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"batches: their `get_state` gives {shortened(position)}, which is no JSON: {error}. Let it give "
                "bytes, or numbers, text, lists and dictionaries"
            ) from None

    in_all(encode, "the position of the batches could not be read")
    sizes = of_all(np.asarray(len(text), np.int32))
    padded = np.zeros(-(-int(sizes.max()) // _BLOCK) * _BLOCK, np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    found = [json.loads(row[:size].tobytes()) for row, size in zip(of_all(padded), sizes, strict=True)]
    if any(reads for _, reads in found) or any(each != found[0] for each in found):
        return {"of_each": [each for each, _ in found]}
    return {"of_all": position}


def resume(source: Source, saved: Any) -> None:
    """Moves ``source`` to this process's position among those that `gathered` gave; all processes call it.

    Raises:
      ConfigError: the saved value is no such positions, or each is of one of another number of processes, or the source
        has no such position; where another process's has none, `CheckpointError`.
    """
    in_all(lambda: source.set_state(_own(saved)), "the saved position of the batches could not be taken")


def _own(saved: Any) -> Any:
    count = jax.process_count()
    match saved:
        case {"of_all": position, **rest} if not rest:
            return position
        case {"of_each": [*positions], **rest} if not rest and len(positions) > 1:
            if len(positions) == count:
                return positions[jax.process_index()]
            raise ConfigError(
                f"the batches were saved by {len(positions)} processes, each of which reads rows of its own, and "
                f"this run has {count}: nothing says which rows {'it has' if count == 1 else 'each has'} still to "
                f"read. Go on with {len(positions)} processes, or start over in another folder; whole batches, the "
                "same in every process, go on with any number"
            )
        case _:
            raise ConfigError(
                f"the saved position of the batches is {shortened(saved)}, and has neither one 'of_all' processes nor "
                "a list 'of_each' of several: no run of `autoshard.train` saved it. Start over in another folder"
            )
