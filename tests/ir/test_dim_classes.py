"""Dimension classes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.ir.dim_classes import DimClass, argument_roles, dim_classes, label_dims
from autoshard.ir.graph import Graph
from tests.programs import graph, mesh, mlp_args, mlp_step


def classes(g: Graph) -> tuple[DimClass, ...]:
    return dim_classes(g, label_dims(g))


def test_classes_of_a_training_step() -> None:
    found = {(c.name, c.size) for c in classes(graph(mlp_step, mlp_args(64, 16, 32), mesh(a=4)))}
    assert found == {("x.0", 64), ("w1.1", 32), ("x.1", 16), ("y.1", 16)}


def test_forward_and_backward_share_their_classes() -> None:
    g = graph(mlp_step, mlp_args(64, 16, 32), mesh(a=4))
    hidden = next(c for c in classes(g) if c.size == 32)
    members = {g.values[v].name for v, _ in hidden.inputs}
    assert members == {"params['w1']", "params['w2']"}


def test_the_size_is_the_common_divisor() -> None:
    def fun(x):
        return jnp.sin(x.reshape(4, 6, 5)).reshape(24, 5)

    sizes = {c.size for c in classes(graph(fun, ((24, 5),), mesh(a=4)))}
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
    found = classes(graph(lambda state: jax.tree.map(jnp.sin, state), (state,), mesh(a=4), donate_argnums=0))
    assert {c.name for c in found} == {f"{name}.0", f"{name}.1"}


def test_names_are_distinct_and_stable() -> None:
    g = graph(mlp_step, mlp_args(64, 16, 32), mesh(a=4))
    names = [c.name for c in classes(g)]
    assert len(set(names)) == len(names)
    assert names == [c.name for c in classes(g)]


def momentum(state, x, steps):
    """``steps`` updates of a weight with momentum, in a loop; the gradients of four micro-batches in another."""

    def update(state, _):
        w, m = state
        gradient = jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2))
        total = jax.lax.scan(lambda g, x: (g + gradient(w, x), None), jnp.zeros_like(w), x)[0]
        return (w - m, 0.9 * m + total), None

    return jax.lax.scan(update, state, None, steps)[0] if steps else update(state, None)[0]


@pytest.mark.parametrize("steps", [0, 3])
def test_parameters_are_known_at_any_depth_of_loops(steps: int) -> None:
    args = ((8, 8), (8, 8)), (4, 16, 8)
    roles = argument_roles(graph(lambda s, x: momentum(s, x, steps), args, mesh(a=4), donate_argnums=0))
    assert (roles.parameters, roles.optimizer, roles.batch) == ({0}, {1}, {2})
