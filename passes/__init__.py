"""passes: rewrites of the traced program before it is planned, each a file or a folder, by the name that a user gives.

In comes a `Program`, out goes a `Program` with the same arguments, results and effects. `autoshard.transforms.pipeline`
has the contract and checks it after every pass; `autoshard.api` says which passes run by default. Passes do not import
each other, nor rules: what an operation is they ask of the program's rule table.

May import: transforms, cost, and what they may.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.passes.accumulate import Accumulate
from autoshard.passes.attention import Attention
from autoshard.passes.attention_operands import AttentionOperands
from autoshard.passes.dead_code import DeadCode
from autoshard.passes.experts import Experts
from autoshard.passes.losses import Losses
from autoshard.passes.microbatch import Microbatch
from autoshard.passes.norms import Norms
from autoshard.passes.offload import Offload
from autoshard.passes.one_hot import OneHot
from autoshard.passes.pad_uneven import PadUneven
from autoshard.passes.recompute import Recompute
from autoshard.passes.rotary import Rotary
from autoshard.passes.sum_products import SumProducts
from autoshard.passes.transposed_products import TransposedProducts
from autoshard.transforms.pipeline import Pass

PASSES: Mapping[str, type[Pass]] = {
    p.name: p
    for p in (
        Accumulate,
        Attention,
        AttentionOperands,
        DeadCode,
        Experts,
        Losses,
        Microbatch,
        Norms,
        Offload,
        OneHot,
        PadUneven,
        Recompute,
        Rotary,
        SumProducts,
        TransposedProducts,
    )
}
"""The passes by the name that a user writes in ``passes=[...]``."""

__all__ = [
    "PASSES",
    "Accumulate",
    "Attention",
    "AttentionOperands",
    "DeadCode",
    "Experts",
    "Losses",
    "Microbatch",
    "Norms",
    "Offload",
    "OneHot",
    "PadUneven",
    "Recompute",
    "Rotary",
    "SumProducts",
    "TransposedProducts",
]
