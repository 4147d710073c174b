"""Products that are reduce-scattered in a ring or gather an operand in one: the same results, sent by permutes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.backend.audit import audit
from autoshard.backend.rings import product_rings
from autoshard.backend.rings import ring as one_ring
from autoshard.backend.rings.fused_with_products import FusedWithProducts
from autoshard.backend.rings.operand_gathers import Change
from autoshard.ir.spec import Spec
from autoshard.machine.mesh import Hardware, Link, LogicalMesh
from autoshard.machine.mesh_config import MeshConfig
from autoshard.plan.decisions import Island
from tests.programs import graph

LINK = {"link": Link("link", 1e10, 1e-6)}
HARDWARE = Hardware(
    "cpu", {"float32": 1e11}, 8e9, 1e12, LINK, 1e-6, blocking_reduce_scatters=True, blocking_gathers=True
)


def mesh(**axes: int) -> LogicalMesh:
    return LogicalMesh(tuple(axes), tuple(axes.values()), HARDWARE)


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype("f4")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_rings, "MIN_PRODUCT", 16)
    monkeypatch.setattr(one_ring, "MIN_SUM", 16)


def few_parts(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    for module in (one_ring, product_rings):
        monkeypatch.setattr(module, "MAX_PARTS", most)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("axes", "ins", "out"),
    [
        ({"a": 8}, (P(None, "a"), P("a")), P("a")),
        ({"a": 8}, (P(None, "a"), P("a")), P(None, "a")),
        ({"a": 4, "b": 2}, (P(None, ("a", "b")), P(("a", "b"))), P(("a", "b"))),
        ({"a": 4, "b": 2}, (P(None, ("a", "b")), P(("a", "b"))), P(("b", "a"))),
        ({"a": 4, "b": 2}, (P(None, ("a", "b")), P(("a", "b"))), P("a", "b")),
        ({"a": 4, "b": 2}, (P("b", "a"), P("a")), P(("b", "a"))),
        ({"a": 4, "b": 2}, (P("b", "a"), P("a")), P("b", "a")),
        ({"a": 2, "b": 4}, (P(None, "a"), P("a", "b")), P(None, ("b", "a"))),
    ],
    ids=["rows", "columns", "over both", "over both, turned", "an axis each", "behind", "beside", "columns behind"],
)
def test_a_sum_that_travels_beside_its_product_is_the_sum(axes: Any, ins: Any, out: P, dtype: str) -> None:
    x, w = (jnp.asarray(a, dtype) for a in (normal(16, 32), normal(32, 24, seed=1)))
    step = autoshard.jit(jnp.matmul, mesh=mesh(**axes), in_shardings=ins, out_shardings=out)
    wanted = np.asarray(x, "f4") @ np.asarray(w, "f4")
    np.testing.assert_allclose(np.asarray(step(x, w), "f4"), wanted, **_bounds(dtype, wanted))
    compiled = step.lower(x, w).compile()
    text = compiled.as_text() or ""
    assert " collective-permute" in text
    assert " reduce-scatter(" not in text
    if dtype == "float32":  # sums in bfloat16 XLA for CPU sends as float32
        assert audit(compiled, step.plan(x, w)).clean


def _bounds(dtype: str, wanted: Any) -> dict[str, float]:
    # In bfloat16 each of 8 partial sums and each addition is rounded to 8 bits.
    return {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 0, "atol": 2**-5 * float(abs(wanted).max())}


def test_a_part_of_the_sums_may_stay_to_be_reduced() -> None:
    """Over b all have the sum; over a each has a part of it."""
    x, w = normal(16, 32), normal(32, 24, seed=1)
    step = autoshard.jit(
        jnp.matmul, mesh=mesh(a=4, b=2), in_shardings=(P(None, ("a", "b")), P(("a", "b"))), out_shardings=P("a")
    )
    np.testing.assert_allclose(step(x, w), x @ w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "order", "permutes"), [((4, 2), "ab", 2), ((4, 2), "ba", 1), ((2, 4), "ba", 2), ((2, 4), "ab", 1)]
)
def test_an_axis_of_few_devices_goes_in_the_ring_where_the_first_has_too_many(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int], order: str, permutes: int
) -> None:
    """Shards come in another order then, and are sent to where they belong."""
    few_parts(monkeypatch, 2)
    x, w, both = normal(64, 32), normal(32, 24, seed=1), tuple(order)
    on = mesh(**dict(zip("ab", sizes, strict=True)))
    step = autoshard.jit(jnp.matmul, mesh=on, in_shardings=(P(None, both), P(both)), out_shardings=P(both))
    np.testing.assert_allclose(step(x, w), x @ w, rtol=1e-5, atol=1e-5)
    compiled = step.lower(x, w).compile()
    assert (compiled.as_text() or "").count(" collective-permute(") == permutes
    assert audit(compiled, step.plan(x, w)).clean


@pytest.mark.parametrize("fits", [True, False])
def test_a_gradient_has_no_ring_where_an_operand_may_not_fit_beside_its_parts(fits: bool) -> None:
    """Of no product, for XLA may compute it while the one product reads it, where there is no ring."""
    x, w = normal(16, 32), normal(32, 24, seed=1)

    def planned(memory: float) -> autoshard.Step:
        on = replace(mesh(a=8), hardware=replace(HARDWARE, memory=memory))
        return autoshard.jit(jnp.matmul, mesh=on, in_shardings=(P(None, "a"), P("a")), out_shardings=P("a"))

    peak, operand = planned(8e9).plan(x, w).memory.peak, w.nbytes / 8
    step = planned((peak + operand * (1.01 if fits else 0.99)) / 0.95)
    assert ("stablehlo.collective_permute" in step.lower(x, w).as_text()) == fits
    np.testing.assert_allclose(step(x, w), x @ w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("products", "read"), [(1, True), (1, False), (2, True)])
def test_parts_of_a_product_are_kept_apart_from_their_sums(products: int, read: bool) -> None:
    """So that they wait for no permute. Of a sum of several products only the last waits for one."""

    def fun(xs: Any, ws: Any, v: Any) -> Any:
        first, *rest = (x @ w for x, w in zip(xs, ws, strict=True))
        h = sum(rest, first)
        return jnp.tanh(_kept(h, P("a"))) @ v if read else h

    xs = [normal(16, 32, seed=n) for n in range(products)]
    ws = [normal(32, 24, seed=n) / 8 for n in range(2, 2 + products)]
    v = normal(24, 8, seed=4)
    step = autoshard.jit(fun, mesh=mesh(a=4), in_shardings=(P(None, "a"), P("a"), P()), out_shardings=P("a"))
    wanted = np.concatenate(xs, 1) @ np.concatenate(ws)
    np.testing.assert_allclose(step(xs, ws, v), np.tanh(wanted) @ v if read else wanted, rtol=1e-5, atol=1e-5)
    text = step.lower(xs, ws, v).as_text()
    assert text.count("stablehlo.dot_general") == 4 * products + read
    assert text.count("stablehlo.collective_permute") == 3
    assert text.count("stablehlo.optimization_barrier") == (4 if products == 1 else 0)


def test_gradients_in_a_loop_of_layers_are_those_of_one_device() -> None:
    def step(ws: Any, x: Any) -> Any:
        def loss(ws: Any) -> Any:
            h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w["up"]) @ w["down"], None), x, ws)
            return (h**2).mean()

        value, grads = jax.value_and_grad(loss)(ws)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value

    ws = {"up": normal(3, 16, 32) / 8, "down": normal(3, 32, 16, seed=1) / 8}
    x = normal(32, 16, seed=2)
    sharded = autoshard.jit(step, mesh=mesh(data=4, model=2), strategy="fsdp_tp")
    after, value = sharded(ws, x)
    expected, wanted = jax.jit(step)(ws, x)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), after, expected)
    assert " collective-permute" in (sharded.lower(ws, x).compile().as_text() or "")


@pytest.mark.parametrize("small", [True, False])
def test_small_products_and_long_rings_are_reduce_scattered_at_once(
    monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    if small:
        monkeypatch.setattr(product_rings, "MIN_PRODUCT", 1 << 20)
    else:
        few_parts(monkeypatch, 4)
    step = autoshard.jit(jnp.matmul, mesh=mesh(a=8), in_shardings=(P(None, "a"), P("a")), out_shardings=P("a"))
    text = step.lower(normal(16, 32), normal(32, 24)).compile().as_text() or ""
    assert text.count(" reduce-scatter(") == 1
    assert " collective-permute" not in text


def _kept(h: Any, *specs: P) -> Any:
    """The hidden layer, split as each of the specs says in turn."""
    for spec in specs:
        h = jax.lax.with_sharding_constraint(h, spec)
    return h


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("axes", "hidden", "weight", "out"),
    [
        ({"a": 8}, P("a"), P(None, "a"), P(None, "a")),
        ({"a": 4, "b": 2}, P(("b", "a")), P(None, "a"), P("b", "a")),
        ({"a": 2, "b": 4}, P("a", "b"), P(), P("a")),
    ],
    ids=["rows", "behind", "columns, which are summed over"],
)
@pytest.mark.parametrize("readers", [1, 2])
def test_an_operand_that_travels_beside_its_product_is_gathered(
    axes: Any, hidden: P, weight: P, out: P, dtype: str, readers: int
) -> None:
    x, v = (jnp.asarray(a, dtype) for a in (normal(64, 16), normal(16, 32, seed=1)))
    ws = [jnp.asarray(normal(32, 16 if out == P("a") else 64, seed=n), dtype) for n in range(readers)]

    def fun(x: Any, v: Any, ws: Any) -> Any:
        h = _kept(jnp.tanh(x @ v), hidden)
        return [h @ w for w in ws]

    rows = P(hidden[0]) if weight == P() else hidden
    step = autoshard.jit(
        fun, mesh=mesh(**axes), in_shardings=(rows, P(), [weight] * readers), out_shardings=[out] * readers
    )
    h = np.asarray(jnp.tanh(x @ v), "f4")
    for made, w in zip(step(x, v, ws), ws, strict=True):
        wanted = h @ np.asarray(w, "f4")
        np.testing.assert_allclose(np.asarray(made, "f4"), wanted, **_bounds(dtype, wanted))
    compiled = step.lower(x, v, ws).compile()
    text = compiled.as_text() or ""
    assert text.count(" collective-permute(") == axes["b" if weight == P() else "a"] - 1
    assert " all-gather(" not in text
    if dtype == "float32":
        assert audit(compiled, step.plan(x, v, ws)).clean


def test_a_ring_begins_when_the_one_before_it_is_done() -> None:
    def fun(x: Any, y: Any, v: Any, w: Any) -> Any:
        g, h = (_kept(jnp.tanh(a @ v), P("a")) for a in (x, y))
        return g @ w, h @ w

    x, y, v, w = normal(64, 16), normal(64, 16, seed=1), normal(16, 32, seed=2), normal(32, 64, seed=3)
    out = P(None, "a")
    step = autoshard.jit(fun, mesh=mesh(a=8), in_shardings=(P("a"), P("a"), P(), out), out_shardings=(out, out))
    for made, a in zip(step(x, y, v, w), (x, y), strict=True):
        np.testing.assert_allclose(made, np.tanh(a @ v) @ w, rtol=1e-5, atol=1e-5)
    lowered = step.lower(x, y, v, w)
    assert lowered.as_text().count("optimization_barrier") == 1
    assert (lowered.compile().as_text() or "").count(" collective-permute(") == 2 * 7


def test_the_ring_of_a_gradient_begins_when_the_one_before_it_is_done() -> None:
    def grads(x: Any, ws: Any) -> Any:
        return jax.grad(lambda ws: (jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]) ** 2).sum())(ws)

    x, ws = normal(1024, 16) / 32, [normal(16, 32, seed=1) / 4, normal(32, 16, seed=2) / 4]
    rows = [P("a"), P("a")]
    step = autoshard.jit(grads, mesh=mesh(a=4), in_shardings=(P("a"), rows), out_shardings=rows)
    for made, wanted in zip(step(x, ws), grads(x, ws), strict=True):
        np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-5)
    lowered = step.lower(x, ws)
    assert (lowered.compile().as_text() or "").count(" collective-permute(") == 2 * 3
    waiting = [line for line in lowered.as_text().splitlines() if "optimization_barrier" in line and ":2" in line]
    assert len(waiting) == 1


@pytest.mark.parametrize("parts", range(2, 9))
def test_a_ring_passes_every_device_of_a_line_in_hops_of_two_at_most(parts: int) -> None:
    order = one_ring.folded(parts)
    assert sorted(order) == list(range(parts))
    assert max(abs(a - b) for a, b in zip(order, [*order[1:], order[0]], strict=True)) <= 2


@pytest.mark.parametrize(
    ("axes", "data", "width", "parts", "parts_of_sums"),
    [
        ({"data": 4, "model": 4}, "data", 1 << 14, 4, 4),  # along a line all at once take as long as a ring
        (
            {"data": 2, "model": 8},
            "model",
            1 << 14,
            8,
            None,
        ),  # over two lines at once less, but the product takes as long
        ({"data": 2, "model": 8}, "model", 1 << 10, None, None),
    ],
)
def test_what_takes_less_time_at_once_has_no_ring(
    axes: Any, data: str, width: int, parts: int | None, parts_of_sums: int | None
) -> None:
    """A permute of a ring takes one link; a gather or a scatter over a part of a torus all of them, both ways."""
    on = MeshConfig(axes=axes, tpu="v5e:4x4").mesh()
    products = graph(jnp.matmul, ((1 << 16, 1 << 12), (1 << 12, width)), on)
    (kind,) = [node.kind for node in products.nodes if node.kind.flops]
    rows, whole, sums = Spec(((data,), ())), Spec(((), ())), Spec(((), ()), ((data, "sum"),))
    gathered = Island(0, (), (whole, whole), (whole,), (whole,), "", "")
    found = product_rings.gather_ring(kind, 0, Change(rows, whole), gathered, on)
    assert (found and found.parts) == parts
    columns = Spec(((), (data,))), Spec(((data,), ()))
    summed, saved = product_rings.product_ring(kind, Island(0, (), columns, (sums,), (rows,), "", ""), on)
    assert (summed and summed.parts) == parts_of_sums
    assert (saved > 0) == (parts_of_sums is not None)


def test_parts_are_not_added_up_where_memory_is_too_slow_for_their_sums() -> None:
    """A part of a dimension that is summed over makes a part of each element: each product reads and writes the sum."""
    whole, columns = Spec(((), ())), Spec(((), ("a",)))
    change, island = Change(columns, whole), Island(0, (), (whole, whole), (whole,), (whole,), "", "")
    for bandwidth, rings in ((1e12, True), (1e10, False)):
        on = replace(mesh(a=4), hardware=replace(HARDWARE, bandwidth=bandwidth))
        (kind,) = [n.kind for n in graph(jnp.matmul, ((64, 64), (64, 32)), on).nodes if n.kind.flops]
        assert (product_rings.gather_ring(kind, 0, change, island, on) is not None) == rings


ROWS = P(("b", "a"))


def logits(x: Any, w: Any) -> Any:
    y = x @ w
    return jnp.exp(y - y.max(-1, keepdims=True)) @ w.T


@pytest.mark.parametrize(("bandwidth", "gradient", "rings"), [(1e12, False, 1), (1e9, False, 0), (1e9, True, 1)])
def test_what_a_product_computes_is_not_stored_for_a_ring_that_saves_less(
    bandwidth: float, gradient: bool, rings: int
) -> None:
    """XLA computes the exponentials of a softmax while a product reads them; a gradient's ring stores them anyway."""
    x, w = normal(128, 16), normal(16, 512, seed=1) / 8
    on = replace(mesh(a=4, b=2), hardware=replace(HARDWARE, bandwidth=bandwidth))
    made = autoshard.jit(logits, mesh=on, in_shardings=(ROWS, P(None, "a")), out_shardings=ROWS).executable(x, w)
    gradients = {*made.graph.nodes[-1].results} if gradient else set[int]()
    found = product_rings.sum_rings(made.graph, made.plan, gradients, FusedWithProducts(made.graph, made.plan))
    assert len(found) == rings


