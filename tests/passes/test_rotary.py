"""Rotations of halves on whole rows: the same numbers, however they are written, and nothing else changes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import autoshard
from autoshard import jaxpr as jx
from autoshard.ir.program import Program
from autoshard.machine.mesh_config import MeshConfig
from autoshard.passes.rotary import Rotary
from autoshard.transforms.swapped_halves import by_parts, by_product
from tests.programs import mesh, program

ON_TPU = MeshConfig(axes={"data": 8}, tpu="v6e:2x4").mesh()
BATCH, SEQ, HEADS, WIDTH = 2, 16, 3, 32
HALF = WIDTH // 2
RNG = np.random.default_rng(0)
X = RNG.normal(size=(BATCH, SEQ, HEADS, WIDTH)).astype("float32")
DOWN = RNG.normal(size=X.shape).astype("float32")


def angles():
    angle = jnp.arange(SEQ, dtype=jnp.float32)[:, None] * 100.0 ** (-jnp.arange(HALF) / HALF)
    return jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]


def by_split(x):
    cos, sin = angles()
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def by_slices(x):
    cos, sin = angles()
    first, second = x[..., :HALF].astype(jnp.float32), x[..., HALF:].astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, sin * first + cos * second], axis=-1).astype(x.dtype)


def by_turned_halves(x):
    cos, sin = (jnp.concatenate([t, t], -1).astype(x.dtype) for t in angles())
    return x * cos + jnp.concatenate([-x[..., HALF:], x[..., :HALF]], axis=-1) * sin


def backwards_and_scaled(x):
    cos, sin = angles()
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    return jnp.concatenate([second * sin * 2.0 - first * cos, -(first * sin * 3.0) - second * cos], axis=-1)


WAYS = [by_split, by_slices, by_turned_halves, backwards_and_scaled]


def step_of(rotate):
    def step(x, down):
        y, pullback = jax.vjp(rotate, x)
        return y, pullback(down)

    return step


def traced(fun, *args, on=ON_TPU) -> Program:
    return program(fun, args, on)


def rewritten(fun, *args) -> tuple[Program, Program]:
    before = traced(fun, *args)
    after = Rotary()(before)
    jx.check_jaxpr(after.jaxpr)
    return before, after


def results(program: Program, *args) -> list[Any]:
    return [np.asarray(x, "float32") for x in jx.as_fun(program.jaxpr)(*args)]


def halves(program: Program) -> int:
    """Operations on half rows of the activations."""
    shape = (BATCH, SEQ, HEADS, HALF)
    return sum(jx.aval(v).shape == shape for e in jx.walk(program.jaxpr) for v in e.outvars if jx.is_array(v))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rotate", WAYS)
def test_rows_are_the_same_numbers(rotate, dtype):
    args = jnp.asarray(X, dtype), jnp.asarray(DOWN, dtype)
    before, after = rewritten(step_of(rotate), *args)
    assert halves(before) > 0
    assert halves(after) == 0
    for was, now in zip(results(before, *args), results(after, *args), strict=True):
        np.testing.assert_array_equal(now, was)


def test_each_is_reported_with_its_line():
    before, after = rewritten(step_of(by_split), X, DOWN)
    assert Rotary().change(before, after).startswith("2 rotations of halves computed on whole rows (")
    assert "test_rotary.py:" in Rotary().change(before, after)
    assert Rotary().change(before, before) == "no rotation of halves is rewritten"


def test_within_a_loop():
    def step(x):
        return jax.grad(lambda x: jnp.sin(jax.lax.scan(lambda h, s: (by_split(h) * s, None), x, S)[0]).sum())(x)

    S = np.arange(1.0, 4, dtype="float32")
    before, after = rewritten(step, X)
    assert halves(after) == 0
    (was,), (now,) = results(before, X), results(after, X)
    np.testing.assert_array_equal(now, was)


@pytest.mark.parametrize("depth", [1, 6, 7])
def test_a_negation_of_a_negation(depth):
    def turned(x):
        first, second = jnp.split(x, 2, axis=-1)
        for _ in range(depth):
            second = jax.lax.neg(second)
        return jnp.concatenate([second * 3, first * 2], axis=-1)

    before, after = rewritten(turned, X)
    assert (after is before) == (depth == 7)  # beyond a depth nothing is looked for
    np.testing.assert_array_equal(results(after, X)[0], results(before, X)[0])


def joined(first, second):
    return jnp.concatenate([first, second], axis=-1)


NOT_ROTATIONS = {
    "halves in their order": lambda a, b: joined(a * 2, b * 3),
    "a half twice": lambda a, b: joined(a + a, b + b),
    "one half alone": lambda a, b: joined(a, a),
    "one sum, one term": lambda a, b: joined(a + b, a),
    "a factor as large as the halves": lambda a, b: joined(a * DOWN[..., :HALF] - b, b * DOWN[..., HALF:] + a),
    "unequal factors": lambda a, b: joined(b * 2, a * 3 * 4),
    "a function of a half": lambda a, b: joined(jnp.sin(b), a),
    "another dimension": lambda a, b: jnp.concatenate([b, a], axis=0),
    "three parts": lambda a, b: jnp.concatenate([b, a, a], axis=-1),
    "rounded between": lambda a, b: joined(b.astype("bfloat16").astype("float32"), a),
}


@pytest.mark.parametrize("what", NOT_ROTATIONS)
def test_what_is_no_rotation_stays(what):
    before, after = rewritten(lambda x: NOT_ROTATIONS[what](*jnp.split(x, 2, axis=-1)), X)
    assert after is before


def test_halves_of_two_arrays_stay():
    before, after = rewritten(lambda x, y: joined(x[..., HALF:], y[..., :HALF]), X, DOWN)
    assert after is before


def test_every_second_element_stays():
    before, after = rewritten(lambda x: joined(x[..., HALF:], x[..., ::2]), X)
    assert after is before


@pytest.mark.parametrize("parts", [[8, 24], [0, 16], [4, 20]])
def test_other_parts_of_a_split_than_halves_stay(parts):
    """The one of half a row that begins elsewhere, or stands elsewhere among the parts."""
    before, after = rewritten(lambda x: joined(jnp.split(x, parts, axis=-1)[1] * 2, x[..., :HALF] * 3), X)
    (was,), (now,) = results(before, X), results(after, X)
    np.testing.assert_array_equal(now, was)


def test_a_sum_with_a_padded_number_stays():
    before = traced(lambda x: jax.lax.pad(x, jnp.float32(0), []) + x, np.float32(3))
    assert Rotary()(before) is before


@pytest.mark.parametrize("places", [HALF, -HALF])
def test_halves_that_change_places_and_no_more_stay(places):
    before, after = rewritten(lambda x: jnp.roll(x, places, axis=-1), X)
    assert after is before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_by_a_product_halves_are_exchanged_to_the_bit(dtype):
    """As it is lowered for TPUs."""
    x = jnp.asarray(X * 10.0 ** RNG.integers(-4, 4, X.shape), dtype)
    np.testing.assert_array_equal(by_product(x)[0], by_parts(x)[0])


def test_other_thirds_than_halves_stay():
    before, after = rewritten(lambda x: joined(x[..., 8:16], x[..., :8]), X)
    assert after is before


def test_halves_that_fill_lanes_stay():
    x = np.zeros((8, 256), "float32")
    assert Rotary()(before := traced(lambda x: joined(x[:, 128:], x[:, :128]), x)) is before


def test_chips_without_tiles_stay():
    assert Rotary()(before := traced(by_split, X, on=mesh(data=8))) is before


def test_where_it_has_not_been_seen_to_pay_they_stay():
    v4 = MeshConfig(axes={"data": 8}, tpu="v4:2x2x2").mesh()
    assert Rotary()(before := traced(by_split, X, on=v4)) is before


@pytest.mark.parametrize("specs", [("data",), (None, None, None, "data"), (None, "data", None, None)])
def test_sharded_rows_are_the_same_numbers(specs):
    sharding = jax.sharding.PartitionSpec(*specs)
    on = MeshConfig(axes={"data": 2}, hardware="tpu-v6e")
    step = autoshard.jit(step_of(by_split), mesh=on, in_shardings=(sharding, sharding))
    for was, now in zip(jax.jit(step_of(by_split))(X, DOWN), step(X, DOWN), strict=True):
        np.testing.assert_allclose(now, was, rtol=1e-6, atol=1e-6)
    assert "2 rotations of halves" in str(step.plan(X, DOWN).explain())
