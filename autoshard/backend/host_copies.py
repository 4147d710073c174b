"""Copies of a layer's values to the host's memory and back, so that XLA for TPU runs them beside a layer's products.

XLA sends a value in the iteration after the one that makes it. A value is fetched in the iteration before the one that
reads it (`autoshard.backend.gathers.rows_ahead`). In between it is in the loop's carry, where only one iteration's
fits: the product that makes the next one waits until it has been sent, and the next one is not fetched until nothing
reads it (libtpu 0.0.50.1: 0.3 of 9.3 ms of products beside what a loop of two of them sent, 9.3 from a place of its
own). So what is sent is a copy, and so is what is read. XLA removes a copy that it sees: here it cannot know that the
condition of a choice holds.

XLA schedules from an iteration's end. It begins a fetch in the last place before the values are needed where it has
nothing else to put, such as beside a permute of a ring that sums a gradient: 5 ms before an iteration's end where two
fetches take 17. So a product in the middle of the iteration waits for them (`products_that_wait`).

To send and to fetch earlier XLA takes one iteration out of the loop. There it may read what stays on the device in
another layout than in the loop, and copies all layers to that before: a decoder of twelve layers of 2,048 took 4.5 GiB
more for that. A slice that such a loop stacks, and one that is read of it, is therefore put in one layout, that of
XLA's kernels: the first dimension major, the last one minor, and of two between them the longer one next to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from autoshard import jaxpr as jx
from autoshard.cost.overlap.host_copies import copied_beside_products
from autoshard.cost.overlap.products import innermost_loops, product_seconds, products_by_loop
from autoshard.cost.overlap.weights_and_gradients import gradients_of
from autoshard.ir.graph import Graph
from autoshard.jaxpr.arguments import in_host_memory
from autoshard.machine.host_link import FROM_HOST, layer_seconds
from autoshard.machine.mesh import LogicalMesh
from autoshard.plan.record import PlanRecord

Order = tuple[int, ...] | None
"""Of the dimensions of an array, from major to minor; None: as XLA chooses."""


class Wait(NamedTuple):
    """A product of a loop that begins when values of the next iteration have been fetched from the host."""

    operands: tuple[int, ...]
    """Their positions, those first that fewer of the iteration's products are computed before: weights."""
    fetched: tuple[int, ...]


def sent(eqn: jx.JaxprEqn, order: Order = None) -> list[jx.JaxprEqn]:
    """The equations that copy an operand to the host's memory as ``eqn`` does, from a place of its own on the
    device, in the ``order`` of its dimensions if there is one."""
    space = jx.aval(eqn.outvars[0]).memory_space
    return jx.splice(lambda x: jax.device_put(_ordered(_copy(x), order), space), eqn, eqn.invars)


def fetched(eqn: jx.JaxprEqn, order: Order = None) -> tuple[list[jx.JaxprEqn], jx.Var]:
    """The equations that copy an operand to the device's memory as ``eqn`` does, in the ``order`` of its dimensions if
    there is one, to be read in a place of its own there; and what they fetch."""
    space, arrived = jx.aval(eqn.outvars[0]).memory_space, jx.new_var(eqn.outvars[0])
    fetch = jx.splice(lambda x: _ordered(jax.device_put(x, space), order), eqn.replace(outvars=[arrived]), eqn.invars)
    own = jx.splice(lambda x: jax.lax.optimization_barrier(_copy(x)), eqn, [arrived])
    return [*fetch, *own], arrived


def _ordered(x: jax.Array, order: Order) -> jax.Array:
    return x if order is None else with_layout_constraint(x, Layout(order))


def products_that_wait(graph: Graph, plan: PlanRecord) -> dict[int, Wait]:
    """The products, by node, that wait for what their loop fetches for its next iteration: the first before which
    others take as long as the copies, or the last one."""
    mesh, nodes, loop_of = plan.mesh, graph.nodes, innermost_loops(graph)
    moved = [n for n in copied_beside_products(graph) if nodes[n].kind.host_transfer == FROM_HOST]
    shards = {c.value: c.spec.num_shards(mesh.shape) for c in plan.intermediates if c.node is None}
    found = dict[int, Wait]()
    for inside in products_by_loop(graph) if moved else ():
        copies = [n for n in moved if loop_of[n] == loop_of[inside[0]]]
        if copies:
            values = tuple(nodes[n].results[0] for n in copies)
            sizes = [nodes[n].kind.bytes[0] / shards.get(v, mesh.size) for n, v in zip(copies, values, strict=True)]
            n, operands = _product_after(sum(sizes) / mesh.hardware.host_bandwidth, graph, inside, mesh)
            found[n] = Wait(operands, values)
    return found


