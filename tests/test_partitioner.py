"""Where XLA's partitioner (JAX 0.12) gives wrong numbers, an error, or dies: the step gives what one device does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.backend.audit import collectives

NHWC = ("NHWC", "HWIO", "NHWC")


@dataclass(frozen=True)
class Case:
    """A function, its arguments' shapes, and pins under which `jax.jit` with the same shardings fails."""

    fun: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    ins: tuple[P | None, ...] = ()
    out: P | None = None


def conv(x: Any, w: Any, **options: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC, **options)


def pool(x: Any, size: int, stride: int) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (size, size), (stride, stride), "SAME")


def both_pools(x: Any, y: Any) -> Any:
    def larger(a: Any, b: Any) -> Any:
        return jnp.maximum(a[0], b[0]), a[1] + b[1]

    return lax.reduce_window((x, y), (-jnp.inf, 0.0), larger, (2, 2), (1, 1), "VALID", (2, 3))


def update(at: int, size: int) -> Callable[[Any], Any]:
    return lambda x: lax.dynamic_update_slice(x, x[:1, :size] + 1, (jnp.int32(at), jnp.int32(1)))


CASES = {
    "a convolution's image and features": Case(
        conv, ((4, 8, 8, 4), (3, 3, 4, 4)), (P(None, "a"), P(None, None, None, "b")), P(None, "a", None, "b")
    ),
    "and its batch": Case(
        conv, ((4, 8, 8, 4), (3, 3, 4, 4)), (P("c", None, "a"), P(None, None, None, "b")), P("c", None, "a", "b")
    ),
    "and its input's features": Case(
        conv, ((4, 8, 8, 4), (3, 3, 4, 4)), (P(None, "a", None, "c"), None), P(None, "a", None, "b")
    ),
    "its result alone": Case(conv, ((4, 8, 8, 4), (3, 3, 4, 4)), (), P(None, "c", "b", "a")),
    "features of groups of the batch": Case(
        lambda x, w: conv(x, w, batch_group_count=2),
        ((4, 8, 8, 4), (3, 3, 4, 4)),
        (P(None, None, None, "a"), P(None, None, "a")),
    ),
    "an update out of bounds": Case(update(9, 4), ((8, 4),), (P("a"),), P("a")),
    "an update out of bounds, in two dimensions": Case(update(9, 2), ((8, 4),), (P("a"),), P("a", "b")),
    "the gradient of windows that overlap": Case(
        jax.grad(lambda x: jnp.sum(jnp.sin(pool(x, 3, 1)))), ((8, 16),), (P("a", "b"),), P("a", "b")
    ),
    "the gradient of windows in steps": Case(
        jax.grad(lambda x: jnp.sum(jnp.sin(pool(x, 3, 2)))), ((8, 16),), (P(("a", "b")),), P(("a", "b"))
    ),
    "two dilated operands": Case(both_pools, ((4, 6), (4, 6)), (P("a"), P("a"))),
    "patches and features": Case(
        lambda x, w: lax.conv_general_dilated(x, w, (2, 2), "VALID", dimension_numbers=NHWC),
        ((4, 8, 8, 4), (2, 2, 4, 4)),
        (P(None, "a"), P(None, None, "b", "c")),
    ),
    "a transform along a split dimension": Case(
        lambda x: jnp.real(jnp.fft.fft(x)), ((4, 8),), (P(None, "a"),), P(None, "b")
    ),
    "a reduction of two operands": Case(
        lambda x, y: lax.reduce((x, y), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,)),
        ((4, 8), (4, 8)),
        (P(None, "a"), P(None, "b")),
    ),
    "a picked tangent": Case(
        lambda x, t: jax.jvp(lambda x: pool(x, 2, 1), (x,), (t,))[1], ((4, 8), (4, 8)), (P("a"), P("a")), P("b")
    ),
    "padding taken off": Case(lambda x: lax.pad(x, 0.0, ((-1, 2, 1), (0, 0, 0))), ((8, 4),), (P("a"),)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_step_is_right(case: Case) -> None:
    rng = np.random.default_rng(0)
    args = [rng.normal(size=s).astype("f4") for s in case.shapes]
    step = autoshard.jit(
        case.fun,
        mesh={"a": 2, "b": 2, "c": 2},
        strategy="replicated",
        in_shardings=case.ins or None,
        out_shardings=case.out,
    )
    chex.assert_trees_all_close(step(*args), jax.jit(case.fun)(*args), rtol=1e-4, atol=1e-5, strict=True)


def test_axes_whose_sizes_do_not_divide_one_another_change_places() -> None:
    x = np.arange(288.0, dtype="f4").reshape(12, 24)
    places = [
        P(),
        P("a", "b"),
        P("b", "a"),
        P(("a", "b")),
        P(("b", "a")),
        P(None, ("a", "b")),
        P(None, ("b", "a")),
        P("b"),
    ]
    for before, after in itertools.permutations(places, 2):
        step = autoshard.jit(jnp.sin, mesh={"a": 2, "b": 3}, in_shardings=before, out_shardings=after)
        np.testing.assert_array_equal(step(x), jnp.sin(x))


def test_edges_of_an_image_are_all_that_travels() -> None:
    """Where memory is fast beside the links, so that putting an image and its edges together takes less than to send
    the image."""
    case = CASES["and its batch"]
    mesh = autoshard.MeshConfig(axes={"a": 2, "b": 2, "c": 2}, hardware="h100")
    step = autoshard.jit(case.fun, mesh=mesh, in_shardings=case.ins, out_shardings=case.out)
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 128, 256, 128), (3, 3, 128, 128))]
    found = collectives(step.lower(*args).compile().as_text(), step.plan(*args).mesh)
    assert {c.kind for c in found} == {"collective-permute"}
    assert {c.axes for c in found} == {("a",)}
