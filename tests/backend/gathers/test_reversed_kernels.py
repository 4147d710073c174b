"""Kernels of convolutions placed before they are reversed: the same numbers, and cuDNN's routine applies."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.extend.core import primitives as _prims
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard import jaxpr as jx
from autoshard.backend.gathers.reversed_kernels import place_before_reversal

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
X = jax.random.normal(jax.random.key(0), (8, 9, 9, 4))
KERNEL = jax.random.normal(jax.random.key(1), (3, 3, 8, 4))


def placed(x: jax.Array, *dims: Any) -> jax.Array:
    return lax.with_sharding_constraint(x, NamedSharding(MESH, P(*dims)))


def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The gradient of a convolution's input, of stride 2, with a reversed kernel."""
    return lax.conv_general_dilated(
        x, kernel, (1, 1), [(1, 1)] * 2, lhs_dilation=(2, 2), dimension_numbers=("NHWC", "HWOI", "NHWC")
    )


def step(x: jax.Array, kernel: jax.Array) -> jax.Array:
    kernel = lax.rev(placed(kernel, None, None, "data"), (0, 1))
    return convolved(x, placed(placed(kernel, None, None, "data"), None, None, None, None))


def in_a_loop(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.scan(lambda total, s: (total + step(x, kernel * s), None), jnp.zeros((8, 17, 17, 8)), jnp.arange(2.0))[0]


def read_twice(x: jax.Array, kernel: jax.Array) -> Any:
    kernel = placed(lax.rev(kernel, (0, 1)), None, None, None, None)
    return convolved(x, kernel), kernel.sum()


def not_placed(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return convolved(x, lax.rev(placed(kernel, None, None, "data"), (0, 1)))


def not_reversed(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return convolved(x, placed(kernel * 2, None, None, None, None))


def kernels_made_by(jaxpr: jx.Jaxpr) -> list[jx.Primitive]:
    """What makes the kernel of each convolution."""
    bodies = [jaxpr, *(b for e in jx.eqns_with_regions(jaxpr) for b in jx.subjaxprs(e))]
    made: dict[jx.Atom, jx.JaxprEqn] = {v: e for body in bodies for e in body.eqns for v in e.outvars}
    return [made[e.invars[1]].primitive for e in jx.walk(jaxpr) if e.primitive is _prims.conv_general_dilated_p]


def before_and_after(fun: Any) -> tuple[jx.Jaxpr, jx.Jaxpr]:
    before = jx.normalize(jax.make_jaxpr(fun)(X, KERNEL))
    after = place_before_reversal(before)
    jx.check_jaxpr(after)
    for was, now in zip(*(jax.jit(jx.as_fun(j))(X, KERNEL) for j in (before, after)), strict=True):
        np.testing.assert_array_equal(was, now)
    return before, after


@pytest.mark.parametrize("fun", [step, in_a_loop])
def test_a_convolution_reads_the_reversal_itself(fun: Any) -> None:
    before, after = before_and_after(fun)
    assert _prims.rev_p not in kernels_made_by(before)
    assert kernels_made_by(after) == [_prims.rev_p]
    constraints = [[e.params["sharding"].spec for e in jx.walk(j) if jx.is_constraint(e)] for j in (before, after)]
    assert constraints[0] == constraints[1]


@pytest.mark.parametrize("fun", [read_twice, not_placed, not_reversed])
def test_anything_else_stays(fun: Any) -> None:
    before, after = before_and_after(fun)
    assert after is before
