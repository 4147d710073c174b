"""The ordinary call is JAX's own: Python sees a call once for each way in which it comes."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import autoshard
from autoshard.backend.executable import Executable
from autoshard.errors import ArgumentError, PlacementWarning

jit = functools.partial(autoshard.jit, mesh={"data": 4, "model": 2})
STATE = {"w": jnp.ones((8, 4)), "b": jnp.zeros(4)}


@pytest.fixture(autouse=True)
def traces_counted_anew() -> None:
    """Of `chex.assert_max_traces`, which counts those of a function that was defined in the same place before."""
    chex.clear_trace_counter()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[Executable]:
    """The calls that went by way of Python, as they happen."""
    seen: list[Executable] = []
    original = Executable.call

    def call(self: Executable, *args: Any) -> Any:
        seen.append(self)
        return original(self, *args)

    monkeypatch.setattr(Executable, "call", call)
    return seen


def update(state: Any, batch: Any) -> Any:
    return {k: v + batch.sum() for k, v in state.items()}, batch * 2


def test_placed_and_host_arguments_of_two_sizes_in_turn(slow: list[Executable]):
    step = jit(chex.assert_max_traces(update, n=2))
    ways: list[Any] = []
    for size in (16, 8):
        host = np.ones((size, 4), np.float32)
        state, placed = step.plan(STATE, host).put(STATE, host)
        ways += [(state, host), (state, placed)]
    for _ in range(3):
        for state, batch in ways:
            after, doubled = step(state, batch)
            np.testing.assert_array_equal(after["w"], np.asarray(state["w"]) + batch.sum())
            assert doubled.shape == batch.shape
    assert len(slow) == len(ways)
    assert len(set(slow)) == 2


def test_a_second_call_traces_nothing_however_the_arguments_come():
    step, x = jit(chex.assert_max_traces(lambda x, y: x * y, n=1)), jnp.arange(8.0)
    for given in (x, np.asarray(x), step.plan(x, x).put(x, x)[0]):
        for args, kwargs in (((given, x), {}), ((given,), {"y": x}), ((), {"y": x, "x": given})):
            np.testing.assert_array_equal(step(*args, **kwargs), x * x)
    np.testing.assert_array_equal(step.lower(x, x).compile()(x, x), x * x)
    np.testing.assert_array_equal(jax.jit(step)(x, x), x * x)
    np.testing.assert_array_equal(jax.vmap(step)(x[None], x[None]), x[None] ** 2)


class TestWhereverItIsCalled(chex.TestCase):
    """Inside another `jax.jit` or not, with arguments on the host or on a device."""

    @chex.variants(with_jit=True, without_jit=True, with_device=True, without_device=True)
    def test_a_step_gives_what_the_function_does(self) -> None:
        step, x = jit(chex.assert_max_traces(lambda x: (x @ x.T, {"sum": x.sum(0)}), n=1)), np.ones((8, 4), np.float32)
        around = self.variant(lambda x: jax.tree.map(lambda y: 2 * y, step(x)))
        for _ in range(2):
            chex.assert_trees_all_equal(around(x), (2 * x @ x.T, {"sum": 2 * x.sum(0)}))


def test_keywords_and_static_values(slow: list[Executable]):
    @chex.assert_max_traces(n=3)
    def fun(x: Any, n: int, *, z: Any, a: Any, m: int = 1) -> Any:
        return (x - z * a) * n + m

    step, x = jit(fun, static_argnames=("n", "m")), jnp.arange(8.0)
    for _ in range(3):
        for n, m in ((2, 1), (3, 1), (2, 5)):
            np.testing.assert_array_equal(step(x, n, z=x * 2, a=x, m=m), (x - 2 * x * x) * n + m)
            np.testing.assert_array_equal(step(n=n, a=x, x=x, m=m, z=x * 2), (x - 2 * x * x) * n + m)
    assert len(slow) == 3


def test_modules(slow: list[Executable]):
    model, step = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jit(lambda model, x: model(x), strategy="dp")
    x = np.ones((8, 4), np.float32)
    for _ in range(4):
        np.testing.assert_allclose(step(model, x), model(x), rtol=1e-6)
    assert len(slow) <= 2  # on one device at first, then as planned


def test_a_wrongly_placed_argument_does_not_slow_the_others(slow: list[Executable]):
    step, x = jit(lambda x: x + 1), jnp.arange(8.0)
    far = jax.device_put(x, jax.devices()[3])
    with pytest.warns(PlacementWarning) as caught:
        step(far)
    assert [w.filename for w in caught] == [__file__]
    for _ in range(3):
        np.testing.assert_array_equal(step(far), x + 1)
        np.testing.assert_array_equal(step(x), x + 1)
    assert len(slow) == 1 + 3 + 1


def test_a_call_inside_a_trace_leaves_the_outer_calls_alone(slow: list[Executable]):
    step, x = jit(lambda x: x * 2), jnp.arange(8.0)
    for _ in range(3):
        np.testing.assert_array_equal(jax.jit(lambda y: step(y) + step(x))(x), 4 * x)
        np.testing.assert_array_equal(step(x), 2 * x)
    assert len(slow) <= 2


def test_settings_of_jax_are_part_of_the_program():
    step, x = jit(chex.assert_max_traces(lambda x: x @ x, n=2)), np.ones((8, 8), np.float32)
    step(x)
    for _ in range(2):
        with jax.default_matmul_precision("highest"):
            step(x)
            assert "HIGHEST" in step.lower(x).as_text()
        assert "HIGHEST" not in step.lower(x).as_text()
        step(x)
    chex.clear_trace_counter()
    with jax.enable_x64(True):
        assert step(x.astype(np.float64)).dtype == np.float64
    assert step(x.astype(np.float64)).dtype == np.float32


def test_compiling_switched_off():
    seen: list[Any] = []

    def fun(model: Any, x: Any) -> Any:
        seen.append(x)
        return model(x) if callable(model) else x @ model

    x, model = np.ones((8, 4), np.float32), nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    step = jit(fun)
    for first in (np.ones((4, 2), np.float32), model):
        want = fun(first, x)
        step(first, x)
        seen.clear()
        with jax.disable_jit():
            np.testing.assert_allclose(step(first, x), want)
            assert seen[0] is x
            assert step.plan(first, x).cost == jit(fun).plan(first, x).cost


def test_caches_of_jax_cleared():
    step, x = jit(lambda x: x * 3), jnp.arange(8.0)
    for _ in range(2):
        np.testing.assert_array_equal(step(x), 3 * x)
        jax.clear_caches()


def test_a_static_argument_without_a_hash_is_named():
    step = jit(lambda x, n: x * n[0], static_argnums=1)
    with pytest.raises(ArgumentError, match="the static argument n is a list, which is not hashable"):
        step(np.ones(8), [2])
    np.testing.assert_array_equal(step(np.ones(8), (2,)), 2)
    with pytest.raises(ArgumentError, match="the static argument n is a list, which is not hashable"):
        step(np.ones(8), [2])


def test_a_step_dies_with_its_last_name():
    step = jit(lambda x: x * 2)
    step(jnp.arange(8.0))
    gone = weakref.ref(step)
    del step
    gc.collect()
    assert gone() is None


def test_a_cleared_step_plans_as_at_first(slow: list[Executable]):
    @chex.assert_max_traces(n=5)
    def fun(state: Any, x: Any) -> Any:
        return update(state, x)

    step, short, long = jit(fun, donate_argnums=0), np.ones((8, 4), np.float32), np.ones((16, 4), np.float32)
    first = step.plan(STATE, long)
    assert "first_plan" in {p.reason for p in step.plan(STATE, short).inputs}
    step.clear_cache()
    for _ in range(2):
        again = step.plan(STATE, short)
        assert "first_plan" not in {p.reason for p in again.inputs}
    np.testing.assert_array_equal(step(step.plan(STATE, long).put(STATE), long)[1], long * 2)
    assert step.plan(STATE, long) is not first
    step.clear_cache()
    assert step.plan(STATE, long) == first


def test_a_cleared_step_of_modules_and_of_methods():
    class Scale:
        def __init__(self, by: float) -> None:
            self.by = by

        @jit
        def __call__(self, x: Any) -> Any:
            return x * self.by

    scale, model, x = Scale(2.0), nnx.Linear(4, 4, rngs=nnx.Rngs(0)), np.ones((8, 4), np.float32)
    apply = jit(lambda model, x: model(x))
    for by in (2.0, 3.0):
        scale.by = by  # closed over, so that it is part of the trace
        np.testing.assert_array_equal(scale(x), x * by)
        np.testing.assert_allclose(apply(model, x), model(x), rtol=1e-6)
        Scale.__call__.clear_cache()
        apply.clear_cache()


def log_of_product(w: Any, x: Any) -> Any:
    return w * 1.0, jnp.log(x @ w).sum(0)


W, GOOD = np.ones((4, 4), np.float32), np.ones((8, 4), np.float32)
BAD = -GOOD


@pytest.mark.parametrize("donated", [(), (0,)], ids=["kept", "donated"])
def test_the_operation_that_makes_a_nan_is_named(donated: tuple[int, ...]):
    plan = jit(log_of_product, donate_argnums=donated).plan(W, GOOD)
    jax.config.update("jax_debug_nans", True)
    try:
        step = jit(log_of_product, donate_argnums=donated)
        assert step.plan(W, GOOD) == plan
        for x in (BAD, GOOD, BAD):  # at first, and by JAX's own dispatch
            w = plan.put(W)
            if x is GOOD:
                step(w, x)
                continue
            with pytest.raises(FloatingPointError, match=r"invalid value \(nan\) encountered in log"):
                step(w, x)
        model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        for _ in range(2):
            with pytest.raises(FloatingPointError, match="encountered in log"):
                jit(lambda model, x: jnp.log(model(x) - 100))(model, GOOD)
        adopted = jit(log_of_product, donate_argnums=donated, strategy=plan)
        assert adopted(plan.put(W), GOOD)[1].sum() > 0
    finally:
        jax.config.update("jax_debug_nans", False)
    state = plan.put(W)
    step(state, GOOD)  # donates again
    assert state.is_deleted() == bool(donated)


def test_what_a_donated_argument_no_longer_tells():
    step = jit(log_of_product, donate_argnums=0)
    put = step.plan(W, GOOD).put
    step(put(W), GOOD)
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError, match=r"log_of_product: .* donated and is gone: .*clear_cache\(\)"):
            step(put(W), BAD)
        step.clear_cache()
        with pytest.raises(FloatingPointError, match="encountered in log"):
            step(put(W), BAD)
