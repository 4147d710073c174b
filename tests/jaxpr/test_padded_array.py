"""An array that is stored with padding: to JAX, NumPy and those who build on them it is its values, and no more."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard import PaddedArray
from autoshard.jaxpr import as_stored

VALUES = np.arange(14, dtype="f4").reshape(7, 2)


def sharding(*spec: Any, memory_kind: str | None = None) -> NamedSharding:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return NamedSharding(mesh, P(*spec), memory_kind=memory_kind)


def padded(**kind: str) -> PaddedArray:
    """`VALUES`, stored with a row that is not zero."""
    stored = np.full((8, 2), 1e9, "f4")
    stored[:7] = VALUES
    return PaddedArray(jax.device_put(stored, sharding("a", "b", **kind)), (7, 2))


def through_optax(x: Any) -> Any:
    updates, _ = optax.clip_by_global_norm(1.0).update({"x": x}, optax.EmptyState())
    return optax.apply_updates({"x": x}, updates)["x"], optax.tree.norm({"x": x})


USES: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda x: (x + 1, 1 - x, VALUES * x, x / x.max(), -x, abs(x), x**2, x @ x.T, x > 3, divmod(x, 2)),
    "attributes": lambda x: (x.T, x.sum(), x.mean(0), x.astype("bfloat16"), x.reshape(-1), x.at[1].set(0), x.ravel()),
    "branches": lambda x: lax.cond(True, lambda a: a * 2, lambda a: a, x),
    "closed over": lambda x: jax.jit(lambda y: x * y)(VALUES),
    "compiled": lambda x: jax.jit(lambda a: a * 2).lower(x).compile()(x),
    "copied": lambda x: (jnp.array(x), jnp.asarray(x), np.array(x), x.copy(), copy.copy(x), copy.deepcopy(x)),
    "derivatives": lambda x: (jax.grad(lambda a: (a**2).sum())(x), jax.jvp(jnp.sin, (x,), (x,))),
    "elements": lambda x: (x[3], x[3, 1], x[-1], list(x)[6], x[np.array([0, 6])], f"{x[6, 1]:.2f}"),
    "fetched": lambda x: (jax.device_get({"x": x}), np.asarray(x, "f8"), np.sum(x), np.concatenate([x, x])),
    "functions": lambda x: (jnp.sum(x), jnp.zeros_like(x), jnp.concatenate([x, x]), jnp.where(x > 3, x, 0)),
    "jit": lambda x: [jax.jit(lambda a, b: a + b)(x, VALUES) for _ in range(3)],
    "lax": lambda x: (lax.add(x, x), lax.scan(lambda c, a: (c + a, a), jnp.zeros(2), x), jax.vmap(jnp.sum)(x)),
    "linear algebra": lambda x: (jnp.linalg.norm(x), jnp.vdot(x, x), jnp.linalg.svd(x, compute_uv=False)),
    "nnx": lambda x: (nnx.Param(x) + 1, nnx.Param(x)[...]),
    "optax": through_optax,
    "pickled": lambda x: pickle.loads(pickle.dumps(x)),
    "placed": lambda x: [jax.device_put(x, p) for p in (None, jax.devices()[3], sharding(), sharding(None, "b"))],
    "remat": jax.checkpoint(lambda x: jnp.sin(x) * 2),
    "text": lambda x: (str(x), f"{x}", len(x), x.shape, x.ndim, x.size, x.dtype, x.nbytes, x.weak_type),
    "trees": lambda x: jax.tree.map(jnp.sum, {"a": x, "b": [x]}),
    "types": lambda x: (jax.eval_shape(lambda a: a * 2, x).shape, jax.typeof(x).shape, jnp.result_type(x)),
    "typed": lambda x: (isinstance(x, jax.Array), jnp.issubdtype(x.dtype, jnp.floating), jax.tree.structure(x)),
}  # fmt: skip


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_it_is_used_as_its_values_are(use: Callable[[Any], Any]) -> None:
    got, expected = use(padded()), use(jnp.asarray(VALUES))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if isinstance(b, jax.Array | np.ndarray | np.generic | float):
            assert (a.dtype, a.shape) == (b.dtype, b.shape) if not isinstance(b, float) else True
            np.testing.assert_allclose(np.asarray(a, "f8"), np.asarray(b, "f8"), rtol=1e-6)
        else:
            assert a == b


def test_it_says_how_it_is_stored_and_how_its_values_are_placed() -> None:
    x = padded()
    assert (x.stored.shape, x.stored.sharding.spec) == ((8, 2), P("a", "b"))
    assert x.sharding == x.value.sharding == sharding(None, "b")
    assert {s.data.shape for s in x.addressable_shards} == {(7, 1)}
    assert x.committed
    assert x.devices() == set(jax.devices())
    assert repr(x).startswith("PaddedArray([[ 0.,")
    with pytest.raises(TypeError, match="unhashable"):
        hash(x)


def test_in_the_memory_of_the_host() -> None:
    x = padded(memory_kind="pinned_host")
    assert x.sharding.memory_kind == x.value.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(x, VALUES)
    np.testing.assert_array_equal(x.value, VALUES)


def test_donated_to_a_function_of_values_it_stays() -> None:
    x = padded()
    np.testing.assert_array_equal(jax.jit(lambda a: a + 1, donate_argnums=0)(x), VALUES + 1)
    np.testing.assert_array_equal(x, VALUES)
    x.delete()
    assert x.is_deleted()
    with pytest.raises(RuntimeError, match="deleted"):
        x + 1


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
@pytest.mark.parametrize("given", ["numpy", "list", "uncommitted", "one device", "the mesh", "padded", "longer"])
def test_the_stored_form_of_any_array(given: str, kind: str) -> None:
    x = {
        "numpy": VALUES,
        "list": VALUES.tolist(),
        "uncommitted": jnp.asarray(VALUES),
        "one device": jax.device_put(VALUES, jax.devices()[2]),
        "the mesh": jax.device_put(VALUES, sharding(None, "b")),
        "padded": padded(),
        "longer": PaddedArray(jax.device_put(np.pad(VALUES, ((0, 9), (0, 0))), sharding("b")), (7, 2)),
    }[given]
    place = sharding("a", memory_kind=kind)
    found = as_stored(x, (8, 2), place)
    assert found.sharding == place
    np.testing.assert_array_equal(np.asarray(found)[:7], VALUES)


def test_a_reader_of_arrays_saves_and_restores_the_values(tmp_path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "x", {"x": padded()})
        checkpointer.wait_until_finished()
        np.testing.assert_array_equal(checkpointer.restore(tmp_path / "x")["x"], VALUES)
