"""Gradients in rings, beside parts of another gradient's product: the same numbers, in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import jaxpr as jx
from autoshard.backend.audit import audit
from autoshard.backend.lower import _Lowering
from autoshard.backend.rings import gradients_in_turn, product_rings
from autoshard.backend.rings import ring as one_ring
from autoshard.machine.mesh import Hardware, Link, LogicalMesh
from tests.scanned_layers import gradients_through, noted

LAYERS, ROWS, WIDTH, HIDDEN = 3, 1024, 16, 48
COLUMNS = P(None, None, "model")
BOTH = P(None, None, ("data", "model"))
FINER = {"a": BOTH, "b": BOTH, "up": P(None, "data", "model"), "down": P(None, "model", "data")}
SPLIT = {"a": COLUMNS, "b": COLUMNS, "up": COLUMNS, "down": P(None, "model")}
TOKENS = P(("data", "model"))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_ring, "MIN_SUM", 16)
    for module in (gradients_in_turn, product_rings):
        monkeypatch.setattr(module, "MIN_PRODUCT", 16)


def mesh(bandwidth: float, data: int, memory: float) -> LogicalMesh:
    links = {"link": Link("link", bandwidth, 1e-6)}
    hardware = Hardware(
        "cpu", {"float32": 1e11}, memory, 1e12, links, 1e-6, blocking_reduce_scatters=True, blocking_gathers=True
    )
    return LogicalMesh(("data", "model"), (data, 8 // data), hardware)


def gradients(
    ws: Any, x: Any, *, scan: bool, effects: bool = False, kept: Callable[[Any, P], Any] = lambda x, spec: x
) -> Any:
    """Tokens are split over both axes but in an MLP, which has its own split over model."""

    def layer(h: Any, w: Any) -> tuple[Any, None]:
        h = kept(noted(h) if effects else h, TOKENS)
        h = h + jnp.tanh(jnp.tanh(h @ w["a"]) @ w["b"])
        made = jnp.tanh(kept(h, P("data")) @ w["up"]) @ w["down"]
        return h + made, None

    return gradients_through(layer, ws, x, scan=scan)


def arguments() -> Any:
    def normal(seed: int, *shape: int) -> Any:
        return np.random.default_rng(seed).standard_normal(shape).astype("f4") / 4

    shapes = {"a": (WIDTH, WIDTH), "b": (WIDTH, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return {name: normal(n, LAYERS, *shape) for n, (name, shape) in enumerate(shapes.items())}, normal(4, ROWS, WIDTH)


def step(
    bandwidth: float, *, scan: bool = True, data: int = 2, effects: bool = False, memory: float = 8e9
) -> autoshard.Step:
    on = jax.make_mesh((data, 8 // data), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def run(ws: Any, x: Any) -> Any:
        def kept(x: Any, spec: P) -> Any:
            return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(on, spec))

        return gradients(ws, x, scan=scan, effects=effects, kept=kept)

    split = SPLIT if data == 2 else FINER
    return autoshard.jit(run, mesh=mesh(bandwidth, data, memory), in_shardings=(split, TOKENS), out_shardings=split)


SLOW, FAST = 1e8, 1e13
"""Bandwidths of links: permutes outlast the products of their rings, or do not."""


def counts(run: autoshard.Step) -> tuple[int, int]:
    """Products and barriers that two values go through."""
    lines = run.lower(*arguments()).as_text().splitlines()
    barriers = [line for line in lines if "optimization_barrier" in line]
    return sum("stablehlo.dot_general" in line for line in lines), sum(":2 " in line for line in barriers)


def by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients_in_turn.GradientRings, "in_turn", lambda self, jaxpr, bundles: None)


@pytest.mark.parametrize("bandwidth", [SLOW, FAST])
def test_gradients_beside_the_permutes_of_others_are_the_same(bandwidth: float) -> None:
    args, run = arguments(), step(bandwidth)
    for made, wanted in zip(jax.tree.leaves(run(*args)), jax.tree.leaves(gradients(*args, scan=True)), strict=True):
        np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-6)
    compiled = run.lower(*args).compile()
    assert audit(compiled, run.plan(*args)).clean


def test_a_product_is_computed_in_parts_beside_permutes_that_outlast_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rings have six permutes: the gradient of ``down`` has four parts, the most that its 16 columns allow, and
    each is there before what a permute has brought is added."""
    products, barriers = counts(step(SLOW))
    by_themselves(monkeypatch)
    assert counts(step(SLOW)) == (products - 3, barriers - 4)


def test_a_gradient_that_gathers_nothing_comes_before_the_first_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once all that is no gradient is computed: one value waits for that, and one for it."""
    for module in (one_ring, product_rings):  # no ring over data: that of the MLP
        monkeypatch.setattr(module, "MAX_PARTS", 2)
    args, run = arguments(), step(SLOW, data=4)
    products, barriers = counts(run)

    def of_up(self: _Lowering, eqn: jx.JaxprEqn) -> bool:
        return jx.aval(eqn.outvars[0]).shape == (WIDTH, HIDDEN)

    monkeypatch.setattr(_Lowering, "_gathers_beside_products", of_up)
    run = step(SLOW, data=4)
    assert counts(run) == (products + 1, barriers + 2)  # `up` alone is in parts now, and has two
    for made, wanted in zip(jax.tree.leaves(run(*args)), jax.tree.leaves(gradients(*args, scan=True)), strict=True):
        np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fits", [True, False])
def test_nothing_is_put_off_where_its_operands_may_not_fit(monkeypatch: pytest.MonkeyPatch, fits: bool) -> None:
    """Of the gradient of ``down``: the hidden layer of a device's rows, and the cotangent."""
    operands = 4 * ROWS // 2 * (HIDDEN // 4 + WIDTH)
    memory = (step(SLOW).plan(*arguments()).memory.peak + operands * (1.01 if fits else 0.99)) / 0.95
    found = counts(step(SLOW, memory=memory))
    by_themselves(monkeypatch)
    assert (counts(step(SLOW, memory=memory)) != found) == fits


@pytest.mark.parametrize(
    ("bandwidth", "options"),
    [(FAST, {}), (SLOW, {"scan": False}), (SLOW, {"effects": True})],
    ids=["fast links", "unrolled layers", "effects"],
)
def test_others_are_lowered_by_themselves(monkeypatch: pytest.MonkeyPatch, bandwidth: float, options: Any) -> None:
    """Of unrolled layers all would come at the end of the step; effects stay in their order."""
    found = counts(step(bandwidth, **options))
    by_themselves(monkeypatch)
    assert counts(step(bandwidth, **options)) == found
