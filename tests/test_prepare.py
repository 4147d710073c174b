"""Which mesh is chosen where none is given."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import ArgumentError, SpecError

X = np.ones((16, 16), np.float32)


def product(s: Any, b: Any) -> Any:
    return (b @ s).sum()


def test_meshes_that_do_not_serve_are_left_out():
    assert "model" in autoshard.jit(product, in_shardings=(P(None, "model"), None)).plan(X, X).mesh.shape
    plan = autoshard.jit(product, strategy="fsdp_tp").plan(X, np.ones((4, 16), np.float32))
    assert plan.mesh.shape["data"] <= 4
    annotated = autoshard.jit(lambda x: autoshard.annotate(x * 2, P("model")).sum())
    assert "model" in annotated.plan(X).mesh.shape
    constrained = autoshard.jit(lambda x: jax.lax.with_sharding_constraint(x * 2, P("model")).sum())
    assert "model" in constrained.plan(X).mesh.shape


def test_the_mesh_of_a_sharding_is_chosen():
    devices = np.array(jax.devices()[::-1])
    mesh = Mesh(devices.reshape(2, 4), ("rows", "columns"))
    for pins in ({"in_shardings": (NamedSharding(mesh, P("rows")), None)}, {"out_shardings": NamedSharding(mesh, P())}):
        step = autoshard.jit(product, **pins)
        assert step.plan(X, X).mesh.shape == dict(mesh.shape)
        np.testing.assert_allclose(step(X, X), product(X, X))
        assert step.plan(X, X).mesh.devices == tuple(devices)
    other = NamedSharding(Mesh(devices, ("all",)), P("all"))
    with pytest.raises(SpecError, match=r"\{'rows': 2, 'columns': 4\} and \{'all': 8\}: choose one"):
        autoshard.jit(product, in_shardings=(NamedSharding(mesh, P("rows")), other)).plan(X, X)


def test_none_serves():
    with pytest.raises(SpecError, match=r"product: no mesh of these devices.*data=8.*data=4.*data=2") as caught:
        autoshard.jit(product, in_shardings=(P(None, "mdel"), None)).plan(X, X)
    assert "did you mean 'model'?" in str(caught.value)
    with pytest.raises(ArgumentError, match="^in_shardings is no prefix"):
        autoshard.jit(product, in_shardings=({"a": None}, None)).plan(X, X)


def test_an_error_of_the_function_is_raised_as_it_is():
    def fun(x: Any) -> Any:
        raise ValueError("of the function")

    with pytest.raises(ValueError, match="^of the function") as caught:
        autoshard.jit(fun).plan(X)
    assert caught.value.__context__ is None
