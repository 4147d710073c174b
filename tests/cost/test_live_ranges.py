"""Live ranges: which values are buffers, and when, on programs small enough to tell by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost.live_ranges import find_live_ranges
from autoshard.cost.liveness import Liveness
from autoshard.ir.build_graph import build_graph
from autoshard.ir.graph import Graph
from autoshard.machine.mesh import LogicalMesh
from autoshard.passes import SumProducts
from tests.programs import CHIP, graph, mesh, program

W = (64, 64)


def buffers(g: Graph, least: int = 64 * 64 * 2) -> list[tuple[str, float]]:
    """The buffers of at least ``least`` bytes: defining operation, and share of the value's bytes."""
    made = {v: n.kind.op for n in g.nodes for v in n.results}
    r = find_live_ranges(g)
    found = zip(r.values, r.scale, strict=True)
    return sorted((made.get(int(v), "argument"), float(s)) for v, s in found if g.values[v].bytes * s >= least)


def test_elementwise_consumers_are_fused_into_a_product():
    g = graph(lambda x, w: (jnp.tanh(x @ w) * 2).sum(0) @ w, (W, W), mesh(a=1))
    assert buffers(g) == [("mul", 1.0)]


def test_fused_values_are_recomputed_in_the_backward_pass():
    def loss(w, x):
        return ((jax.nn.silu(x @ w[0]) @ w[1]) ** 2).sum()

    g = graph(jax.grad(loss), ((2, *W), W), mesh(a=1))
    r = find_live_ranges(g)
    kept = [g.values[v] for v in r.values[r.residuals] if g.values[v].shape == W]
    assert len(kept) == 2  # the two products; not silu, nor its derivative


def test_a_product_is_fused_with_the_one_value_that_it_is_read_through():
    def gated(x, w):
        h = x @ w
        return (h * jax.nn.sigmoid(h)) @ w

    assert buffers(graph(lambda x, w: gated(x, w).sum(), (W, W), mesh(a=1))) == [("dot_general", 1.0), ("mul", 1.0)]


def test_operands_and_results_of_library_products_are_materialized():
    library = replace(mesh(a=1), hardware=replace(CHIP, fused_products=False))

    def fun(x, w):
        return (jnp.tanh((x @ w).T) @ w).sum()

    assert buffers(graph(fun, (W, W), mesh(a=1))) == [("dot_general", 1.0), ("tanh", 1.0)]
    assert buffers(graph(fun, (W, W), library)) == [("dot_general", 1.0), ("dot_general", 1.0), ("tanh", 1.0)]


@pytest.mark.parametrize(("rows", "kept"), [(512, 1), (2048, 0)])
def test_small_sources_of_a_library_s_fusions_do_not_count(rows, kept):
    """Such as the sums that a norm's gradient is computed from."""
    library = replace(mesh(a=1), hardware=replace(CHIP, fused_products=False))

    def fun(x):
        h = x
        for n in range(9):
            h = h * jax.lax.cumsum(x.sum(0) + n)
        return jnp.tanh(h).sum(0), (h * h).sum(0)

    for on, expected in ((library, kept), (mesh(a=1), 1)):
        g = graph(fun, ((rows, 64),), on)
        r = find_live_ranges(g)
        whole = [v for v in r.values if g.values[v].shape == (rows, 64) and v not in g.inputs]
        assert len(whole) == expected


def test_a_value_that_crosses_a_barrier_is_materialized():
    def fun(x, w):
        return (jax.lax.optimization_barrier(jnp.tanh(x)) @ w).sum()

    assert buffers(graph(fun, (W, W), mesh(a=1))) == [("dot_general", 1.0), ("tanh", 1.0)]


def scanned(w, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0].sum()


def test_a_stacked_residual_is_live_from_its_loop_s_start_to_the_end_of_the_loop_that_reads_it():
    g = graph(jax.grad(scanned), ((5, *W), W), mesh(a=1))
    r = find_live_ranges(g)
    (forward, backward) = sorted(g.loops)
    stacks = [i for i in r.residuals if g.values[r.values[i]].shape == (5, *W)]
    assert stacks
    for i in stacks:
        assert r.first[i] == forward[0]
        assert r.last[i] == backward[1]


def test_a_conversion_of_sliced_weights_is_hoisted_out_of_the_loop():
    def narrow(w, x):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w.astype(jnp.bfloat16)), None), x, w)[0].sum()

    args = (jax.ShapeDtypeStruct((5, *W), jnp.float32), jax.ShapeDtypeStruct(W, jnp.bfloat16))
    g = graph(narrow, args, mesh(a=1))
    r = find_live_ranges(g)
    halves = [(g.values[v].shape, s) for v, s in zip(r.values, r.scale, strict=True) if s != 1]
    assert halves == [((5, *W), 0.5)]


def test_a_sum_is_written_in_place_of_a_dead_operand():
    def fun(x, w):
        return jnp.sort(jnp.sort(x, axis=0) + jnp.sort(w, axis=0), axis=0)

    g = graph(fun, (W, W), mesh(a=1))
    last = max(i for i, n in enumerate(g.nodes) if n.kind.op == "sort")
    r = find_live_ranges(g)
    assert ((r.first <= last) & (last <= r.last)).sum() == 3  # two operands, one of them also the sum, and the result


