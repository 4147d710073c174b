"""Halos: the rows of neighbouring shards that a shard reads where a window slides over a split dimension.

Result row ``j`` of a windowed operation (convolution, pooling) reads operand rows around ``j * stride``. A shard then
needs some rows before and some after its own, from one neighbour or several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

Permutation = Sequence[tuple[int, int]]
"""(source, destination) pairs of shard numbers, as `jax.lax.ppermute` takes them."""


@dataclass(frozen=True, slots=True)
class HaloWindow:
    """A window that slides along one dimension.

    Result row ``j`` reads operand rows ``(j * stride - padding_low) / base_dilation`` to
    ``(j * stride - padding_low + window_size - 1) / base_dilation``, as far as they exist.
    """

    input_size: int
    output_size: int
    stride: int = 1
    padding_low: int = 0
    window_size: int = 1
    base_dilation: int = 1

    @property
    def is_aligned(self) -> bool:
        """Whether a shard's window starts at the same offset from its own rows in every shard."""
        return self.input_size * self.base_dilation == self.output_size * self.stride

    def halo_rows(self, parts: int) -> tuple[int, int]:
        """Rows that a shard reads before its own and after its own, the most of any. ``parts`` divides both sizes."""
        own, results = self.input_size // parts, self.output_size // parts
        reach = self.window_size - 1 - self.padding_low
        first_rows = [
            max(0, -((self.padding_low - k * results * self.stride) // self.base_dilation)) for k in range(1, parts)
        ]
        last_rows = [((k * results - 1) * self.stride + reach) // self.base_dilation for k in range(1, parts)]
        before = max((k * own - first for k, first in enumerate(first_rows, 1)), default=0)
        after = max((min(self.input_size - 1, last) + 1 - k * own for k, last in enumerate(last_rows, 1)), default=0)
        return max(0, before), max(0, after)


@dataclass(frozen=True, slots=True)
class Halo:
    """``window`` slides over dimension ``dim`` of operand ``operand`` of a rule's operation."""

    operand: int
    dim: int
    window: HaloWindow


def rows_per_hop(rows: int, own: int) -> list[int]:
    """How many of the ``rows`` of a halo each neighbour sends, the nearest first, if each has ``own`` rows."""
    return [min(own, rows - n) for n in range(0, rows, own)]


def with_halo(x: Any, axes: tuple[str, ...], dim: int, before: int, after: int) -> Any:
    """Shard ``x`` with ``before`` and ``after`` rows of its neighbours; zeros beyond the first and the last shard.

    For use inside `jax.shard_map`; ``axes`` are the mesh axes that split dimension ``dim`` of ``x``.
    """
    parts, own = lax.axis_size(axes), x.shape[dim]
    hops_before, hops_after = rows_per_hop(before, own), rows_per_hop(after, own)
    pieces = [
        permute_shards(lax.slice_in_dim(x, own - n, own, axis=dim), axes, [(p, p + hop) for p in range(parts - hop)])
        for hop, n in reversed(list(enumerate(hops_before, 1)))
    ]
    pieces.append(x)
    pieces += [
        permute_shards(lax.slice_in_dim(x, 0, n, axis=dim), axes, [(p + hop, p) for p in range(parts - hop)])
        for hop, n in enumerate(hops_after, 1)
    ]
    return lax.concatenate(pieces, dim) if len(pieces) > 1 else x


def permute_shards(x: Any, axes: tuple[str, ...], pairs: Permutation) -> Any:
    """`jax.lax.ppermute` over ``axes`` in any order; JAX's own takes them in mesh order only."""
    order = tuple(a for a in jax.sharding.get_abstract_mesh().axis_names if a in axes) or axes
    ranks = np.arange(lax.axis_size(axes)).reshape([lax.axis_size(a) for a in order])
    rank = ranks.transpose([order.index(a) for a in axes]).ravel()
    return lax.ppermute(x, order, [(int(rank[a]), int(rank[b])) for a, b in pairs])
