"""A mesh with Explicit axes, as `jax.make_mesh` makes it, given to the step and set around its calls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import MeshError

X = np.arange(256, dtype=np.float32).reshape(16, 16) % 7
MESH = jax.make_mesh((4, 2), ("data", "model"))


def gram(x: jax.Array) -> jax.Array:
    return x @ x.T


def test_the_default_mesh_is_explicit():
    assert set(MESH.axis_types) == {AxisType.Explicit}


def test_called_under_the_mesh_and_used_there():
    step = autoshard.jit(lambda x: (gram(x), jax.random.key(3)), mesh=MESH, out_shardings=(P("data"), None))
    outside = step(X)[0]
    with jax.set_mesh(MESH):
        for x in (X, jnp.asarray(X), jax.device_put(X, P()), X):
            for _ in range(2):
                got, key = step(x)
                np.testing.assert_array_equal(got, gram(X))
                assert jax.typeof(got) == jax.typeof(jax.device_put(gram(X), P("data", None)))
                np.testing.assert_array_equal(got + 1, gram(X) + 1)
                np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(3)))
        assert step.plan(X).mesh.shape == dict(MESH.shape)
        assert autoshard.verify(step, X).results
    assert jax.typeof(step(X)[0]) == jax.typeof(outside)


def test_planned_first_under_the_mesh():
    step = autoshard.jit(gram, mesh={"data": 4, "model": 2}, in_shardings=P(None, "model"))
    with jax.set_mesh(MESH):
        np.testing.assert_array_equal(step(X), gram(X))
        assert any(p.spec for p in step.plan(X).intermediates)


def test_inside_another_trace_under_the_mesh():
    step = autoshard.jit(gram, mesh=MESH)
    with jax.set_mesh(MESH):
        np.testing.assert_array_equal(jax.jit(lambda x: step(x) * 2)(X), 2 * gram(X))
        np.testing.assert_allclose(jax.grad(lambda x: step(x).sum())(X), jax.grad(lambda x: gram(x).sum())(X))


def test_shard_map_inside():
    def total(**mesh: jax.sharding.Mesh) -> jax.Array:
        summed = jax.shard_map(lambda x: jax.lax.psum(x, "data"), in_specs=P("data"), out_specs=P(), **mesh)
        step = autoshard.jit(lambda x: summed(x * 2) + 1, mesh=MESH)
        return step(X)

    want = 2 * X.reshape(4, 4, 16).sum(0) + 1
    np.testing.assert_array_equal(total(), want)
    np.testing.assert_array_equal(total(mesh=jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)), want)
    with jax.set_mesh(MESH):
        np.testing.assert_array_equal(total(), want)
        with pytest.raises(MeshError, match=r"In jax\.shard_map, leave out mesh="):
            total(mesh=MESH)
    with pytest.raises(MeshError, match=r"Instead of jax\.reshard, use autoshard\.annotate"):
        autoshard.jit(lambda x: jax.reshard(x, P("data")), mesh=MESH)(X)
