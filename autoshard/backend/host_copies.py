"""Copies of a layer's values to the host's memory and back, so that XLA for TPU runs them beside a layer's products.

XLA sends a value in the iteration after the one that makes it, and fetches it in the one before that reads it. In
between it is in the loop's carry, where only one iteration's fits: the product that makes the next one waits until it
has been sent, and the next one is not fetched until nothing reads it (libtpu 0.0.50.1: 0.3 of 9.3 ms of products beside
what a loop of two of them sent, 9.3 from a place of its own). So what is sent is a copy, and so is what is read. XLA
removes a copy that it sees: here it cannot know that the condition of a choice holds.

To send and to fetch earlier XLA takes one iteration out of the loop. There it may read what stays on the device in
another layout than in the loop, and copies all layers to that before: a decoder of twelve layers of 2,048 took 4.5 GiB
more for that. A slice that such a loop stacks, and one that is read of it, is therefore put in one layout, that of
XLA's kernels: the first dimension major, the last one minor, and of two between them the longer one next to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from autoshard import jaxpr as jx


def beside_products(eqn: jx.JaxprEqn) -> list[jx.JaxprEqn]:
    """The equations that copy an operand to another memory as ``eqn`` does, by way of a place of its own on the
    device."""
    space = jx.aval(eqn.outvars[0]).memory_space

    def send(x: jax.Array) -> jax.Array:
        return jax.device_put(_copy(x), space)

    def fetch(x: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier(_copy(jax.device_put(x, space)))

    return jx.splice(send if space == jax.memory.Space.Host else fetch, eqn, eqn.invars)


def _copy(x: jax.Array) -> jax.Array:
    x, always = jax.lax.optimization_barrier((x, jnp.bool_(True)))
    return jax.lax.select_n(always, jnp.zeros_like(x), x)


def stacks_beside_copies(jaxpr: jx.Jaxpr, moves: Callable[[jx.JaxprEqn], bool]) -> set[jx.Var]:
    """What scans of ``jaxpr`` stack on the device while they send slices of something else to the host's memory.

    Args:
      moves: whether an equation copies to the host's memory or from it.
    """
    found = set[jx.Var]()
    for eqn in jaxpr.eqns:
        groups = jx.scan_groups(eqn)
        if groups is not None and any(moves(e) and _on_host(e.outvars[0]) for e in jx.regions(eqn)[0].body.eqns):
            found.update(v for v in eqn.outvars[groups.carry :] if not _on_host(v))
    return found


def in_one_layout(
    body: jx.Jaxpr,
    scan: jx.JaxprEqn,
    stacks: Container[jx.Var],
    shard_shape: Callable[[jx.Var], Sequence[int]],
    lanes: int,
) -> jx.Jaxpr:
    """The ``body`` of ``scan`` with slices of ``stacks`` in one layout; itself where it has none.

    Args:
      shard_shape: of a slice on one device.
      lanes: elements of the minor dimension that the chip computes with at once; a shorter one is padded to them.
    """
    groups = jx.scan_groups(scan)
    assert groups is not None
    starts, ends, before, after = list(body.invars), list(body.outvars), list[jx.JaxprEqn](), list[jx.JaxprEqn]()
    for k in range(groups.consts + groups.carry, len(starts)):
        stack, row = scan.invars[k], starts[k]
        if isinstance(stack, jx.Var) and stack in stacks and (order := _order(row, shard_shape(row), lanes)):
            starts[k] = jx.Var(row.aval)
            before += _in_layout(starts[k], row, order, scan)
    for k in range(groups.carry, len(ends)):
        row = ends[k]
        if scan.outvars[k] in stacks and isinstance(row, jx.Var) and (order := _order(row, shard_shape(row), lanes)):
            ends[k] = made = jx.Var(row.aval)
            after += _in_layout(row, made, order, scan)
    if not before and not after:
        return body
    return jx.with_eqns(body, [*before, *body.eqns, *after], invars=starts, outvars=ends)


def _on_host(var: jx.Var) -> bool:
    return jx.aval(var).memory_space == jax.memory.Space.Host


def _order(var: jx.Var, shape: Sequence[int], lanes: int) -> tuple[int, ...] | None:
    """The dimensions of ``var``, whose shards have ``shape``, from major to minor; None where XLA has not been seen to
    choose two layouts: for an attention's result, of five dimensions, and for the sums of its rows, which fill no
    lanes."""
    if not jx.is_array(var) or len(shape) not in (3, 4) or shape[-1] < lanes:
        return None
    return (0, *sorted(range(1, len(shape) - 1), key=shape.__getitem__), len(shape) - 1)


def _in_layout(source: jx.Var, result: jx.Var, order: tuple[int, ...], like: jx.JaxprEqn) -> list[jx.JaxprEqn]:
    return jx.splice(lambda x: with_layout_constraint(x, Layout(order)), like.replace(outvars=[result]), [source])
