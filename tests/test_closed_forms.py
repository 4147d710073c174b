"""Layouts that any right planner reaches, with the collectives of the compiled program: Alpa's tests on four devices.

Alpa prices communication alone and makes every product use all devices: products are dear here, memory is free, and
links have a latency next to nothing. (Zheng et al., "Alpa", OSDI 2022; tests/shard_parallel of its repository.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autoshard
from autoshard.backend.audit import audit
from autoshard.machine.collective import collective_seconds
from autoshard.machine.mesh import Hardware, Link, LogicalMesh
from autoshard.runtime.plan import Plan
from autoshard.train.models.decoder import ModelConfig, make_steps
from autoshard.train.optimizer import OptimizerConfig

Loss = Callable[[Any, Any], Any]


def mesh(*sizes: int, beta: tuple[float, ...] = (1.0, 1.0), latency: float = 1e-6, flops: float = 1e9) -> LogicalMesh:
    """Axes x and y; ``beta`` is the price of a byte on each."""
    links = {name: Link(name, 1e9 / b, latency) for name, b in zip("xy", beta, strict=True)}
    hardware = Hardware("communication", {"float32": flops}, 1e18, 1e30, links, latency / 10)
    return LogicalMesh(("x", "y"), sizes, hardware, ("x", "y"), tuple(jax.devices()[: sizes[0] * sizes[1]]))


def planned(loss: Loss, params: Any, batch: Any, on: LogicalMesh, strategy: str = "auto") -> tuple[Plan, Counter[str]]:
    """The plan of an Adam step, and how many collectives of each kind the compiled step has, which are as planned."""
    optimizer = optax.adam(1e-2)

    def step(state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state[0], batch)
        updates, moments = optimizer.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), value

    given = (params, jax.eval_shape(optimizer.init, params)), batch
    stepped = autoshard.jit(step, mesh=on, strategy=strategy, donate_argnums=0)
    plan = stepped.plan(*given)
    found = audit(stepped.lower(*given).compile(), plan)
    assert found.clean, str(found)
    emitted: Counter[str] = Counter()
    for row in found.rows:
        emitted[row.kind] += sum(c.count for c in row.emitted)
    return plan, +emitted


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


def norm(x: Any, scale: Any, shift: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6) * scale + shift


def encoder(p: Mapping[str, Any], x: Any) -> Any:
    """One layer, with biases and a norm after each block."""
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, p[n]) + p[n + "_bias"] for n in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k) / q.shape[-1] ** 0.5)
    mixed = jnp.einsum("bhst,bthe->bshe", weights, v)
    x = norm(x + jnp.einsum("bshe,hed->bsd", mixed, p["out"]) + p["out_bias"], p["scale1"], p["shift1"])
    inner = jax.nn.gelu(x @ p["fc1"] + p["fc1_bias"])
    return norm(x + inner @ p["fc2"] + p["fc2_bias"], p["scale2"], p["shift2"])


def encoders(layers: int, width: int, heads: int) -> list[dict[str, Any]]:
    """The parameters of so many layers."""
    one = {n: array(width, heads, width // heads) for n in "qkv"}
    one |= {f"{n}_bias": array(heads, width // heads) for n in "qkv"}
    one |= {"out": array(heads, width // heads, width), "out_bias": array(width)}
    one |= {"fc1": array(width, 4 * width), "fc1_bias": array(4 * width)}
    one |= {"fc2": array(4 * width, width), "fc2_bias": array(width)}
    one |= {f"{n}{i}": array(width) for n in ("scale", "shift") for i in (1, 2)}
    return [dict(one) for _ in range(layers)]


def bert(layers: int, batch: int, seq: int, width: int, heads: int, *, remat: bool = False) -> tuple[Loss, Any, Any]:
    """Encoder layers alone."""

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for p in params:
            x = (jax.checkpoint(encoder) if remat else encoder)(p, x)
        return jnp.mean((x - batch["y"]) ** 2)

    return loss, encoders(layers, width, heads), {n: array(batch, seq, width) for n in "xy"}


def masked_language_model(layers: int, batch: int, seq: int, width: int, heads: int, vocab: int) -> Any:
    """Encoder layers between three embeddings, and a head that has the first one again."""

    def loss(params: Any, batch: Any) -> Any:
        x = sum(params[n][batch[n]] for n in ("embed", "type", "position"))
        x = norm(x, params["scale"], params["shift"])
        for p in params["layers"]:
            x = encoder(p, x)
        x = norm(jax.nn.gelu(x @ params["dense"] + params["dense_bias"]), params["head_scale"], params["head_shift"])
        logits = x @ params["embed"].T + params["head_bias"]
        each = optax.softmax_cross_entropy(logits, jax.nn.one_hot(batch["labels"], vocab))
        asked = batch["labels"] > 0
        return jnp.sum(asked * each) / jnp.sum(asked)

    sizes = {"embed": vocab, "type": 2, "position": 512, "dense": width}
    params = {"layers": encoders(layers, width, heads), "head_bias": array(vocab)}
    params |= {n: array(rows, width) for n, rows in sizes.items()}
    params |= {n: array(width) for n in ("scale", "shift", "dense_bias", "head_scale", "head_shift")}
    ids = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    return loss, params, dict.fromkeys(("embed", "type", "position", "labels"), ids)


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_a_tensor_parallel_decoder_has_four_reductions_a_layer(scan: bool) -> None:
    """Not 7: what the three projections and the two of the gated block send back is added before it is reduced."""
    layers, model = 3, ModelConfig(layers=3, scan=scan, d_model=256, heads=8, d_ff=1024, vocab=1024, seq=8)
    steps = make_steps(model, OptimizerConfig(), 100)
    state = jax.eval_shape(steps.init, jax.random.key(0))
    batch = {k: jax.ShapeDtypeStruct((8, model.seq), jnp.int32) for k in ("inputs", "targets")}
    step = autoshard.jit(steps.train, mesh=mesh(4, 1), donate_argnums=0)
    plan = step.plan(state, batch)
    found = audit(step.lower(state, batch).compile(), plan)
    assert found.clean, str(found)
    size = 8 * model.seq * model.d_model * 4
    for side in (plan.cost.collectives, [c for row in found.rows for c in row.emitted]):
        assert {c.kind for c in side} == {"all-reduce"}
        assert sum(c.bytes // size * c.count for c in side) == 4 * layers + 1  # and one of what the logits send back


def spec_of(plan: Plan, end: str) -> list[str]:
    """Specs of the parameters whose path ends so."""
    return [str(p.spec) for p in plan.inputs if p.path.startswith("state[0]") and p.path.endswith(end)]


@pytest.mark.parametrize("sizes", [(1, 4), (2, 2)], ids=str)
def test_gradients_of_micro_batches_are_reduced_once_a_step(sizes: tuple[int, int]) -> None:
    """Alpa's: one all-reduce after the loop over micro-batches, none in it."""
    on = mesh(*sizes, latency=1e-9)
    loss, params, batch = mlp(2, 128, 16, bias=True)

    def step(params: Any, batches: Any) -> Any:
        def micro(total: Any, batch: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, batch)), None

        zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params))
        value, grads = jax.lax.scan(micro, zeros, batches)[0]
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    stepped = autoshard.jit(step, mesh=on, donate_argnums=0)
    given = params, {name: array(2, *x.shape) for name, x in batch.items()}
    plan = stepped.plan(*given)
    found = audit(stepped.lower(*given).compile(), plan)
    assert found.clean, str(found)
    assert [(c.kind, c.count, c.bytes) for c in found.emitted] == [("all-reduce", 1, 2 * (16 * 16 + 16) * 4 + 4)]
    used = tuple(a for a, n in zip("xy", sizes, strict=True) if n > 1)
    apart = 5 * collective_seconds("all-reduce", used, 0, on)  # they are planned one by one
    assert plan.cost.transfers <= seconds(on, ("all-reduce", found.emitted[0].bytes), axes=used) + apart


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


