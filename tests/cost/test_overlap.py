"""Which reshards run beside products, and how long: of weights until they are read, of gradients once they are made."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost.cost import CostModel
from autoshard.cost.overlap import (
    MIN_PRODUCT,
    RING_GAIN,
    Hideable,
    Resharded,
    exposed_values,
    gathered_ahead,
    gathered_axis,
    hideable,
    ring_reshards,
    seconds_waited,
    seconds_waited_by,
    with_hidden_transfers,
)
from autoshard.ir.graph import Graph, OpKind
from autoshard.ir.program import PipelineRequest
from autoshard.ir.propagate import propagate
from autoshard.ir.spec import Spec
from autoshard.machine.collective import collective_seconds
from autoshard.machine.mesh import LogicalMesh
from autoshard.machine.mesh_config import MeshConfig
from tests.programs import CHIP, graph, mesh

A, B = (4, 4), (3, 4, 4)
HIDING = replace(CHIP, hidden_collectives=0.75)
WIDTH, HIDDEN, LAYERS = 512, 2048, 6
WEIGHTS = {"down": (LAYERS, HIDDEN, WIDTH), "up": (LAYERS, WIDTH, HIDDEN)}


def on(hardware: Any = HIDING, **axes: int) -> LogicalMesh:
    return replace(mesh(**(axes or {"data": 4})), hardware=hardware)


def train(params: dict[str, Any], x: Any) -> Any:
    """A step of scanned layers of two products each."""

    def loss(params: dict[str, Any]) -> Any:
        layer = lambda h, w: (jnp.tanh(jnp.tanh(h @ w["up"]) @ w["down"]), None)  # noqa: E731
        return (jax.lax.scan(layer, x, params)[0] ** 2).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def beside(g: Graph) -> list[tuple[float, ...]]:
    """Of each product that reads weights or makes gradients of them, in order: of both operands, then of the result."""
    return [n.kind.beside for n in with_hidden_transfers(g).nodes if n.kind.beside is not None]


def product_seconds(tokens: int, devices: int = 4) -> float:
    return 2 * tokens * WIDTH * HIDDEN / CHIP.flops["float32"] / devices


def collective(kind: Any, size: int = 4 * WIDTH * HIDDEN) -> float:
    return collective_seconds(kind, ("data",), size, on())


def near(*seconds: float) -> Any:
    return pytest.approx(seconds, rel=1e-5)


def test_a_weight_is_gathered_beside_the_products_before_it_in_the_same_iteration() -> None:
    """The first product waits for its weight, and activations are never there early."""
    short, long = 8, 1 << 14
    assert product_seconds(short) < collective("all-gather") < product_seconds(long)
    assert beside(graph(train, (WEIGHTS, (short, WIDTH)), on()))[0] == near(0, product_seconds(short), 0)
    assert beside(graph(train, (WEIGHTS, (long, WIDTH)), on()))[0] == near(0, collective("all-gather"), 0)


def test_a_gradient_is_reduced_beside_the_products_after_it_in_the_same_iteration() -> None:
    """Backward there are two, each with products after it; of short ones the second finds the link taken."""

    def made(tokens: int) -> list[float]:
        return [b[2] for b in beside(graph(train, (WEIGHTS, (tokens, WIDTH)), on())) if b[2]]

    assert made(1 << 14) == near(collective("all-reduce"), collective("all-reduce"))
    assert made(8) == near(product_seconds(8))


def test_collectives_before_take_their_time_first() -> None:
    def chain(params: list[Any], x: Any) -> Any:
        def loss(params: list[Any]) -> Any:
            return functools.reduce(lambda h, w: jnp.tanh(h @ w), params, x).sum()

        return [p - g for p, g in zip(params, jax.grad(loss)(params), strict=True)]

    tokens, n = 512, 1024
    found = beside(graph(chain, ([(n, n)] * 4, (tokens, n)), on()))
    one = 2 * tokens * n * n / CHIP.flops["float32"] / 4
    assert one < collective("all-gather", 4 * n * n)
    assert [b[1] for b in found][:3] == near(one, one, one)  # of three products the third gather has but one


def test_nothing_runs_beside_where_the_chip_hides_nothing_nor_of_what_no_call_carries() -> None:
    args = (WEIGHTS, (4096, WIDTH))
    assert beside(graph(train, args, on())) != []
    assert beside(graph(train, args, on(CHIP))) == []
    alone = beside(graph(lambda params, x: train(params, x)["up"].sum(), args, on()))
    assert [b[:2] for b in alone] == [(0.0, 0.0)] * len(alone)  # gradients have their time


def test_the_share_of_the_chip_is_hidden_as_far_as_products_last() -> None:
    node = next(n for n in with_hidden_transfers(graph(train, (WEIGHTS, (512, WIDTH)), on())).nodes if n.kind.beside)
    kind = replace(node.kind, beside=(0.0, 3e-3, 0.0))
    waited = [seconds_waited(seconds, kind, 1, on()) for seconds in (1e-3, 4e-3, 1e-2)]
    assert waited == pytest.approx([0.25e-3, 1e-3, 7e-3])
    assert [seconds_waited(1e-3, kind, i, on()) for i in (0, 2)] == [1e-3, 1e-3]


def test_what_is_hidden_is_no_part_of_the_seconds_of_a_call() -> None:
    shapes = (WEIGHTS, (1 << 14, WIDTH))
    costs = []
    for hardware in (CHIP, HIDING):
        g = graph(train, shapes, on(hardware))
        rows, split = Spec((("data",), ())), Spec(((), ("data",), ()))
        pins = dict(zip(g.inputs, (split, split, rows), strict=True)) | dict.fromkeys(g.outputs, split)
        costs.append(CostModel(g).cost(propagate(CostModel(g).graph, [], pins)))
    plain, hiding = costs
    assert (plain.hidden, hiding.compute) == (0.0, plain.compute)
    assert hiding.seconds == pytest.approx(hiding.compute + hiding.transfers)
    assert hiding.sent == pytest.approx(plain.transfers)
    of_layers = [c for c in plain.collectives if c.kind != "all-to-all" and c.count == LAYERS]
    whole = sum(c.count * collective_seconds(c.kind, c.axes or (), c.bytes, on()) for c in of_layers)
    assert 0.75 * whole / 4 <= hiding.hidden <= 0.75 * whole


def test_gpus_gather_weights_of_layers_an_iteration_ahead() -> None:
    """All products of the iteration are beside it; else none is beside what the first one reads."""
    cluster = MeshConfig(axes={"data": 4}, gpu="h100", nodes=4, per_node=1).mesh()
    other = replace(cluster, target=None, devices=tuple(jax.devices()))
    g, elsewhere = (graph(train, (WEIGHTS, (1 << 18, WIDTH)), m) for m in (cluster, other))
    assert {g.values[v].shape for v in gathered_ahead(g)} == {(HIDDEN, WIDTH), (WIDTH, HIDDEN)}
    assert not gathered_ahead(elsewhere)
    assert len(beside(g)) == len(beside(elsewhere)) + 1


def test_activations_of_the_backward_pass_move_beside_gradients_on_gpus_but_for_slow_links() -> None:
    cluster = MeshConfig(axes={"node": 4, "model": 2}, gpu="h100", nodes=4, per_node=2).mesh()
    g = with_hidden_transfers(graph(train, (WEIGHTS, (1 << 18, WIDTH)), cluster))
    kinds = [n.kind for n in g.nodes if n.kind.on_fast_links]
    assert kinds
    assert all(k.beside is not None and k.beside[i] > 0 for k in kinds for i in k.on_fast_links)
    rows, within, between = Spec(((), ())), Spec((("model",), ())), Spec((("node",), ()))
    (i, *_) = kinds[0].on_fast_links
    assert [hideable(kinds[0], i, before, rows, cluster).share for before in (within, between)] == [1.0, 0.0]
    summed = Spec(((), ()), (("node", "sum"),))
    assert hideable(kinds[0], i, summed, between, cluster).share == 0.0
    assert hideable(kinds[0], i, rows, between, cluster).share == 1.0, "nothing is sent"
    other = next(j for j in range(3) if j not in kinds[0].on_fast_links)
    assert hideable(kinds[0], other, between, rows, cluster).share == 1.0
    elsewhere = replace(cluster, target=None, devices=tuple(jax.devices()))
    there = with_hidden_transfers(graph(train, (WEIGHTS, (1 << 18, WIDTH)), elsewhere))
    assert not any(n.kind.on_fast_links for n in there.nodes)


WAITING = replace(CHIP, blocking_gathers=True, blocking_reduce_scatters=True, hidden_collectives=0.9)
LARGE = 4 * 4 * MIN_PRODUCT // HIDDEN
"""Tokens of which a part of a product is one that goes in a ring."""


def products(hardware: Any, tokens: int, *, staged: bool = False) -> list[OpKind]:
    """Those of a step, or of one that is a stage of a pipeline."""
    found = graph(train, (WEIGHTS, (tokens, WIDTH)), on(hardware))
    request = PipelineRequest(on(hardware), "data") if staged else None
    found = with_hidden_transfers(replace(found, program=replace(found.program, pipeline=request)))
    return [n.kind for n in found.nodes if n.kind.flops]


def test_chips_that_would_wait_send_activations_and_gradients_in_rings() -> None:
    """Weights have all products before them; in a stage of a pipeline nothing but rings is counted."""
    whole, staged = products(WAITING, LARGE), products(WAITING, LARGE, staged=True)
    assert all(kind.in_rings == {0, 1, 2} for kind in staged)
    assert {kind.in_rings for kind in whole} == {frozenset({0, 2}), frozenset({0, 1, 2})}  # weights; gradients of them
    for kind in (*whole, *staged):
        seconds = {kind.beside[i] for i in kind.in_rings} if kind.beside else {0.0}
        assert seconds == {product_seconds(LARGE)}
    assert not any(kind.in_rings for kind in products(HIDING, LARGE))
    assert not any(kind.beside for kind in products(HIDING, LARGE, staged=True))


def rings_of(kind: OpKind) -> list[Hideable]:
    """Of an operand gathered by rows and by columns, and whole."""
    whole, rows, columns = Spec(((), ())), Spec((("data",), ())), Spec(((), ("data",)))
    return [hideable(kind, 0, a, b, on()) for a, b in ((rows, whole), (columns, whole), (whole, rows))]


def test_an_operand_is_gathered_in_a_ring_of_whose_parts_each_makes_a_large_part_of_the_result() -> None:
    """Of what is summed over, where the result is no larger than it: each part makes a summand."""
    wide = next(k for k in products(WAITING, LARGE) if k.shapes[-1] == (LARGE, HIDDEN))
    narrow = next(k for k in products(WAITING, LARGE) if k.shapes[:1] == ((LARGE, HIDDEN),))
    few = next(k for k in products(WAITING, LARGE // 64) if k.shapes[-1] == (LARGE // 64, HIDDEN))
    assert [r.share > 0 for r in rings_of(wide)] == [True, False, False]
    assert [r.share > 0 for r in rings_of(narrow)] == [True, True, False]
    assert [r.share > 0 for r in rings_of(few)] == [False, False, False]


def test_what_goes_in_a_ring_is_waited_for_where_it_takes_longer_than_the_product() -> None:
    kind = replace(products(WAITING, LARGE)[0], beside=(2e-3, 0.0, 2e-3))
    chip = on(WAITING)
    waited = [seconds_waited(seconds, kind, 0, chip, Hideable(0.5)) for seconds in (1e-3, 5e-3)]
    assert waited == pytest.approx([(1 - 0.9 * 0.5) * 1e-3, (1 - 0.4) * 5e-3])
    assert seconds_waited(4e-3, kind, 0, chip, Hideable(1.0, 0.25)) == pytest.approx(3e-3)  # 5 ms in the ring
    assert seconds_waited(4e-3, kind, 0, chip, Hideable(1.0, 1.0)) == 4e-3
    assert seconds_waited(4e-3, kind, 1, chip, Hideable(1.0)) == 4e-3


def test_a_sum_is_scattered_over_one_axis_in_a_ring_of_few_devices() -> None:
    both, made = on(data=4, model=2), 64 * MIN_PRODUCT
    summed = Spec(((), ()), (("data", "sum"), ("model", "sum")))
    found = ring_reshards(summed, None, made, both)
    assert Spec(((), ())) not in found  # an all-reduce
    first = found[Spec((("data",), ("model",)))].share
    assert first == found[Spec((("data", "model"), ()))].share == pytest.approx(0.75 * RING_GAIN)
    assert found[Spec((("model",), ("data",)))].share == pytest.approx(0.5 * RING_GAIN)
    alone = Spec(((), ()), (("data", "sum"),))
    assert ring_reshards(alone, None, made, on(data=16)) == {}
    assert ring_reshards(Spec((("data",), ())), (0,), made, on(data=16)) == {}
    assert ring_reshards(alone, None, made, both)[Spec(((), ("data",)))].share == RING_GAIN
    assert ring_reshards(alone, None, 2 * MIN_PRODUCT, both) == {}
    assert ring_reshards(Spec(((), ()), (("data", "max"),)), None, made, both) == {}
    mixed = ring_reshards(summed, None, 1024 * MIN_PRODUCT, on(data=16, model=8))
    assert mixed[Spec((("data", "model"), ()))].share == pytest.approx(7 / 8 * RING_GAIN), "the axis of few goes first"


def test_a_ring_along_one_axis_may_outlast_the_collective_that_uses_all_links() -> None:
    """Of a slice of 16 x 16 chips a permute uses one link of a chip's four."""
    slice_ = MeshConfig(axes={"data": 32, "model": 8}, tpu="v5e:16x16").mesh()
    summed = Spec(((), ()), (("data", "sum"), ("model", "sum")))
    found = ring_reshards(summed, None, 1024 * MIN_PRODUCT, slice_)[Spec((("data", "model"), ()))]
    over_all = collective_seconds("reduce-scatter", ("data", "model"), 1 << 40, slice_)
    hops = 7 / 8 * collective_seconds("collective-permute", ("model",), 1 << 40, slice_)
    assert found.outlasts == pytest.approx(hops / over_all - 7 / 8, rel=1e-2)
    assert found.outlasts > 0.3


