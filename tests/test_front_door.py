"""What a person meets first: `help(autoshard)` names what there is, every public object prints as one useful line."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import pytest

import autoshard


def scaled(state, x):
    return jax.tree.map(lambda w: w * jnp.mean(x @ w), state)


@pytest.fixture(scope="module")
def objects():
    step = autoshard.jit(scaled, mesh={"data": 4, "model": 2}, strategy="fsdp", donate_argnums=0)
    state, x = {"w": jnp.ones((16, 16))}, jnp.ones((32, 16))
    plan, compiled = step.plan(state, x), step.lower(state, x).compile()
    given = [plan, step, plan.cost, plan.memory, plan.profile, plan.diff(plan), plan.plot("memory")]
    given += [
        autoshard.audit(compiled, plan),
        autoshard.verify(step, state, x),
        autoshard.MeshConfig(axes={"data": -1}),
    ]
    given.append(autoshard.Schedule.named("gpipe", stages=2, microbatches=2))
    return {type(x).__name__: repr(x) for x in given}


def test_public_objects_print_as_a_line(objects):
    assert {n: t for n, t in objects.items() if "\n" in t or " object at 0x" in t or len(t) > 240} == {}
    assert objects["Step"] == "<Step of scaled, strategy fsdp: planned for 1 kind of arguments>"
    assert objects["MeshConfig"] == "MeshConfig(axes={'data': -1})"
    assert objects["Audit"].startswith("<Audit of planned and emitted collectives: ")
    assert objects["Verification"].startswith("<Verification: 1 results equal")
    assert objects["Cost"].startswith("<Cost of a call: ")
    assert objects["Memory"].startswith("<Memory per device: ")
    assert objects["StepProfile"].startswith("<StepProfile of ")


def test_help_names_what_there_is():
    text = inspect.getdoc(autoshard) or ""
    named = [n for n in autoshard.__all__ if f"`{n}`" in text]
    assert len(named) > 10
    assert all(inspect.getdoc(getattr(autoshard, n)) for n in autoshard.__all__)
