"""Halos: their sizes, counted row by row, and the collectives of gradients of split images."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.backend.audit import audit
from autoshard.ir.halo import HaloWindow, rows_per_hop, with_halo

NHWC = ("NHWC", "HWIO", "NHWC")
ROWS = P("b", "a")


@pytest.mark.parametrize(
    "window",
    [
        HaloWindow(12, 12, 1, 1, 3),
        HaloWindow(24, 12, 2, 0, 3),
        HaloWindow(12, 24, 1, 1, 3, 2),
        HaloWindow(12, 12, 1, 5, 11),
        HaloWindow(12, 12, 1, -2, 3),
        HaloWindow(24, 12, 1, 0, 13),
    ],
    ids=str,
)
def test_halo_rows_are_those_that_some_shard_reads(window: HaloWindow) -> None:
    for parts in (2, 3, 4, 6):
        own, made = window.input_size // parts, window.output_size // parts
        before = behind = 0
        for k, j, tap in itertools.product(range(parts), range(made), range(window.window_size)):
            row, off = divmod((k * made + j) * window.stride - window.padding_low + tap, window.base_dilation)
            if off == 0 and 0 <= row < window.input_size:
                before, behind = max(before, k * own - row), max(behind, row + 1 - (k + 1) * own)
        assert window.halo_rows(parts) == (before, behind)


def test_rows_per_hop() -> None:
    assert rows_per_hop(5, 2) == [2, 2, 1]
    assert rows_per_hop(0, 2) == []


@pytest.mark.parametrize(("before", "after"), [(0, 0), (1, 0), (5, 3), (2, 4)])
def test_a_shard_with_rows_of_several_neighbours(before: int, after: int) -> None:
    rows, own = np.arange(1, 9), 2
    extended = partial(with_halo, axes=("parts",), dim=0, before=before, after=after)
    on = jax.make_mesh((4,), ("parts",), axis_types=(AxisType.Auto,))
    found = jax.jit(jax.shard_map(extended, mesh=on, in_specs=P("parts"), out_specs=P("parts")))(rows)
    padded = np.pad(rows, (before, after))
    for first, part in zip(range(0, len(rows), own), np.split(np.asarray(found), 4), strict=True):
        np.testing.assert_array_equal(part, padded[first : first + before + own + after])


def loss(stride: int, groups: int, dilation: int, w: Any, x: Any) -> Any:
    strides, dilations = (stride, 1), (dilation, 1)
    y = lax.conv_general_dilated(jnp.sin(x), w, strides, "SAME", None, dilations, NHWC, feature_group_count=groups)
    return jnp.sum(jnp.sin(y))


CASES = {
    "plain": (partial(loss, 1, 1, 1), (3, 3, 4, 8)),
    "larger windows": (partial(loss, 1, 1, 1), (5, 3, 4, 8)),
    "strided": (partial(loss, 2, 1, 1), (3, 3, 4, 8)),
    "strided alone": (partial(loss, 2, 1, 1), (1, 1, 4, 8)),
    "dilated": (partial(loss, 1, 1, 2), (3, 3, 4, 8)),
    "by feature": (partial(loss, 1, 4, 1), (3, 3, 1, 4)),
}


@pytest.mark.parametrize(("fun", "shape"), CASES.values(), ids=CASES)
def test_gradients_of_split_images_exchange_halos_and_all_reduce(fun: Any, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    args = [rng.normal(size=s).astype("f4") for s in (shape, (2, 32, 4, 4))]
    grad = jax.grad(fun, (0, 1))
    step = autoshard.jit(
        grad, mesh={"a": 4, "b": 2}, strategy="replicated", in_shardings=(P(), ROWS), out_shardings=(P(), ROWS)
    )
    for a, b in zip(jax.jit(grad)(*args), step(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    found = audit(step.lower(*args).compile(), step.plan(*args))
    assert found.clean, str(found)
    assert {c.kind for c in found.emitted} <= {"collective-permute", "all-reduce"}
    assert sum(c.total_bytes for c in found.emitted if c.kind == "all-reduce") == args[0].nbytes


def test_gradients_of_grouped_convolutions_exchange_halos_and_all_reduce() -> None:
    rng = np.random.default_rng(0)
    w, x, t = (rng.normal(size=s).astype("f4") for s in ((3, 3, 2, 8), (2, 32, 4, 4), (2, 32, 4, 8)))

    def grad(w: Any, x: Any, t: Any) -> Any:
        options = {"dimension_numbers": NHWC, "feature_group_count": 2}
        return jax.vjp(lambda w: lax.conv_general_dilated(x, w, (1, 1), "SAME", **options), w)[1](t)[0]

    step = autoshard.jit(
        grad, mesh={"a": 4, "b": 2}, strategy="replicated", in_shardings=(P(), ROWS, ROWS), out_shardings=P()
    )
    np.testing.assert_allclose(jax.jit(grad)(w, x, t), step(w, x, t), rtol=1e-4, atol=1e-4)
    found = audit(step.lower(w, x, t).compile(), step.plan(w, x, t))
    assert found.clean, str(found)
    assert {c.kind for c in found.emitted} == {"collective-permute", "all-reduce"}
