"""Uneven sizes: the numbers of one device, whatever the mesh; and of what is shifted, no more than the edges travel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import jaxpr as jx
from autoshard.api import DEFAULT_PASSES, MEMORY_SAVING_PASSES
from autoshard.passes import PASSES, PadUneven
from tests.combinations import every_third
from tests.forms import compared, same, step
from tests.programs import mesh, mlp_args, mlp_step, program

X = np.random.default_rng(0).normal(size=(32, 24)).astype("f4")


def neighbours(x: Any) -> Any:
    p = jnp.pad(x, 1)
    return p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * x


def next_token(x: Any) -> Any:
    """A loss of each row's logits by the row after."""
    labels = jnp.argmax(x, 1)
    scores = jax.nn.log_softmax(x[:-1] * 2)
    return -jnp.take_along_axis(scores, labels[1:, None], 1).mean()


def counted(x: Any) -> Any:
    """Slices in a loop and in a branch."""

    def turn(c: Any, a: Any) -> tuple[Any, Any]:
        return jnp.roll(c, 1, 0) + a[0], (c[1:] * c[:-1]).sum()

    c, sums = lax.scan(turn, x, jnp.stack([x, -x]))
    return lax.cond(sums[0] > 0, lambda c: abs(jnp.diff(c, axis=0)).sum(), lambda c: jnp.diff(c, axis=1).max(), c)


def with_noise(x: Any) -> Any:
    return x[1:] + jax.random.normal(jax.random.key(0), (31, 24))


def pinned(x: Any) -> Any:
    return (autoshard.annotate(x[1:] * 2, P()) + x[:-1]).sum(0)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    **{f"{f.__name__} of a difference": lambda x, f=f: f(x[1:] - x[:-1], 0) + f(abs(x[:, 3:]))
       for f in (jnp.sum, jnp.max, jnp.min, jnp.prod, jnp.argmax, jnp.argmin)},
    "all and any": lambda x: ((x[1:] > x[:-1]).all(0), (x[3:] > 2).any(0), (x[2:].astype("int32") * 9).max(0)),
    "blocks": lambda x: jnp.concatenate([x[5:], x[:3], x[:2]], 0),
    "blocks of another operand": lambda x: jnp.concatenate([x[:1] * 2, x[1:] - x[:-1]], 0),
    "branches and turns": counted,
    "cut and pad": lambda x: lax.pad(x[3:], x[0, 0], ((-2, 5, 0), (1, -2, 0))),
    "cut and pad by another": lambda x: lax.pad(lax.pad(x, 1.0, ((1, 0, 0), (0, 0, 0))), 2.0, ((1, -2, 0), (0, 0, 0))),
    "every second": lambda x: x[2::2] * x[1:-1:2],
    "gather": lambda x: jnp.take_along_axis(x[1:], jnp.argsort(x[:-1], 1), 1).sum(0),
    "gradient of a gather": jax.grad(lambda x: jnp.take_along_axis(x[1:], jnp.argsort(x[:-1], 1), 1)[:, 7:].sum()),
    "middle": lambda x: x[1:-1, 1:-1],
    "more than a few": lambda x: x[5:17] * 2,
    "neighbours": neighbours,
    "neighbours' gradient": jax.grad(lambda x: jnp.sin(neighbours(x)).sum()),
    "next token": jax.value_and_grad(next_token),
    "nothing": lambda x: jnp.concatenate([x[:0], x[1:], x[32:] * 2], 0),
    "outer product": lambda x: (x[:-1].T @ x[1:], x[1:] @ x[:-1].T),
    "outer product of infinities": lambda x: jnp.log(abs(x[:-1] * (jnp.arange(31) > 0)[:, None])).T @ x[1:],
    "padding that is computed": lambda x: lax.pad(x[:-1], (x[1:] * x[:-1]).sum(), ((1, 0, 0), (0, 0, 0))),
    "pinned": pinned,
    "random numbers": with_noise,
    "reversed": lambda x: jnp.flip(x[1:], 0) + jnp.cumsum(x[1:], 0),
    "reshaped": lambda x: (x[1:].reshape(31, 3, 8) * x[:-1].reshape(31, 3, 8)).sum(1).reshape(-1),
    "roll": lambda x: jnp.roll(x, (3, -7), (0, 1)),
    "roll and its gradient": jax.grad(lambda x: (jnp.roll(x, 5, 1) ** 3).sum()),
    "running sum": lambda x: lax.associative_scan(jnp.add, x),
    "running products and sums": lambda x: lax.associative_scan(
        lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (jnp.tanh(x), x), axis=1
    ),
    "shift": lambda x: jnp.pad(x[:-1], ((1, 0), (0, 0))) * x,
    "split": lambda x: [a.sum(0) for a in jnp.split(x, [1, 14], 0)],
    "sums of logarithms": jax.grad(lambda x: jnp.sin(lax.cumlogsumexp(x, 1)).sum()),
    "under a derivative of its own": lambda x: jax.nn.relu(x[1:] - x[:-1]).mean(),
}  # fmt: skip
MESHES = {
    "one axis": ({"x": 8}, P("x")),
    "two, turned": ({"a": 2, "b": 4}, P(("b", "a"))),
    "one each": ({"a": 2, "b": 4}, P("a", "b")),
    "one of one device": ({"a": 1, "b": 8}, P("a", "b")),
}


