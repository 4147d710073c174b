"""Gathers and scatters on shards, put together, against the operation on the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from autoshard import jaxpr as jx

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
MODES = ["clip", "drop", "promise_in_bounds"]


def equation(fun: Callable[..., Any], name: str, *operands: Any) -> tuple[jx.JaxprEqn, list[Any]]:
    """The one equation of this name in ``fun``, and its operands, which are computed before it."""
    jaxpr = jx.normalize(jax.make_jaxpr(fun)(*operands))
    values = dict(zip(jaxpr.invars, operands, strict=True))
    for e in jaxpr.eqns:
        read = [a.val if isinstance(a, jx.Literal) else values[a] for a in e.invars]
        if e.primitive.name == name:
            return e, read
        values.update(zip(e.outvars, jx.bind_equation(e, read, e.params), strict=True))
    raise AssertionError(name)


def on_shards(fun: Callable[..., Any], in_specs: Any, out_specs: Any, *operands: Any) -> Any:
    run = jax.shard_map(fun, mesh=MESH, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(run)(*operands)


def same(expected: Any, found: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def indices(mode: str, *shape: int) -> np.ndarray[Any, Any]:
    """Some beyond the bounds of a dimension of 16, unless they are promised to be within."""
    low, high = (0, 16) if mode == "promise_in_bounds" else (-3, 20)
    return np.random.default_rng(0).integers(low, high, shape).astype(np.int32)


@pytest.mark.parametrize("mode", MODES)
def test_one_of_each_row(mode: str) -> None:
    """The logits of the targets: rows over ``data``, the vocabulary over ``model``."""
    x, i = np.random.default_rng(1).normal(size=(4, 3, 16)).astype(np.float32), indices(mode, 4, 3, 1)
    given = {"drop": "fill"}.get(mode, mode)
    numbers = lax.GatherDimensionNumbers((), (2,), (2,), (0, 1), (0, 1))
    eqn, operands = equation(lambda x, i: lax.gather(x, i, numbers, (1, 1, 1), mode=given), "gather", x, i)
    split = [("data",), (), ("model",)]
    part = jx.gather_on_shards(eqn, split)
    specs = P("data", None, "model"), P("data")
    found = on_shards(lambda x, i: lax.psum(part(x, i), "model"), specs, P("data"), *operands)
    same(jx.bind_equation(eqn, operands, eqn.params)[0], found)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bool", "int8"])
def test_rows_of_a_table(mode: str, dtype: str) -> None:
    """Of an embedding whose rows are split over both axes, and whose columns are not."""
    x, i = (np.random.default_rng(1).normal(size=(16, 4)) * 9).astype(dtype), indices(mode, 8, 3)
    given = {"drop": "fill"}.get(mode, mode)
    eqn, operands = equation(
        lambda x, i: jnp.take(
            x,
            i,
            0,
            mode=given if mode != "promise_in_bounds" else "clip",
        ),
        "gather",
        x,
        i,
    )
    part = jx.gather_on_shards(eqn, [("data", "model"), ()])

    def summed(x: Any, i: Any) -> Any:
        return lax.psum(part(x, i).astype("int32" if dtype != "float32" else dtype), ("data", "model")).astype(dtype)

    found = on_shards(summed, (P(("data", "model")), P()), P(), *operands)
    same(jx.bind_equation(eqn, operands, eqn.params)[0], found)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["add", "mul", "max"])
def test_updates_of_rows_and_of_a_split_dimension(mode: str, kind: str) -> None:
    """Rows over ``data`` are batched; of the indexed dimension, over ``model``, each device has a part."""
    rng = np.random.default_rng(1)
    x, i, u = rng.normal(size=(4, 16, 2)), indices(mode, 4, 5, 1), rng.normal(size=(4, 5, 2))
    numbers = lax.ScatterDimensionNumbers((2,), (1,), (1,), (0,), (0,))
    scatter = {"add": lax.scatter_add, "mul": lax.scatter_mul, "max": lax.scatter_max}[kind]
    given = {"drop": "drop"}.get(mode, mode)
    name = f"scatter-{kind}"
    eqn, operands = equation(
        lambda x, i, u: scatter(x, i, u, numbers, mode=given),
        name,
        *(a.astype(np.float32) for a in (x,)),
        i,
        u.astype(np.float32),
    )
    part = jx.scatter_on_shards(eqn, [("data",), ("model",), ()], ())
    specs = P("data", "model"), P("data"), P("data")
    found = on_shards(part, specs, P("data", "model"), *operands)
    same(jx.bind_equation(eqn, operands, eqn.params)[0], found)


@pytest.mark.parametrize("kind", ["add", "mul"])
def test_updates_that_devices_have_apart_come_to_one_operand_once(kind: str) -> None:
    """The gradient of an embedding: tokens over ``data``, columns over ``model``."""
    rng = np.random.default_rng(1)
    x, i, u = rng.normal(size=(16, 8)), indices("drop", 6, 1), rng.normal(size=(6, 8))
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    scatter = {"add": lax.scatter_add, "mul": lax.scatter_mul}[kind]
    eqn, operands = equation(
        lambda x, i, u: scatter(x, i, u, numbers, mode="drop"),
        "scatter-mul" if kind == "mul" else "scatter-add",
        x.astype(np.float32),
        i,
        u.astype(np.float32),
    )
    part = jx.scatter_on_shards(eqn, [(), ("model",)], ["data"])

    def together(x: Any, i: Any, u: Any) -> Any:
        own = part(x, i, u)
        return lax.psum(own, "data") if kind == "add" else jnp.prod(lax.all_gather(own, "data"), 0)

    specs = P(None, "model"), P("data"), P("data", "model")
    found = on_shards(together, specs, P(None, "model"), *operands)
    np.testing.assert_allclose(found, jx.bind_equation(eqn, operands, eqn.params)[0], rtol=1e-5)


def test_updates_of_all_that_a_shard_has() -> None:
    """One window, at no index."""
    x, u = np.ones((8, 16), np.float32), np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32)
    numbers = lax.ScatterDimensionNumbers((0, 1), (), ())
    eqn, operands = equation(
        lambda x, i, u: lax.scatter_add(x, i, u, numbers), "scatter-add", x, np.zeros(0, np.int32), u
    )
    spec = P("data", "model")
    part = jx.scatter_on_shards(eqn, [("data",), ("model",)], ())
    same(x + u, on_shards(part, (spec, P(), spec), spec, *operands))


def test_indices_that_no_signed_number_has_clip_to_the_last_row() -> None:
    x, i = np.arange(16, dtype=np.float32), np.asarray([[3], [2**31 + 7], [2**32 - 1]], np.uint32)
    numbers = lax.GatherDimensionNumbers((), (0,), (0,))
    eqn, operands = equation(lambda x, i: lax.gather(x, i, numbers, (1,), mode="clip"), "gather", x, i)
    part = jx.gather_on_shards(eqn, [("model",)])
    found = on_shards(lambda x, i: lax.psum(part(x, i), "model"), (P("model"), P()), P(), *operands)
    same([3.0, 15.0, 15.0], found)
