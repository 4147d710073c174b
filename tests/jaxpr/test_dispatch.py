"""`Step.lower` and `Step.trace` return stages that behave like those of `jax.stages`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import ArgumentError, MeshError

jit = functools.partial(autoshard.jit, mesh={"data": 4, "model": 2})
X = np.arange(256, dtype=np.float32).reshape(16, 16)


def minus(left: Any, a: Any) -> Any:
    """Keywords come to JAX by name, and ``a`` before ``left``."""
    return left - 2 * a


FORMS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((X, X), {}),
    ((X,), {"a": X}),
    ((), {"left": X, "a": X}),
    ((), {"a": X, "left": X}),
]


@pytest.mark.parametrize("form", FORMS)
def test_the_executable_is_called_as_it_was_lowered(form: tuple[tuple[Any, ...], dict[str, Any]]):
    args, kwargs = form
    step = jit(minus, in_shardings=(P("data"), P(None, "model")), donate_argnames="left")
    lowered, plain = step.lower(*args, **kwargs), jax.jit(minus).lower(*args, **kwargs)
    compiled = lowered.compile()
    assert lowered.in_tree == compiled.in_tree == plain.in_tree
    assert compiled.out_tree == plain.out_tree
    np.testing.assert_array_equal(compiled(*args, **kwargs), minus(X, X))
    given, named = compiled.input_shardings
    specs = {**dict(zip(("left", "a"), given, strict=False)), **named}
    assert {k: s.spec for k, s in specs.items()} == {"left": P("data"), "a": P(None, "model")}
    info = {**dict(zip(("left", "a"), lowered.args_info[0], strict=False)), **lowered.args_info[1]}
    assert {k: i.donated for k, i in info.items()} == {"left": True, "a": False}


def test_variable_keywords():
    step = jit(lambda **k: k["a"] - k["b"])
    compiled = step.lower(b=X, a=X * 3).compile()
    np.testing.assert_array_equal(compiled(a=X * 3, b=X), X * 2)
    assert set(compiled.input_shardings[1]) == {"a", "b"}


def test_calls_and_lowering_share_the_executable(monkeypatch: pytest.MonkeyPatch):
    step = jit(minus)
    compiled = step.lower(left=X, a=X).compile()  # in another order than the program's: lowered once more
    np.testing.assert_array_equal(compiled(left=X, a=X), -X)
    one = step.lower(X, X).compile()
    step(X, X)
    assert step.executable(X, X).compiled.runtime_executable() is one.runtime_executable()


def test_traced_as_in_jax():
    step = jit(lambda s, n, b: {"s": s * n, "t": b.sum()}, static_argnums=1, donate_argnums=0)
    plain = jax.jit(lambda s, n, b: {"s": s * n, "t": b.sum()}, static_argnums=1, donate_argnums=0)
    got, want = step.trace(X, 3, X), plain.trace(X, 3, X)
    assert got.fun_name == want.fun_name
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), t.out_info) for t in (got, want)]
    assert shapes[0] == shapes[1]
    assert got.in_tree == want.in_tree
    assert [i.donated for i in jax.tree.leaves(got.args_info)] == [i.donated for i in jax.tree.leaves(want.args_info)]
    assert got.donate_argnums == (0,)
    assert got.effects == frozenset()
    assert jax.tree.structure(got.in_avals) == got.in_tree
    result = got.lower().compile()(X, X)
    np.testing.assert_array_equal(result["s"], X * 3)
    assert "program" in str(got)


def test_exported_with_its_shardings():
    def fun(w: Any, batch: Any, n: int) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.tanh(batch["x"] @ w).sum())(w) * n, batch["y"]

    step = jit(fun, static_argnums=2, in_shardings=(P(None, "model"), {"x": P("data"), "y": None}))
    w, batch = X / 256, {"x": X, "y": X[0]}
    exported = jax.export.export(step)(w, batch, 3)
    plan = step.plan(w, batch, 3)
    assert (exported.fun_name, exported.nr_devices) == ("fun", 8)
    assert exported.in_shardings_jax(plan.jax_mesh)[0].spec == P(None, "model")
    placed = plan.put(w, batch)
    jax.tree.map(np.testing.assert_array_equal, exported.call(*placed), step(*placed, 3))
    by_name = jax.export.export(step)(w, n=3, batch=batch)
    jax.tree.map(np.testing.assert_array_equal, by_name.call(placed[0], batch=placed[1]), step(*placed, 3))


def test_what_cannot_be_exported_is_refused():
    step = jit(minus)
    for platforms in (["tpu"], ["cpu", "tpu"], ["cuda"]):
        with pytest.raises(
            MeshError, match=r"minus is planned over .*, a mesh of cpu devices, .*lowered for (tpu|cuda)"
        ):
            jax.export.export(step, platforms=platforms)(X, X)
    (rows,) = jax.export.symbolic_shape("rows")
    abstract = jax.ShapeDtypeStruct((rows, 16), "float32")
    with pytest.raises(ArgumentError, match=r"minus: an argument has the symbolic shape \(rows, 16\)"):
        jax.export.export(step)(abstract, abstract)
