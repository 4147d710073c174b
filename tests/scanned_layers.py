"""A step of scanned layers of two products each, for tests of what runs beside products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.cost.overlap.beside_products import with_hidden_transfers
from autoshard.cost.overlap.rings import MIN_PRODUCT
from autoshard.ir.graph import Graph, OpKind
from autoshard.ir.program import PipelineRequest
from autoshard.machine.mesh import LogicalMesh
from tests.programs import CHIP, graph, mesh

HIDING = replace(CHIP, hidden_collectives=0.75)
WAITING = replace(CHIP, blocking_gathers=True, blocking_reduce_scatters=True, hidden_collectives=0.9)
WIDTH, HIDDEN, LAYERS = 512, 2048, 6
WEIGHTS = {"down": (LAYERS, HIDDEN, WIDTH), "up": (LAYERS, WIDTH, HIDDEN)}
LARGE = 4 * 4 * MIN_PRODUCT // HIDDEN
"""Tokens of which a part of a product is one that goes in a ring."""


def on(hardware: Any = HIDING, **axes: int) -> LogicalMesh:
    return replace(mesh(**(axes or {"data": 4})), hardware=hardware)


def train(params: dict[str, Any], x: Any) -> Any:
    """A step of scanned layers of two products each."""

    def loss(params: dict[str, Any]) -> Any:
        layer = lambda h, w: (jnp.tanh(jnp.tanh(h @ w["up"]) @ w["down"]), None)  # noqa: E731
        return (jax.lax.scan(layer, x, params)[0] ** 2).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def beside(g: Graph) -> list[tuple[float, ...]]:
    """Of each product that reads weights or makes gradients of them, in order: of both operands, then of the result."""
    return [n.kind.beside for n in with_hidden_transfers(g).nodes if n.kind.beside is not None]


def products(hardware: Any, tokens: int, *, staged: bool = False) -> list[OpKind]:
    """Those of a step, or of one that is a stage of a pipeline."""
    found = graph(train, (WEIGHTS, (tokens, WIDTH)), on(hardware))
    request = PipelineRequest(on(hardware), "data") if staged else None
    found = with_hidden_transfers(replace(found, program=replace(found.program, pipeline=request)))
    return [n.kind for n in found.nodes if n.kind.flops]


def product_seconds(tokens: int, devices: int = 4) -> float:
    return 2 * tokens * WIDTH * HIDDEN / CHIP.flops["float32"] / devices


@jax.custom_vjp
def noted(x: Any) -> Any:
    """Itself; its cotangent is seen on the host."""
    return x


def _note(_: None, cotangent: Any) -> tuple[Any]:
    jax.debug.callback(lambda x: None, cotangent[0, 0])
    return (cotangent,)


noted.defvjp(lambda x: (x, None), _note)


def gradients_through(layer: Callable[[Any, Any], tuple[Any, None]], ws: Any, x: Any, *, scan: bool) -> Any:
    """Of a loss of what layers make of ``x``, with respect to their weights, which ``ws`` has stacked; scanned or one
    after the other."""

    def loss(ws: Any) -> Any:
        h = x
        if scan:
            h, _ = jax.lax.scan(layer, h, ws)
        else:
            for n in range(len(jax.tree.leaves(ws)[0])):
                h, _ = layer(h, jax.tree.map(lambda w, n=n: w[n], ws))
        return (h**2).mean()

    return jax.grad(loss)(ws)