@pytest.mark.parametrize(
    ("saved", "stored", "too_long"),
    [
        ({1: 10.0}, {1: {7: 4.0, 8: 4.0}}, set()),
        ({1: 10.0}, {1: {7: 6.0, 8: 4.0}}, {7}),
        ({1: 4.0, 2: 4.0}, {1: {7: 6.0}, 2: {7: 6.0}}, set()),
        ({1: 2.0, 2: 3.0}, {1: {7: 6.0}, 2: {7: 6.0}}, {7}),
        ({1: 4.0}, {1: {7: 6.0}, 2: {7: 6.0}}, {7}),
    ],
    ids=["shared by two operands", "too much for one of them", "two rings", "two that save too little", "one is left"],
)
def test_rings_share_what_they_store_and_operands_what_a_ring_saves(
    saved: Any, stored: Any, too_long: set[int]
) -> None:
    assert product_rings._stored_for_longer(saved, saved, stored) == too_long


@pytest.mark.parametrize(("bandwidth", "permutes"), [(1e12, 6), (1e9, 3)])
@pytest.mark.parametrize("other", ["reduced", "an operand"])
def test_what_xla_computes_with_a_product_counts_against_a_ring_that_gathers(
    other: str, bandwidth: float, permutes: int
) -> None:
    """A maximum of what the product makes, and exponentials that it reads."""

    def fun(x: Any, v: Any, w: Any) -> Any:
        h = jax.lax.with_sharding_constraint(jnp.tanh(x @ v), P("a"))
        if other == "reduced":
            y = h @ w
            return y.max(0), jnp.sin(y) @ w.T
        y = v @ w
        return jnp.tanh(h @ jnp.exp(y - y.max(0))) @ w.T

    x, v, w = normal(64, 16), normal(16, 16, seed=1), normal(16, 512, seed=2) / 8
    on = replace(mesh(a=4), hardware=replace(HARDWARE, bandwidth=bandwidth))
    step = autoshard.jit(fun, mesh=on, in_shardings=(P("a"), P(), P(None, "a")))
    with jax.set_mesh(step.plan(x, v, w).jax_mesh):
        wanted = jax.jit(fun)(x, v, w)
    for made, one in zip(*map(jax.tree.leaves, (step(x, v, w), wanted)), strict=True):
        np.testing.assert_allclose(made, one, rtol=1e-5, atol=1e-5)
    text = step.lower(x, v, w).compile().as_text() or ""
    assert text.count(" collective-permute(") == permutes, "three of them of the sum that comes after"
