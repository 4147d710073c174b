"""halo: what a part of an operand reads of its neighbours, and how parts send each other their edges.

Where windows slide over a dimension, row ``j`` of what they make reads rows around ``j * step`` of it. A part then
needs some rows before its own and some behind, of as many neighbours as have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

Permutation = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class HaloWindow:
    """Row ``j`` of ``count`` reads rows ``(j * step - low) / base`` to ``(j * step - low + reach - 1) / base`` of
    ``size``, as far as there are such."""

    input_size: int
    output_size: int
    stride: int = 1
    padding_low: int = 0
    window_size: int = 1
    base_dilation: int = 1

    @property
    def is_aligned(self) -> bool:
        """Whether every part reads from the same place of its own rows on."""
        return self.input_size * self.base_dilation == self.output_size * self.stride

    def halo_rows(self, parts: int) -> tuple[int, int]:
        """How many rows a part reads before its own, and behind, at most. ``parts`` divides both sizes."""
        own, made = self.input_size // parts, self.output_size // parts
        starts = [max(0, -((self.padding_low - k * made * self.stride) // self.base_dilation)) for k in range(1, parts)]
        ends = [((k * made - 1) * self.stride - self.padding_low + self.window_size - 1) // self.base_dilation for k in range(1, parts)]
        before = max((k * own - first for k, first in enumerate(starts, 1)), default=0)
        behind = max((min(self.input_size - 1, last) + 1 - k * own for k, last in enumerate(ends, 1)), default=0)
        return max(0, before), max(0, behind)


@dataclass(frozen=True, slots=True)
class Halo:
    """Along dimension ``dim`` of operand ``operand``, parts of a rule's operation read as ``window`` says."""

    operand: int
    dim: int
    window: HaloWindow


def rows_per_hop(rows: int, own: int) -> list[int]:
    """How many of ``rows`` each neighbour sends, the nearest first, of ``own`` that each has."""
    return [min(own, rows - n) for n in range(0, rows, own)]


def with_halo(x: Any, axes: tuple[str, ...], dim: int, before: int, behind: int) -> Any:
    """A part with so many rows of its neighbours on either side; beyond the first and the last part there are zeros.

    It is used inside `jax.shard_map`; ``axes`` are the mesh axes that split dimension ``dim`` of ``x``.
    """
    parts, own = lax.axis_size(axes), x.shape[dim]
    above, below = rows_per_hop(before, own), rows_per_hop(behind, own)
    pieces = [
        permute_shards(lax.slice_in_dim(x, own - n, own, axis=dim), axes, [(p, p + hop) for p in range(parts - hop)])
        for hop, n in reversed(list(enumerate(above, 1)))
    ]
    pieces.append(x)
    pieces += [
        permute_shards(lax.slice_in_dim(x, 0, n, axis=dim), axes, [(p + hop, p) for p in range(parts - hop)])
        for hop, n in enumerate(below, 1)
    ]
    return lax.concatenate(pieces, dim) if len(pieces) > 1 else x


def permute_shards(x: Any, axes: tuple[str, ...], pairs: Permutation) -> Any:
    """`jax.lax.ppermute` over axes in any order; it takes them in the mesh's alone."""
    order = tuple(a for a in jax.sharding.get_abstract_mesh().axis_names if a in axes) or axes
    ranks = np.arange(lax.axis_size(axes)).reshape([lax.axis_size(a) for a in order])
    rank = ranks.transpose([order.index(a) for a in axes]).ravel()
    return lax.ppermute(x, order, [(int(rank[a]), int(rank[b])) for a, b in pairs])
