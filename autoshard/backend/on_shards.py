"""What each device does in an island beside the operation itself: it adds halos, and reduces partial results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from autoshard.backend.rings import ring as one_ring
from autoshard.backend.rings.ring import Ring, first_ring
from autoshard.ir.halo import permute_shards, with_halo
from autoshard.ir.rule import Rule
from autoshard.ir.spec import Axes, Spec
from autoshard.machine.collective import REDUCE_SCATTER, collective_seconds
from autoshard.machine.mesh import LogicalMesh
from autoshard.plan.decisions import Island


def extend_with_halos(operands: Sequence[Any], rule: Rule, island: Island, sizes: Mapping[str, int]) -> tuple[Any, ...]:
    """The shards extended by the rows that they read of their neighbours, where that is not left to XLA."""
    found = list(operands)
    for halo in rule.halos:
        axes = island.in_specs[halo.operand].dims[halo.dim]
        if axes and rule.kind(rule.halo_factor(halo)) != "halo":
            rows = halo.window.halo_rows(math.prod(sizes[a] for a in axes))
            found[halo.operand] = with_halo(found[halo.operand], axes, halo.dim, *rows)
    return tuple(found)


def reduce_partials(x: Any, spec: Spec, reduced: Spec, mesh: LogicalMesh) -> Any:
    """``x``, a shard of a result with ``spec``, sliced and all-reduced or reduce-scattered over its partial axes to
    ``reduced``, one dimension after the other, so that a slow link comes last and carries less.
    """
    partial = dict(spec.partial)
    added = {d: axes for d, split in enumerate(reduced.dims) if (axes := split[len(spec.dims[d]) :])}
    for d in min(itertools.permutations(added), key=lambda order: _seconds_in_order(order, added, partial, x, mesh)):
        for scattered, axes in itertools.groupby(added[d], partial.__contains__):
            group = tuple(axes)
            x = _reduce_scatter(x, d, group, mesh) if scattered else _own_part(x, d, group)
            partial = {a: kind for a, kind in partial.items() if a not in group}
    for kind in dict.fromkeys(partial.values()):
        axes = tuple(a for a, k in partial.items() if k == kind)
        if kind in _REDUCERS:
            x = _REDUCERS[kind](x, axes)
        else:  # JAX has no collective for this reduction
            shards = jax.lax.all_gather(x, axes)
            x = jnp.prod(shards, axis=0, dtype=x.dtype) if kind == "prod" else _BITWISE[kind].reduce(shards, axis=0)
    return x


def _seconds_in_order(
    order: Sequence[int], added: Mapping[int, Axes], partial: Container[str], x: Any, mesh: LogicalMesh
) -> float:
    """Seconds to scatter ``x`` over the axes that are ``added`` to its dimensions, in this ``order`` of them."""
    return _seconds_over(itertools.chain.from_iterable(added[d] for d in order), partial, x.nbytes, mesh)


def _seconds_over(axes: Iterable[str], partial: Container[str], size: int, mesh: LogicalMesh) -> float:
    """Seconds to scatter ``size`` bytes over one axis after the other, or to slice them along those not ``partial``."""
    seconds = 0.0
    for axis in axes:
        seconds += collective_seconds(REDUCE_SCATTER, (axis,), size, mesh) if axis in partial else 0.0
        size //= mesh.shape[axis]
    return seconds


def reduce_in_rings(x: Any, spec: Spec, reduced: Spec, mesh: LogicalMesh) -> Any:
    """As `reduce_partials`, with rings in place of reduce-scatters."""
    while ring := first_ring(spec, reduced, x.shape, mesh.shape, one_ring.MIN_SUM):
        x, spec = ring.sum(x), ring.left
    return reduce_partials(x, spec, reduced, mesh)


def product_in_ring(
    ring: Ring,
    operation: Callable[..., Any],
    operands: Sequence[Any],
    reduced: Spec,
    mesh: LogicalMesh,
    beside: Sequence[Any] = (),
) -> Any:
    """The shard of a product's result, summed in a ring and over what other axes there are, to ``reduced``."""
    summed = ring.product(lambda *cut: jax.tree.leaves(operation(*cut))[0], operands, beside)
    return in_order(reduce_in_rings(summed, ring.left, ring.placed, mesh), ring.placed, reduced, mesh)


def in_order(x: Any, placed: Spec, asked: Spec, mesh: LogicalMesh) -> Any:
    """A shard of an array that is ``placed``, as it is ``asked`` for: the same axes split each dimension, perhaps in
    another order, in which devices have each other's shards."""
    for before, after in zip(placed.dims, asked.dims, strict=True):
        if before != after:
            devices = np.arange(mesh.axes_size(after)).reshape([mesh.shape[a] for a in after])
            now_at = devices.transpose([after.index(a) for a in before]).ravel()  # by the number of the shard
            x = permute_shards(x, after, [(int(device), shard) for shard, device in enumerate(now_at)])
    return x


def _own_part(x: Any, dim: int, axes: Axes) -> Any:
    """This device's part of ``x``, which is the same along ``axes``, in dimension ``dim``."""
    n = x.shape[dim] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * n, n, dim)


def _reduce_scatter(x: Any, dim: int, axes: Axes, mesh: LogicalMesh) -> Any:
    """The sum of partial sums over ``axes``, scattered along dimension ``dim``.

    One reduce-scatter an axis, since XLA for TPU (JAX 0.12) turns one over two axes into an all-reduce and a slice. It
    does so also of one along another than the major dimension: where the axes do not come in the order in which they
    split the dimension, so that a slow link comes last and carries less, the parts are put into that order first.
    """
    order = min(itertools.permutations(axes), key=lambda order: _scatter_seconds(order, axes, x.nbytes, mesh))
    if order == axes:
        for axis in axes:
            x = jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
        return x
    before, after, parts = x.shape[:dim], x.shape[dim + 1 :], [mesh.shape[a] for a in axes]
    x = x.reshape(*before, *parts, x.shape[dim] // math.prod(parts), *after)
    x = jnp.moveaxis(x, [dim + axes.index(a) for a in order], range(len(order)))
    for axis in order:
        x = jax.lax.psum_scatter(x, axis, scatter_dimension=0)
    return x


def _scatter_seconds(order: Axes, axes: Axes, size: int, mesh: LogicalMesh) -> float:
    """Seconds to scatter ``size`` bytes over one axis after the other, and to put them into another order than
    ``axes``.
    """
    moved = 0.0 if order == axes else 2 * size / mesh.hardware.memory_rate
    return moved + _seconds_over(order, order, size, mesh)


_REDUCERS = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}
_BITWISE = {"and": jnp.bitwise_and, "or": jnp.bitwise_or}