@pytest.mark.parametrize(("strategy", "gathers"), [("zero2", 1), ("zero3", 2)])
def test_zero_scatters_every_gradient_once_and_gathers_every_parameter(strategy: str, gathers: int) -> None:
    """Alpa's: one reduce-scatter, and one gather, or two where parameters are in parts; here one serves both passes."""
    plan, found = planned(*mlp(6, 256, 32, bias=True), mesh(4, 1), strategy)
    sent: Counter[str] = Counter()
    for c in plan.cost.collectives:
        sent[c.kind] += c.total_bytes
    everything = 6 * (32 * 32 + 32) * 4
    assert sent["reduce-scatter"] == everything
    assert everything <= sent["all-gather"] <= gathers * everything
    assert sent["all-reduce"] == 4
    assert found["all-gather"] == 12


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
    assert not any(any(p.spec.dims) for p in plan.inputs if p.path.startswith("state"))


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


def test_encoder_layers_on_two_axes_do_with_seven_reductions() -> None:
    """Alpa's has 4 a layer: 7 of activations, and one of the gradients over the batch's axis."""
    on = mesh(2, 2)
    plan, found = planned(*bert(2, 8, 8, 128, 8), on)
    assert found == {"all-reduce": 7}
    size = 8 * 8 * 128 * 4
    theirs = 7 * collective_seconds("all-reduce", ("y",), size // 2, on)
    theirs += collective_seconds(
        "all-reduce", ("x",), sum(math.prod(p.shape) * 4 for p in plan.inputs if p.path.startswith("state[0]")) // 2, on
    )
    assert plan.cost.transfers <= theirs


def test_a_masked_language_model_has_four_reductions_a_layer_and_five_around_them() -> None:
    """Alpa's, which computes the head's square product on every device ("recompute of heavy operations"): products
    cost something here, less than to send what they would leave. A reduction over both axes may be one over the first
    and gathers over the second, which send less."""
    layers, on = 2, mesh(2, 2, flops=5e11)
    plan, found = planned(*masked_language_model(layers, 4, 4, 512, 4, 4096), on)
    assert found["all-reduce"] <= 4 * layers + 5
    assert found["all-gather"] <= 2 * layers
    assert set(found) <= {"all-reduce", "all-gather"}
    assert spec_of(plan, "['embed']") == ["[x+y, _]"]
    assert spec_of(plan, "['dense']") == ["[_, _]"]
    activations = [("all-reduce", 4 * 4 * 512 * 4)] * (4 * layers + 2)
    assert plan.cost.transfers <= seconds(on, *activations, *[("all-reduce", 4 * 4 * 4)] * 3, axes=("x", "y"))


@pytest.mark.parametrize("beta", [(1.0, 1.0), (1.0, 0.1)], ids=str)
def test_a_masked_language_model_whose_every_product_is_split_does_as_planned(beta: tuple[float, float]) -> None:
    """The head's square product is split over both axes, and leaves terms over one that are wanted whole."""
    plan, _ = planned(*masked_language_model(1, 4, 4, 512, 4, 4096), mesh(2, 2, beta=beta))
    assert spec_of(plan, "['embed']") == ["[x+y, _]"]
    assert spec_of(plan, "['dense']")[0] in ("[x, y]", "[y, x]")


def seconds(on: LogicalMesh, *sent: tuple[str, int], axes: tuple[str, ...] = ("x",)) -> float:
    """What collectives of these kinds and bytes take."""
    return sum(collective_seconds(kind, axes, size, on) for kind, size in sent)


def test_a_tied_embedding_is_split_by_rows_and_nothing_is_gathered() -> None:
    vocab, width, ids = 1024, 8, jax.ShapeDtypeStruct((8, 8), jnp.int32)

    def loss(params: Any, batch: Any) -> Any:
        logits = params["embed"][batch["ids"]] @ params["embed"].T
        return optax.softmax_cross_entropy(logits, jax.nn.one_hot(batch["labels"], vocab)).mean()

    plan, found = planned(loss, {"embed": array(vocab, width)}, {"ids": ids, "labels": ids}, mesh(2, 2))
    assert set(found) == {"all-reduce"}
    assert spec_of(plan, "['embed']") == ["[x+y, _]"]


def convolved(x: Any, w: Any, groups: int = 1) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups)


