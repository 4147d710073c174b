"""Products and training steps in random shapes, meshes and layouts on a chip that waits for collectives: what goes in
rings there gives, in float32, the numbers of the unsharded step, to 1e-5.

``AUTOSHARD_EXAMPLES`` is the number of each, 4 unless it is set, and ``AUTOSHARD_SEED`` draws others: `make kernels`
runs 300.
"""

from __future__ import annotations

import os
from dataclasses import replace
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.backend.rings import gradients_in_turn, product_rings
from autoshard.backend.rings import ring as one_ring
from autoshard.machine.mesh import Link, LogicalMesh
from tests.backend.rings.test_product_rings import HARDWARE, normal
from tests.random_draws import spec

EXAMPLES = int(os.environ.get("AUTOSHARD_EXAMPLES", "4"))
SEED = int(os.environ.get("AUTOSHARD_SEED", "0"))
MESHES = ({"a": 8}, {"a": 4, "b": 2}, {"a": 2, "b": 4}, {"a": 2, "b": 2}, {"a": 3, "b": 2}, {"a": 2, "b": 2, "c": 2})
PRODUCTS = ("mk,kn->mn", "mk,nk->mn", "bmk,kn->bmn", "bmk,bmn->kn", "bmk,bkn->bmn")
SIZES = (8, 16, 24, 48)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (product_rings, gradients_in_turn):
        monkeypatch.setattr(module, "MIN_PRODUCT", 16)
    monkeypatch.setattr(one_ring, "MIN_SUM", 16)


def drawn_mesh(rng: Random) -> LogicalMesh:
    """Links from ones that a product hides to ones that it does not."""
    axes = rng.choice(MESHES)
    links = {"link": Link("link", rng.choice([1e8, 1e9, 1e10]), 1e-6)}
    return LogicalMesh(tuple(axes), tuple(axes.values()), replace(HARDWARE, links=links))


def drawn_product(seed: int) -> tuple[autoshard.Step, list[Any], str]:
    """A product with random specs of its operands and of its result."""
    rng = Random(f"product {seed}")
    mesh, how = drawn_mesh(rng), rng.choice(PRODUCTS)
    ins, out = how.split("->")
    sizes = {name: rng.choice(SIZES) for name in "bmkn"}
    shapes = [tuple(sizes[name] for name in part) for part in (*ins.split(","), out)]
    *operands, result = (spec(rng, shape, dict(mesh.shape)) for shape in shapes)
    step = autoshard.jit(
        lambda x, w: jnp.einsum(how, x, w), mesh=mesh, in_shardings=tuple(operands), out_shardings=result
    )
    return step, [normal(*shape, seed=i) for i, shape in enumerate(shapes[:-1])], how


def permutes(step: autoshard.Step, *args: Any) -> int:
    return (step.lower(*args).compile().as_text() or "").count(" collective-permute")


@pytest.mark.parametrize("seed", range(SEED * EXAMPLES, (SEED + 1) * EXAMPLES))
def test_random_products(seed: int) -> None:
    step, operands, how = drawn_product(seed)
    wanted = np.einsum(how, *operands)
    np.testing.assert_allclose(step(*operands), wanted, rtol=1e-5, atol=1e-5 * abs(wanted).max())


def test_many_of_these_products_have_rings() -> None:
    assert sum(permutes(step, *operands) > 0 for step, operands, _ in map(drawn_product, range(16))) >= 5


@pytest.mark.parametrize("seed", range(SEED * EXAMPLES, (SEED + 1) * EXAMPLES))
def test_random_steps(seed: int) -> None:
    """Gradients of layers, scanned over or not, some of them recomputed."""
    rng = Random(f"step {seed}")
    mesh, layers = drawn_mesh(rng), rng.choice([2, 3])
    batch, width, hidden = (mesh.size * rng.choice([1, 2, 4]) for _ in range(3))
    scanned, strategy = rng.random() < 0.6, rng.choice(["auto", "auto", "fsdp", "tp", "fsdp_tp"])

    def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return h + jnp.tanh(h @ p["up"]) @ p["down"], None

    def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            h, each = x, zip(*params.values(), strict=True)
            if scanned:
                h, _ = jax.lax.scan(layer, h, params)
            for p in () if scanned else each:
                h, _ = layer(h, dict(zip(params, p, strict=True)))
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = {
        "up": normal(layers, width, hidden, seed=seed) / width**0.5,
        "down": normal(layers, hidden, width, seed=seed + 1) / hidden**0.5,
    }
    x = normal(batch, width, seed=seed + 2)
    passes = rng.choice([[], ["recompute:full"], ["recompute:products:1"]])
    sharded = autoshard.jit(step, mesh=mesh, strategy=strategy, passes=passes)
    got, wanted = sharded(params, x), jax.jit(step)(params, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(abs(b).max()))
