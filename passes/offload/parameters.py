"""Parameters of layers that wait in the host's memory: the loops over layers that read them bring in a row at a time.

XLA copies a layer's row while it computes the layer before. A loop over some of the layers reads its rows of the whole
array by number: to slice that first would be a copy within the host's memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard import jaxpr as jx


@dataclass(frozen=True)
class _Rows:
    """Rows of an array: those from ``first`` on, cast to each of ``casts`` in turn."""

    array: jx.Var
    first: int = 0
    casts: tuple[Any, ...] = ()

    @property
    def is_array(self) -> bool:
        """Whether it is the array itself, or its first rows."""
        return not self.first and not self.casts


def read_by_layer(jaxpr: jx.Jaxpr, arrays: Iterable[jx.Var]) -> set[jx.Var]:
    """Those of ``arrays`` that loops over layers can read from the host's memory: what else depends on them is no
    product and feeds none, as an optimizer's update."""
    on_host = {v: jx.host_var(v) for v in arrays}
    left = with_rows_from_host(jaxpr, on_host)
    depends: dict[jx.Var, frozenset[jx.Var]] = {v: frozenset({v}) for v in on_host}
    multiplied = frozenset[jx.Var]()
    for e in left.eqns:
        of = frozenset[jx.Var]().union(*(depends.get(a, ()) for a in e.invars if isinstance(a, jx.Var)))
        if of and any(map(jx.contraction_flops, (e, *(i for r in jx.regions(e) for i in jx.walk(r.body))))):
            multiplied |= of
        depends.update(dict.fromkeys(e.outvars, of))
    read = {a for e in left.eqns for a in e.invars if isinstance(a, jx.Var)}
    return {v for v, host in on_host.items() if host in read} - multiplied


def with_rows_from_host(jaxpr: jx.Jaxpr, on_host: Mapping[jx.Var, jx.Var]) -> jx.Jaxpr:
    """``jaxpr`` with loops over layers that read rows of arrays from the host's memory.

    Args:
      on_host: by array, what it is there. What else reads the array reads it from the device, as before.
    """
    rows = {v: _Rows(v) for v in on_host}
    eqns = list[jx.JaxprEqn]()
    for e in jaxpr.eqns:
        source = rows.get(e.invars[0]) if e.invars and isinstance(e.invars[0], jx.Var) else None
        if source is not None and (found := _as_rows(e, source)):
            rows[e.outvars[0]] = found
        eqns += _reading(e, rows, on_host)
    return jx.eliminate_dead_code(jx.with_eqns(jaxpr, eqns))


def _as_rows(eqn: jx.JaxprEqn, source: _Rows) -> _Rows | None:
    """The result of ``eqn``, which reads ``source``, as rows of the same array; None where it is something else."""
    if eqn.primitive is lax.convert_element_type_p:
        return _Rows(source.array, source.first, (*source.casts, eqn.params["new_dtype"]))
    if eqn.primitive is not lax.slice_p or any(s != 1 for s in eqn.params["strides"] or ()):
        return None
    first, *others = eqn.params["start_indices"]
    same_rows = not any(others) and jx.aval(eqn.outvars[0]).shape[1:] == jx.aval(source.array).shape[1:]
    return _Rows(source.array, source.first + first, source.casts) if same_rows else None


def _reading(eqn: jx.JaxprEqn, rows: Mapping[jx.Var, _Rows], on_host: Mapping[jx.Var, jx.Var]) -> list[jx.JaxprEqn]:
    """``eqn``; a loop with the rows that it reads in turn from the host's memory, and so a loop around it."""
    groups = jx.scan_groups(eqn)
    read = {k: rows[a] for k, a in enumerate(eqn.invars) if isinstance(a, jx.Var) and a in rows} if groups else {}
    if groups is None or not read:
        return [eqn]
    consts, carried = groups.consts, groups.consts + groups.carry
    operands, body = list(eqn.invars), jx.regions(eqn)[0].body
    starts, outside = list(body.invars), jx.outside_autodiff(eqn)
    body, hosts = _within(body, [starts[k] for k, r in read.items() if k < consts and r.is_array])
    for k in [k for k in read if starts[k] in hosts]:
        operands[k], starts[k] = on_host[read[k].array], hosts[starts[k]]
    stacks = {k: (r, on_host[r.array]) for k, r in read.items() if k >= carried}
    whole = {k for k, (r, host) in stacks.items() if not r.first and jx.aval(host).shape[0] == groups.length}
    arrays = {host: jx.new_var(host) for k, (_, host) in stacks.items() if k not in whole}
    numbers, before = dict[int, tuple[jx.Atom, jx.Var]](), list[jx.JaxprEqn]()  # by the first row: all, and one
    for first in dict.fromkeys(r.first for k, (r, _) in stacks.items() if k not in whole):
        eqns, (made,) = jx.emit(functools.partial(_numbers, first, groups.length), outside)
        before, numbers[first] = [*before, *eqns], (made, _row_of(made))
    fetched, like = list[jx.JaxprEqn](), body.eqns[0] if body.eqns else outside
    for k, (r, host) in stacks.items():
        row, source = starts[k], [arrays[host], numbers[r.first][1]] if k not in whole else [_row_of(host)]
        operands[k], starts[k] = host, source[0]
        fetched += jx.splice(functools.partial(_brought_in, casts=r.casts), like.replace(outvars=[row]), source)
    kept = [k for k in range(carried, len(operands)) if k not in stacks or k in whole]

    def ends(of: Sequence[Any], more: Iterable[Any], numbered: Iterable[Any]) -> list[Any]:
        return [*of[:consts], *more, *of[consts:carried], *(of[k] for k in kept), *numbered]

    inputs = ends(starts, arrays.values(), (number for _, number in numbers.values()))
    sizes = consts + len(arrays), groups.carry, len(kept) + len(numbers)
    return [
        *before,
        jx.rebuild_scan(
            eqn,
            jx.with_eqns(body, [*fetched, *body.eqns], invars=inputs),
            sizes,
            ends(operands, arrays, (stack for stack, _ in numbers.values())),
            eqn.outvars,
        ),
    ]


def _within(body: jx.Jaxpr, arrays: Sequence[jx.Var]) -> tuple[jx.Jaxpr, dict[jx.Var, jx.Var]]:
    """``body`` with loops that read the inputs ``arrays`` from the host's memory where nothing else reads them, and
    what these are there."""
    hosts = {v: jx.host_var(v) for v in arrays}
    left = jx.use_counts(with_rows_from_host(body, hosts)) if hosts else {}
    hosts = {v: host for v, host in hosts.items() if not left[v]}
    return (with_rows_from_host(body, hosts) if hosts else body), hosts


def _row_of(stack: jx.Atom) -> jx.Var:
    """A new variable for a row of ``stack``."""
    return jx.Var(jx.aval(stack).update(shape=jx.aval(stack).shape[1:]))


def _numbers(first: int, length: int) -> jax.Array:
    return first + lax.iota(jnp.int32, length)


def _brought_in(x: jax.Array, number: jax.Array | None = None, *, casts: Sequence[Any]) -> jax.Array:
    """A row on the device: ``x``, or that of this number of ``x``."""
    if number is not None:
        x = lax.dynamic_index_in_dim(x, number, keepdims=False)
    return functools.reduce(lax.convert_element_type, casts, jax.device_put(x, jax.memory.Space.Device))
