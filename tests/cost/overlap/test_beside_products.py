"""How long products run beside reshards: of weights until they are read, of gradients once they are made."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost.overlap.beside_products import with_hidden_transfers
from autoshard.machine.collective import collective_seconds
from autoshard.machine.mesh_config import MeshConfig
from tests.programs import CHIP, graph
from tests.scanned_layers import (
    HIDDEN,
    HIDING,
    LARGE,
    WAITING,
    WEIGHTS,
    WIDTH,
    beside,
    on,
    product_seconds,
    products,
    train,
)


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


def test_activations_of_the_backward_pass_move_beside_gradients_on_gpus() -> None:
    cluster = MeshConfig(axes={"node": 4, "model": 2}, gpu="h100", nodes=4, per_node=2).mesh()
    g = with_hidden_transfers(graph(train, (WEIGHTS, (1 << 18, WIDTH)), cluster))
    kinds = [n.kind for n in g.nodes if n.kind.on_fast_links]
    assert kinds
    assert all(k.beside is not None and k.beside[i] > 0 for k in kinds for i in k.on_fast_links)
    elsewhere = replace(cluster, target=None, devices=tuple(jax.devices()))
    there = with_hidden_transfers(graph(train, (WEIGHTS, (1 << 18, WIDTH)), elsewhere))
    assert not any(n.kind.on_fast_links for n in there.nodes)


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


@pytest.mark.parametrize("chip", ["cpu", "tpu"])
def test_nothing_is_left_beside_the_sum_of_a_head_s_gradient_that_is_made_before_the_backward_loop(chip: str) -> None:
    """For TPUs XLA computes it after the loop; elsewhere the product that makes its operand's gradient is beside it."""

    def step(params: dict[str, Any], head: Any, x: Any) -> Any:
        def loss(params: dict[str, Any], head: Any) -> Any:
            def layer(h: Any, w: dict[str, Any]) -> tuple[Any, None]:
                return jnp.tanh(jnp.tanh(h @ w["up"]) @ w["down"]), None

            h, _ = jax.lax.scan(layer, x, params)
            return ((h @ head) ** 2).mean()

        return jax.grad(loss, (0, 1))(params, head)

    mesh = on()
    if chip == "tpu":
        tpu = MeshConfig(axes={"data": 4}, tpu="v5e:2x2").mesh()
        mesh = replace(mesh, target=tpu.target)
    g = with_hidden_transfers(graph(step, (WEIGHTS, (WIDTH, HIDDEN), (1 << 14, WIDTH)), mesh))
    inside = {i for first, last in g.loops for i in range(first, last + 1)}
    outside = [n.kind for i, n in enumerate(g.nodes) if n.kind.flops and i not in inside]
    (gradient,) = (kind for kind in outside if kind.shapes[-1] == (HIDDEN, WIDTH))
    assert (gradient.beside is None) == (chip == "tpu")
    assert gradient.beside is None or gradient.beside[2] > 0
