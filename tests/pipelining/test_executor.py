"""Chains of layers as pipelines against the plain loop on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from autoshard import MeshConfig
from autoshard import jaxpr as jx
from autoshard.backend.stage_branches import stray_collectives
from autoshard.pipelining.chain import find_chain
from autoshard.pipelining.executor import run_pipelined
from autoshard.pipelining.stages import Stages
from autoshard.rules import SHIPPED
from autoshard.schedule.schedule import Schedule
from tests.combinations import ALL
from tests.models import BATCH, SEQ, VOCAB, WIDTH, cross_entropy, tokens
from tests.pipelined_steps import accumulated


def params_of(layers: int) -> dict[str, Any]:
    w = 0.3 * jax.random.normal(jax.random.key(0), (layers, WIDTH, WIDTH))
    embed = jax.random.normal(jax.random.key(1), (VOCAB, WIDTH))
    return {"embed": embed, "layers": {"w": w, "b": jnp.zeros((layers, WIDTH))}}


def plain_loss(params: Any, batch: Any, *, reverse: bool = False) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w["w"] + w["b"]), None

    x, _ = jax.lax.scan(layer, params["embed"][batch["x"]], params["layers"], reverse=reverse)
    return cross_entropy(x @ params["embed"].T, batch["y"])


def pipelined(
    step: Callable[..., Any], args: Any, schedule: Schedule, layers: tuple[int, ...], *, together: bool = False
) -> Any:
    """The results of ``step`` with its chain of layers over as many stages as ``schedule`` has, of two devices each."""
    axes = {"stage": schedule.stages, "model": min(2, 8 // schedule.stages)}
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * 2)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jaxpr = jx.normalize(jax.make_jaxpr(step)(*args))
        chain = find_chain(jaxpr, "step", SHIPPED)
        stages = Stages("stage", schedule, layers, together=together, turned=chain.turned)
        run, flat = jax.jit(lambda *xs: run_pipelined(jaxpr, chain, stages, mesh, xs)), jax.tree.leaves(args)
        compiled = run.lower(*flat).compile()
        assert not stray_collectives(compiled.as_text() or "", MeshConfig(axes=axes).mesh(), "stage")
        flat = compiled(*flat)
    return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(step, *args)), flat)


def assert_equal_to_one_device(
    step: Callable[..., Any], args: Any, schedule: Schedule, layers: tuple[int, ...], *, together: bool = False
) -> None:
    expected, found = jax.jit(step)(*args), pipelined(step, args, schedule, layers, together=together)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), expected, found)


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "layers"),
    [
        ("1f1b", 4, 8, (1, 1, 1, 1)),
        ("1f1b", 4, 1, (2, 1, 1, 1)),
        ("gpipe", 2, 4, (3, 2)),
        ("interleaved:2", 2, 4, (1, 2, 1, 1)),
        ("zb-h1", 4, 2, (1, 1, 1, 1)),
        ("zb-v", 2, 4, (2, 1, 1, 1)),
    ],
)
def test_losses_and_gradients_are_those_of_one_device(
    name: str, stages: int, microbatches: int, layers: tuple[int, ...]
) -> None:
    schedule = Schedule.named(name, stages=stages, microbatches=microbatches)
    step = accumulated(plain_loss, microbatches)
    assert_equal_to_one_device(step, (params_of(sum(layers)), tokens(0)), schedule, layers)


@pytest.mark.parametrize(("name", "layers"), [("1f1b", (2, 2)), ("interleaved:2", (1, 2, 1, 1)), ("zb-h1", (2, 1))])
def test_the_input_goes_into_the_last_layer(name: str, layers: tuple[int, ...]) -> None:
    """Of layers that are all alike but for their weights, from the last to the first."""
    schedule = Schedule.named(name, stages=2, microbatches=4)
    step = accumulated(functools.partial(plain_loss, reverse=True), 4)
    assert_equal_to_one_device(step, (params_of(sum(layers)), tokens(0)), schedule, layers)


@pytest.mark.parametrize(("name", "layers"), [("interleaved:2", (1, 2, 1, 1)), ("zb-h1", (2, 1))])
def test_all_stages_compute_what_any_does(name: str, layers: tuple[int, ...]) -> None:
    schedule = Schedule.named(name, stages=2, microbatches=4)
    args = params_of(sum(layers)), tokens(0)
    assert_equal_to_one_device(accumulated(plain_loss, 4), args, schedule, layers, together=True)


@pytest.mark.skipif(not ALL, reason="AUTOSHARD_COMBINATIONS=all runs it")
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved:2", "zb-h1", "zb-v"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_any_number_of_micro_batches_and_layers(name: str, stages: int) -> None:
    """One, fewer than stages, as many, more, and no multiple; layers that stages divide and that they do not."""
    counts = sorted({1, stages - 1, stages, stages + 1, 2 * stages, 3 * stages + 1})
    for microbatches, layers in zip(counts, (*range(9, 3, -1), 4), strict=False):
        schedule = Schedule.named(name, stages=stages, microbatches=microbatches)
        parts = stages * schedule.chunks
        layers = max(layers, parts)
        cut = tuple(layers // parts + (p < layers % parts) for p in range(parts))
        batch = jax.tree.map(lambda x, n=microbatches: x[jnp.arange(2 * n) % len(x)], tokens(0))
        assert_equal_to_one_device(accumulated(plain_loss, microbatches), (params_of(layers), batch), schedule, cut)


def test_what_layers_share_and_return_and_what_the_loop_stacks_and_counts() -> None:
    """A weight that every layer reads, an auxiliary loss of each layer, a term that reads no layer, a cast of
    stacked weights, keys that each layer has, a loop that carries a key and a number, and stacks losses and
    which answers are right."""

    def loss(params: Any, batch: Any, key: Any) -> tuple[jax.Array, jax.Array]:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, jax.Array]:
            w, key = w
            kept = jax.random.bernoulli(key, 0.9, x.shape)
            x = x + jnp.where(kept, jnp.tanh(x @ w["w"].astype(jnp.float32) + w["b"] * params["shared"]), 0)
            return x, (x**2).mean()

        low = {**params["layers"], "w": params["layers"]["w"].astype(jnp.bfloat16)}
        keys = jax.random.split(key, 4)
        x, squares = jax.lax.scan(layer, params["embed"][batch["x"]], (low, keys))
        logits = x @ params["embed"].T
        total = cross_entropy(logits, batch["y"]) + 0.01 * squares.mean() + batch["x"].mean()
        return total, logits.argmax(-1) == batch["y"]

    def step(params: Any, batch: Any, key: Any) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(4, BATCH // 4, SEQ), batch)

        def add(carry: Any, part: Any) -> Any:
            sums, key, n = carry
            key, own = jax.random.split(key)
            (value, right), grads = jax.value_and_grad(loss, has_aux=True)(params, part, own)
            return (jax.tree.map(jnp.add, sums, grads), key, n + 1), (value, n, right)

        carry = jax.tree.map(jnp.zeros_like, params), key, 0
        (sums, key, n), stacked = jax.lax.scan(add, carry, parts)
        return sums, jax.random.key_data(key), n, stacked

    params = {**params_of(4), "shared": jnp.ones(WIDTH)}
    schedule = Schedule.named("interleaved:2", stages=2, microbatches=4)
    assert_equal_to_one_device(step, (params, tokens(0), jax.random.key(3)), schedule, (1, 1, 1, 1))
