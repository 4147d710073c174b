"""Evaluating a jaxpr over another mesh than the one it was traced for, with some of its axes manual or without them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import source_info_util as _source
from jax._src.shard_map import shard_map_p as _shard_map_p
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core import primitives as _prims
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from autoshard.jaxpr.nested import regions, with_bodies
from autoshard.jaxpr.rewrite import bind_equation
from autoshard.jaxpr.value import aval

_CONSTRAINT = _prims.sharding_constraint_p
_SCATTERS = frozenset({_prims.scatter_p, _prims.scatter_add_p, _prims.scatter_max_p, _prims.scatter_min_p})


def is_constraint(eqn: JaxprEqn) -> bool:
    """Whether ``eqn`` is a `with_sharding_constraint`, an identity."""
    return eqn.primitive is _CONSTRAINT


def is_shard_map(eqn: JaxprEqn) -> bool:
    """Whether ``eqn`` is a `jax.shard_map`."""
    return eqn.primitive is _shard_map_p


def replay(jaxpr: Jaxpr, operands: Sequence[Any], apart: str) -> list[Any]:
    """The results of ``jaxpr`` on ``operands``, evaluated over the mesh of the context and not that of its trace.

    Args:
      apart: a mesh axis that `shard_map`s leave alone, and, where it is manual in the context, constraints too.
    """
    mesh = jax.sharding.get_abstract_mesh()
    values: dict[Var, Any] = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    values.update(zip(jaxpr.invars, operands, strict=True))
    for eqn in jaxpr.eqns:
        read = [_number(a) if isinstance(a, Literal) else values[a] for a in eqn.invars]
        values.update(zip(eqn.outvars, replay_equation(eqn, read, mesh, apart), strict=True))
    return [_number(a) if isinstance(a, Literal) else values[a] for a in jaxpr.outvars]


def _number(literal: Literal) -> Any:
    """The value of ``literal`` without the mesh of its trace, which JAX may keep in its type."""
    return literal.val if aval(literal).weak_type else np.asarray(literal.val)


def replay_equation(eqn: JaxprEqn, operands: Sequence[Any], mesh: AbstractMesh, apart: str) -> list[Any]:
    """The results of ``eqn`` on ``operands`` over ``mesh``, that of the context; ``apart`` as in `replay`."""
    if eqn.primitive is _CONSTRAINT:
        spec = PartitionSpec(*(_without(entry, mesh.manual_axes) for entry in eqn.params["sharding"].spec))
        with _source.user_context(eqn.source_info.traceback, name_stack=eqn.source_info.name_stack):
            return [jax.lax.with_sharding_constraint(operands[0], NamedSharding(mesh, spec))]
    if eqn.primitive is _shard_map_p:
        p = eqn.params
        part = jax.shard_map(
            lambda *shards: replay(p["jaxpr"], shards, apart),
            mesh=mesh,
            in_specs=tuple(p["in_specs"]),
            out_specs=list(p["out_specs"]),
            axis_names=set(p["newly_manual_axes"]) - {apart},
            check_vma=p["check_vma"],
        )
        return list(part(*operands))
    whole = eqn.primitive in _SCATTERS and mesh.manual_axes and sum(mesh.shape[a] > 1 for a in mesh.auto_axes) > 1
    if whole:  # XLA (JAX 0.12) aborts where it splits one over some of the axes that are not manual
        operands = [_replicated(x, mesh) for x in operands]
    if bodies := [_retraced(r.body, apart) for r in regions(eqn)]:
        eqn = with_bodies(eqn, bodies)
    with eqn.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
        results = bind_equation(eqn, operands, eqn.params)
    return [_replicated(x, mesh) for x in results] if whole else results


def _replicated(x: Any, mesh: AbstractMesh) -> Any:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))


def _retraced(body: Jaxpr, apart: str) -> Jaxpr:
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in map(aval, body.invars)]
    return jax.make_jaxpr(lambda *xs: replay(body, xs, apart))(*shapes)


def _without(entry: Any, axes: Sequence[str]) -> Any:
    """An entry of a `PartitionSpec` without ``axes``."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return entry
    left = tuple(a for a in ((entry,) if isinstance(entry, str) else entry) if a not in axes)
    return left or None