@pytest.mark.parametrize("again", [False, True])
def test_an_update_is_written_in_place_of_an_operand_that_nothing_else_reads(again):
    def fun(x, row):
        before = jnp.sort(x, axis=0)
        after = jnp.sort(jax.lax.dynamic_update_slice(before, row, (3, 0)), axis=0)
        return after.sum() + before.sum() if again else after.sum()

    found = buffers(graph(fun, (W, (1, 64)), mesh(a=1)))
    assert ("dynamic_update_slice" in dict(found)) == again


def test_a_broadcast_that_a_loop_reads_is_not_materialized():
    def fun(x, w):
        mask = jnp.broadcast_to(jnp.arange(64) > 3, W)
        return jax.lax.fori_loop(0, 3, lambda _, h: jnp.where(mask, h @ w, 0.0), x)

    g = graph(fun, (W, W), mesh(a=1))
    r = find_live_ranges(g)
    assert not [v for v in r.values if g.values[v].dtype == "bool" and g.values[v].shape == W]


def test_a_scatter_of_one_element_per_row_is_fused():
    def loss(x, label):
        return jnp.take_along_axis(jax.nn.log_softmax(x), label[:, None], axis=1).mean()

    args = (jax.ShapeDtypeStruct(W, jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32))
    g = graph(jax.grad(lambda x, label: loss(x @ x, label)), args, mesh(a=1))
    assert "scatter-add" not in dict(buffers(g))


@pytest.mark.parametrize(("bits", "share"), [(16, 0.5), (64, 1.0)])
def test_a_value_that_only_products_read_is_stored_in_their_operand_bits(bits, share):
    on = LogicalMesh(("a",), (1,), replace(CHIP, operand_bits=bits))
    g = graph(lambda x, w: ((x @ w) @ w).sum(), (W, W), on)
    assert buffers(g) == sorted([("dot_general", share), ("dot_general", 1.0)])


def test_a_value_is_no_on_chip_candidate_if_a_product_between_does_not_read_it():
    def fun(x, w, between):
        h = jnp.sort(x @ w, axis=0)
        k = jnp.sort(w @ w, axis=0) if between else w
        return jnp.sort(h @ k, axis=0).sum()

    for between in (False, True):
        g = graph(lambda x, w, between=between: fun(x, w, between), (W, W), mesh(a=1))
        made = {v: n.kind.op for n in g.nodes for v in n.results}
        r = find_live_ranges(g)
        sorts = [bool(h) for v, h in zip(r.values, r.on_chip_candidate, strict=True) if made[int(v)] == "sort"]
        assert sorts == ([False, True, True] if between else [True, True])


def test_a_sum_of_products_starts_before_its_last_product_can_execute():
    def fun(x, y, w):
        late = jnp.sort(jnp.sort(y @ w[0], axis=0) @ w[1], axis=0)
        return (x @ w[2] + late @ w[3]).sum()

    on = mesh(a=1)
    traced = SumProducts()(program(fun, (W, W, (4, *W)), on))
    g = build_graph(traced)
    (n,) = [n for n, node in enumerate(g.nodes) if node.kind.op == "sum_of_products"]
    products = [i for i, node in enumerate(g.nodes) if node.kind.op == "dot_general"]
    assert find_live_ranges(g).sum_start[n] < products[1] < n


@pytest.mark.parametrize(("scale", "in_place"), [(3.0, True), (jnp.arange(64.0), False)])
def test_a_product_is_not_written_in_place_of_a_value_with_a_fused_reduction(scale, in_place):
    def fun(x, w, v):
        h = x @ w
        total = (h * scale).sum(0)
        return x @ v + h, total

    assert bool(find_live_ranges(graph(fun, (W, W, W), mesh(a=1))).in_place_products) == in_place


def by_scan(step, start):
    return jax.lax.scan(lambda c, _: (step(c), c[0]), start, None, length=5)


def by_while(step, start):
    return jax.lax.while_loop(lambda c: c[-1].sum() < 5, step, start)


def by_branches(step, start):
    return by_scan(lambda c: jax.lax.cond(c[-1].sum() < 5, step, lambda c: c, c), start)


def by_nested_loops(step, start):
    return by_scan(lambda c: jax.lax.fori_loop(0, 3, lambda _, c: step(c), c), start)


@pytest.mark.parametrize("loop", [by_scan, by_while, by_branches, by_nested_loops])
@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
def test_values_carried_round_share_buffers_without_a_circle(loop, order):
    """Numbers that a loop starts from have no buffer before it; in whatever order they are carried, each has one."""

    def step(c):
        return (*(c[i] for i in order), c[3] * c[0])

    g = graph(lambda x: loop(step, (1.0, 2.0, 3.0, x)), (W,), mesh(a=1))
    liveness = Liveness(g)
    for v in range(len(g.values)):
        assert liveness.root(liveness.root(v)) == liveness.root(v)
