"""A plan made earlier beside what the user gives with it: it is taken, or refused by name, and overrules nothing."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import MemoryBudgetError, PlanError

MESH = {"data": 4, "model": 2}
X = np.ones((16, 16), np.float32)
jit = functools.partial(autoshard.jit, mesh=MESH)


def step(state: Any, batch: Any) -> Any:
    return {"w": state["w"] - 0.1 * batch.mean()}, jnp.tanh(batch @ state["w"]).sum()


STATE = {"w": np.ones((16, 32), np.float32)}


@pytest.fixture(scope="module")
def plan() -> autoshard.Plan:
    pins = {"w": P(None, ("data", "model"))}
    return jit(step, in_shardings=(pins, P(("data", "model"))), out_shardings=(pins, None)).plan(STATE, X)


def test_a_pin_that_the_plan_overrules_is_named(plan: autoshard.Plan):
    for pins in (({"w": P("model")}, None), (P("model"), P("data"))):
        names = r"state\['w'\] is pinned to \[model, _\], and its spec in the plan is \[_, data\+model\]"
        with pytest.raises(PlanError, match=names):
            jit(step, strategy=plan, in_shardings=pins).plan(STATE, X)
    with pytest.raises(
        PlanError, match=r"result\[0\]\['w'\] is pinned to \[_, _\], and its spec in the plan is \[_, data\+model\]"
    ):
        jit(step, strategy=plan, out_shardings=(P(), None)).plan(STATE, X)
    config = autoshard.MeshConfig.model_validate({"axes": MESH, "pins": {"batch": ["data"]}})
    with pytest.raises(PlanError, match=r"batch is pinned to \[data, _\], and its spec in the plan is \[data\+m"):
        autoshard.jit(step, mesh=config, strategy=plan)(STATE, X)


def test_a_pin_that_agrees_is_no_error(plan: autoshard.Plan):
    pins = {"w": P(None, ("data", "model"))}
    config = autoshard.MeshConfig.model_validate({"axes": MESH, "pins": {"batch": [["data", "model"]]}})
    agreed = autoshard.jit(step, mesh=config, strategy=plan, in_shardings=(pins, None), out_shardings=(pins, P()))
    assert agreed.plan(STATE, X) == plan
    np.testing.assert_allclose(agreed(STATE, X)[1], step(STATE, X)[1], rtol=1e-5)


def test_a_pin_inside_the_step():
    def inside(spec: P, x: Any) -> Any:
        return autoshard.annotate(jnp.tanh(x), spec) + 1

    plan = jit(functools.partial(inside, P("data"))).plan(X)
    assert jit(functools.partial(inside, P("data")), strategy=plan).plan(X) == plan
    assert jit(functools.partial(inside, P(P.UNCONSTRAINED)), strategy=plan).plan(X) == plan
    with pytest.raises(
        PlanError, match=r"annotate at .*test_adopt.py:\d+ is pinned to \[model, _\], .* is \[data, _\]"
    ):
        jit(functools.partial(inside, P("model")), strategy=plan).plan(X)


def test_the_memory_budget(plan: autoshard.Plan):
    peak = plan.memory.peak
    assert jit(step, strategy=plan, memory_budget=peak).plan(STATE, X) == plan
    with pytest.raises(MemoryBudgetError, match=r"the plan needs [\d.]+ K?i?B per device .* budget is 100 B"):
        jit(step, strategy=plan, memory_budget=100)(STATE, X)
    config = autoshard.MeshConfig.model_validate({"axes": MESH, "memory_budget": peak - 1})
    with pytest.raises(MemoryBudgetError):
        autoshard.jit(step, mesh=config, strategy=plan).plan(STATE, X)


def test_the_donation_is_named(plan: autoshard.Plan):
    with pytest.raises(PlanError, match=r"made with nothing donated, the step donates state: .*donate_argnums"):
        jit(step, strategy=plan, donate_argnums=0).plan(STATE, X)
    donated = jit(step, donate_argnums=(0, 1)).plan(STATE, X)
    with pytest.raises(PlanError, match="made with state, batch donated, the step donates batch"):
        jit(step, strategy=donated, donate_argnames="batch").plan(STATE, X)


def test_the_passes_are_named(plan: autoshard.Plan):
    def wasteful(x: Any) -> Any:
        jnp.sin(x) @ x
        return x + 1

    with pytest.raises(
        PlanError,
        match=r"with passes=\['dead_code', .*, 'sum_products', 'pad_uneven'\], and wasteful runs with passes=\[\]",
    ):
        jit(wasteful, strategy=jit(wasteful).plan(X), passes=[]).plan(X)
    assert jit(step, strategy=plan, passes=[]).plan(STATE, X) == plan  # there was nothing that the pass could do


def test_other_results_and_other_operations(plan: autoshard.Plan):
    with pytest.raises(PlanError, match=r"its result 1 is result\[1\]: float32\[\], the step's .*\['loss'\]: float32"):
        jit(lambda state, batch: (state, {"loss": batch.sum()}), strategy=plan).plan(STATE, X)
    with pytest.raises(PlanError, match="the arguments agree, the operations do not"):
        jit(lambda state, batch: (step(state, batch)[0], batch.sum()), strategy=plan).plan(STATE, X)


def test_loops_of_other_lengths():
    def repeated(turns: int, x: Any) -> Any:
        return jax.lax.fori_loop(0, turns, lambda _, h: jnp.tanh(h @ h), x)

    plan = jit(functools.partial(repeated, 3)).plan(X)
    assert jit(functools.partial(repeated, 3), strategy=plan).plan(X) == plan
    with pytest.raises(PlanError, match="the arguments agree, the operations do not"):
        jit(functools.partial(repeated, 4), strategy=plan).plan(X)


def test_compiler_options_go_before_those_of_the_plan():
    options = {"xla_cpu_enable_fast_math": True}
    plan = jit(step, compiler_options={**options, "xla_cpu_enable_fast_min_max": True}).plan(STATE, X)
    again = jit(step, strategy=plan, compiler_options={"xla_cpu_enable_fast_math": False}).plan(STATE, X)
    assert dict(again.compiler_options) == {"xla_cpu_enable_fast_math": False, "xla_cpu_enable_fast_min_max": True}
    assert jax.tree.structure(again.in_specs) == jax.tree.structure(plan.in_specs)
