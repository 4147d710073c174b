"""State that is stored with padding: the same numbers whatever the padding holds, and in which shapes it is stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from autoshard import jaxpr as jx
from autoshard.passes import PadUneven
from autoshard.transforms.pad_state import pad_state, padded_shapes, stored_shape
from tests.forms import same
from tests.passes.pad_uneven.test_pad_uneven import FUNCTIONS, X
from tests.programs import mesh, program

AT = np.array([[0, 31, 32], [-1, 34, 5], [33, -33, 2**31 - 1]], "i4")
"""Positions: in range, in the padding, behind it, before the beginning."""
SMALL = np.array([0, 31, 32, 34, 255, 7], "u1")


def taken(mode: str, at: Any = AT) -> Callable[[Any], Any]:
    return lambda x: (x.at[at].get(mode=mode), x.at[:, at[..., None]].get(mode=mode), x.at[at[0], 3].get(mode=mode))


def written(mode: str, how: str, at: Any = AT) -> Callable[[Any], Any]:
    def fun(x: Any) -> Any:
        new = jnp.ones((*at.shape, 24)) * jnp.arange(24) * 0.25 + 0.5
        return getattr(x.at[at], how)(new, mode=mode), getattr(x.T.at[:, at[-1]], how)(new[-1].T, mode=mode)

    return fun


def one_step(x: Any) -> Any:
    """Of an optimizer whose every part could read padding: a global norm, a mean, a decay, a factored moment."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.5), optax.adafactor(0.1, min_dim_size_to_factor=8), optax.lamb(0.1)
    )
    updates, state = optimizer.update(jax.grad(lambda x: (jnp.tanh(x @ x.T) ** 2).mean())(x), optimizer.init(x), x)
    return optax.apply_updates(x, updates), state


def layers(x: Any) -> Any:
    """Rows as the layers of a scan, rematerialized; rows and columns carried, stacked, branched on."""

    @jax.checkpoint
    def layer(c: Any, w: Any) -> tuple[Any, Any]:
        c = jnp.tanh(c * w + w.max())
        return c, (c.sum(), c * 2)

    def loss(x: Any) -> Any:
        c, (sums, ys) = lax.scan(layer, jnp.ones(24), x)
        return (c**2).sum() + sums.mean() + (ys * x).mean()

    value, grads = jax.value_and_grad(loss)(x)
    best = lax.cond(value > 0, lambda a, b: (a * 2, b.sum(0)), lambda a, b: (b, a.sum(0)), x, grads)
    return best, lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.5 + x.mean(), -c[2]), (0, x, x.sum(1))
    )


INDEXED: dict[str, Callable[[Any], Any]] = {
    **{f"taken {mode}": taken(mode) for mode in ("clip", "fill", "promise_in_bounds")},
    **{f"{how} {mode}": written(mode, how) for mode in ("clip", "drop") for how in ("add", "max", "min", "mul", "set")},
    "taken of small positions": taken("fill", SMALL),
    "one from each row": lambda x: jnp.take_along_axis(x, jnp.argmax(x, 1, keepdims=True), 1),
    "gradient of rows": jax.grad(lambda x: (jnp.tanh(x)[AT[0]] ** 2).sum()),
    "sorted": lambda x: (jnp.sort(x, 0), lax.top_k(x, 3), jnp.cumsum(x, 1), jnp.median(x)),
    "loops": layers,
    "optimizers": one_step,
    "drawn": lambda x: x * jax.random.normal(jax.random.key(0), x.shape) + jax.random.uniform(jax.random.key(1), (24,)),
    "solved": lambda x: jnp.linalg.solve(x.T @ x + jnp.eye(24), x.T),
    "labels": lambda x: optax.softmax_cross_entropy_with_integer_labels(x, jnp.arange(32) % 24).mean(),
    "one-hot labels": lambda x: (jax.nn.one_hot(jnp.arange(32) % 24, 24) * jax.nn.log_softmax(x)).sum(),
}  # fmt: skip


@pytest.mark.parametrize("fun", [*FUNCTIONS.values(), *INDEXED.values()], ids=[*FUNCTIONS, *INDEXED])
def test_what_the_padding_holds_reaches_no_result(fun: Callable[[Any], Any]) -> None:
    before = program(fun, [X.shape], mesh(x=5))
    after = PadUneven()(pad_state(before, {0: (35, 25)}))
    jx.check_jaxpr(after.jaxpr)
    padded = np.full((35, 25), np.nan, "f4")
    padded[:32, :24] = X
    same(jax.jit(jx.as_fun(after.jaxpr))(padded), jax.jit(jx.as_fun(before.jaxpr))(X), scale=1.0)


def test_results_that_replace_arguments_get_zeros() -> None:
    before = program(lambda s: jax.tree.map(lambda x: x * 2 + 1, s), [{"w": (7, 3), "b": (5,)}], mesh(x=8))
    assert padded_shapes(before) == {1: (8, 3)}
    after = PadUneven()(pad_state(before, padded_shapes(before)))
    b, w = jax.jit(jx.as_fun(after.jaxpr))(np.ones(5, "f4"), np.ones((8, 3), "f4"))
    np.testing.assert_array_equal(w, np.repeat([[3.0], [0.0]], [7, 1], 0) * np.ones(3))
    assert b.shape == (5,)
    leaf = after.inputs[1]
    assert (leaf.shape, leaf.stored_shape, leaf.aval.shape, leaf.bytes) == ((7, 3), (8, 3), (8, 3), 96)


def test_a_pinned_argument_keeps_its_shape() -> None:
    before = program(lambda s: {"w": s["w"] * 2, "v": s["v"]}, [{"v": (7,), "w": (7,)}], mesh(x=8))
    pinned = replace(before, inputs=(replace(before.inputs[0], pin=P()), before.inputs[1]))
    assert padded_shapes(pinned) == {1: (8,)}


@pytest.mark.parametrize(
    ("shape", "axes", "stored"),
    [
        ((7,), {"x": 8}, (8,)),
        ((7,), {"x": 2, "y": 4}, (8,)),
        ((5,), {"x": 8}, (5,)),  # three of eight would be padding
        ((5,), {"x": 2, "y": 4}, (6,)),  # one of six is, and half of the mesh is used
        ((3,), {"x": 256}, (3,)),
        ((12, 6, 4), {"x": 8}, (12, 8, 4)),  # not 16, of a dimension that other things share
        ((12, 6, 4), {"x": 2, "y": 4}, (12, 6, 4)),  # two of one dimension and four of another
        ((50257, 768), {"x": 8}, (50264, 768)),  # free, and the vocabulary can be split
        ((6, 768), {"x": 8}, (6, 768)),  # not free, and another dimension can be
        ((7, 7), {"x": 8}, (8, 7)),
        ((7, 7), {"x": 2, "y": 4}, (8, 7)),
        ((0, 7), {"x": 8}, (0, 7)),
        ((), {"x": 8}, ()),
        ((64, 64), {"x": 2, "y": 2, "z": 2}, (64, 64)),
    ],
)
def test_the_shape_to_store_with(shape: tuple[int, ...], axes: dict[str, int], stored: tuple[int, ...]) -> None:
    assert stored_shape(shape, mesh(**axes)) == stored
