"""Small programs, traced for tests of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.cost.fusions import with_memory_traffic
from autoshard.ir.build_graph import build_graph
from autoshard.ir.graph import Graph
from autoshard.ir.program import Program
from autoshard.ir.trace import trace
from autoshard.machine.mesh import Hardware, Link, LogicalMesh
from autoshard.rules import SHIPPED

CHIP = Hardware(
    "chip",
    {"float32": 1e12, "bfloat16": 2e12},
    16e9,
    1e11,
    {"link": Link("link", 1e10, 1e-6)},
    1e-6,
    host_bandwidth=1e10,
)


def mesh(**axes: int) -> LogicalMesh:
    """A mesh of the test chip."""
    return LogicalMesh(tuple(axes), tuple(axes.values()), CHIP)


def program(fun: Callable[..., Any], args: Sequence[Any], on: LogicalMesh, **options: Any) -> Program:
    """``fun`` traced; shapes among ``args`` stand for float32 arrays."""

    def is_shape(x: Any) -> bool:
        return isinstance(x, tuple) and all(isinstance(n, int) for n in x)

    avals = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32) if is_shape(s) else s, args, is_leaf=is_shape)
    jitted = jax.jit(fun, donate_argnums=options.pop("donate_argnums", None))
    return trace(jitted, avals, {}, on, **{"rules": SHIPPED, **options})


def graph(fun: Callable[..., Any], args: Sequence[Any], on: LogicalMesh, **options: Any) -> Graph:
    """``fun`` traced and flattened, with what its fusions move."""
    return with_memory_traffic(build_graph(program(fun, args, on, **options)))


def mlp_step(params: Mapping[str, Any], batch: Mapping[str, Any]) -> tuple[Any, Any]:
    """One SGD step of a two-layer network."""

    def loss(p: Mapping[str, Any]) -> Any:
        return jnp.mean((jnp.tanh(batch["x"] @ p["w1"]) @ p["w2"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def mlp_args(batch: int, width: int, hidden: int) -> tuple[Any, Any]:
    """Arguments of `mlp_step`, as shapes."""
    return ({"w1": (width, hidden), "w2": (hidden, width)}, {"x": (batch, width), "y": (batch, width)})
