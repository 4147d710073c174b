"""Dimension classes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.ir.dim_classes import dim_classes
from tests.programs import graph, mesh, mlp_args, mlp_step


def test_classes_of_a_training_step() -> None:
    found = {(c.name, c.size) for c in dim_classes(graph(mlp_step, mlp_args(64, 16, 32), mesh(a=4)))}
    assert found == {("batch", 64), ("w1.1", 32), ("x.1", 16), ("y.1", 16)}


def test_forward_and_backward_share_their_classes() -> None:
    g = graph(mlp_step, mlp_args(64, 16, 32), mesh(a=4))
    hidden = next(c for c in dim_classes(g) if c.size == 32)
    members = {g.values[v].name for v, _ in hidden.inputs}
    assert members == {"params['w1']", "params['w2']"}


def test_the_size_is_the_common_divisor() -> None:
    def fun(x):
        return jnp.sin(x.reshape(4, 6, 5)).reshape(24, 5)

    sizes = {c.size for c in dim_classes(graph(fun, ((24, 5),), mesh(a=4)))}
    assert 4 in sizes


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        (("layers", "0", "w"), "w"),
        (("dense", "kernel"), "dense"),
        (("block/0/w", "value"), "block/0/w"),
        (("mlp", "up-proj"), "up-proj"),
        (("it's", "kernel"), "it's"),
    ],
)
def test_a_class_is_named_after_the_last_key_that_tells(keys: tuple[str, ...], name: str) -> None:
    state: Any = (8, 4)
    for key in reversed(keys):
        state = {key: state}
    found = dim_classes(graph(lambda state: jax.tree.map(jnp.sin, state), (state,), mesh(a=4), donate_argnums=0))
    assert {c.name for c in found} == {f"{name}.0", f"{name}.1"}


def test_names_are_distinct_and_stable() -> None:
    g = graph(mlp_step, mlp_args(64, 16, 32), mesh(a=4))
    names = [c.name for c in dim_classes(g)]
    assert len(set(names)) == len(names)
    assert names == [c.name for c in dim_classes(g)]
