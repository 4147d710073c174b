"""MaxText's own steps, as `benchmarks/maxtext_steps.py` kept them, to be read as autoshard's are.

What kernels compute is in the names that autoshard's have, by which `autoshard.backend.estimate` counts them: MaxText's
are given such names, by what their shapes and their own descriptions say.
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

from benchmarks.answers import Answer
from benchmarks.maxtext_steps import file_of

_GROUPED = re.compile(
    r"(operand_layout_constraints=\{[^=]*?\bbf16\[(\d+),\d+\][^=]*?frontend_attributes=\{kernel_metadata=\{\n"
    r'.*\n\}\}, metadata=\{op_name="[^"]*/)jit\((t?gmm)\)/pallas_call"'
)
"""MegaBlocks' kernels for TPU: rows [m, k] with matrices [groups, k, n], or with rows [m, n]."""
_EXCHANGE = re.compile(r"( = (?:\(\(.*?\}\), )?bf16\[)(\d+)(,.* )ragged-(all-to-all(?:-start)?\()")
"""An all-to-all of rows, as many to each device as are of its experts: its result has all places. Where something else
waits for it, operands are before the result in a tuple."""


def kept_answer(steps: Path, name: str, seq: int, rows: int = 0) -> Answer | None:
    """What the compiler made of a row of `maxtext_steps.ROWS`; None where nothing is kept.

    Args:
      seq: tokens of a sequence.
      rows: how many rows products of ragged groups have on a device with an even load; 0: as many as places.
    """
    path = file_of(steps, name)
    if not path.exists():
        return None
    said = json.loads(gzip.decompress(path.read_bytes()))
    return Answer(**said | {"text": _with_rows(_with_blocks(said["text"], seq), rows)})


def _with_blocks(text: str, seq: int) -> str:
    """HLO whose causal attention kernels say in their scope, as autoshard's do, how many blocks they compute."""
    for size in set(re.findall(r'block_q\\?": (\d+)', text)):
        blocks = seq // int(size)
        scope = f"splash_blocks_{blocks * (blocks + 1) // 2}_of_{blocks**2}"
        text = text.replace("jit(_splash_attention)/", f"{scope}/jit(_splash_attention)/")
    return text


def _with_rows(text: str, rows: int) -> str:
    """HLO whose kernels for products of ragged groups are named as XLA's, with the rows that they have, and whose
    exchanges of rows send so many."""
    named = _GROUPED.sub(lambda found: f'{found[1]}rows_{rows or found[2]}_of_{found[2]}/{found[3]}/ragged-dot"', text)
    named = _EXCHANGE.sub(lambda found: f"{found[1]}{rows or found[2]}{found[3]}{found[4]}", named)
    if "gmm)/pallas_call" in named or re.search(r" ragged-all-to-all(-start)?\(", named):
        raise ValueError("products of ragged groups, or exchanges of rows, in other words than those of MaxText 0.2.5")
    return named