@pytest.mark.parametrize(("name", "on"), every_third(FUNCTIONS, MESHES))
def test_numbers_are_those_of_one_device(name: str, on: str) -> None:
    axes, spec = MESHES[on]
    ours = autoshard.jit(FUNCTIONS[name], mesh=axes, strategy="replicated", in_shardings=(spec,))
    same(ours(X), jax.jit(FUNCTIONS[name])(X), scale=1.0)


@pytest.mark.parametrize("fun", FUNCTIONS.values(), ids=FUNCTIONS)
def test_the_program_is_well_formed_and_computes_the_same(fun: Callable[[Any], Any]) -> None:
    before = program(fun, [X.shape], mesh(x=8))
    after = PadUneven()(before)
    jx.check_jaxpr(after.jaxpr)
    same(jax.jit(jx.as_fun(after.jaxpr))(X), jax.jit(jx.as_fun(before.jaxpr))(X), scale=1.0)


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "complex64", "int8", "uint32"])
def test_of_any_type(dtype: str) -> None:
    x = (X * 4).astype(jnp.dtype(dtype)) if dtype != "bool" else X > 0
    largest = () if dtype == "complex64" else (lambda x: jnp.max(x[1:], 0), lambda x: jnp.min(x[:-1], 0))
    for fun in (partial(jnp.roll, shift=3, axis=0), lambda x: x[:-1] == x[1:], lambda x: jnp.sum(x[3:], 0), *largest):
        same(autoshard.jit(fun, mesh={"x": 8}, strategy="replicated", in_shardings=(P("x"),))(x), jax.jit(fun)(x))


def test_random_numbers_stay_as_they_are_and_what_means_nothing_is_not_iterated_on() -> None:
    def drawn(x: Any) -> Any:
        return jax.random.gamma(jax.random.key(0), abs(x[1:]) + 0.1), lax.igamma(abs(x[1:]), abs(x[:-1]))

    got = autoshard.jit(drawn, mesh={"x": 8}, strategy="replicated", in_shardings=(P("x"),))(X)
    for a, b in zip(got, jax.jit(drawn)(X), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)


@pytest.mark.parametrize(
    ("fun", "args"),
    [
        (mlp_step, mlp_args(64, 16, 32)),
        (lambda x: x[:32] + x[32:], [(64, 48)]),
        (lambda x: x[1:] - x[:-1], [(63, 48)]),
        (lambda x: jnp.concatenate([x, x], 0), [(64, 48)]),
        (lambda x: x[5] * 2, [(64, 48)]),
    ],
)
def test_where_nothing_is_uneven_the_program_stays(fun: Callable[..., Any], args: Any) -> None:
    before = program(fun, args, mesh(x=8))
    assert PadUneven()(before) is before
    on_one = program(lambda x: x[1:] - x[:-1], [(64, 48)], mesh(x=1))
    assert PadUneven()(on_one) is on_one


def test_a_roll_is_one_array_laid_over_itself() -> None:
    after = PadUneven()(program(lambda x: jnp.roll(x, 3, 0), [(64, 48)], mesh(x=8)))
    names = [e.primitive.name for e in after.jaxpr.eqns]
    assert sorted(names) == ["ge", "iota", "pad", "pad", "select_n"]


WIDE = np.random.default_rng(0).normal(size=(512, 2048)).astype("f4")
ROWS, COLUMNS = P("x"), P(None, "x")
SENT: dict[str, tuple[Callable[..., Any], P, Any, float]] = {
    "difference, and its gradient": (
        jax.value_and_grad(lambda x: (jnp.diff(x, axis=1) ** 2).sum()), COLUMNS, (P(), COLUMNS), 2 * 512 * 4 + 64),
    "neighbours": (neighbours, COLUMNS, COLUMNS, 2 * 512 * 4),
    "next token, and its gradient": (jax.value_and_grad(next_token), ROWS, (P(), ROWS), 6 * 2048 * 4),
    "roll": (lambda x: jnp.roll(x, 3, 1), COLUMNS, COLUMNS, 3 * 512 * 4),
    "roll of rows": (lambda x: jnp.roll(x, -2, 0), ROWS, ROWS, 2 * 2048 * 4),
    "shift": (lambda x: jnp.pad(x[:, :-1], ((0, 0), (1, 0))), COLUMNS, COLUMNS, 512 * 4),
    "uneven slice": (lambda x: x[3:499, 5:1933], ROWS, ROWS, 12 * 2048 * 4),
}  # fmt: skip
"""Function, the spec of its operand, those of its results, and the bytes a device may send at most."""


