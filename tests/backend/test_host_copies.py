"""Copies to the host's memory and back beside products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.backend.host_copies import beside_products


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_the_same_bits_in_the_same_memory_by_way_of_another_place(dtype):
    def there_and_back(x):
        return jax.device_put(jax.device_put(x, jax.memory.Space.Host), jax.memory.Space.Device)

    x = jnp.asarray([[np.nan, -0.0, np.inf], [1e-40, 1.5, -2.0]]).astype(dtype)
    plain = jax.make_jaxpr(there_and_back)(x).jaxpr
    copied = [beside_products(e) for e in plain.eqns]
    copy = ["optimization_barrier", "broadcast_in_dim", "select_n"]
    there, back = ([e.primitive.name for e in eqns] for eqns in copied)
    assert there == [*copy, "device_put"]
    assert back == ["device_put", *copy, "optimization_barrier"]
    assert [eqns[-1].outvars[0].aval for eqns in copied] == [e.outvars[0].aval for e in plain.eqns]
    (got,) = jax.jit(lambda x: jax.core.eval_jaxpr(plain.replace(eqns=[*copied[0], *copied[1]]), [], x))(x)
    np.testing.assert_array_equal(np.asarray(got).view("uint8"), np.asarray(x).view("uint8"))
