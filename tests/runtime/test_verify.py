"""Verify: says yes to what is equal, and where it parts to what is not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import jaxpr as jx
from autoshard.errors import VerificationError
from autoshard.ir.program import Program
from autoshard.ir.rule import Local, parse
from autoshard.runtime.verify import compare_arrays
from tests.programs import mlp_step
from tests.two_processes import run


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
    assert compare_arrays("keys", keys, keys, 1e-4).equal
    assert compare_arrays("keys", keys, keys.at[2].set(jax.random.key(9)), 1e-4).absolute == 2
    assert compare_arrays("none", keys[:0], keys[:0], 1e-4).equal


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


@dataclass(frozen=True)
class Scaled(autoshard.Pass):
    """Multiplies the first floating-point result by 1 + ``by``."""

    name: ClassVar[str] = "scaled"
    by: float = 0.0

    def __call__(self, program: Program) -> Program:
        def fun(*args: Any) -> Any:
            first, *others = jx.as_fun(program.jaxpr)(*args)
            return [first * (1 + self.by), *others]

        return program.with_jaxpr(jax.make_jaxpr(fun)(*[leaf.aval for leaf in program.inputs]))


@pytest.mark.parametrize(("by", "equal"), [(1e-6, True), (0.01, False)])
def test_the_pass_across_which_numbers_differ_is_named(by: float, equal: bool) -> None:
    def fun(x: Any) -> Any:
        return jnp.tanh(x @ x.T), x.sum()

    step = autoshard.jit(fun, mesh={"a": 8}, passes=["dead_code", Scaled(by), "sum_products"])
    x = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    assert autoshard.verify(step, x).results  # the sharded program does what the passes made of the step
    if equal:
        found = autoshard.verify(step, x, passes=True)
        assert [name for name, _ in found.passes] == ["scaled:1e-06"]
        assert "across the pass scaled:1e-06, result" in str(found)
    else:
        with pytest.raises(VerificationError, match=r"fun: the pass scaled:0.01 changes 1 of 2 results .*result\[0\]"):
            autoshard.verify(step, x, passes=True)


def test_passes_of_padded_and_accumulated_programs_agree() -> None:
    rng = np.random.default_rng(0)
    w, x = (rng.normal(size=s).astype(np.float32) for s in ((6, 10), (24, 6)))

    def fun(w: Any, xs: Any) -> Any:
        grads = jax.lax.scan(lambda g, x: (g + jax.grad(lambda w: jnp.tanh(x @ w).sum())(w), None), w * 0, xs)[0]
        return w - 0.1 * grads, jax.random.normal(jax.random.key(0), (10,))

    step = autoshard.jit(fun, mesh={"data": 4, "model": 2}, donate_argnums=0)
    assert autoshard.verify(step, w, x.reshape(3, 8, 6), passes=True).passes


def in_one_of_two_processes() -> Any:
    """What `verify` says of arguments on the host, of arguments as planned, and of a step that is wrong on one side."""

    def fun(w: Any, x: Any, key: Any) -> Any:
        y = jnp.tanh(x @ w) + jax.random.normal(key)
        return w - 0.1 * jax.grad(lambda w: jnp.tanh(x @ w).sum())(w), y, jax.random.split(key, 4)

    w, x, key = arguments()[0]["w1"], arguments()[1]["x"], jax.random.key(0)
    step = autoshard.jit(fun, mesh={"data": 2, "model": 2}, strategy="fsdp_tp", donate_argnums=0)
    placed = step.plan(w, x, key).put(w, x, key)
    assert not any(a.is_fully_addressable or a.is_fully_replicated for a in placed[:2])
    found = [len(autoshard.verify(step, *args).results) for args in (placed, (w, x, key))]
    assert not placed[0].is_deleted()

    def total(x: Any) -> Any:
        return jnp.sin(x).sum(0)

    wrong_sine = Local(lambda axes, x: jnp.sin(x) + 1, lambda parts, sizes: ())
    rule = {"sin": replace(parse("ij -> ij"), local=wrong_sine)}
    wrong = autoshard.jit(total, mesh={"data": 4}, in_shardings=P("data"), rules=rule)
    with pytest.raises(VerificationError, match="total: 1 of 1 results differ .* first at .*test_verify.py:.* sin"):
        autoshard.verify(wrong, x)
    return found


def test_in_a_program_of_two_processes() -> None:
    assert run("tests.runtime.test_verify:in_one_of_two_processes") == [[3, 3], [3, 3]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_the_last_digit_of_a_float_may_differ(dtype: str) -> None:
    one = jnp.ones(3, dtype)
    after = np.asarray(1 + float(jnp.finfo(dtype).eps)).astype(dtype)
    assert compare_arrays("", one, one.at[0].set(after), 1e-4).equal
    assert not compare_arrays("", one, one.at[0].set(-1), 1e-4).equal


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2"])
def test_integers_of_few_bits_are_identical(dtype: str) -> None:
    assert compare_arrays("", jnp.ones(3, dtype), jnp.ones(3, dtype), 1.0).equal
    assert not compare_arrays("", jnp.ones(3, dtype), jnp.ones(3, dtype).at[0].set(0), 1.0).equal