def test_large_convolutions_on_a_small_batch_are_split_by_features_in_turn() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for w in params:
            x = convolved(x, w)
        return jnp.mean((x - batch["y"]) ** 2)

    plan, found = planned(loss, [array(3, 3, 256, 256)] * 4, {n: array(8, 16, 16, 256) for n in "xy"}, mesh(4, 1))
    assert found == {"all-reduce": 3}
    assert [str(p.spec) for p in plan.inputs[:4]] == ["[_, _, _, x]", "[_, _, x, _]"] * 2


def test_depthwise_convolutions_are_split_by_features() -> None:
    def loss(w: Any, batch: Any) -> Any:
        return jnp.mean((convolved(batch["x"], w, 256) - batch["y"]) ** 2)

    plan, found = planned(loss, array(3, 3, 1, 256), {n: array(4, 8, 8, 256) for n in "xy"}, mesh(4, 1))
    assert found == {"all-reduce": 1}
    assert str(plan.inputs[0].spec) == "[_, _, _, x]"


def test_convolutions_with_batch_norm_take_no_longer_than_a_split_batch() -> None:
    """Alpa's: the batch split, with all-reduces alone. Features of 4 are sent for less."""

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for p in params:
            x = convolved(x, p["w"])
            mean = x.mean((0, 1, 2))
            x = (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean((0, 1, 2)) + 1e-5) * p["scale"] + p["shift"]
            x = jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jnp.mean((x - batch["y"]) ** 2)

    one = {"w": array(3, 3, 4, 4), "scale": array(4), "shift": array(4)}
    given = loss, [one] * 3, {"x": array(16, 16, 16, 4), "y": array(16, 2, 2, 4)}, mesh(4, 1)
    theirs, found = planned(*given, strategy="dp")
    assert set(found) == {"all-reduce"}
    assert planned(*given)[0].cost.seconds <= theirs.cost.seconds


