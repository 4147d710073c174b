"""Chains of layers found in loops over micro-batches, and what stands against them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard import jaxpr as jx
from autoshard.errors import PipelineError
from autoshard.pipelining.chain import Chain, find_chain
from autoshard.rules import SHIPPED

LAYERS, WIDTH = 4, 4


def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = jnp.tanh(x @ w)
    return x, x.mean()


def found(iteration: Callable[..., Any], carry: Any = None) -> Chain:
    """The chain in a loop of three micro-batches of ``iteration(weights, carry, x)``."""

    def step(w: jax.Array, xs: jax.Array) -> Any:
        return jax.lax.scan(lambda carry, x: iteration(w, carry, x), jnp.zeros_like(w) if carry is None else carry, xs)

    w = jnp.ones((LAYERS, WIDTH, WIDTH))
    return find_chain(jx.normalize(jax.make_jaxpr(step)(w, jnp.ones((3, 2, WIDTH)))), "step", SHIPPED)


def gradient(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.grad(lambda w: jax.lax.scan(layer, x, w)[0].sum())(w)


def test_the_loop_its_scans_and_what_it_sums() -> None:
    chain = found(lambda w, carry, x: (carry + gradient(w, x), None))
    assert (chain.groups.length, chain.layers) == (3, LAYERS)
    assert [e and e.params["reverse"] for e in (chain.forward, chain.backward)] == [False, True]
    assert [chain.where(added) for added in chain.sums.values()] == [{"backward"}]


def test_without_a_backward_it_is_the_scan_over_what_all_iterations_share() -> None:
    chain = found(lambda w, c, x: (c + jax.lax.scan(layer, x, w)[0].sum(), None), jnp.zeros(()))
    assert (chain.layers, chain.backward, chain.recurrent) == (LAYERS, None, frozenset())
    assert [chain.where(added) for added in chain.sums.values()] == [{"last"}]
    with pytest.raises(PipelineError, match="scan carries from one micro-batch to the next what is no sum"):
        found(lambda w, c, x: (jax.lax.scan(layer, x + c, w)[0].sum(), None), jnp.zeros(()))


def test_carries_that_any_stage_can_compute_are_not_summed() -> None:
    carry = jnp.zeros((LAYERS, WIDTH, WIDTH)), 0
    chain = found(lambda w, c, x: ((c[0] + gradient(w, x), c[1] * 2 + 1), None), carry)
    assert ([*chain.sums], chain.recurrent) == ([0], {1})


@pytest.mark.parametrize(
    ("iteration", "says"),
    [
        (lambda w, c, x: (c * 0.5 + gradient(w, x), None), "mul carries from one micro-batch to the next"),
        (lambda w, c, x: (c + gradient(w, x) ** 2, None), "takes together what each stage's backward computes"),
        (lambda w, c, x: (c + gradient(w, x).sum() ** 2, None), "is not linear in what each stage's backward computes"),
        (lambda w, c, x: (c + (g := gradient(w, x)), g), "returns what each layer has of every micro-batch"),
        (lambda w, c, x: (c + gradient(w, x + c[0, 0]), None), "carries from one micro-batch to the next"),
        (lambda w, c, x: (c + w, None), "no chain of layers"),
    ],
)
def test_what_no_pipeline_can_run_is_refused(iteration: Any, says: str) -> None:
    with pytest.raises(PipelineError, match=says.replace("**", r"\*\*")):
        found(iteration)


def test_the_refusal_names_the_line() -> None:
    with pytest.raises(PipelineError, match=r"test_chain\.py:\d+: "):
        found(lambda w, c, x: (c * 0.5 + gradient(w, x), None))