def test_all_rings_of_a_product_together_run_beside_it() -> None:
    kind = products(WAITING, LARGE)[0]
    whole, rows = Spec(((), ())), Spec((("data",), ()))
    seconds = 2 * product_seconds(LARGE)
    moved = [Resharded(0, rows, whole, seconds), Resharded(2, Spec(((), ()), (("data", "sum"),)), rows, seconds)]
    assert sum(seconds_waited_by(kind, moved, on(WAITING))) == pytest.approx(2 * seconds - product_seconds(LARGE))
    short = [m._replace(seconds=seconds / 16) for m in moved]
    assert seconds_waited_by(kind, short, on(WAITING)) == pytest.approx([seconds / 16 * (1 - 0.9 * RING_GAIN)] * 2)


def exposed(fun: Any, *args: Any) -> list[bool]:
    """Of each product, in order, whether what it reads first is exposed."""
    made = graph(fun, args, mesh(data=2))
    found = exposed_values(made)
    return [n.operands[0] in found for n in made.nodes if n.kind.op == "dot_general"]


def test_only_what_the_last_product_has_made_is_exposed() -> None:
    def fun(x: Any, w: Any) -> Any:
        h = jnp.tanh(x @ w)
        return jnp.sin(h) @ w, h @ w, jnp.cos(x) @ w

    assert exposed(fun, A, A) == [False, True, False, False]


