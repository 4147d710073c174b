"""Carried state that a step brings in whole from the host's memory: each array when its update is due.

XLA for TPU begins such a copy as soon as its operand is there, which an argument is from the step's first instruction
on, whatever an optimization barrier says (libtpu 0.0.50.1): an 8B decoder on v5e:2x2 had 2 GiB of moments of its
embedding and head on each chip through the whole backward part. Nothing is taken out of a branch. So the copy is in
one whose condition always holds, which XLA cannot know. It comes after a barrier of what the program makes before it,
so that one update's arrays are there at a time, as `passes/offload/` orders them, and of what the update reads that is
there last: the gradient. The other branch returns that, since XLA drops what no branch reads, and barriers at last.

What both branches return has the layout in which XLA has the argument: that with the least padding. In another one XLA
copies the argument to the device, back to the host, and to the device once more.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from autoshard import jaxpr as jx
from autoshard.cost.memory import elements_in_tiles


def fetched_in_turn(jaxpr: jx.Jaxpr, arrays: Mapping[jx.Var, tuple[int, ...]]) -> jx.Jaxpr:
    """``jaxpr`` with the copies to the device that it makes of these arguments whole, each after what is made before.
    Itself where it makes none.

    Args:
      arrays: with the order of their dimensions in the device's memory, from major to minor.
    """
    if not arrays:
        return jaxpr
    on_host, eqns, fetches = {**arrays}, list[jx.JaxprEqn](), False
    ready, last = dict[jx.Var, int](), list[jx.Var]()
    for n, eqn in enumerate(jaxpr.eqns):
        if not _is_of_one(eqn, on_host):
            eqns.append(eqn)
        elif jx.aval(eqn.outvars[0]).memory_space == jax.memory.Space.Host:  # constrained
            eqns.append(eqn)
            on_host[eqn.outvars[0]] = on_host[_variables(eqn)[0]]
        else:
            read, fetches = _read_with(jaxpr, n, ready), True
            known = [*last, *([max(read, key=ready.__getitem__)] if read else [])]
            fetched = functools.partial(_fetched, Layout(on_host[_variables(eqn)[0]]))
            eqns += jx.splice(fetched, eqn, [eqn.invars[0], *dict.fromkeys(known)])
        waits = bool(jx.regions(eqn)) or bool(jx.contraction_flops(eqn))
        made = {v: n if waits else max((ready.get(a, -1) for a in _variables(eqn)), default=-1) for v in eqn.outvars}
        ready |= {v: at for v, at in made.items() if _is_on_device(v)}
        last = [v for v in eqn.outvars if _is_on_device(v)][-1:] or last
    return jx.with_eqns(jaxpr, eqns) if fetches else jaxpr


def least_padded(shape: Sequence[int], tile: tuple[int, int]) -> tuple[int, ...] | None:
    """The order of the dimensions of an array of this ``shape``, from major to minor, in which tiles of (rows, columns)
    pad it least; None of three dimensions and more, of which XLA has not been seen to choose so."""
    if len(shape) != 2:
        return (0,) if len(shape) == 1 else None
    a, b = shape
    return (0, 1) if elements_in_tiles(a, b, tile) <= elements_in_tiles(b, a, tile) else (1, 0)


def _fetched(layout: Layout, x: jax.Array, *known: jax.Array) -> jax.Array:
    *_, always = jax.lax.optimization_barrier((*known, jnp.bool_(True)))
    like = [k for k in known[-1:] if (k.shape, k.dtype) == (x.shape, x.dtype)]

    def fetch(x: jax.Array, *_: jax.Array) -> jax.Array:
        return with_layout_constraint(jax.device_put(x, jax.memory.Space.Device), layout)

    def other(_: jax.Array, *like: jax.Array) -> jax.Array:
        return with_layout_constraint(like[0] if like else jnp.zeros(x.shape, x.dtype), layout)

    return jax.lax.cond(always, fetch, other, x, *like)


def _is_of_one(eqn: jx.JaxprEqn, arrays: Mapping[jx.Var, Any]) -> bool:
    """Whether it makes one of ``arrays`` again, there or in another memory."""
    read = _variables(eqn)
    if len(eqn.invars) != 1 or len(eqn.outvars) != 1 or arrays.keys().isdisjoint(read):
        return False
    before, after = jx.aval(read[0]), jx.aval(eqn.outvars[0])
    return before.shape == after.shape and before.dtype == after.dtype


def _read_with(jaxpr: jx.Jaxpr, n: int, made: Container[jx.Var]) -> list[jx.Var]:
    """The arrays among ``made`` that are read by what depends on the result of the ``n``-th equation."""
    depends, found = {*jaxpr.eqns[n].outvars}, list[jx.Var]()
    for eqn in jaxpr.eqns[n + 1 :]:
        read = _variables(eqn)
        if not depends.isdisjoint(read):
            depends.update(eqn.outvars)
            found += [a for a in read if a in made]
    return found


def _variables(eqn: jx.JaxprEqn) -> list[jx.Var]:
    return [a for a in eqn.invars if isinstance(a, jx.Var)]


def _is_on_device(var: jx.Var) -> bool:
    """Whether it is an array of the device, and no number."""
    return jx.is_array(var) and jx.aval(var).memory_space == jax.memory.Space.Device and bool(jx.aval(var).shape)
