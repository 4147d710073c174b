"""The passes that a user can name: rewrites of the traced program before it is planned, each a file or a folder."""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.passes.accumulate import Accumulate
from autoshard.passes.attention import Attention
from autoshard.passes.dead_code import DeadCode
from autoshard.passes.one_hot import OneHot
from autoshard.passes.pad_uneven import PadUneven
from autoshard.passes.recompute import Recompute
from autoshard.passes.sum_products import SumProducts
from autoshard.passes.transposed_products import TransposedProducts
from autoshard.transforms.pipeline import Pass

KNOWN: Mapping[str, type[Pass]] = {
    p.name: p for p in (Accumulate, Attention, DeadCode, OneHot, PadUneven, Recompute, SumProducts, TransposedProducts)
}
"""The passes by the name that a user writes in ``passes=[...]``."""

__all__ = [
    "KNOWN",
    "Accumulate",
    "Attention",
    "DeadCode",
    "OneHot",
    "PadUneven",
    "Recompute",
    "SumProducts",
    "TransposedProducts",
]