def test_a_turn_of_a_loop_begins_with_what_is_exposed() -> None:
    def fun(x: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w) @ w, jnp.sin(h) @ w), x, ws)

    assert exposed(fun, A, B) == [True, True, False]


def test_an_activation_is_exposed_where_products_before_it_last_less_than_its_gather() -> None:
    def fun(x: Any, w: Any) -> Any:
        h = x @ w
        return jnp.tanh(h) @ w, jnp.sin(h) @ w, jnp.cos(h) @ w

    def found(rows: int, *gathered: int) -> list[bool]:
        made = graph(fun, [(rows, WIDTH), (WIDTH, WIDTH)], mesh(data=2))
        first = [n.operands[0] for n in made.nodes if n.kind.op == "dot_general"]
        whole = {first[g] for g in gathered}
        specs = lambda n, v: (Spec((("data",), ())), Spec(((), ()))) if v in whole else None  # noqa: E731
        return [v in exposed_values(made, specs) for v in first[1:]]

    short, long = 2, 1 << 14
    assert found(long) == found(long, 3) == [True, False, False]
    assert found(short, 3) == [True, False, True]
    assert found(long, 1) == [True, True, False]  # the first of them has a ring, beside which nothing is gathered
    assert found(long, 1, 2) == [True, True, True]


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ((("a", "b"), ()), (("a",), ()), (0, "b")),
        (((), ("a",)), ((), ()), (1, "a")),
        ((("a", "b"), ()), ((), ()), None),
        ((("a", "b"), ()), (("b",), ()), None),
        ((("a",), ("b",)), ((), ()), None),
        (((), ()), (("a",), ()), None),
    ],
    ids=["the minor axis", "an axis alone", "two axes", "the major axis", "two dimensions", "a slice"],
)
def test_a_gather_over_one_axis(before: Any, after: Any, found: tuple[int, str] | None) -> None:
    assert gathered_axis(Spec(before), Spec(after)) == found
