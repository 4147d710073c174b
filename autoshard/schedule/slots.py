"""Operations of a pipeline's stages, where parts of the model are, and what an operation needs first."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Operation(enum.StrEnum):
    """What a stage does for one micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward."""
    INPUT_GRADIENT = "I"
    """The part of a backward that makes the gradient of the stage's input, which the stage before waits for."""
    WEIGHT_GRADIENT = "W"
    """The rest of a backward whose `INPUT_GRADIENT` part is done: nothing waits for it."""


class Slot(NamedTuple):
    """What a stage runs at one tick."""

    operation: Operation
    chunk: int
    """Which of the stage's parts of the model, from 0."""
    microbatch: int


Placement = tuple[tuple[int, ...], ...]
"""``placement[chunk][stage]``: which part of the model, counted from its input, that chunk of the stage is."""
Key = tuple[Operation, int, int]
"""An operation, the part of the model, and the micro-batch."""


def looped(stages: int, chunks: int) -> Placement:
    """The model goes round all stages, ``chunks`` times."""
    return tuple(tuple(range(chunk * stages, (chunk + 1) * stages)) for chunk in range(chunks))


def v_shaped(stages: int) -> Placement:
    """The model goes from the first stage to the last and back, so that the first holds its beginning and its end."""
    return (tuple(range(stages)), tuple(range(2 * stages - 1, stages - 1, -1)))


def needs(slot: Slot, stage: int, placement: Placement) -> tuple[Key, ...]:
    """What has to be done at an earlier tick."""
    part = placement[slot.chunk][stage]
    last = len(placement) * len(placement[0]) - 1
    match slot.operation:
        case Operation.FORWARD:
            return ((Operation.FORWARD, part - 1, slot.microbatch),) if part else ()
        case Operation.WEIGHT_GRADIENT:
            return ((Operation.INPUT_GRADIENT, part, slot.microbatch),)
        case _:
            after = ((slot.operation, part + 1, slot.microbatch),) if part < last else ()
            return ((Operation.FORWARD, part, slot.microbatch), *after)


def label(slot: Slot | None, chunks: int) -> str:
    """Such as ``F3``; ``F3.1`` of the second chunk where there are several; a dot where a stage is idle."""
    if slot is None:
        return "."
    return f"{slot.operation}{slot.microbatch}" + (f".{slot.chunk}" if chunks > 1 else "")


def describe(key: Key, placement: Placement) -> str:
    """Such as ``F3 of stage 1``."""
    operation, part, microbatch = key
    chunk, stage = next((c, row.index(part)) for c, row in enumerate(placement) if part in row)
    return f"{label(Slot(operation, chunk, microbatch), len(placement))} of stage {stage}"
