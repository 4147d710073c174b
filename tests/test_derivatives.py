"""Derivatives of sharded functions, to the third order: those of one device, and split like what they belong to.

Each function of the zoo takes a weight and a batch, the weight split over ``model`` and the batch over ``data``. Its
derivatives are taken inside the planned step, and around it. In float64, so that what differs is not rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

MESH = {"data": 2, "model": 4}
TOLERANCE = 1e-10
"""Of the largest entry of a result."""
BATCH, WIDTH, HIDDEN = 4, 8, 64
ROWS = P("data")


@dataclass(frozen=True)
class Case:
    """A function of a weight and a batch, with their shapes and how they are split."""

    fun: Callable[[Any, Any], Any]
    weight: tuple[int, ...]
    spec: P
    batch: tuple[int, ...] = (BATCH, WIDTH)
    rows: P = ROWS


def normalised(axes: int | tuple[int, ...], *, centred: bool = True) -> Callable[[Any, Any], Any]:
    """Layer, batch and RMS norm differ in the axes and in whether the mean is taken off."""

    def fun(w: Any, x: Any) -> Any:
        h = x @ w
        h = h - h.mean(axes, keepdims=True) if centred else h
        return h * lax.rsqrt((h * h).mean(axes, keepdims=True) + 0.1)

    return fun


def attention(w: Any, x: Any) -> Any:
    q = jnp.einsum("bsd,dhk->bshk", x, w)
    p = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, jnp.sin(q)))
    return jnp.einsum("bhst,bthk->bshk", p, q)


def scanned(w: Any, x: Any) -> Any:
    return lax.scan(lambda h, layer: (h + jnp.tanh(h @ layer) @ layer.T, h.sum()), x, w)


def experts(w: Any, x: Any) -> Any:
    gate = jax.nn.softmax(x @ jnp.sin(jnp.arange(WIDTH * 8.0).reshape(WIDTH, 8)))
    return jnp.einsum("be,bef->bf", gate, jnp.tanh(jnp.einsum("bd,edf->bef", x, w)))


def embedded(w: Any, x: Any) -> Any:
    ids = jnp.asarray(np.arange(BATCH * 3).reshape(BATCH, 3) * 7 % HIDDEN)
    return jnp.tanh(w[ids]) * x[:, None]


def convolved(w: Any, x: Any) -> Any:
    return jnp.tanh(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))


def label_loss(w: Any, x: Any) -> Any:
    logits = x @ w
    picked = jnp.take_along_axis(logits, jnp.arange(BATCH)[:, None] * 9 % HIDDEN, 1)[:, 0]
    return jax.nn.logsumexp(logits, 1) - picked


COLUMNS = ((WIDTH, HIDDEN), P(None, "model"))
ZOO = {
    "attention": Case(attention, (WIDTH, 8, 4), P(None, "model"), (BATCH, 4, WIDTH)),
    "batch norm": Case(normalised(0), *COLUMNS),
    "convolution": Case(convolved, (3, 3, 4, 32), P(None, None, None, "model"), (BATCH, 4, 4, 4)),
    "convolution, image split": Case(
        convolved, (3, 3, 8, 8), P(None, None, "model"), (1, 8, 4, 8), P(None, "data", None, "model")
    ),
    "cumsum": Case(lambda w, x: jnp.cumsum(jnp.sin(x @ w), 0) * jnp.cumsum(w, 0).sum(0), *COLUMNS),
    "embedding": Case(embedded, (HIDDEN, WIDTH), P("model")),
    "experts": Case(experts, (8, WIDTH, 8), P("model")),
    "label loss": Case(label_loss, *COLUMNS),
    "layer norm": Case(normalised(1), *COLUMNS),
    "logsumexp": Case(lambda w, x: jax.nn.logsumexp(x @ w, 1), *COLUMNS),
    "matmul, columns": Case(lambda w, x: jnp.tanh(x @ w) @ w.T, *COLUMNS),
    "matmul, rows": Case(lambda w, x: jnp.tanh(x @ w.T) @ w, (HIDDEN, WIDTH), P("model")),
    "rms norm": Case(normalised(1, centred=False), *COLUMNS),
    "scan": Case(scanned, (3, WIDTH, HIDDEN), P(None, None, "model")),
    "softmax": Case(lambda w, x: jax.nn.softmax(x @ w) @ w.T, *COLUMNS),
    "sort": Case(lambda w, x: jnp.sort(x @ w, 0) * jnp.arange(1.0, BATCH + 1)[:, None], *COLUMNS),
}
every_case = pytest.mark.parametrize("case", ZOO.values(), ids=ZOO)


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def derivatives(fun: Callable[[Any, Any], Any], w: Any, x: Any, t: Any) -> dict[str, Any]:
    """Derivatives of ``fun`` at ``w`` and ``x``, by every mode; ``t`` is a direction of ``w``."""

    def loss(w: Any, x: Any) -> Any:
        return sum(jnp.sum(jnp.sin(y) + y**3 / 9) for y in jax.tree.leaves(fun(w, x)))

    def slope(w: Any) -> Any:
        return jnp.sum(jax.grad(loss)(w, x) * t)

    def curve(w: Any) -> Any:
        return jax.jvp(lambda w: jax.jvp(lambda w: loss(w, x), (w,), (t,))[1], (w,), (t,))[1]

    _, pull = jax.vjp(lambda w: fun(w, x), w)
    value, (grad, grad_x) = jax.value_and_grad(loss, (0, 1))(w, x)
    return {
        "value": value,
        "jvp": jax.jvp(lambda w: fun(w, x), (w,), (t,))[1],
        "vjp": pull(fun(w, x))[0],
        "grad": grad,
        "grad of the batch": grad_x,
        "second, reverse over reverse": jax.grad(slope)(w),
        "second, forward over reverse": jax.jvp(lambda w: jax.grad(loss)(w, x), (w,), (t,))[1],
        "third, forward over forward over reverse": jax.grad(curve)(w),
    }


LIKE_THE_WEIGHT = (
    "grad",
    "second, reverse over reverse",
    "second, forward over reverse",
    "third, forward over forward over reverse",
    "vjp",
)


def arguments(case: Case) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=shape) / 2 for shape in (case.weight, case.batch, case.weight))


def assert_equal(expected: dict[str, Any], got: dict[str, Any]) -> None:
    def off(a: Any, b: Any) -> float:
        return float(np.max(np.abs(a - b)) / max(1.0, np.max(np.abs(a))))

    chex.assert_trees_all_equal_shapes_and_dtypes(expected, got)
    chex.assert_trees_all_equal_comparator(
        lambda a, b: off(a, b) <= TOLERANCE, lambda a, b: f"off by {off(a, b)}", expected, got
    )


@every_case
def test_inside_the_step(case: Case) -> None:
    args = arguments(case)
    step = autoshard.jit(
        lambda w, x, t: derivatives(case.fun, w, x, t),
        mesh=MESH,
        strategy="replicated",
        in_shardings=(case.spec, case.rows, case.spec),
    )
    compiled = step.lower(*args).compile()
    assert_equal(jax.jit(lambda w, x, t: derivatives(case.fun, w, x, t))(*args), step(*args))
    plan = step.plan(*args)
    assert {name: plan.out_specs[name] for name in LIKE_THE_WEIGHT} == dict.fromkeys(LIKE_THE_WEIGHT, case.spec)
    assert plan.out_specs["grad of the batch"] == case.rows
    weight = args[0].nbytes
    gathered = [c for c in collectives(compiled.as_text(), plan.mesh) if c.kind == "all-gather" and c.bytes >= weight]
    assert not gathered


@every_case
def test_around_the_step(case: Case) -> None:
    args = arguments(case)
    step = autoshard.jit(case.fun, mesh=MESH, strategy="replicated", in_shardings=(case.spec, case.rows))
    got = jax.jit(lambda w, x, t: derivatives(step, w, x, t))(*args)
    assert_equal(jax.jit(lambda w, x, t: derivatives(case.fun, w, x, t))(*args), got)


def test_around_the_step_without_a_jit() -> None:
    case = ZOO["matmul, columns"]
    w, x, t = arguments(case)
    step = autoshard.jit(lambda w, x: jnp.sum(case.fun(w, x) ** 2), mesh=MESH, in_shardings=(case.spec, case.rows))
    plain = jax.jit(lambda w, x: jnp.sum(case.fun(w, x) ** 2))
    for mode in (jax.grad, jax.jacfwd, lambda f: jax.grad(lambda w, x: jnp.vdot(jax.grad(f)(w, x), t))):
        a, b = mode(plain)(w, x), mode(step)(w, x)
        assert np.max(np.abs(a - b)) <= TOLERANCE * np.max(np.abs(a))
