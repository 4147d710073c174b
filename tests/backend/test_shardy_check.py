"""Shardy, asked anew, comes to the layouts that the plan says; and says so where it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.ir.spec import Spec
from tests.programs import mlp_args, mlp_step
from tests.shardy_check import comes_back, propagated


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), tree, is_leaf=lambda x: isinstance(x, tuple))


def scanned(ws: Any, x: Any) -> Any:
    """A residual network, its layers in a loop."""
    return jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w["up"]) @ w["down"], None), x, ws)[0]


def attention(w: Any, x: Any) -> Any:
    """Softmax attention with four heads; ``x``: [batch, seq, embed]."""
    q, k, v = (jnp.einsum("bse,ehd->bshd", x, w[n]) for n in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k))
    return jnp.einsum("bhst,bthd,hde->bse", scores, v, w["o"])


PROGRAMS = {
    "mlp": (mlp_step, mlp_args(64, 16, 32)),
    "scanned": (scanned, ({"up": (4, 32, 64), "down": (4, 64, 32)}, (64, 32))),
    "attention": (attention, ({**dict.fromkeys("qkv", (64, 4, 16)), "o": (4, 16, 64)}, (8, 32, 64))),
}


@pytest.mark.parametrize("strategy", ["auto", "tp", "fsdp_tp"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_plan_comes_back(name: str, strategy: str) -> None:
    fun, args = PROGRAMS[name]
    args = tuple(map(shapes, args))
    step = autoshard.jit(fun, mesh={"data": 2, "model": 4}, strategy=strategy)
    plan = step.plan(*args)
    assert [str(d) for d in comes_back(step.lower(*args), plan)] == []


def test_another_plan_does_not() -> None:
    x, w = np.ones((8, 16), "f4"), np.ones((16, 8), "f4")
    step = autoshard.jit(lambda x, w, unused: x @ w, mesh={"a": 8}, in_shardings=(P("a"), None, P("a")))
    plan, lowered = step.plan(x, w, x), step.lower(x, w, x)
    before = lowered.as_text()
    assert comes_back(lowered, plan) == ()
    wrong = Spec(((), ("a",)))
    other = replace(
        plan,
        inputs=(replace(plan.inputs[0], spec=wrong), *plan.inputs[1:]),
        outputs=(replace(plan.outputs[0], spec=wrong),),
    )
    found = comes_back(lowered, other)
    assert [(d.path, d.found) for d in found] == [
        (plan.inputs[0].path, '{"a"}, {}'),
        (plan.outputs[0].path, '{"a"}, {}'),
    ]
    assert "Shardy shards it as" in str(found[0])
    assert lowered.as_text() == before  # the passes ran on a copy


def test_a_result_that_is_moved_at_the_end_is_a_difference() -> None:
    step = autoshard.jit(jnp.transpose, mesh={"a": 8}, in_shardings=P("a"), out_shardings=P("a"))
    x = np.ones((8, 16), "f4")
    plan = step.plan(x)
    assert comes_back(step.lower(x), plan) == ()  # the move is in the step, as planned
    plain = jax.jit(jnp.transpose, in_shardings=plan.in_shardings, out_shardings=plan.out_shardings)
    (found,) = comes_back(plain.lower(x), plan)
    assert found.found == '{}, {"a"}'


def test_propagation_shows_the_collectives_to_come() -> None:
    step = autoshard.jit(lambda x, w: x @ w, mesh={"a": 8}, in_shardings=(P(None, "a"), P("a")), out_shardings=P())
    text = propagated(step.lower(np.ones((8, 16), "f4"), np.ones((16, 8), "f4")))
    assert text.count("sdy.all_reduce") == 1
    assert "sdy.all_gather" not in text
