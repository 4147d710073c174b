"""Local forms on devices: the numbers of one device, the collectives that were planned, and fewer bytes than XLA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

from tests.forms import EIGHT, GRID, HASTY, compared, same, step

COLUMNS = P(None, "x")
START = np.int32(1000)


def real(*shape: int, dtype: Any = "float32") -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(dtype)


def whole(*shape: int, most: int = 3, dtype: Any = "int32") -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(-most, most, shape).astype(dtype)


ROWS = real(64, 2048)
TABLE, TOKENS = real(8192, 64), abs(whole(1024, most=8000))
MANY, WANTED = abs(whole(4096, most=8000)), real(4096, 64)


def picked(table: Any, tokens: Any) -> Any:
    return table[tokens]


def learnt(table: Any, tokens: Any, wanted: Any) -> Any:
    return jax.value_and_grad(lambda table: ((table[tokens] - wanted) ** 2).sum())(table)


# function, operands, their specs, and the specs of the results: the same for both compilers
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[P, ...], Any]] = {
    "cumsum": (partial(lax.cumsum, axis=1), (ROWS,), (COLUMNS,), COLUMNS),
    "cumprod": (partial(lax.cumprod, axis=1), (ROWS,), (COLUMNS,), COLUMNS),
    "cummax": (partial(lax.cummax, axis=1), (ROWS,), (COLUMNS,), COLUMNS),
    "cummin": (partial(lax.cummin, axis=1), (ROWS,), (COLUMNS,), COLUMNS),
    "cumlogsumexp": (partial(lax.cumlogsumexp, axis=1), (ROWS,), (COLUMNS,), COLUMNS),
    "cumsum from the end": (partial(lax.cumsum, axis=1, reverse=True), (ROWS,), (COLUMNS,), COLUMNS),
    "argmax": (partial(jnp.argmax, axis=1), (ROWS,), (COLUMNS,), P()),
    "argmin": (partial(jnp.argmin, axis=1), (ROWS,), (COLUMNS,), P()),
    "top_k": (lambda x: tuple(lax.top_k(x, 3)), (ROWS,), (COLUMNS,), (P(), P())),
    "dynamic_slice": (partial(lax.dynamic_slice_in_dim, slice_size=96, axis=1), (ROWS, START), (COLUMNS, P()), P()),
    "dynamic_update_slice": (
        partial(lax.dynamic_update_slice_in_dim, axis=1),
        (ROWS, real(64, 96), START),
        (COLUMNS, P(), P()),
        COLUMNS,
    ),
    "pad to twice the size": (lambda x: lax.pad(x, 0.5, ((0, 0, 0), (1024, 1024, 0))), (ROWS,), (COLUMNS,), COLUMNS),
    "first half": (lambda x: x[:, :1024], (ROWS,), (COLUMNS,), COLUMNS),
    "concatenate": (lambda x, y: jnp.concatenate([x, y], 1), (ROWS, -ROWS), (COLUMNS, COLUMNS), COLUMNS),
    "split": (lambda x: tuple(jnp.split(x, 2, 1)), (ROWS,), (COLUMNS,), (COLUMNS, COLUMNS)),
    "tile": (partial(lax.tile, reps=(1, 3)), (ROWS,), (COLUMNS,), COLUMNS),
    "tile both": (partial(lax.tile, reps=(2, 2)), (ROWS,), (COLUMNS,), COLUMNS),
    "nonzero": (lambda x: jnp.nonzero(x > 2, size=100), (ROWS,), (P("x"),), P()),
    "embedding, then split by width": (lambda t, i: t[i], (TABLE, TOKENS), (P("x"), P()), COLUMNS),
    "embedding's gradient, wherever it falls": (
        jax.grad(lambda t, i, u: (jnp.sin(t[i]) * u).sum()),
        (TABLE, TOKENS, real(1024, 64)),
        (P("x"), P("x"), P("x")),
        None,
    ),
    # Where tokens are more than a part of the vocabulary, the table is split by width for the time being.
    "embedding of many tokens": (picked, (TABLE, MANY), (P("x"), P()), P()),
    "embedding of many tokens, split equally": (picked, (TABLE, MANY), (P("x"), P("x")), P("x")),
    "embedding's gradient of many tokens": (learnt, (TABLE, MANY, WANTED), (P("x"), P(), P()), (P(), P("x"))),
    "embedding's gradient of many tokens, split equally": (
        learnt,
        (TABLE, MANY, WANTED),
        (P("x"), P("x"), P("x")),
        (P(), P("x")),
    ),
}
TWO = {
    "embedding's gradient, tokens over another axis": (
        learnt,
        (TABLE, TOKENS, WANTED[:1024]),
        (P("y"), P("x"), P("x")),
        (P(), P("y")),
    ),
    "embedding's gradient in many sequences": (
        learnt,
        (TABLE, TOKENS.reshape(8, 128), WANTED[:1024].reshape(8, 128, 64)),
        (P("y"), P("x"), P("x")),
        (P(), P("y")),
    ),
    "merge": (lambda x: x.reshape(128, 32), (real(8, 16, 32),), (P(None, "y"),), P("y")),
    "cumsum": (partial(lax.cumsum, axis=1), (ROWS,), (P("x", "y"),), P("x", "y")),
}
"""On a mesh of two axes."""


@pytest.mark.parametrize(("fun", "args", "specs", "results"), CASES.values(), ids=CASES)
def test_fewer_bytes_travel_than_xla_alone_sends(fun, args, specs, results):
    ours = step(fun, specs, EIGHT, results)
    found, sent, table = compared(ours, fun, args, specs, results)
    assert found.clean, str(found)
    assert sent[0] < sent[1], table
    same(ours(*args), jax.jit(fun)(*args))


@pytest.mark.parametrize(("fun", "args", "specs", "results"), TWO.values(), ids=TWO)
def test_fewer_bytes_travel_over_one_of_two_axes(fun, args, specs, results):
    ours = step(fun, specs, GRID, results)
    found, sent, table = compared(ours, fun, args, specs, results)
    assert found.clean, str(found)
    assert sent[0] < sent[1], table
    same(ours(*args), jax.jit(fun)(*args))


X, ROW = P("x"), real(64 * 4096)
LABELS = abs(whole(64, most=1000))


def by_hand(x: Any, labels: Any) -> Any:
    """The mean of log-sum-exp less label pick."""
    return (jax.nn.logsumexp(x, -1) - jnp.take_along_axis(x, labels[:, None], -1)[:, 0]).mean()


def by_softmax(x: Any, labels: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], -1).mean()


def by_one_hot(x: Any, labels: Any) -> Any:
    return -(jax.nn.one_hot(labels, x.shape[-1]) * jax.nn.log_softmax(x)).sum(-1).mean()


def by_optax(x: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()


ENTROPIES = (by_hand, by_softmax, by_one_hot, by_optax)
NATIVE: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[P, ...], Any]] = {
    "sort": (partial(lax.sort, dimension=1), (ROWS,), (COLUMNS,), COLUMNS),
    "top_k of each row": (lambda x: tuple(lax.top_k(x, 3)), (ROWS,), (X,), (X, X)),
    "merge": (lambda x: x.reshape(-1), (ROWS,), (COLUMNS,), X),
    "unmerge": (lambda x: x.reshape(64, 4096), (ROW,), (X,), COLUMNS),
    "every second": (lambda x: x[:, 1::2], (ROWS,), (COLUMNS,), COLUMNS),
    "a column, and its gradient":
        (jax.value_and_grad(lambda x: jnp.sin(x[:, 5]).sum()), (real(512, 2048),), (COLUMNS,), (P(), COLUMNS)),
    "bins": (lambda x: jnp.digitize(x, jnp.linspace(-1, 1, 9)), (ROWS,), (COLUMNS,), COLUMNS),
    "gathered as flags": (jnp.isfinite, (ROWS,), (COLUMNS,), P()),
    "mean's gradient": (jax.grad(lambda x: jnp.sin(x.mean(1)).sum()), (real(512, 2048),), (COLUMNS,), COLUMNS),
    "sums of logarithms' gradient":
        (jax.grad(lambda x: jnp.sin(lax.cumlogsumexp(x, 1)).sum()), (real(512, 512),), (COLUMNS,), COLUMNS),
    "embedding": (lambda t, i: t[i], (real(1024, 16), whole(64, most=1000)), (X, P()), P()),
    "embedding's gradient": (
        jax.grad(lambda t, i, u: (t[i] * u).sum()),
        (real(1024, 16), abs(whole(64, most=1000)), real(64, 16)), (X, P(), P()), X),
    "one cache entry": (partial(lax.dynamic_update_slice_in_dim, axis=1), (ROWS, real(64, 1), START),
                        (COLUMNS, P(), P()), COLUMNS),
    **{f"cross-entropy {f.__name__}": (f, (ROWS, LABELS), (COLUMNS, P()), P()) for f in ENTROPIES},
    **{f"cross-entropy {f.__name__}, and its gradient":
       (jax.value_and_grad(f), (ROWS, LABELS), (COLUMNS, P()), (P(), COLUMNS)) for f in (by_hand, by_optax)},
}  # fmt: skip


@pytest.mark.parametrize(("fun", "args", "specs", "results"), NATIVE.values(), ids=NATIVE)
def test_no_more_bytes_travel_where_xla_does_well(fun, args, specs, results):
    ours = step(fun, specs, EIGHT, results)
    found, sent, table = compared(ours, fun, args, specs, results)
    assert found.clean, str(found)
    assert sent[0] <= sent[1], table
    same(ours(*args), jax.jit(fun)(*args))


def odd(*shape: int, dtype: Any = "float32") -> np.ndarray:
    """Few different numbers, so that many are equal; with NaN, infinities and both zeros where there are such."""
    rng = np.random.default_rng(7)
    if not jax.dtypes.issubdtype(dtype, np.floating):
        return rng.integers(0, 5, shape).astype(dtype)
    x = rng.choice(np.asarray([-2, -1, -0.0, 0.0, 1, 2]), shape)
    x[1] = rng.choice(np.asarray([np.nan, np.inf, -np.inf, 1]), shape[1:])
    x[2] = -np.inf
    x[3, -1] = np.nan
    return x.astype(jnp.dtype(dtype))


FORMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    **{f"{name} {reverse}": (partial(getattr(lax, name), axis=1, reverse=reverse), ())
       for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp") for reverse in (False, True)},
    "argmax": (partial(lax.argmax, axis=1, index_dtype="int32"), ()),
    "argmin": (partial(lax.argmin, axis=1, index_dtype="uint8"), ()),
    "top_k": (lambda x: tuple(lax.top_k(x, 3)), ()),
    "top_k of more than a part": (lambda x: tuple(lax.top_k(x, 21)), ()),
    "dynamic_slice": (partial(lax.dynamic_slice_in_dim, slice_size=11, axis=1), (np.int32(25),)),
    "dynamic_slice before": (partial(lax.dynamic_slice_in_dim, slice_size=7, axis=1), (np.int32(-70),)),
    "dynamic_slice after": (partial(lax.dynamic_slice_in_dim, slice_size=7, axis=1), (np.uint8(250),)),
    "dynamic_update_slice": (lambda x, i: lax.dynamic_update_slice_in_dim(x, x[:, 3:16], i, 1), (np.int32(25),)),
    "dynamic_update_slice after": (lambda x, i: lax.dynamic_update_slice_in_dim(x, x[:, :13], i, 1), (np.int32(40),)),
    "pad": (lambda x: lax.pad(x, jnp.asarray(1, x.dtype), ((0, 0, 0), (24, 8, 0))), ()),
    "pad and cut": (lambda x: lax.pad(x, jnp.asarray(1, x.dtype), ((0, 2, 0), (-5, 21, 0))), ()),
    "slice": (lambda x: x[1:, 13:37], ()),
    "every second": (lambda x: x[:, 1::2], ()),
    "concatenate": (lambda x: jnp.concatenate([x, x[:, :24], -x], 1), ()),
    "rotate": (lambda x: jnp.concatenate([x[:, 24:], x[:, :24]], 1), ()),
    "split": (lambda x: tuple(jnp.split(x, [8, 32], 1)), ()),
    "rev": (partial(lax.rev, dimensions=(0, 1)), ()),
    "a few": (lambda x: x[:, 5:40:9], ()),
    "a few put in": (lambda x: lax.pad(x[:, :3], jnp.asarray(1, x.dtype), ((0, 0, 0), (5, 30, 5))), ()),
    "tile": (partial(lax.tile, reps=(2, 3)), ()),
}  # fmt: skip
AS_WELL = [FORMS[name][0] for name in ("every second", "top_k", "top_k of more than a part")]
"""What XLA splits itself, or where the candidates can be more than what they are taken from."""
SPLITS = {"one axis": P(None, "y"), "two": P(None, ("x", "y")), "two, turned": P(None, ("y", "x")),
          "rows too": P("x", "y")}  # fmt: skip


@pytest.mark.parametrize(("fun", "more"), FORMS.values(), ids=FORMS)
def test_equal_numbers_with_ties_and_nan_over_any_axes(fun, more):
    for dtype in ("float32", "bfloat16", "int32"):
        if "logsumexp" in str(fun) and dtype == "int32":
            continue
        x = odd(6, 48, dtype=dtype)
        expected = jax.jit(fun)(x, *more)
        for name, spec in SPLITS.items() if dtype == "float32" else [("two", SPLITS["two"])]:
            ours = step(fun, (spec, *(P() for _ in more)), HASTY)
            assert ours.plan(x, *more).islands or fun in AS_WELL, name
            same(ours(x, *more), expected)


SMOOTH = [name for name in FORMS if not name.startswith("arg") and not name.endswith("True")]


def weighed(fun: Callable[..., Any], *more: Any) -> Callable[[Any], Any]:
    """The sum of what ``fun`` gives, each element with a weight of its own."""

    def total(x: Any) -> Any:
        leaves = [y for y in jax.tree.leaves(fun(x, *more)) if jax.dtypes.issubdtype(y.dtype, np.inexact)]
        return sum((y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)).sum() for y in leaves)

    return total


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_are_equal_inside_the_step_and_through_it(name):
    fun, more = FORMS[name]
    total, x = weighed(fun, *more), real(6, 48)
    expected = jax.jit(jax.grad(total))(x)
    same(step(jax.grad(total), (SPLITS["rows too"],), HASTY)(x), expected, scale=1.0)
    same(jax.grad(step(total, (SPLITS["rows too"],), HASTY))(x), expected, scale=1.0)
