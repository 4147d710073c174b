"""A step written for `nnx.jit` does the same when only its decorator changes."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import ArgumentError

MESH = {"data": 4, "model": 2}
jit = functools.partial(autoshard.jit, mesh=MESH)


class Net(nnx.Module):
    """[batch, 4] to the same, by way of batch norm and dropout.

    No bias ahead of the norm: its gradient is rounding error alone, which Adam scales up to a step.
    """

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 16, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.dropout(jnp.tanh(self.norm(self.first(x)))))

    @jit
    def forward(self, x: jax.Array) -> jax.Array:
        """The same as a planned method."""
        return self(x)


class Tied(nnx.Module):
    """Two layers with one kernel."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.a, self.b = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
        self.b.kernel = self.a.kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(jnp.tanh(self.a(x)))


def make(kind: type = Net) -> tuple[Any, ...]:
    model = kind(nnx.Rngs(0, dropout=1))
    return model, nnx.Optimizer(model, optax.adamw(1e-2, eps=1e-4), wrt=nnx.Param)


def make_with_metrics() -> tuple[Any, ...]:
    return *make(), nnx.MultiMetric(loss=nnx.metrics.Average("loss"), size=nnx.metrics.Average("size"))


def train(model: Any, optimizer: Any, batch: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda m: ((m(batch["x"]) - batch["y"]) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def train_with_metrics(model: Any, optimizer: Any, metrics: Any, batch: Any) -> None:
    metrics.update(loss=train(model, optimizer, batch), size=jnp.abs(batch["x"]).mean())


def batch(i: int = 0, size: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(i)
    return {k: rng.normal(size=(size, 4)).astype(np.float32) for k in "xy"}


def same_state(got: Any, want: Any) -> None:
    flat = [jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(m)))[0] for m in (got, want)]
    assert [p for p, _ in flat[0]] == [p for p, _ in flat[1]]
    for (path, a), (_, b) in zip(*flat, strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=jax.tree_util.keystr(path))


def agrees(fun: Callable[..., Any], make: Callable[[], tuple[Any, ...]], *rest: Any, **options: Any) -> tuple[Any, Any]:
    """Calls ``fun`` three times under each decorator. Returns the planned step, and what it mutated."""
    reference, planned = nnx.jit(fun), jit(fun, **options)
    want, got = make(), make()
    for i in range(3):
        given = rest or (batch(i),)
        a, b = reference(*want, *given), planned(*got, *given)
        chex.assert_trees_all_close(b, a, rtol=1e-5, atol=1e-6, strict=True)
        same_state(got, want)
    return planned, got


@pytest.mark.parametrize("options", [{}, {"donate_argnums": (0, 1)}, {"strategy": "fsdp"}, {"strategy": "fsdp_tp"}])
@pytest.mark.parametrize("kind", [Net, Tied])
def test_model_and_optimizer_are_mutated_in_place(kind: type, options: dict[str, Any]):
    step, (model, optimizer) = agrees(train, lambda: make(kind), **options)
    plan = step.plan(model, optimizer, batch())
    assert set(plan.in_specs[2]) == {"x", "y"}
    kernel = (model.first if kind is Net else model.a).kernel
    assert kernel[...].sharding.device_set == set(jax.devices())
    assert len(jax.tree.leaves(plan.in_specs[0])) == len(jax.tree.leaves(nnx.state(model)))
    if kind is Tied:
        assert model.b.kernel is model.a.kernel
    if "donate_argnums" in options:
        step(model, optimizer, batch())  # on CPU, JAX donates no array that NumPy has looked at
        before = kernel.get_value()
        step(model, optimizer, batch())
        assert before.is_deleted()
        assert not kernel.get_value().is_deleted()


def test_the_random_streams_advance():
    _, (model, _) = agrees(train, make)
    assert int(model.dropout.rngs.count[...]) == 3


@pytest.mark.parametrize("draw", [lambda r: r.params(), lambda r: r(), lambda r: r.fork()["params"]()])
def test_rngs_as_an_argument(draw: Callable[[Any], Any]):
    def fun(rngs: Any, x: Any) -> Any:
        return x + jax.random.normal(draw(rngs), x.shape)

    step, (rngs,) = agrees(fun, lambda: (nnx.Rngs(0),), jnp.zeros((8, 4)))
    assert float(step(rngs, jnp.zeros((8, 4)))[0, 0]) != float(step(rngs, jnp.zeros((8, 4)))[0, 0])


def test_metrics_accumulate_and_nothing_is_returned():
    _, (_, _, metrics) = agrees(train_with_metrics, make_with_metrics)
    reference, (model, optimizer, other) = nnx.jit(train_with_metrics), make_with_metrics()
    for i in range(3):
        reference(model, optimizer, other, batch(i))
    np.testing.assert_allclose(metrics.compute()["loss"], other.compute()["loss"], rtol=1e-5)
    metrics.reset()
    assert float(metrics.size.count[...]) == 0


def test_train_and_eval_are_two_programs():
    runs: list[bool] = []

    def fun(model: Any, x: Any) -> Any:
        runs.append(model.norm.use_running_average)
        return model(x)

    step, (model, _), x = jit(fun, strategy="dp"), make(), batch()["x"]
    for _ in range(2):
        model.train()
        first, second = step(model, x), step(model, x)
        assert float(jnp.abs(first - second).max()) > 0  # dropout
        model.eval()
        np.testing.assert_array_equal(step(model, x), step(model, x))
    assert sorted(runs, key=bool) == [False, True]


def test_the_step_is_traced_once_a_shape():
    sizes: list[int] = []

    def fun(model: Any, optimizer: Any, batch: Any) -> Any:
        sizes.append(batch["x"].shape[0])
        return train(model, optimizer, batch)

    step, state = jit(fun, strategy="dp"), make()
    for size in (16, 8, 16, 8, 16):
        step(*state, batch(0, size))
    assert sizes == [16, 8]


def test_modules_by_keyword():
    step, got, want = jit(train), make(), make()
    step(*got, batch=batch())
    step(optimizer=got[1], model=got[0], batch=batch(1))
    for i in range(2):
        nnx.jit(train)(*want, batch(i))
    same_state(got, want)


@pytest.mark.parametrize("options", [{}, {"donate_argnames": ("model", "optimizer")}])
def test_modules_of_keyword_only_arguments(options: dict[str, Any]):
    def keyword_only(scale: Any, *, optimizer: Any, model: Any, batch: Any) -> Any:
        return scale * train(model, optimizer, batch)

    step, got, want = jit(keyword_only, **options), make(), make()
    for i in range(3):
        loss = step(2.0, model=got[0], batch=batch(i), optimizer=got[1])
        np.testing.assert_allclose(loss, 2 * nnx.jit(train)(*want, batch(i)), rtol=1e-5)
    same_state(got, want)
    plan = step.plan(2.0, model=got[0], optimizer=got[1], batch=batch())
    donated = {leaf.path.split("[")[0] for leaf in plan.inputs if leaf.donated}
    assert donated == set(options.get("donate_argnames", ()))


def test_a_step_that_takes_modules_now_and_then():
    step, model, x = jit(lambda f, x: f(x)), make()[0], batch()["x"]
    double = jax.tree_util.Partial(lambda x: x * 2)
    model.eval()
    for f in (double, model, double, model):
        np.testing.assert_allclose(step(f, x), f(x), rtol=1e-5, atol=1e-6)


def test_static_arguments_beside_modules():
    def fun(model: Any, n: int, x: Any) -> Any:
        return model(x) * n

    step, (model, _), x = jit(fun, static_argnums=1), make(), batch()["x"]
    model.eval()
    for n in (2, 3, 2):
        np.testing.assert_allclose(step(model, n, x), model(x) * n, rtol=1e-5, atol=1e-6)


def test_user_shardings_are_prefixes_of_the_users_arguments():
    step, state = jit(train, in_shardings=(P(), P(), P("data")), out_shardings=P()), make()
    plan = step.plan(*state, batch())
    assert set(jax.tree.leaves(plan.in_specs[:2], is_leaf=lambda x: isinstance(x, P))) == {P()}
    assert plan.in_specs[2] == {"x": P("data"), "y": P("data")}
    assert step(*state, batch()).sharding.is_fully_replicated


def test_planned_abstractly_and_initialized_sharded():
    step = jit(train, strategy="fsdp")
    abstract = nnx.eval_shape(make)
    plan = step.plan(*abstract, batch())
    assert plan == step.plan(*make(), batch())
    model = plan.init(lambda: make()[0])
    optimizer = plan.init(lambda: make()[1], argnum=1)
    split = [x for x in jax.tree.leaves(nnx.state(model)) if not x.sharding.is_fully_replicated]
    assert split
    want = make()
    for i in range(2):
        loss = step(model, optimizer, batch(i))
        np.testing.assert_allclose(loss, nnx.jit(train)(*want, batch(i)), rtol=1e-5)
    same_state((model, optimizer), want)


def test_methods_of_a_module():
    model, other = make()[0], make()[0]
    x = batch()["x"]
    for _ in range(2):
        np.testing.assert_allclose(model.forward(x), nnx.jit(lambda m, x: m(x))(other, x), rtol=1e-5, atol=1e-6)
    same_state(model, other)
    assert model.forward.plan(x).in_specs[1] is not None


def test_one_module_twice():
    def fun(a: Any, b: Any, x: Any) -> Any:
        a.kernel[...] = a.kernel[...] + 1
        return b(x)

    got, want = (nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(2))
    np.testing.assert_allclose(jit(fun)(got, got, jnp.ones((8, 4))), nnx.jit(fun)(want, want, jnp.ones((8, 4))))
    same_state(got, want)


def test_modules_within_a_pytree_and_lone_variables():
    def fun(tree: Any, v: Any, x: Any) -> Any:
        v[...] = v[...] + x.sum()
        tree["m"].kernel[...] *= 2
        return tree["m"](x) + tree["n"]

    def made() -> tuple[Any, ...]:
        return {"m": nnx.Linear(4, 4, rngs=nnx.Rngs(0)), "n": jnp.ones(4)}, nnx.Variable(jnp.zeros(()))

    step, got, want = jit(fun), made(), made()
    for _ in range(2):
        np.testing.assert_allclose(step(*got, jnp.ones((8, 4))), nnx.jit(fun)(*want, jnp.ones((8, 4))), rtol=1e-6)
    assert float(got[1][...]) == 64
    same_state(got[0]["m"], want[0]["m"])


def test_new_modules_are_returned():
    def fun(model: Any, key: Any) -> Any:
        return nnx.Linear(4, 4, rngs=nnx.Rngs(key)), {"sum": model.first.kernel[...].sum()}

    step, (model, _) = jit(fun), make()
    for _ in range(2):
        layer, rest = step(model, jax.random.key(3))
        same_state(layer, nnx.Linear(4, 4, rngs=nnx.Rngs(jax.random.key(3))))
        np.testing.assert_allclose(rest["sum"], model.first.kernel[...].sum(), rtol=1e-5)
    born = jit(lambda key: Net(nnx.Rngs(key)))(jax.random.key(3))
    same_state(born, Net(nnx.Rngs(jax.random.key(3))))


def test_the_first_state_is_not_kept_alive():
    step, (model, optimizer) = jit(train), make()
    first = weakref.ref(model.first.kernel.get_value())
    step(model, optimizer, batch())
    gc.collect()
    assert first() is None


def test_modules_are_put_where_the_plan_has_them() -> None:
    """All at once: what two of them share, the new ones share."""
    step, (model, optimizer) = jit(train, strategy="fsdp"), make(Tied)
    plan = step.plan(model, optimizer, batch())
    new, tuned, rows = plan.put(model, optimizer, batch())
    assert new is not model
    assert new.a.kernel is new.b.kernel
    flat = jax.tree.leaves((nnx.split((new, tuned))[1], rows))
    wanted = jax.tree.leaves(plan.in_shardings, is_leaf=lambda s: isinstance(s, NamedSharding))
    assert all(x.sharding.is_equivalent_to(s, x.ndim) for x, s in zip(flat, wanted, strict=True))
    np.testing.assert_allclose(step(new, tuned, rows), step(model, optimizer, batch()), rtol=1e-6)
    chex.assert_trees_all_equal(nnx.state(new), nnx.state(model), strict=True)
    assert isinstance(plan.put(make(Tied)[0]), Tied)
    with pytest.raises(ArgumentError, match="put: train takes"):
        plan.put(make(Net)[0])


def test_a_functional_state_is_a_tree_like_any_other() -> None:
    """Of `nnx.split`: the step returns the next one, and the donated one is its memory."""
    graph, state = nnx.split(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))

    def step(state: nnx.State, x: jax.Array) -> tuple[nnx.State, jax.Array]:
        loss, grads = jax.value_and_grad(lambda s: (nnx.merge(graph, s)(x) ** 2).mean())(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
    wanted, loss = jax.jit(step)(state, x)
    planned = jit(step, donate_argnums=0)
    plan = planned.plan(state, x)
    after, found = planned(state, x)
    assert type(after) is nnx.State
    chex.assert_trees_all_close((after, found), (wanted, loss), rtol=1e-5)
    carried = [p.path for p in plan.inputs if p.path.startswith("state")]
    assert len(carried) == 2
    assert [p.path for p in plan.outputs if not p.replaces] == ["result[1]"]
