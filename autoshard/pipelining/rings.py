"""Slots of values on a stage, and values that conditionals return."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import primitives as prims
from jax.sharding import NamedSharding, PartitionSpec

from autoshard import jaxpr as jx
from autoshard.pipelining.stage_dims import finest_split


def cast_as(values: list[Any], like: Sequence[jx.Var]) -> list[Any]:
    """``values`` as arrays of the dtypes of ``like``: literals among them have weak types."""
    return [jnp.asarray(x, jx.aval(v).dtype) for x, v in zip(values, like, strict=True)]


def zeros(shape: tuple[int, ...], like: jx.Atom) -> Any:
    """Zeros of the dtype of ``like``."""
    return jnp.zeros(shape, jx.aval(like).dtype)


def pick(ring: Any, slot: Any) -> Any:
    """What ``ring`` has in a slot; of -1, that of the first, which nothing reads."""
    return lax.dynamic_index_in_dim(ring, jnp.maximum(slot, 0), 0, keepdims=False)


def put(ring: Any, x: Any, slot: Any) -> Any:
    """``ring`` with ``x`` in a slot; unchanged where that is -1."""
    at = jnp.maximum(slot, 0)
    kept = jnp.where(slot >= 0, x, lax.dynamic_index_in_dim(ring, at, 0, keepdims=False))
    return lax.dynamic_update_index_in_dim(ring, kept, at, 0)


type Rings = dict[str, list[Any]]
"""Slots with a row for each layer, [slot, row, ...], by what they hold."""


@dataclass(frozen=True)
class Rows:
    """What a slot has of each layer."""

    ring: Any
    """[slot, row, ...], or which of `Rings`."""
    slot: Any
    spec: PartitionSpec | None = None
    """As the plan splits a row, if it says so: else XLA may exchange whole rings for it."""
    dropped: int = 0
    """First dimensions of ``spec`` that a row lacks."""

    def row(self, rings: Rings, index: Any) -> Any:
        """That of a row."""
        ring = rings[self.ring[0]][self.ring[1]] if isinstance(self.ring, tuple) else self.ring
        at = (self.slot, index, *(0,) * (ring.ndim - 2))
        row = lax.dynamic_slice(ring, at, (1, 1, *ring.shape[2:])).reshape(ring.shape[2:])
        return laid_out(row, self.spec, 0, self.dropped, whole=True) if isinstance(self.ring, tuple) else row


def laid_out(x: Any, spec: PartitionSpec | None, added: int = 0, dropped: int = 0, *, whole: bool = False) -> Any:
    """``x``, a ring or a row of one, as `split_as` splits it, in the layout that conditionals give what goes through
    them. In another one, which suits those who read its rows, XLA would copy a ring whole, to that layout and back.

    A row that the plan does not say how to split, XLA's partitioner (JAX 0.12) may gather here: copies cost more.
    """
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    split = functools.partial(split_as, spec=spec, added=added, dropped=dropped, whole=whole)
    return split(with_layout_constraint(split(x), Layout(tuple(range(x.ndim)))))


def put_row(ring: Any, x: Any, slot: Any, row: Any) -> Any:
    """``ring`` [slot, row, ...] with ``x`` [1, ...] in one row of a slot."""
    return lax.dynamic_update_slice(ring, x[None], (slot, row, *(0,) * (ring.ndim - 2)))


def add_row(sums: Any, x: Any, chunk: Any, row: Any) -> Any:
    """``sums`` [chunk, row, ...] with ``x`` [1, ...] added to one row."""
    at = (chunk, row, *(0,) * (sums.ndim - 2))
    before = lax.dynamic_slice(sums, at, (1, *x.shape))
    return lax.dynamic_update_slice(sums, before + x[None].astype(sums.dtype), at)


def added_at(stacked: Any, index: Any, x: Any) -> Any:
    """``stacked`` [index, ...] with ``x`` added to one row; of booleans, whether either has one."""
    row = stacked.at[index]
    return row.max(x) if stacked.dtype == bool else row.add(x.astype(stacked.dtype))


def summed(x: Any, axis: str, spec: PartitionSpec | None = None) -> Any:
    """The sum over the stages, each device's part of it by itself; of booleans, whether any has one.

    Args:
      spec: as the plan splits ``x``, if it says so.
    """
    x = on_shards(x, spec)
    total = lax.psum(x.astype(jnp.int32), axis).astype(x.dtype) if x.dtype == bool else lax.psum(x, axis)
    return split_as(on_shards(total, spec), spec, whole=True)


def planned_specs(body: jx.Jaxpr) -> Mapping[jx.Var, PartitionSpec]:
    """How the plan splits variables of ``body`` where its equations say so: constraints, casts of what they constrain,
    `jax.shard_map`s over all axes, and scans, which constrain what they carry."""
    found: dict[jx.Var, PartitionSpec] = {}
    for eqn in body.eqns:
        if jx.is_constraint(eqn):
            found[eqn.outvars[0]] = spec = eqn.params["sharding"].spec
            known = [(eqn.invars[0], spec)]
        elif eqn.primitive is prims.convert_element_type_p:
            (x,), (y,) = eqn.invars, eqn.outvars
            known = [(y, found.get(x))] if isinstance(x, jx.Var) else []
        elif sides := jx.manual_specs(eqn):
            known = zip([*eqn.invars, *eqn.outvars], itertools.chain(*sides), strict=True)
        elif groups := jx.scan_groups(eqn):
            within = jx.regions(eqn)[0].body
            carried, specs = within.invars[groups.consts :][: groups.carry], planned_specs(within)
            known = [(y, specs.get(v)) for v, y in zip(carried, eqn.outvars, strict=False)]
        else:
            continue
        for atom, spec in known:
            if isinstance(atom, jx.Var) and spec is not None:
                found.setdefault(atom, spec)
    return found


def sent_specs(values: Iterable[jx.Var], specs: Mapping[jx.Var, PartitionSpec]) -> Mapping[jx.Var, PartitionSpec]:
    """The specs of ``values``; of one that another of the same shape refines, that: an activation is sent split as its
    gradient is, or XLA would exchange the one where a conditional returns either."""
    shapes = {v: jx.aval(v).shape for v in values if v in specs}
    dims = {v: [*specs[v], *[None] * (len(shape) - len(specs[v]))] for v, shape in shapes.items()}

    def refines(fine: jx.Var, coarse: jx.Var) -> bool:
        return shapes[fine] == shapes[coarse] and all(
            b is None or a == b for a, b in zip(dims[fine], dims[coarse], strict=True)
        )

    return {v: specs[next((o for o in shapes if refines(o, v) and dims[o] != dims[v]), v)] for v in shapes}


def split_as(x: Any, spec: PartitionSpec | None, added: int = 0, dropped: int = 0, *, whole: bool = False) -> Any:
    """``x`` with the dimensions that ``spec`` splits split so; as it is where that is None.

    Args:
      added, dropped: dimensions that ``x`` has ahead of those of ``spec``, and first ones of ``spec`` that it lacks.
      whole: what ``spec`` does not split is kept whole. Else it is left to XLA, which may know from what comes after
        the loop that less is enough.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if spec is None or not mesh.auto_axes:
        return x
    rest = None if whole else PartitionSpec.UNCONSTRAINED
    entries = [PartitionSpec.UNCONSTRAINED] * added + [axes or rest for axes in spec[dropped:]]
    entries += [rest] * (x.ndim - len(entries))
    if all(axes is PartitionSpec.UNCONSTRAINED for axes in entries):
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*entries)))


