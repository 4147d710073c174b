"""What is pinned: the stops between two specs, and what an operation whose edges are exchanged makes."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.ir.graph import Value
from autoshard.ir.spec import Spec
from autoshard.machine.mesh import Hardware, Link, LogicalMesh
from autoshard.plan.constraints import each_divides_next, reshard_waypoints

HARDWARE = Hardware("cpu", {"float32": 1e11}, 8e9, 1e10, {"host": Link("host", 1e10, 1e-6)}, 1e-6)
MESH = LogicalMesh(("d", "m"), (4, 2), HARDWARE)
IMAGE = Value((32, 32, 32), 32, "float32")


@pytest.mark.parametrize(
    ("before", "after", "between"),
    [
        ((("d",), ("m",), ()), ((), (), ("d", "m")), 1),
        (((), ("m",), ()), ((), (), ("m",)), 0),
        ((("d",), (), ()), ((), (), ()), 0),
        (((), (), ()), (("d",), (), ("m",)), 0),
        ((("d", "m"), (), ()), ((), (), ("m",)), 1),
    ],
    ids=["two moves to one dimension", "one move", "a gather", "slices", "a move and a gather"],
)
def test_stops_are_where_an_axis_moves_and_more_is_sent(
    before: tuple[tuple[str, ...], ...], after: tuple[tuple[str, ...], ...], between: int
) -> None:
    assert len(reshard_waypoints(Spec(before), Spec(after), IMAGE, MESH)) == between


@pytest.mark.parametrize(
    ("sizes", "nested"), [((), True), ((3,), True), ((8, 2, 1, 4), True), ((2, 3), False), ((6, 2, 4), False)]
)
def test_sizes_of_which_each_divides_the_next_larger_one(sizes: tuple[int, ...], nested: bool) -> None:
    assert each_divides_next(sizes) == nested


def test_gathers_that_would_be_reductions_go_axis_by_axis() -> None:
    before, after = Spec((("d", "m"), (), ())), Spec(((), (), ()))
    summed = [replace(MESH, hardware=replace(HARDWARE, all_gather_as_all_reduce_from=n)) for n in (8, 9)]
    assert [reshard_waypoints(before, after, IMAGE, mesh) for mesh in summed] == [(Spec((("d",), (), ())),), ()]
    assert reshard_waypoints(Spec((("d",), (), ())), after, IMAGE, summed[0]) == ()


@pytest.mark.parametrize(
    ("tpu", "model", "stop"),
    [("v5e:8x8", 4, (("data", "model"), ())), ("v5e:16x16", 16, ((), ("model",))), ("v5p:4x4x4", 4, ((), ("model",)))],
)
def test_several_dimensions_are_gathered_one_after_the_other(
    tpu: str, model: int, stop: tuple[tuple[str, ...], ...]
) -> None:
    """Where axes share a side of the slice, by way of one dimension that is split over both."""
    before, after = Spec((("data",), ("model",))), Spec(((), ()))
    mesh = autoshard.MeshConfig(axes={"data": -1, "model": model}, tpu=tpu).mesh()
    assert reshard_waypoints(before, after, Value((4096, 8192), 16, "bfloat16"), mesh) == (Spec(stop),)


def test_a_value_that_moves_twice_is_not_gathered() -> None:
    """XLA alone gathers it."""
    before, after = P("d", "m"), P(None, None, ("d", "m"))

    def step(x: jax.Array) -> jax.Array:
        return autoshard.annotate(autoshard.annotate(jnp.sin(x), before) * 2, after)

    x = jnp.asarray(np.random.default_rng(0).standard_normal((16, 16, 16)), jnp.float32)
    jitted = autoshard.jit(step, mesh={"d": 4, "m": 2}, in_shardings=before, out_shardings=after)
    text = jitted.lower(x).compile().as_text()
    assert "all-to-all" in text
    assert "all-gather" not in text
    np.testing.assert_allclose(jitted(x), jnp.sin(x) * 2, rtol=1e-6)


def test_what_a_convolution_of_split_images_makes_is_pinned_as_it_is_made() -> None:
    """Where edges are exchanged XLA computes it, and would take its result's layout from what reads it."""
    split, moved = P(None, ("d", "m")), P(None, "d", None, "m")

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        made = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return autoshard.annotate(made, moved)

    numbers = np.random.default_rng(0)
    x, w = (jnp.asarray(numbers.standard_normal(s), jnp.float32) for s in ((2, 64, 8, 4), (3, 3, 4, 8)))
    jitted = autoshard.jit(
        step, mesh={"d": 4, "m": 2}, strategy="replicated", in_shardings=(split, None), out_shardings=moved
    )
    np.testing.assert_allclose(jitted(x, w), step(x, w), rtol=1e-4, atol=1e-4)
    pinned = {(p.shape, p.spec) for p in jitted.plan(x, w).intermediates if p.op == "conv_general_dilated"}
    rows = Spec(((), ("d", "m"), (), ()))
    assert {(x.shape, rows), ((2, 64, 8, 8), rows)} <= pinned


@pytest.mark.parametrize(
    ("second", "islands"), [(P(None, None, "d"), 2), (P(), 1), (P("d"), 0)], ids=["otherwise", "whole", "alike"]
)
def test_what_is_stretched_to_unlike_splits_is_stretched_on_shards(second: P, islands: int) -> None:
    """XLA for TPU computes what is stretched once, and exchanges it."""
    first = P("d")

    def step(x: jax.Array, y: jax.Array, angle: jax.Array) -> tuple[jax.Array, jax.Array]:
        turned = jnp.sin(angle)[None, :, None, :]
        return x * turned, y - turned

    numbers = np.random.default_rng(0)
    x, angle = (jnp.asarray(numbers.standard_normal(s), jnp.float32) for s in ((8, 4, 8, 2), (4, 2)))
    jitted = autoshard.jit(
        step, mesh={"d": 4}, in_shardings=(first, second, None), out_shardings=(first, second), passes=()
    )
    found = jitted.plan(x, x, angle).islands
    assert [i.op for i in found] == ["mul", "sub"][:islands]
    assert all(i.in_specs[0].dims == i.reduced_specs[0].dims and not i.axes for i in found)
    for made, want in zip(jitted(x, x, angle), jax.jit(step)(x, x, angle), strict=True):
        np.testing.assert_array_equal(made, want)


def test_a_mask_may_be_broadcast_to_unlike_splits() -> None:
    """Its shape is a parameter of the operation: it does not run on shards."""
    splits = P("d"), P(None, "d")

    def step(x: jax.Array, y: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
        mask = (seen > 0)[None, None]
        return jnp.where(mask, x, 0), jnp.where(mask, y, -1)

    numbers = np.random.default_rng(0)
    x, seen = (jnp.asarray(numbers.standard_normal(s), jnp.float32) for s in ((8, 8, 4, 4), (4, 4)))
    jitted = autoshard.jit(step, mesh={"d": 4}, in_shardings=(*splits, None), out_shardings=splits, passes=())
    for made, want in zip(jitted(x, x, seen), jax.jit(step)(x, x, seen), strict=True):
        np.testing.assert_array_equal(made, want)
