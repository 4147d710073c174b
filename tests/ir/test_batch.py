"""What presets take for the batch, and for parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.errors import SpecError
from autoshard.runtime.plan import Plan

MESH = {"data": 2, "model": 4}


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


MLP = {"b": f32(64), "head": f32(64, 16), "w": f32(32, 64)}
LM = {"emb": f32(128, 32), "head": f32(32, 128), "w": f32(32, 32)}


def mlp(p, x):
    return jnp.tanh(x @ p["w"] + p["b"]) @ p["head"]


def mlp_loss(p, x, y):
    return jnp.mean((mlp(p, x) - y) ** 2)


def log_likelihood(p, tokens):
    z = jax.nn.log_softmax(jnp.tanh(p["emb"][tokens[:, :-1]] @ p["w"]) @ p["head"])
    return jnp.take_along_axis(z, tokens[:, 1:, None], -1).sum((1, 2))


def updates(loss: Callable[..., Any]) -> Callable[..., Any]:
    """One step with momentum; the state is the parameters and the momentum."""

    def step(state, *batch):
        p, m = state
        m = jax.tree.map(lambda m, g: 0.9 * m + g, m, jax.grad(loss)(p, *batch))
        return jax.tree.map(lambda p, m: p - 0.1 * m, p, m), m

    return step


def micro_batches(state, xs, ys):
    p, m = state

    def add(total, batch):
        return jax.tree.map(jnp.add, total, jax.grad(mlp_loss)(p, *batch)), None

    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, p), (xs, ys))
    m = jax.tree.map(lambda m, g: 0.9 * m + g, m, total)
    return jax.tree.map(lambda p, m: p - 0.1 * m, p, m), m


def reshaped_inside(state, x, y):
    return micro_batches(state, x.reshape(4, -1, x.shape[1]), y.reshape(4, -1, y.shape[1]))


def sgd(p, x, y):
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(lambda p: jnp.mean((x @ p["w"] - y) ** 2))(p))


def lora(adapter, base, x, y):
    return mlp_loss({**base, "w": base["w"] + adapter["a"] @ adapter["b"]}, x, y)


def dpo(p, reference, chosen, rejected):
    margin = [log_likelihood(p, t) - log_likelihood(reference, t) for t in (chosen, rejected)]
    return -jnp.mean(jax.nn.log_sigmoid(0.1 * (margin[0] - margin[1])))


def sparse_rows(p, row_pointer, columns, weights, y):
    rows = jnp.repeat(jnp.arange(64), jnp.diff(row_pointer), total_repeat_length=len(columns))
    x = jax.ops.segment_sum(p["emb"][columns] * weights[:, None], rows, 64)
    return jnp.mean((jnp.tanh(x @ p["w"]) @ p["head"] - y) ** 2)


def images_in_text(p, tokens, patches, grid):
    seen = jax.nn.softmax(patches @ p["w"] @ patches.T) @ patches
    h = p["emb"][tokens] + jnp.where((tokens == 7)[..., None], seen[jnp.cumsum(tokens == 7, 1) % 37], 0.0)
    z = jax.nn.log_softmax(jnp.tanh((h + grid.sum()) @ p["w"]) @ p["head"])
    return -jnp.mean(jnp.take_along_axis(z, tokens[..., None], -1))


def two_towers(p, images, texts):
    """Of as many images as texts, but in classes of their own: each looks for its like among the others."""
    a, b = jnp.tanh(jnp.tanh(images @ p["w"]) @ p["w"]), jnp.tanh(p["emb"][texts].sum(1) @ p["w"])
    return -jnp.mean(jnp.max(a @ b.T, 1)) - jnp.mean(jnp.max(a @ b.T, 0))


def recurrent(p, xs, y):
    h = jax.lax.scan(lambda h, x: (jnp.tanh((h + x) @ p["w"]), None), jnp.zeros_like(xs[0]), xs)[0]
    return jnp.mean((h @ p["head"] - y) ** 2)


def nodes_of_a_graph(p, adjacency, x, y):
    return jnp.mean((adjacency @ jnp.tanh(adjacency @ x @ p["w"]) @ p["head"] - y) ** 2)


def decode(p, cache, token):
    q = p["emb"][token] @ p["w"]
    cache = jnp.concatenate([cache[:, 1:], q[:, None]], 1)
    h = jnp.einsum("bs,bsd->bd", jax.nn.softmax(jnp.einsum("bd,bsd->bs", q, cache)), cache)
    return cache, jnp.argmax(h @ p["head"], -1)


def two(p: Any) -> Any:
    return p, p


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...], list[tuple[str, int]]]] = {
    "predict": (mlp, (MLP, f32(64, 32)), (), [("x", 0)]),
    "linear": (lambda w, b, x: x @ w + b, (f32(32, 64), f32(64), f32(64, 32)), (), [("x", 0)]),
    "sgd": (sgd, ({"w": f32(32, 16)}, f32(64, 32), f32(64, 16)), (), [("x", 0), ("y", 0)]),
    "updates": (updates(mlp_loss), (two(MLP), f32(64, 32), f32(64, 16)), (0,), [("batch[0]", 0), ("batch[1]", 0)]),
    "micro_batches": (micro_batches, (two(MLP), f32(4, 16, 32), f32(4, 16, 16)), (0,), [("xs", 1), ("ys", 1)]),
    "reshaped_inside": (reshaped_inside, (two(MLP), f32(64, 32), f32(64, 16)), (0,), [("x", 0), ("y", 0)]),
    "lora": (
        updates(lora),
        (two({"a": f32(32, 4), "b": f32(4, 64)}), MLP, f32(64, 32), f32(64, 16)),
        (0,),
        [("batch[1]", 0), ("batch[2]", 0)],
    ),
    "dpo": (updates(dpo), (two(LM), LM, i32(16, 9), i32(16, 9)), (0,), [("batch[1]", 0), ("batch[2]", 0)]),
    "sparse_rows": (
        updates(sparse_rows),
        (two(LM), i32(65), i32(200), f32(200), f32(64, 128)),
        (0,),
        [("batch[1]", 0), ("batch[2]", 0), ("batch[3]", 0)],
    ),
    "images_in_text": (updates(images_in_text), (two(LM), i32(8, 16), f32(37, 32), i32(3, 3)), (0,), [("batch[0]", 0)]),
    "two_towers": (updates(two_towers), (two(LM), f32(64, 32), i32(32, 5)), (0,), [("batch[0]", 0), ("batch[1]", 0)]),
    "recurrent": (
        updates(recurrent),
        (two(LM), f32(5, 64, 32), f32(64, 128)),
        (0,),
        [("batch[0]", 1), ("batch[1]", 0)],
    ),
    "graph": (
        updates(nodes_of_a_graph),
        (two(LM), f32(40, 40), f32(40, 32), f32(40, 128)),
        (0,),
        [("batch[0]", 0), ("batch[0]", 1), ("batch[1]", 0), ("batch[2]", 0)],
    ),
    "decode": (decode, (LM, f32(16, 8, 32), i32(16)), (1,), [("cache", 0), ("token", 0)]),
}


def planned(case: str, strategy: str = "dp", **options: Any) -> Plan:
    fun, args, donated, _ = CASES[case]
    return autoshard.jit(fun, mesh=MESH, strategy=strategy, donate_argnums=donated, **options).plan(*args)


@pytest.mark.parametrize("case", CASES)
def test_the_batch_is_what_the_program_computes_independently(case: str) -> None:
    plan = planned(case, passes=[])
    assert [(b.path, b.dim) for b in plan.batch] == CASES[case][3]
    split = {(p.path, d) for p in plan.inputs for d, axes in enumerate(p.spec.dims) if axes}
    first = {b.path: (b.path, b.dim) for b in reversed(plan.batch)}  # a dimension repeated in an array is split once
    assert split == set(first.values())
    assert not plan.diagnostics


@pytest.mark.parametrize("case", ["predict", "lora", "dpo", "decode"])
def test_arguments_without_the_batch_are_parameters(case: str) -> None:
    """Stored sharded over all axes, but under dp and zero1."""
    batch = {path for path, _ in CASES[case][3]}
    frozen = {"predict": "p", "lora": "batch[0]", "dpo": "batch[0]", "decode": "p"}[case]
    for strategy in ("fsdp", "fsdp_tp", "tp", "zero1", "dp"):
        axes = {"data", "model"} if strategy in ("fsdp", "fsdp_tp", "tp") else set()
        plan = planned(case, strategy, passes=[])
        found = {p.path: set(p.spec.axes) for p in plan.inputs if p.path.startswith(frozen) and len(p.shape) > 1}
        assert found
        assert batch.isdisjoint(found)
        assert [path for path, used in found.items() if used != axes] == [], strategy


@pytest.mark.parametrize("case", ["micro_batches", "reshaped_inside"])
def test_micro_batches_are_split_by_example_and_optimizer_state_is_stored_sharded(case: str) -> None:
    """Each device computes an eighth of every micro-batch, whatever pass rewrites the loop."""
    fun, args, *_ = CASES[case]
    for strategy in ("zero1", "zero2", "dp"):
        plan = planned(case, strategy)
        assert plan.memory.parameters == sum(4 * np.prod(x.shape) for x in jax.tree.leaves(MLP))
        assert plan.memory.optimizer == plan.memory.parameters // (1 if strategy == "dp" else 8)
        assert {p.spec.axes for p in plan.inputs if p.path in ("x", "y", "xs", "ys")} == {("data", "model")}
    given = [np.random.default_rng(k).normal(size=x.shape).astype("f4") for k, x in enumerate(jax.tree.leaves(args))]
    call = jax.tree.structure(args).unflatten(given)
    step = autoshard.jit(fun, mesh=MESH, strategy="zero1")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), step(*call), jax.jit(fun)(*call))


def test_a_batch_takes_the_axes_that_divide_it() -> None:
    """12 is split in 4 on the mesh 2 x 4, and the plan says so; 7 is refused."""
    fun, (state, *_), donated, _ = CASES["updates"]
    step = autoshard.jit(fun, mesh=MESH, strategy="dp", donate_argnums=donated)
    plan = step.plan(state, f32(12, 32), f32(12, 16))
    assert {p.path: str(p.spec) for p in plan.inputs if p.path.startswith("batch")} == {
        "batch[0]": "[model, _]",
        "batch[1]": "[model, _]",
    }
    (remark,) = plan.diagnostics
    assert remark.text.startswith(
        "strategy 'dp': dimension 0 of batch[0] is split over model only, since 12 does not divide"
    )
    with pytest.raises(SpecError, match=r"dimension 0 of batch\[0\] has size 7 .* pad the batch to 8"):
        step.plan(state, f32(7, 32), f32(7, 16))
    assert "Taken for the batch: dimension 0 of batch[0], batch[1]." in plan.explain()


@pytest.mark.parametrize("last", [jnp.sum, jnp.mean, lambda z: (z.T * 3).sum() - 1])
def test_the_batch_of_a_product_that_is_only_summed_afterwards(last: Callable[..., Any]) -> None:
    step = autoshard.jit(lambda w, x: last(x @ w), mesh=MESH, strategy="fsdp_tp")
    plan = step.plan(f32(32, 16), f32(8, 32))
    assert [(b.path, b.dim) for b in plan.batch] == [("x", 0)]
    assert plan.inputs[1].spec.dims[0] == ("data",)


def test_where_nothing_is_a_batch_the_plan_says_so() -> None:
    step = autoshard.jit(lambda x: jnp.cumsum(jnp.sort(x)), mesh=MESH, strategy="fsdp")
    plan = step.plan(f32(64))
    assert plan.batch == ()
    assert {str(p.spec) for p in plan.inputs} == {"[_]"}
    (remark,) = plan.diagnostics
    assert remark.text.startswith("strategy 'fsdp': no dimension of an argument qualifies as the batch")
    assert "No dimension of an argument qualifies as the batch." in plan.explain()


def test_a_dimension_that_is_sorted_more_than_multiplied_is_no_batch() -> None:
    def ranks(x: Any, w: Any) -> Any:
        y = (x @ w)[:, 0]
        for _ in range(4):
            y = jnp.cumsum(jnp.sort(jnp.sin(y)))
        return y

    assert autoshard.jit(ranks, mesh=MESH).plan(f32(64, 2), f32(2, 1)).batch == ()
    assert autoshard.jit(lambda x, w: (x @ w)[:, 0], mesh=MESH).plan(f32(64, 2), f32(2, 1)).batch != ()


def test_zero_without_optimizer_state_says_so() -> None:
    found = [[d.text for d in planned("sgd", s).diagnostics] for s in ("zero1", "zero2", "fsdp")]
    says = "strategy 'zero{}': the step carries no optimizer state, so nothing is stored sharded"
    assert found == [[says.format(1)], [says.format(2)], []]