def on_shards(x: Any, spec: PartitionSpec | None, added: int = 0) -> Any:
    """``x`` split as finely as it can be: over the axes of ``spec``, and over others that are automatic; as it is where
    the plan does not say how it is split.

    Args:
      added: dimensions that ``x`` has ahead of those of ``spec``.
    """
    if spec is None:
        return x
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {axis: mesh.shape[axis] for axis in mesh.auto_axes}
    dims = [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in spec]
    dims += [()] * (x.ndim - added - len(dims))
    return split_as(x, PartitionSpec(*finest_split(x.shape[added:], dims, sizes)), added)


def without_specs(results: Any) -> Any:
    """``results`` of a branch, as a tree, with their specs left open.

    XLA (JAX 0.12) refuses a conditional of which two branches end in constraints to different specs.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.auto_axes:
        return results
    return jax.tree.map(
        lambda x: lax.with_sharding_constraint(
            x, NamedSharding(mesh, PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * x.ndim))
        ),
        results,
    )


def choose(
    condition: Any, if_true: Any, if_false: Any, *operands: Any, once_in: int = 1, together: bool = False
) -> Any:
    """`jax.lax.cond`, whose branches may constrain what they return.

    Args:
      once_in: of so many runs, on a stage where it ever holds, the condition holds in one.
      together: run both branches, so that devices of all stages meet in what they have in them.
    """
    if together:
        return kept_where(condition, if_true(*operands), if_false(*operands))
    with jx.branch_runs((once_in, 1), once_in):
        return lax.cond(
            condition, lambda *xs: without_specs(if_true(*xs)), lambda *xs: without_specs(if_false(*xs)), *operands
        )


def kept_where(condition: Any, if_true: Any, if_false: Any) -> Any:
    """One of two trees of arrays, by a scalar."""
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(condition, a, b), if_true, if_false)
