"""Products of ragged groups over any dimensions: the numbers of one device, and nothing gathered."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.backend.audit import audit
from tests.forms import GRID, same, step

SIZES = {
    "even": [8] * 8,
    "uneven": [1, 0, 30, 2, 0, 0, 20, 11],
    "one has all": [0, 0, 0, 64, 0, 0, 0, 0],
    "rows of no group": [3, 4, 5, 0, 6, 7, 2, 1],
}


def real(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype("float32")


def products(x: Any, w: Any, sizes: Any, ct: Any) -> Any:
    """The product and both of its gradients: all modes but that of a ragged batch."""
    out, transposed = jax.vjp(lambda x, w: lax.ragged_dot(x, w, sizes), x, w)
    return out, *transposed(ct)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(
    "specs",
    [
        (P(("x", "y")), P(), P(("x", "y"))),
        (P("x"), P("y"), P("x")),
        (P(), P(("x", "y")), P()),
        (P("y"), P(None, None, "x"), P("y", "x")),
        (P("x", "y"), P(None, "y"), P("x")),
    ],
    ids=["rows", "rows and groups", "groups", "rows and columns", "rows and contracted"],
)
def test_equal_to_one_device_however_rows_and_groups_are_split(specs: tuple[P, ...], sizes: list[int]):
    x, w, ct, n = real(64, 16), real(8, 16, 32), real(64, 32) + 1, np.asarray(sizes, np.int32)
    sharded = step(products, (specs[0], specs[1], P(), specs[2]), GRID)
    same(sharded(x, w, n, ct), jax.jit(products)(x, w, n, ct))


def test_rows_that_are_split_send_their_weights_gradient_alone():
    x, w, ct, n = real(4096, 16), real(8, 16, 32), real(4096, 32), np.full(8, 512, np.int32)
    sharded = step(products, (P("x"), P(), P(), P("x")), GRID, (P("x"), P("x"), P()))
    plan = sharded.plan(x, w, n, ct)
    found = audit(sharded.lower(x, w, n, ct).compile(), plan)
    assert found.clean, str(found)
    assert {(c.kind, c.bytes) for c in plan.cost.collectives} == {("all-reduce", w.nbytes)}


@pytest.mark.parametrize(("hardware", "growth"), [("tpu-v5e", 1.0), ("h100", 2.0)])
def test_flops_are_those_of_each_row_with_one_group_or_with_all_where_there_is_no_kernel(hardware: str, growth: float):
    def product(x: Any, w: Any, sizes: Any) -> Any:
        return lax.ragged_dot(x, w, sizes)

    mesh = autoshard.MeshConfig(axes={"x": 8}, hardware=hardware)

    def plan(groups: int) -> Any:
        shapes = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((8192, 4096), (groups, 4096, 8192))]
        return autoshard.jit(product, mesh=mesh).plan(*shapes, jax.ShapeDtypeStruct((groups,), "int32"))

    few, many = (plan(groups) for groups in (2, 4))
    flops, rate = 2 * 8192 * 4096 * 8192 / 8, mesh.mesh().hardware.product_rate("bfloat16")
    assert few.cost.compute >= flops / rate * (1 if growth == 1 else 2)
    assert many.cost.compute / few.cost.compute == pytest.approx(growth, rel=0.2)
    assert growth == 1 or many.memory.peak >= 4 * 8192 * 4096 * 2 / 8
