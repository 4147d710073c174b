"""What is sent to the host's memory beside products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.backend.host_copies import sent_from_a_copy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_the_same_bits_in_the_same_memory_by_way_of_another_place(dtype):
    x = jnp.asarray([[np.nan, -0.0, np.inf], [1e-40, 1.5, -2.0]]).astype(dtype)
    plain = jax.make_jaxpr(lambda x: jax.device_put(x, jax.memory.Space.Host))(x).jaxpr
    copied = plain.replace(eqns=sent_from_a_copy(plain.eqns[0]))
    assert [e.primitive.name for e in copied.eqns] == [
        "optimization_barrier",
        "broadcast_in_dim",
        "select_n",
        "device_put",
    ]
    assert [v.aval for v in copied.outvars] == [v.aval for v in plain.outvars]
    (got,) = jax.jit(lambda x: jax.core.eval_jaxpr(copied, [], x))(x)
    np.testing.assert_array_equal(np.asarray(got).view("uint8"), np.asarray(x).view("uint8"))
