"""Gathers and scatters at positions counted along a dimension, as in ``x[jnp.arange(n), labels]``, as batched ones.

A batched dimension is parallel: a part of it is gathered from the same part of the operand and the indices. Where it is
indexed by its own positions, nothing in the operation says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx


def with_batched_indices(jaxpr: jx.Jaxpr) -> jx.Jaxpr:
    """``jaxpr``, not the bodies in it, with such gathers and scatters batched; itself where there are none."""
    made = {v: e for e in jaxpr.eqns for v in e.outvars}
    batched = {e: new for e in jaxpr.eqns if (new := _batched(e, made)) is not None}
    return jx.with_eqns(jaxpr, [new for e in jaxpr.eqns for new in batched.get(e, [e])]) if batched else jaxpr


def _batched(eqn: jx.JaxprEqn, made: Mapping[jx.Var, jx.JaxprEqn]) -> list[jx.JaxprEqn] | None:
    if eqn.primitive not in _FIELDS or not isinstance(eqn.invars[1], jx.Var):
        return None
    columns = made.get(eqn.invars[1])
    dropped, index_map, batching, positions = _FIELDS[eqn.primitive]
    numbers = eqn.params["dimension_numbers"]
    rank = len(jx.aval(eqn.invars[1]).shape)
    if columns is None or columns.primitive is not _prims.concatenate_p or columns.params["dimension"] != rank - 1:
        return None
    if getattr(numbers, batching) or any(jx.aval(a).shape[-1] != 1 for a in columns.invars):
        return None
    shape = jx.aval(eqn.invars[0]).shape
    along: dict[int, int] = {}
    for d, column in zip(getattr(numbers, index_map), columns.invars, strict=True):
        p = _counted(column, made)
        if p is None or d not in getattr(numbers, dropped) or p == rank - 1 or p in along.values():
            continue
        if jx.aval(eqn.invars[1]).shape[p] == shape[d]:
            along[d] = p
    kept = [(d, a) for d, a in zip(getattr(numbers, index_map), columns.invars, strict=True) if d not in along]
    if not along or not kept:
        return None
    changed = {
        dropped: tuple(d for d in getattr(numbers, dropped) if d not in along),
        index_map: tuple(d for d, _ in kept),
        batching: tuple(sorted(along)),
        positions: tuple(along[d] for d in sorted(along)),
    }
    params = eqn.params | {"dimension_numbers": numbers._replace(**changed), "indices_are_sorted": False}

    def fun(x: Any, *rest: Any) -> Any:
        columns, others = rest[: len(kept)], rest[len(kept) :]
        indices = lax.concatenate(columns, rank - 1)
        return eqn.primitive.bind(x, indices, *others, **params)

    return jx.splice(fun, eqn, [eqn.invars[0], *(a for _, a in kept), *eqn.invars[2:]])


_FIELDS: Mapping[jx.Primitive, tuple[str, str, str, str]] = {
    _prims.gather_p: (
        "collapsed_slice_dims",
        "start_index_map",
        "operand_batching_dims",
        "start_indices_batching_dims",
    ),
} | dict.fromkeys(
    (_prims.scatter_p, _prims.scatter_add_p, _prims.scatter_max_p, _prims.scatter_min_p, _prims.scatter_mul_p),
    (
        "inserted_window_dims",
        "scatter_dims_to_operand_dims",
        "operand_batching_dims",
        "scatter_indices_batching_dims",
    ),
)
"""Fields of the dimension numbers: dimensions that slices lack, indexed ones, batched ones of either operand."""


def _counted(atom: jx.Atom, made: Mapping[jx.Var, jx.JaxprEqn]) -> int | None:
    """The dimension along which the elements of ``atom`` are their positions, 0, 1, 2, ...; None where none is."""
    eqn = made.get(atom) if isinstance(atom, jx.Var) else None
    found = _COUNTED.get(eqn.primitive) if eqn is not None else None
    return found(eqn, made) if found is not None and eqn is not None else None


def _through_broadcast(eqn: jx.JaxprEqn, made: Mapping[jx.Var, jx.JaxprEqn]) -> int | None:
    d = _counted(eqn.invars[0], made)
    if d is None:
        return None
    to = eqn.params["broadcast_dimensions"][d]
    return to if eqn.params["shape"][to] == jx.aval(eqn.invars[0]).shape[d] else None


def _through_cast(eqn: jx.JaxprEqn, made: Mapping[jx.Var, jx.JaxprEqn]) -> int | None:
    d = _counted(eqn.invars[0], made)
    last = 0 if d is None else jx.aval(eqn.invars[0]).shape[d] - 1
    dtype = jx.aval(eqn.outvars[0]).dtype
    return d if np.issubdtype(dtype, np.integer) and last <= np.iinfo(dtype).max else None


def _through_select(eqn: jx.JaxprEqn, made: Mapping[jx.Var, jx.JaxprEqn]) -> int | None:
    """What is selected where the positions are not negative: the positions."""
    which, counted = eqn.invars[:2]
    test = made.get(which) if isinstance(which, jx.Var) else None
    if test is None or test.primitive is not _prims.lt_p or test.invars[0] is not counted:
        return None
    bound = test.invars[1]
    return _counted(counted, made) if isinstance(bound, jx.Literal) and np.all(np.asarray(bound.val) <= 0) else None


_COUNTED: Mapping[jx.Primitive, Callable[[jx.JaxprEqn, Mapping[jx.Var, jx.JaxprEqn]], int | None]] = {
    _prims.broadcast_in_dim_p: _through_broadcast,
    _prims.convert_element_type_p: _through_cast,
    _prims.iota_p: lambda eqn, made: eqn.params["dimension"],
    _prims.select_n_p: _through_select,
}