def test_experts_are_split_and_tokens_travel() -> None:
    """Alpa's: one all-reduce and 4 all-to-alls, two a pass, each of what is dispatched."""
    groups, group, width, experts = 32, 32, 64, 16
    capacity = 2 * group // experts

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"].reshape(groups, group, width)
        gates = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, params["gate"]))
        first = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
        second = jax.nn.one_hot(jnp.argmax(gates * (1 - first), -1), experts)
        places = jnp.cumsum(first, 1) - first, jnp.cumsum(second, 1) - second + first.sum(1, keepdims=True)
        combine = jnp.zeros((groups, group, experts, capacity))
        for chosen, place in zip((first, second), places, strict=True):
            kept = chosen * (place < capacity)
            slot = jax.nn.one_hot((place * kept).sum(-1).astype(int), capacity)
            combine += (gates * kept).sum(-1)[..., None, None] * kept[..., None] * slot[:, :, None, :]
        sent = jnp.einsum("gsec,gsm->egcm", (combine > 0).astype(x.dtype), x)
        made = jax.nn.relu(jnp.einsum("egcm,emh->egch", sent, params["wi"]))
        back = jnp.einsum("egch,ehm->egcm", made, params["wo"])
        return jnp.mean((jnp.einsum("gsec,egcm->gsm", combine, back).reshape(batch["y"].shape) - batch["y"]) ** 2)

    on = mesh(4, 1)
    params = {
        "gate": array(width, experts),
        "wi": array(experts, width, 4 * width),
        "wo": array(experts, 4 * width, width),
    }
    plan, found = planned(loss, params, {n: array(64, 16, width) for n in "xy"}, on)
    dispatched = experts * groups * capacity * width * 4 // 4
    assert found["all-to-all"] <= 4
    assert plan.cost.transfers <= seconds(on, ("all-reduce", width * experts * 4), *[("all-to-all", dispatched)] * 4)
    for name in ("wi", "wo"):
        assert spec_of(plan, f"['{name}']") == ["[x, _, _]"]


def test_dropout_between_two_products_costs_nothing() -> None:
    def loss(params: Any, batch: Any) -> Any:
        h = batch["x"] @ params[0]
        h = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, h.shape), h / 0.9, 0)
        return jnp.mean((h @ params[1] - batch["y"]) ** 2)

    _, found = planned(loss, [array(128, 128)] * 2, {n: array(64, 128) for n in "xy"}, mesh(4, 1))
    assert found == {"all-reduce": 1}


def test_rows_that_are_gathered_from_a_product_cost_no_more_than_one_reduction() -> None:
    def loss(w: Any, batch: Any) -> Any:
        return jnp.mean((batch["x"] @ w)[jnp.arange(8)] ** 2)

    on = mesh(4, 1)
    plan, _ = planned(loss, array(32, 32), {"x": array(64, 32)}, on)
    assert plan.cost.transfers <= seconds(on, ("all-reduce", 32 * 32 * 4))


@pytest.mark.parametrize(
    ("fun", "avals", "argument"),
    [
        (lambda x: jnp.argmax(x, -1), [array(16, 64)], (4, 64)),
        (lambda w, x: w - jax.grad(lambda w: jnp.mean((w @ x) ** 2))(w), [array(144, 144), array(144)], (36, 144)),
        (lambda x: (2 * x).reshape(32, 256), [array(128, 64)], (32, 64)),
    ],
    ids=["argmax", "a matrix times a vector", "a reshape of uneven parts"],
)
def test_what_needs_no_collective_has_none(fun: Any, avals: list[Any], argument: tuple[int, ...]) -> None:
    step = autoshard.jit(fun, mesh=mesh(4, 1))
    plan = step.plan(*avals)
    found = audit(step.lower(*avals).compile(), plan)
    assert found.clean
    assert not any(row.emitted for row in found.rows)
    assert plan.in_shardings[0].shard_shape(avals[0].shape) == argument
