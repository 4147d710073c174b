"""Verify: says yes to what is equal, and where it parts to what is not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import autoshard
from autoshard.errors import VerificationError
from autoshard.runtime.verify import compare
from tests.programs import mlp_step


def arguments() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    params = {"w1": rng.normal(size=(16, 32)) / 4, "w2": rng.normal(size=(32, 16)) / 6}
    batch = {"x": rng.normal(size=(64, 16)), "y": rng.normal(size=(64, 16))}
    return jax.tree.map(jnp.float32, (params, batch))


@pytest.mark.parametrize("strategy", ["auto", "dp", "fsdp", "tp"])
def test_a_correct_plan_verifies_and_donates_nothing(strategy: str) -> None:
    params, batch = arguments()
    step = autoshard.jit(mlp_step, mesh={"data": 4, "model": 2}, strategy=strategy, donate_argnums=0)
    report = autoshard.verify(step, params, batch)
    assert len(report.results) == 3
    assert "3 results equal" in str(report)
    assert not params["w1"].is_deleted()


def test_the_first_equation_that_differs_is_named() -> None:
    calls = [0]

    def drift(x: Any) -> Any:
        calls[0] += 1
        return np.asarray(x) + calls[0]

    def fun(x: Any) -> Any:
        y = jnp.sin(x)
        y = jax.pure_callback(drift, jax.ShapeDtypeStruct(y.shape, y.dtype), y)
        return jnp.cos(y) @ y.T

    line = fun.__code__.co_firstlineno + 2
    with pytest.raises(
        VerificationError, match=rf"result: error .* differ first at .*test_verify.py:{line}: pure_callback"
    ):
        autoshard.verify(autoshard.jit(fun, mesh={"a": 8}), jnp.ones((8, 8)))


def test_nan_equals_nan_and_integers_must_be_equal() -> None:
    step = autoshard.jit(lambda x, n: (x / x, n * 2, x > 0), mesh={"a": 8})
    assert len(autoshard.verify(step, jnp.zeros(8), jnp.arange(8)).results) == 3


def test_a_module_is_not_changed() -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.bn = nnx.BatchNorm(8, rngs=nnx.Rngs(0))

        def __call__(self, x: Any) -> Any:
            return self.bn(x)

    net = Net()
    before = np.asarray(net.bn.mean[...])
    autoshard.verify(autoshard.jit(lambda m, x: m(x).sum(), mesh={"a": 8}), net, jnp.arange(64.0).reshape(8, 8))
    assert np.array_equal(before, np.asarray(net.bn.mean[...]))


def test_typed_keys_are_compared_by_their_key_data() -> None:
    step = autoshard.jit(lambda k, x: (jax.random.split(k)[0], jax.random.split(k, 8), x), mesh={"data": 4, "model": 2})
    report = autoshard.verify(step, jax.random.key(0), jnp.ones((16, 16)))
    assert [d.relative for d in report.results] == [0, 0, 0]
    keys = jax.random.split(jax.random.key(0), 4)
    assert compare("keys", keys, keys, 1e-4).equal
    assert compare("keys", keys, keys.at[2].set(jax.random.key(9)), 1e-4).absolute == 2
    assert compare("none", keys[:0], keys[:0], 1e-4).equal


def test_a_module_with_dropout_verifies() -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.layer, self.drop = nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.drop(self.layer(x))

    step = autoshard.jit(lambda m, x: m(x).sum(), mesh={"a": 8}, strategy="dp")
    paths = [d.path for d in autoshard.verify(step, Net(), jnp.ones((8, 8))).results]
    assert any("['key']" in path for path in paths)


def test_anything_but_a_step_is_refused() -> None:
    with pytest.raises(VerificationError, match="a step made by autoshard.jit"):
        autoshard.verify(lambda x: x, 1)