def _product_after(
    seconds: float, graph: Graph, inside: Sequence[int], mesh: LogicalMesh
) -> tuple[int, tuple[int, ...]]:
    """The first product of a loop before which others take ``seconds``, or the last one, with its operands, those
    first that are there first. Gradients may all come after a product that others read, and do where SparseCores
    scatter them."""
    ready, gradients = _seconds_before(graph, inside, mesh), gradients_of(graph)
    late = mesh.hardware.sparse_core_collectives

    def is_gradient(n: int) -> bool:
        return not gradients.isdisjoint(graph.nodes[n].results)

    order = sorted(inside, key=lambda n: (late and is_gradient(n), ready[n][0], is_gradient(n), n))
    before = {True: 0.0, False: 0.0}  # a gradient, and what others read
    found = order[-1]
    for n in order:
        if before[is_gradient(n)] >= seconds:
            found = n
            break
        before[True] += _seconds([n], graph, mesh)
        before[False] += 0.0 if is_gradient(n) else _seconds([n], graph, mesh)
    _, operands = ready[found]
    return found, tuple(sorted(range(len(operands)), key=operands.__getitem__))


def _seconds_before(graph: Graph, inside: Sequence[int], mesh: LogicalMesh) -> dict[int, tuple[float, list[float]]]:
    """Of each product of a loop, seconds of those that it is computed of, and of those that each of its operands is:
    as soon as they are done XLA computes it, of several at the same time gradients last."""
    before, found, products = dict[int, frozenset[int]](), dict[int, tuple[float, list[float]]](), {*inside}
    for n in range(inside[0], inside[-1] + 1):
        read = [before.get(v, frozenset()) for v in graph.nodes[n].operands]
        together = frozenset[int]().union(*read)
        if n in products:
            found[n] = _seconds(together, graph, mesh), [_seconds(r, graph, mesh) for r in read]
        before.update(dict.fromkeys(graph.nodes[n].results, together | {n} if n in products else together))
    return found


def _seconds(products: Collection[int], graph: Graph, mesh: LogicalMesh) -> float:
    return layer_seconds(sum(product_seconds(graph.nodes[n].kind, mesh) for n in sorted(products)), mesh)


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
        if groups is not None and any(
            moves(e) and in_host_memory(e.outvars[0].aval) for e in jx.regions(eqn)[0].body.eqns
        ):
            found.update(v for v in eqn.outvars[groups.carry :] if not in_host_memory(v.aval))
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
        if isinstance(stack, jx.Var) and stack in stacks and (order := one_order(row, shard_shape(row), lanes)):
            starts[k] = jx.Var(row.aval)
            before += _in_layout(starts[k], row, order, scan)
    for k in range(groups.carry, len(ends)):
        row = ends[k]
        if scan.outvars[k] in stacks and isinstance(row, jx.Var) and (order := one_order(row, shard_shape(row), lanes)):
            ends[k] = made = jx.Var(row.aval)
            after += _in_layout(row, made, order, scan)
    if not before and not after:
        return body
    return jx.with_eqns(body, [*before, *body.eqns, *after], invars=starts, outvars=ends)


def one_order(var: jx.Var, shape: Sequence[int], lanes: int) -> Order:
    """The dimensions of ``var``, whose shards have ``shape``, from major to minor; None where XLA has not been seen to
    choose two layouts: for an attention's result, of five dimensions, and for the sums of its rows, which fill no
    lanes."""
    if not jx.is_array(var) or len(shape) not in (3, 4) or shape[-1] < lanes:
        return None
    return (0, *sorted(range(1, len(shape) - 1), key=shape.__getitem__), len(shape) - 1)


def _in_layout(source: jx.Var, result: jx.Var, order: tuple[int, ...], like: jx.JaxprEqn) -> list[jx.JaxprEqn]:
    return jx.splice(lambda x: with_layout_constraint(x, Layout(order)), like.replace(outvars=[result]), [source])
