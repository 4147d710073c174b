"""Layouts that any right planner reaches, with the collectives of the compiled program: Alpa's tests on four devices.

Alpa prices communication alone and makes every product use all devices: products are dear here, memory is free, and
links have a latency next to nothing. (Zheng et al., "Alpa", OSDI 2022; tests/shard_parallel of its repository.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autoshard
from autoshard.audit import audit
from autoshard.collective import collective_seconds
from autoshard.mesh import Hardware, Link, LogicalMesh
from autoshard.plan import Plan

Loss = Callable[[Any, Any], Any]


def mesh(*sizes: int, beta: tuple[float, ...] = (1.0, 1.0)) -> LogicalMesh:
    """Axes x and y; ``beta`` is the price of a byte on each."""
    links = {name: Link(name, 1e9 / b, 1e-6) for name, b in zip("xy", beta, strict=True)}
    hardware = Hardware("communication", {"float32": 1e9}, 1e18, 1e30, links, 1e-7)
    return LogicalMesh(("x", "y"), sizes, hardware, ("x", "y"), tuple(jax.devices()[: sizes[0] * sizes[1]]))


def planned(loss: Loss, params: Any, batch: Any, on: LogicalMesh) -> tuple[Plan, Counter[str]]:
    """The plan of an Adam step, and how many collectives of each kind the compiled step has."""
    optimizer = optax.adam(1e-2)

    def step(state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state[0], batch)
        updates, moments = optimizer.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), value

    given = (params, jax.eval_shape(optimizer.init, params)), batch
    planned = autoshard.jit(step, mesh=on, donate_argnums=0)
    plan = planned.plan(*given)
    compiled = planned.lower(*given).compile()
    found: Counter[str] = Counter()
    for row in audit(compiled, plan).rows:
        found[row.kind] += sum(c.count for c in row.emitted)
    return plan, +found


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mlp(layers: int, batch: int, width: int, *, bias: bool) -> tuple[Loss, Any, Any]:
    """Products of a square weight, with a rectifier between them."""

    def loss(params: Any, batch: Any) -> Any:
        h = batch["x"]
        for i, p in enumerate(params):
            h = h @ p["w"] + (p["b"] if bias else 0)
            h = jax.nn.relu(h) if i < layers - 1 else h
        return jnp.mean((h - batch["y"]) ** 2)

    weights = {"w": array(width, width), **({"b": array(width)} if bias else {})}
    return loss, [dict(weights) for _ in range(layers)], {"x": array(batch, width), "y": array(batch, width)}


def bert(layers: int, batch: int, seq: int, width: int, heads: int, *, remat: bool = False) -> tuple[Loss, Any, Any]:
    """Encoder layers with biases and a norm after each block."""

    def norm(x: Any, scale: Any, shift: Any) -> Any:
        mean = x.mean(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6) * scale + shift

    def layer(p: Mapping[str, Any], x: Any) -> Any:
        q, k, v = (jnp.einsum("bsd,dhe->bshe", x, p[n]) + p[n + "_bias"] for n in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k) / (width // heads) ** 0.5)
        mixed = jnp.einsum("bhst,bthe->bshe", weights, v)
        x = norm(x + jnp.einsum("bshe,hed->bsd", mixed, p["out"]) + p["out_bias"], p["scale1"], p["shift1"])
        inner = jax.nn.gelu(x @ p["fc1"] + p["fc1_bias"])
        return norm(x + inner @ p["fc2"] + p["fc2_bias"], p["scale2"], p["shift2"])

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for p in params:
            x = (jax.checkpoint(layer) if remat else layer)(p, x)
        return jnp.mean((x - batch["y"]) ** 2)

    one = {n: array(width, heads, width // heads) for n in "qkv"}
    one |= {f"{n}_bias": array(heads, width // heads) for n in "qkv"}
    one |= {"out": array(heads, width // heads, width), "out_bias": array(width)}
    one |= {"fc1": array(width, 4 * width), "fc1_bias": array(4 * width)}
    one |= {"fc2": array(4 * width, width), "fc2_bias": array(width)}
    one |= {f"{n}{i}": array(width) for n in ("scale", "shift") for i in (1, 2)}
    return loss, [dict(one) for _ in range(layers)], {n: array(batch, seq, width) for n in "xy"}


def spec_of(plan: Plan, end: str) -> list[str]:
    """Specs of the parameters whose path ends so."""
    return [str(p.spec) for p in plan.inputs if p.path.startswith("state[0]") and p.path.endswith(end)]


@pytest.mark.parametrize("sizes", [(4, 1), (1, 4)], ids=str)
def test_a_large_batch_on_small_weights_is_split_and_the_gradients_are_reduced_once(sizes: tuple[int, int]) -> None:
    """Alpa's: data parallel, one all-reduce. To turn one layer's activations is cheaper still than its gradient."""
    on = mesh(*sizes)
    plan, found = planned(*mlp(6, 256, 32, bias=True), on)
    axis = "x" if sizes[0] > 1 else "y"
    assert found["all-reduce"] == 1
    assert set(found) <= {"all-reduce", "all-to-all"}
    everything = 6 * (32 * 32 + 32) * 4 + 4
    assert plan.cost.transfers <= collective_seconds("all-reduce", (axis,), everything, on) + 12 * (6e-6 + 1e-7)


@pytest.mark.parametrize("sizes", [(4, 1), (1, 4)], ids=str)
def test_large_weights_on_a_small_batch_are_split_by_columns_and_rows_in_turn(sizes: tuple[int, int]) -> None:
    on = mesh(*sizes)
    plan, found = planned(*mlp(6, 32, 256, bias=False), on)
    axis = "x" if sizes[0] > 1 else "y"
    assert found == {"all-reduce": 5}
    assert spec_of(plan, "['w']") == [f"[_, {axis}]", f"[{axis}, _]"] * 3
    assert plan.cost.transfers == pytest.approx(5 * collective_seconds("all-reduce", (axis,), 32 * 256 * 4, on))


def test_on_two_axes_the_batch_takes_the_dear_one_and_the_weights_the_cheap_one() -> None:
    on = mesh(2, 2, beta=(1.0, 0.1))
    plan, found = planned(*mlp(6, 256, 32, bias=True), on)
    assert found == {"all-reduce": 6}
    assert spec_of(plan, "['w']") == ["[_, y]", "[y, _]"] * 3
    assert {p.path: str(p.spec) for p in plan.inputs}["batch['x']"] == "[x, _]"
    inside = 5 * collective_seconds("all-reduce", ("y",), 256 * 32 * 4 // 2, on)
    assert sum(
        collective_seconds(c.kind, c.axes, c.bytes, on) for c in plan.cost.collectives if c.axes == ("y",)
    ) == pytest.approx(inside)


def test_a_large_batch_of_encoder_layers_is_data_parallel() -> None:
    plan, found = planned(*bert(2, 64, 64, 32, 8), mesh(4, 1))
    assert found == {"all-reduce": 1}
    assert {p.spec.whole() for p in plan.inputs if p.path.startswith("state")} == {True}


@pytest.mark.parametrize(("remat", "reductions"), [(False, 7), (True, 11)])
def test_a_small_batch_of_encoder_layers_is_split_by_heads_and_hidden_width(remat: bool, reductions: int) -> None:
    """Megatron's: 4 a layer, the first without the last; with recompute two more a layer."""
    plan, found = planned(*bert(2, 8, 8, 128, 8, remat=remat), mesh(4, 1))
    assert found == {"all-reduce": reductions}
    for name in "qkv":
        assert spec_of(plan, f"['{name}']") == ["[_, x, _]"] * 2
    assert spec_of(plan, "['out']") == ["[x, _, _]"] * 2
    assert spec_of(plan, "['fc1']") == ["[_, x]"] * 2
    assert spec_of(plan, "['fc2']") == ["[x, _]"] * 2