@pytest.mark.parametrize(("fun", "spec", "results", "most"), SENT.values(), ids=SENT)
def test_edges_are_all_that_travels(fun: Callable[..., Any], spec: P, results: Any, most: float) -> None:
    ours = step(fun, (spec,), mesh(x=8), results)
    found, sent, table = compared(ours, fun, (WIDE,), (spec,), results)
    assert found.clean, str(found)
    assert sent[0] <= min(sent[1], most), table
    same(ours(WIDE), jax.jit(fun)(WIDE), scale=1.0)


SLOPES: dict[str, Callable[[Any], Any]] = {
    "of a root": lambda x: jnp.sqrt(x[:-1]).sum(),
    "of a quotient": lambda x: (1 / (x[1:] - x[:-1])).sum(),
    "of a product": lambda x: (jnp.sqrt(x[:-1]).T @ jnp.outer(x[1:, 0], x[0])).sum(),
    "of its own": lambda x: jax.nn.relu(x[1:] - x[:-1] + 1).sum() + jnp.logaddexp(x[1:], x[:-1]).mean(0).sum(),
}


@pytest.mark.parametrize("fun", SLOPES.values(), ids=SLOPES)
@pytest.mark.parametrize("strategy", ["auto", "replicated"])
def test_slopes_around_a_step_do_not_run_through_what_means_nothing(fun: Callable[[Any], Any], strategy: str) -> None:
    """Of what stands there, a root at zero among it, they would be zero times infinity."""
    x = np.broadcast_to(np.arange(31, -1, -1, dtype="f4")[:, None], (32, 24))
    ours = autoshard.jit(fun, mesh={"x": 8}, strategy=strategy, in_shardings=(P("x"),))
    assert ours.executable(x).unpadded is not None
    same(ours(x), jax.jit(fun)(x), scale=1.0)
    for slope in (jax.grad, jax.jacfwd, lambda f: jax.grad(jax.jit(f))):
        got = slope(ours)(x)
        assert np.isfinite(got).all()
        same(got, slope(fun)(x), scale=1.0)


def test_slopes_of_an_exported_step_do_neither() -> None:
    fun, x = SLOPES["of a root"], np.broadcast_to(np.arange(31, -1, -1, dtype="f4")[:, None], (32, 24))
    ours = autoshard.jit(fun, mesh={"x": 8}, in_shardings=(P("x"),))
    assert ours.executable(x).unpadded is not None
    slope = jax.export.export(ours)(x).vjp()
    (got,) = jax.jit(lambda x: slope.call(x, jnp.float32(1)))(ours.plan(x).put(x))
    same(got, jax.grad(fun)(x), scale=1.0)


def test_a_step_with_such_values_is_verified_against_what_was_written() -> None:
    ours = autoshard.jit(neighbours, mesh={"x": 8}, strategy="replicated", in_shardings=(P("x"),))
    assert all(d.equal for d in autoshard.verify(ours, X).results)
    assert autoshard.jit(jnp.sin, mesh={"x": 8}).executable(X).unpadded is None


@pytest.mark.parametrize("passes", [DEFAULT_PASSES, MEMORY_SAVING_PASSES])
def test_it_runs_last(passes: tuple[str, ...]) -> None:
    assert PASSES["pad_uneven"] is PadUneven
    assert passes[-1] == "pad_uneven"


def test_the_report_names_the_sizes_that_were_padded() -> None:
    def reported(fun: Callable[[Any], Any], **options: Any) -> list[str]:
        step = autoshard.jit(fun, mesh={"x": 8}, strategy="replicated", in_shardings=(P("x"),), **options)
        return [p.change for p in step.plan(X).passes if p.name == "pad_uneven"]

    padded = reported(lambda x: (jnp.sin(x[1:]) - x[:-1]).sum(0))
    assert padded == ["padded dimensions of size 31 (4 times)"]
    padded = reported(lambda x: (x[1:] - x[:-1]).sum(0) + (x[3:] * x[:-3]).sum(0), passes=["pad_uneven"])
    assert padded == ["padded dimensions of size 31 (3 times), 29 (3 times)"]
    assert reported(jnp.sin) == ["nothing to pad"]
    assert reported(lambda x: x[1:] - x[:-1], passes=["dead_code"]) == []


def test_who_names_passes_without_it_goes_without() -> None:
    step = autoshard.jit(lambda x: x[1:] - x[:-1], mesh={"x": 8}, passes=["dead_code"])
    assert step.executable(X).unpadded is None
    same(step(X), X[1:] - X[:-1])


def test_twice_is_once() -> None:
    before = program(lambda x: jnp.roll(x[1:], 3, 0), [(64, 48)], mesh(x=8))
    once = PadUneven()(before)
    twice = PadUneven()(once)
    assert once.unpadded_jaxpr is twice.unpadded_jaxpr is before.jaxpr
