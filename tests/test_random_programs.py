"""Random programs on random meshes under random pins and strategies: what one device computes.

``AUTOSHARD_EXAMPLES`` is the number of programs, 40 unless it is set, and ``AUTOSHARD_SEED`` draws others. One that
fails prints as a `Recipe`; without what it can do without, it belongs among `FOUND`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import SpecError
from autoshard.runtime.verify import compare_arrays
from tests.random_programs import Call, Recipe, draw

EXAMPLES = int(os.environ.get("AUTOSHARD_EXAMPLES", "40"))
SEED = int(os.environ.get("AUTOSHARD_SEED", "0"))
CHUNKS = 10
TOLERANCE = 1e-9
"""In float64; of a result's largest entry where that is more than one."""

FOUND = {
    "branches that end apart, under a pin": Recipe(
        (((12,), "f"),), (Call("branches", (0,)),), (2, 1, 3), "auto", out_pins=(P("c"),)
    ),
    "an update out of bounds": Recipe(
        (((8, 4), "i"), ((3, 8, 4), "f")), (Call("dynamic_update", (1, 0), (0,)),), (3,), out_pins=(P("a"),)
    ),
    "padding with gaps, put together": Recipe(
        (((2, 4, 6), "f"),),
        (Call("pad", (0,), (((0, 3, 0), (1, 2, 1), (1, 2, 0)),)), Call("concatenate", (1, 1), (2,))),
        (2, 2, 2),
        out_pins=(P(None, "b", "a"),),
    ),
    "padding taken off, in a branch": Recipe(
        (((1, 8, 4, 2), "f"),),
        (Call("pad", (0,), (((1, 2, 1), (-1, 0, 0), (0, 0, 0), (0, 0, 0)),)), Call("branches", (1,))),
        (2, 1, 3),
        out_pins=(P(("a", "b")),),
    ),
    "padding taken off, then turned": Recipe(
        (((12, 3, 8, 1), "f"),),
        (
            Call("pad", (0,), (((1, 2, 1), (-1, 0, 1), (1, 2, 0), (0, 0, 0)),)),
            Call("reverse", (1,), ((0,),)),
            Call("transpose", (2,), ((1, 3, 2, 0),)),
            Call("roll", (3,), (2, 2)),
        ),
        (4,),
        out_pins=(P("a"),),
    ),
    "a convolution beside a pinned pool": Recipe(
        (((16, 1, 4, 12), "f"),),
        (
            Call("reshape", (0,), ((16, 2, 4, 6),)),
            Call("repeat", (1,), (1,)),
            Call("convolution", (1,), (3, 2, 12, 6)),
            Call("pool", (2,), (2, (3, 3, 2, 3), (1, 1, 1, 3), "SAME")),
            Call("argsort", (3,), (3,)),
        ),
        (4,),
        out_pins=(P(None, "a"), None),
    ),
    "a transform whose result is wanted split": Recipe(
        (((4,), "f"), ((1, 1, 2), "f")),
        (
            Call("einsum", (1, 0), ("ijk,x->jxik",)),
            Call("fft", (2,)),
            Call("repeat", (3,), (0,)),
            Call("select", (4, 2)),
        ),
        (2,),
        in_pins=(None, P(None, None, "a")),
    ),
    "axes that change places and do not divide": Recipe(
        (((12, 4), "f"), ((12, 4), "f"), ((12, 4), "f")),
        (
            Call("random", (1,)),
            Call("divide", (2, 0)),
            Call("add", (1, 2)),
            Call("reshape", (5,), ((3, 4, 4),)),
        ),
        (2, 3),
        out_pins=(P(("a", "b")), P("b", "a"), None),
    ),
    "rows moved over axes in another order": Recipe(
        (((2, 16), "i"), ((4, 4), "f"), ((4, 4), "f")),
        (
            Call("concatenate", (2, 1), (0,)),
            Call("recurrence", (3,), (False,)),
            Call("scatter_add", (1, 0), (0,)),
        ),
        (2, 2),
        out_pins=(None, P(("b", "a"))),
    ),
    "a pinned value wanted elsewhere as a result": Recipe(
        (((6, 6, 2), "f"),), (Call("annotate", (0,), (P(None, "a"),)),), (2, 3), out_pins=(P(("a", "b")),)
    ),
    "a transform that one device refuses": Recipe((((2, 2), "f"),), (Call("fft", (0,)), Call("solve", (1,))), (2,)),
    "what goes round a loop, wanted elsewhere": Recipe(
        (((6, 8, 1), "f"),),
        (Call("annotate", (0,), (P(("b", "a")),)), Call("counted loop", (1,))),
        (3, 2),
        out_pins=(P("a", "b"),),
    ),
    "groups of features without a window": Recipe(
        (((1, 2, 1, 24), "f"),),
        (Call("convolution", (0,), (1, 1, 96, 24)),),
        (2, 4),
        out_pins=(P(None, None, None, "b"),),
    ),
    "the mean of a gradient by positions that are out of bounds": Recipe(
        (((4,), "f"), ((6,), "i")),
        (Call("gather's gradient", (0, 1), (0,)), Call("reduce", (2,), (1, (0,)))),
        (2, 1),
        "fsdp",
    ),
}


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield
    jax.clear_caches()


def check(recipe: Recipe) -> None:
    """Runs ``recipe`` as planned and on one device."""
    args = recipe.arguments()
    expected = on_one_device(recipe, args)

    def sharded(strategy: str) -> tuple[jax.Array, ...]:
        step = autoshard.jit(
            recipe.__call__,
            mesh=recipe.axes,
            strategy=strategy,
            in_shardings=recipe.in_pins,
            out_shardings=recipe.out_pins,
        )
        return step(*args)

    try:
        got = sharded(recipe.strategy)
    except SpecError:  # data parallel over a batch that does not divide
        assert recipe.strategy in ("dp", "fsdp")
        got = sharded("replicated")
    for i, (a, b) in enumerate(zip(expected, got, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        d = compare_arrays(f"result {i}", np.asarray(a), np.asarray(b), TOLERANCE)
        assert d.equal or (a.dtype.kind == "f" and d.absolute <= TOLERANCE), f"{d}\n{recipe}"


def on_one_device(recipe: Recipe, args: list[np.ndarray]) -> tuple[Any, ...]:
    """At once, or, where XLA's compiler for CPU lays out a transform as it then refuses to, one operation at a time."""
    try:
        return jax.block_until_ready(jax.jit(recipe.__call__)(*args))
    except jax.errors.JaxRuntimeError as e:
        if "fft_thunk" not in str(e):
            raise
        return recipe(*map(jnp.asarray, args))


@pytest.mark.parametrize("recipe", FOUND.values(), ids=FOUND)
def test_what_was_found(recipe: Recipe) -> None:
    check(recipe)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_as_on_one_device(chunk: int) -> None:
    @seed(SEED * CHUNKS + chunk)
    @settings(
        max_examples=-(-EXAMPLES // CHUNKS),
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**32), st.one_of(st.integers(5, 10), st.integers(5, 40)))
    def run(number: int, size: int) -> None:
        recipe = draw(number, size)
        note(str(recipe))
        check(recipe)

    run()
