"""`annotate`: the identity at run time, and a pin that every plan keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import annotate
from autoshard.errors import ArgumentError, SpecError

jit = functools.partial(autoshard.jit, mesh={"data": 4, "model": 2})
W, X = np.eye(8, dtype=np.float32) * 0.5 + 0.1, np.arange(64, dtype=np.float32).reshape(8, 8) / 64


def pinned(step: Any, *args: Any) -> set[str]:
    """Specs of the values that the user pinned inside the step."""
    return {str(p.spec) for p in step.plan(*args).intermediates if p.reason == "pinned"}


def agrees(fun: Callable[..., Any], *args: Any) -> Any:
    step, want = jit(fun), jax.jit(fun)(*args)
    for _ in range(2):
        chex.assert_trees_all_close(step(*args), want, rtol=1e-5, strict=True)
    return step


def test_identity_outside_of_a_planned_step():
    tree = {"a": jnp.ones((4, 4)), "b": (jnp.zeros(3), 2.0)}
    assert jax.tree.structure(annotate(tree, P())) == jax.tree.structure(tree)
    np.testing.assert_array_equal(annotate(jnp.arange(4), P("nowhere")), np.arange(4))
    np.testing.assert_array_equal(jax.jit(lambda x: annotate(x, P("nowhere")))(jnp.arange(4)), np.arange(4))


def test_a_pin_is_kept_and_reported_with_its_source_line():
    step = agrees(lambda w, x: annotate(x @ w, P("model", "data")) + 1, W, X)
    (pin,) = [p for p in step.plan(W, X).intermediates if p.reason == "pinned"]
    assert str(pin.spec) == "[model, data]"
    assert pin.source.startswith(__file__)
    assert "sharding_constraint" in step.lower(W, X).as_text()


@pytest.mark.parametrize("spec", [P("data"), P(None, "model"), P(("model", "data")), P()])
def test_every_strategy_keeps_the_pin(spec: P):
    def fun(w: Any, x: Any) -> Any:
        return jnp.tanh(annotate(x @ w, spec)).sum()

    want = jax.jit(fun)(W, X)
    for strategy in ("dp", "tp", "fsdp_tp", "replicated", "auto"):
        step = jit(fun, strategy=strategy)
        np.testing.assert_allclose(step(W, X), want, rtol=1e-5)
        (kept,) = pinned(step, W, X)
        assert kept == str(autoshard.ir.spec.checked_spec(spec, (8, 8), {"data": 4, "model": 2}, ""))


def test_a_pytree_is_pinned_leaf_by_leaf():
    step = agrees(lambda w, x: annotate({"a": x @ w, "b": [x * 2]}, P("data")), W, X)
    assert len([p for p in step.plan(W, X).intermediates if p.reason == "pinned"]) == 2


def test_inside_loops_and_branches():
    def fun(w: Any, xs: Any) -> Any:
        def body(c: Any, x: Any) -> Any:
            c = annotate(jnp.tanh(annotate(c @ w, P("data", "model")) + x), P("data"))
            return jax.lax.cond(c[0, 0] > 0, lambda c: annotate(c * 2, P("model")), lambda c: c, c), c.sum()

        return jax.lax.scan(body, xs[0], xs)[1].sum()

    xs = np.stack([X, X + 1, X - 1])
    assert pinned(agrees(fun, W, xs), W, xs) == {"[data, model]", "[data, _]", "[model, _]"}
    agrees(jax.grad(fun), W, xs)
    np.testing.assert_allclose(jax.grad(jit(fun))(W, xs), jax.grad(fun)(W, xs), rtol=1e-5)


def test_the_gradient_is_pinned_too():
    step = jit(jax.grad(lambda w, x: (annotate(x @ w, P("data", "model")) ** 2).sum()))
    pins = [p for p in step.plan(W, X).intermediates if p.reason == "pinned"]
    assert [str(p.spec) for p in pins] == ["[data, model]"] * 2


def test_vmap_leaves_the_new_dimension_unconstrained():
    def fun(w: Any, xs: Any) -> Any:
        return jax.vmap(lambda x: annotate(x @ w, P("model")))(xs).sum()

    xs = np.stack([X] * 4)
    step = agrees(fun, W, xs)
    assert pinned(step, W, xs) == {"[_, model, _]"}
    step = jit(fun, strategy="replicated", in_shardings=(None, P("data")))
    np.testing.assert_allclose(step(W, xs), jax.jit(fun)(W, xs), rtol=1e-5)
    assert pinned(step, W, xs) == {"[data, model, _]"}


def test_an_unconstrained_dimension_is_left_to_the_planner():
    step = jit(lambda x: annotate(x * 2, P(P.UNCONSTRAINED, "model")), in_shardings=P("data"))
    assert pinned(step, X) == {"[data, model]"}
    np.testing.assert_array_equal(step(X), X * 2)


def test_under_custom_derivatives_and_checkpoint():
    @jax.custom_vjp
    def twice(x: Any) -> Any:
        return annotate(x * 2, P("data"))

    twice.defvjp(lambda x: (twice(x), None), lambda _, g: (annotate(g * 3, P("model")),))
    agrees(jax.grad(lambda w, x: twice(x @ w).sum()), W, X)
    agrees(jax.grad(lambda w, x: jax.checkpoint(lambda w: annotate(jnp.tanh(x @ w), P("data")))(w).sum()), W, X)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P("modle"), r"test_annotate.py:\d+.*'modle'.*did you mean 'model'"),
        (P("data", "data"), r"test_annotate.py:\d+.*'data' on dimensions 0 and 1"),
        (P(None, None, "data"), r"3 entries.*2 dimensions \(8, 8\)"),
        (P(("data", "model"), None), None),
    ],
)
def test_impossible_pins(spec: P, message: str | None):
    step = jit(lambda x: annotate(x * 2, spec) + 1)
    if message is None:
        np.testing.assert_array_equal(step(X), X * 2 + 1)
    else:
        with pytest.raises(SpecError, match=message):
            step(X)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("data", r"takes a PartitionSpec or a NamedSharding, not 'data'; for one axis write P\('data'\)"),
        (None, r"not None; P\(\) replicates the array"),
        (("data", None), r"not \('data', None\)$"),
    ],
)
def test_other_types_are_refused(spec: Any, message: str):
    with pytest.raises(ArgumentError, match=message):
        annotate(X, spec)


def test_a_named_sharding_is_read_as_its_spec():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P(None, "model"))
    step = agrees(lambda x: annotate(x * 2, sharding) + 1, X)
    assert pinned(step, X) == {"[_, model]"}
    np.testing.assert_array_equal(annotate(X, sharding), X)
    with pytest.raises(SpecError, match=r"over the mesh \{'data': 4, 'model': 2\}, and the step runs on \{'data': 8\}"):
        autoshard.jit(lambda x: annotate(x * 2, sharding), mesh={"data": 8})(X)


def test_a_dimension_that_does_not_divide():
    with pytest.raises(SpecError, match=r"test_annotate.py:\d+.*size 6.*4 parts over data.*pad it to 8"):
        jit(lambda x: annotate(x * 2, P("data")))(jnp.ones(6))


def test_with_sharding_constraint_is_a_pin_too():
    def fun(w: Any, xs: Any) -> Any:
        return jax.vmap(lambda x: jax.lax.with_sharding_constraint(x @ w, P("model")))(xs).sum()

    xs = np.stack([X] * 4)
    step = jit(fun, strategy="replicated", in_shardings=(None, P("data")))
    np.testing.assert_allclose(step(W, xs), jnp.einsum("bij,jk->", xs, W), rtol=1e-5)
    assert pinned(step, W, xs) == {"[data, model, _]"}
