"""Partial results of islands are reduced over fast links first."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from autoshard.backend.on_shards import reduce_partials
from autoshard.ir.spec import Spec
from autoshard.machine.mesh_config import MeshConfig

SHAPE = (8, 16, 4)


@pytest.mark.parametrize("slow_first", [True, False])
def test_what_goes_over_the_slow_link_is_scattered_over_the_fast_one_before(slow_first: bool) -> None:
    """Whichever of their dimensions comes first."""
    logical = MeshConfig(axes={"slice": 2, "data": 4}, tpu="v5e:2x2", slices=2).mesh()
    devices = jax.make_mesh((2, 4), ("slice", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    first, second = ("slice", "data") if slow_first else ("data", "slice")
    made, reduced = Spec(((), (), ()), (("data", "sum"), ("slice", "sum"))), Spec(((first,), (second,), ()))

    def summed(terms: Any) -> Any:
        return reduce_partials(terms[0], made, reduced, logical)

    over = jax.shard_map(
        summed, mesh=devices, in_specs=PartitionSpec(("slice", "data")), out_specs=PartitionSpec(first, second)
    )
    terms = jnp.arange(8 * np.prod(SHAPE), dtype=jnp.float32).reshape(8, *SHAPE)
    np.testing.assert_array_equal(jax.jit(over)(terms), terms.sum(0))
    (inner,) = [e.params["jaxpr"] for e in jax.make_jaxpr(over)(terms).jaxpr.eqns if e.primitive.name == "shard_map"]
    scattered = [e.params["axis_name"] for e in inner.eqns if e.primitive.name == "reduce_scatter"]
    assert [a for axes in scattered for a in axes] == ["data", "slice"]
