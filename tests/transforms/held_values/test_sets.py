"""What a layer's values on the host cost in the choice of what is held."""

from __future__ import annotations

import jax
import numpy as np
from jax import numpy as jnp

from autoshard.machine.mesh_config import MeshConfig
from autoshard.transforms.held_values.sets import SEVERAL_LATE, host_link


def test_a_second_value_on_the_host_has_to_gain_a_share_of_the_layer() -> None:
    """Of a layer that takes far longer than its copies, so that these are hidden."""
    link = host_link(MeshConfig(axes={"data": 16}, tpu="v5e:4x4").mesh())
    assert link is not None
    x = jax.ShapeDtypeStruct((16 * 2048, 8192), jnp.bfloat16)
    layer = jax.make_jaxpr(lambda x, w: x @ w)(x, jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)).eqns
    none, one, two = (link.price(np.full(1, 2.0**20 * bool(n)), np.full(1, n), 4, layer, np.zeros(1)) for n in range(3))
    seconds = 3 * 2 * 2048 * 8192**2 / 197e12
    assert none == 0
    assert 0 < one < 0.01 * seconds  # to be copied for it
    np.testing.assert_allclose(two - one, SEVERAL_LATE * seconds, rtol=0.3)
