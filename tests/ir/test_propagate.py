"""Propagation: closed forms, and properties over random programs and seeds."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from autoshard.ir.annotate import annotate
from autoshard.ir.graph import Graph
from autoshard.ir.propagate import propagate
from autoshard.ir.spec import Spec, replicated
from tests.programs import graph, mesh

MESH = mesh(data=2, model=2)


def outputs(g: Graph, *seeds: Any) -> list[str]:
    """Specs of the results, with arguments seeded in turn (None: not)."""
    levels = [{v: s for v, s in zip(g.inputs, seeds, strict=False) if s is not None}]
    specs = propagate(g, levels).specs
    return [str(specs[v]) for v in g.outputs]


def spec(*dims: str | None) -> Spec:
    return Spec(tuple(tuple(d.split("+")) if d else () for d in dims))


def test_a_product_propagates_rows_and_columns() -> None:
    g = graph(lambda x, w: x @ w, ((8, 4), (4, 6)), MESH)
    assert outputs(g, spec("data", None), spec(None, "model")) == ["[data, model]"]


def test_propagation_from_results_to_operands() -> None:
    g = graph(lambda x, w: jnp.tanh(x @ w), ((8, 4), (4, 6)), MESH, out_shardings=P("data", "model"))
    specs = propagate(g, []).specs
    assert [str(specs[v]) for v in g.inputs] == ["[data, _]", "[_, model]"]


def test_scan_carries_and_stacks() -> None:
    def fun(x: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum(1)), x, ws)

    g = graph(fun, ((8, 4), (3, 4, 4)), MESH)
    assert outputs(g, spec("data", None)) == ["[data, _]", "[_, data]"]


def test_the_dimension_scanned_over_is_not_split() -> None:
    g = graph(lambda x, ws: jax.lax.scan(lambda h, w: (h @ w, None), x, ws)[0], ((8, 4), (4, 4, 4)), MESH)
    specs = propagate(g, [{g.inputs[1]: spec("data", None, None)}]).specs
    assert str(specs[g.outputs[0]]) == "[_, _]"


def test_propagation_through_while_and_cond() -> None:
    def fun(x: Any) -> Any:
        y = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1]
        return jax.lax.cond(y[0, 0] > 0, jnp.cos, lambda z: z * 2, y)

    assert outputs(graph(fun, ((8, 4),), MESH), spec("data", "model")) == ["[data, model]"]


def test_a_gradient_has_the_spec_of_its_weight() -> None:
    g = graph(jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)), ((4, 6), (8, 4)), MESH)
    assert outputs(g, spec(None, "model"), spec("data", None)) == ["[_, model]"]


def test_the_larger_value_wins_a_conflict() -> None:
    large, small = (8, 64), (64, 2)
    for fun, shapes in ((lambda x, w: x @ w, (large, small)), (lambda w, x: x @ w, (small, large))):
        g = graph(fun, shapes, MESH)
        specs = {s: spec("data", None) if s == large else spec(None, "data") for s in shapes}
        assert outputs(g, *(specs[s] for s in shapes)) == ["[data, _]"]


def test_the_larger_value_wins_a_conflict_equations_away() -> None:
    g = graph(lambda x, y: jnp.sin(x.sum(2)) + y, ((8, 4, 16), (8, 4)), MESH)
    assert outputs(g, spec("data", None, None), spec(None, "data")) == ["[data, _]"]


def test_a_pin_inside_the_step_is_kept_and_propagates() -> None:

    g = graph(lambda x: jnp.cos(annotate(jnp.sin(x), P(None, "model"))), ((8, 4),), MESH)
    assert outputs(g, spec("data", None)) == ["[_, model]"]


def test_reshape_splits_and_merges() -> None:
    g = graph(lambda x: x.reshape(8, 3, 4).reshape(24, 4), ((24, 4),), MESH)
    assert outputs(g, spec("data", None)) == ["[data, _]"]


OPS = (
    lambda a, b: a @ b,
    lambda a, b: jnp.tanh(a) + b,
    lambda a, _: a.T,
    lambda a, b: a * b.sum(0, keepdims=True),
    lambda a, _: a.reshape(2, -1).reshape(a.shape),
    lambda a, b: jnp.where(a > 0, a, b),
    lambda a, _: jnp.cumsum(a, 0),
    lambda a, b: jnp.concatenate([a, b])[: a.shape[0]],
)
axes = st.sampled_from([None, "data", "model"])


@st.composite
def programs(draw: Any) -> tuple[Graph, list[dict[int, Spec]]]:
    """A random program over 8 x 8 matrices, and random seeds."""
    one = st.tuples(st.integers(0, len(OPS) - 1), st.integers(0, 9), st.integers(0, 9))
    steps = draw(st.lists(one, min_size=1, max_size=12))

    def fun(*args: Any) -> Any:
        values = list(args)
        for op, i, j in steps:
            values.append(OPS[op](values[i % len(values)], values[j % len(values)]))
        return values[-3:]

    g = graph(fun, ((8, 8),) * 3, MESH)
    levels: list[dict[int, Spec]] = []
    for _ in range(draw(st.integers(0, 2))):
        pairs = {v: draw(st.tuples(axes, axes)) for v in g.inputs}
        levels.append({v: spec(*p) for v, p in pairs.items() if p[0] != p[1]})
    return g, levels


@settings(max_examples=60)
@given(programs())
def test_result_is_a_fixed_point_and_every_split_has_an_origin(case: tuple[Graph, list[dict[int, Spec]]]) -> None:
    g, levels = case
    layout = propagate(g, levels)
    for v, s in enumerate(layout.specs):
        assert len(set(s.axes)) == len(s.axes), "an axis splits one dimension"
        parts = [math.prod(MESH.shape[a] for a in d) for d in s.dims]
        assert all(n % p == 0 for n, p in zip(g.values[v].shape, parts, strict=True))
    assert propagate(g, levels) == layout, "deterministic"
    again = propagate(g, [dict(enumerate(layout.specs))])
    assert again.specs == layout.specs, "a fixed point"
    for v, s in (levels[0] if levels else {}).items():
        assert all(have[: len(want)] == want for have, want in zip(layout.specs[v].dims, s.dims, strict=True))
    split = {(v, d) for v, s in enumerate(layout.specs) for d, a in enumerate(s.dims) if a}
    assert split == set(layout.origins), "every split remembers where it came from"


def test_without_seeds_everything_is_replicated() -> None:
    g = graph(lambda x: jnp.sin(x) @ x, ((8, 8),), MESH)
    assert propagate(g, []).specs == tuple(replicated(len(v.shape)) for v in g.values)


def test_conflicting_seeds_are_reported() -> None:
    g = graph(lambda x: x + 1, ((8, 8),), MESH)
    layout = propagate(g, [{g.inputs[0]: spec("data", None)}, {g.inputs[0]: spec("model", None)}])
    assert [(v, str(s)) for v, s, _ in layout.dropped] == [(g.inputs[0], "[model, _]")]


def test_a_dimension_that_an_axis_does_not_divide_is_not_split() -> None:
    g = graph(jnp.sin, ((6, 3),), MESH)
    assert outputs(g, spec("data", "model")) == ["[data, _]"]
    assert outputs(g, spec("data+model", None)) == ["[_, _]"]


def test_axes_are_added_to_those_that_a_dimension_has_never_put_in_their_place() -> None:
    g = graph(jnp.sin, ((8, 8),), mesh(x=2, y=2, z=2))
    for later, found in (("y+z", "[x, _]"), ("x+y", "[x+y, _]")):
        specs = propagate(g, [{g.inputs[0]: spec("x", None)}, {g.inputs[0]: spec(later, None)}]).specs
        assert str(specs[g.outputs[0]]) == found


@pytest.mark.parametrize("name", ["pod", "x", "stage-2"])
def test_axis_names_do_not_matter(name: str) -> None:
    m = mesh(**{name: 4})
    g = graph(jnp.sin, ((8, 8),), m)
    assert outputs(g, spec(name, None)) == [f"[{name}, _]"]
