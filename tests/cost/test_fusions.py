"""What fusions move, held against counting by hand: in arrays of 64 x 64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.cost.fusions import with_memory_traffic
from autoshard.ir.graph import Graph
from tests.programs import CHIP, graph, mesh

ARRAY = 64 * 64 * 4
X = (64, 64)


def arrays_moved(g: Graph) -> float:
    """Bytes that all nodes read and write, in arrays."""
    traffic = [(n.kind.traffic, n.kind.bytes) for n in g.nodes if n.kind.traffic]
    return sum(share * size for shares, sizes in traffic for share, size in zip(shares, sizes, strict=True)) / ARRAY


def momentum(w: jax.Array, m: jax.Array, g: jax.Array) -> Any:
    m = 0.9 * m + g
    return w - 0.1 * m, m


def centred(x: jax.Array, w: jax.Array) -> jax.Array:
    y = x @ w
    return y - y.sum(0)


def with_sums(x: jax.Array) -> Any:
    return x, x.sum(0), jnp.square(x).sum()


CASES: dict[str, tuple[Callable[..., Any], int, float]] = {
    "a chain is one fusion": (lambda x: jnp.exp(jnp.tanh(x) * 2), 1, 2),
    "an update reads each array once": (momentum, 3, 5),
    "a product reads what its operands are computed from": (lambda a, b, w: (jnp.tanh(a) * b) @ w, 3, 4),
    "what is fused into a product reads its other operand": (lambda x, w, y: jnp.tanh(x @ w + y), 3, 4),
    "between reductions an array is read again": (lambda x: (x - x.sum()) * 2, 1, 3),
    "a product reads for itself": (lambda x, w: (jnp.tanh(x), x @ w), 2, 5),
    "a sum of many is not read again where it goes on": (lambda *xs: sum(xs), 10, 12),
    "between products too": (lambda x, w: jnp.sin(x) * (jnp.cos(x) @ w), 2, 4),
    "sums of a product are computed beside it": (lambda x, w: with_sums(x @ w), 2, 3),
    "sums of elementwise operations too": (lambda x: with_sums(jnp.tanh(x)), 1, 2),
    "what needs a sum is in another sweep": (lambda x, w: jnp.square(centred(x, w)).sum(0), 2, 4),
    "of which there is one for all that need no other": (lambda x, w: with_sums(centred(x, w))[1:], 2, 4),
    "sums of arguments read them": (lambda x: (x.sum(0), x.sum(1)), 1, 2),
    "of a slice the part is read": (lambda x: lax.slice(jnp.tanh(x), (0, 0), (16, 64)) * 2, 1, 0.5),
}


@pytest.mark.parametrize("case", CASES)
def test_arrays_moved(case: str) -> None:
    fun, arguments, moved = CASES[case]
    assert arrays_moved(graph(fun, (X,) * arguments, mesh(a=2))) == pytest.approx(moved, rel=3e-2)  # and rows


def test_nothing_is_fused_into_the_products_of_a_library() -> None:
    on = replace(mesh(a=2), hardware=replace(CHIP, fused_products=False))
    g = graph(lambda x, w, y: jnp.tanh(x @ w + y), (X, X, X), on)
    assert arrays_moved(g) == pytest.approx(3)  # the product's result, y, and the result; the product is priced alone
    g = graph(lambda x, w: (x @ w).sum(), (X, X), on)
    assert arrays_moved(g) == pytest.approx(1, rel=1e-3)  # the product's result, to be summed


def test_a_loop_that_updates_its_state_in_place_writes_what_it_changes() -> None:
    def squashed(x: jax.Array) -> jax.Array:
        def body(i: Any, x: jax.Array) -> jax.Array:
            row = jnp.tanh(lax.dynamic_slice_in_dim(x, i, 1))
            return lax.dynamic_update_slice_in_dim(x, row, i, 0)

        return lax.fori_loop(0, 8, body, x)

    for donated, traffic in (((0,), (0.0, 1.0, 1.0, 1.0, 1.0, 1 / 8)), ((), None)):
        g = graph(squashed, ((8, *X),), mesh(a=2), donate_argnums=donated)
        (update,) = (n for n in g.nodes if n.kind.op == "dynamic_update_slice")
        assert update.kind.traffic == (traffic and pytest.approx(traffic, rel=1e-2)), donated


@pytest.mark.parametrize(("arrays", "devices", "moved"), [(3, 1, 4.5), (1.5, 2, 4.5), (2, 1, 6), (3, 0, 6)])
def test_what_stays_on_chip_counts_for_less(arrays: float, devices: int, moved: float) -> None:
    """The two products' results, of which two arrays and the weights are there at once, are written and read four times
    faster; the arguments and the result are in device memory."""
    chip = replace(CHIP, on_chip=arrays * ARRAY, on_chip_bandwidth=4 * CHIP.bandwidth if devices else 0.0)
    on = replace(mesh(a=max(devices, 1)), hardware=chip)
    g = graph(lambda x, w: jnp.sin((x @ w) @ w), (X, X), on)
    assert arrays_moved(g) == pytest.approx(moved)


def test_a_graph_is_priced_once() -> None:
    g = graph(momentum, (X, X, X), mesh(a=2))
    assert with_memory_traffic(g) is g
