"""Building graphs: flattening, trip counts, phases, diagnostics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

from autoshard.errors import RuleError, SpecError
from autoshard.ir.annotate import annotate
from autoshard.ir.build_graph import build_graph
from autoshard.ir.graph import BACKWARD, FORWARD, PLAIN, OpKinds
from autoshard.rules import SHIPPED, TABLE
from tests.programs import graph, mesh, mlp_args, mlp_step, program

MESH = mesh(data=4)

odd_p = Primitive("odd")
odd_p.def_impl(lambda x: x)
odd_p.def_abstract_eval(lambda x: x)


def test_nested_loops_multiply_trip_counts() -> None:
    def fun(x: Any, ws: Any) -> Any:
        def outer(h: Any, w: Any) -> Any:
            return jax.lax.fori_loop(0, 5, lambda _, c: jnp.sin(c @ w), h), None

        return jax.lax.scan(outer, x, ws)[0]

    g = graph(fun, ((4, 4), (3, 4, 4)), MESH)
    assert [n.trip_count for n in g.nodes if n.kind.op == "dot_general"] == [15]


def test_calls_are_inlined_and_values_defined_once() -> None:
    inner = jax.jit(lambda x: jnp.sin(x) + 1)
    g = graph(lambda x: inner(inner(x)), ((4,),), MESH)
    assert [n.kind.op for n in g.nodes] == ["sin", "add", "sin", "add"]
    made = [v for n in g.nodes for v in n.results]
    assert len(made) == len(set(made))


def test_phases() -> None:
    g = graph(mlp_step, mlp_args(8, 4, 4), MESH)
    phases = {p: [n.kind.op for n in g.nodes if n.phase == p] for p in (FORWARD, BACKWARD, PLAIN)}
    assert phases[FORWARD].count("dot_general") == 2
    assert phases[BACKWARD].count("dot_general") == 3
    assert "dot_general" not in phases[PLAIN]
    assert phases[PLAIN].count("sub") == 2


def test_a_carried_argument_is_tied_to_its_result() -> None:
    g = graph(mlp_step, mlp_args(8, 4, 4), MESH)
    ties = [(n.operands, n.results) for n in g.nodes if n.kind.op == "carry"]
    assert ties == [((g.outputs[i],), (g.inputs[i],)) for i in (0, 1)]


def test_a_primitive_without_a_rule_is_kept_whole_with_a_diagnostic() -> None:
    p = program(lambda x: jnp.sin(odd_p.bind(x)), ((4,),), MESH)
    found = build_graph(p).diagnostics
    assert len(found) == 1
    assert "no rule for the primitive 'odd'" in str(found[0])
    assert __file__ in found[0].source
    with pytest.raises(RuleError, match=r"test_build_graph.py:\d+: odd is kept whole"):
        build_graph(p, strict=True)


def test_a_rule_of_the_wrong_rank_is_refused_with_the_line() -> None:
    transposing = {
        odd_p: lambda *_: TABLE[jax.lax.transpose_p](jax.ShapeDtypeStruct((2, 3), "float32"), permutation=(1, 0)),
    }
    p = program(lambda x: odd_p.bind(x), ((4,),), MESH, rules=replace(SHIPPED, step_rules=transposing))  # noqa: PLW0108
    with pytest.raises(RuleError, match=r"test_build_graph.py:\d+: odd: rule .* other ranks"):
        build_graph(p)


def test_an_impossible_pin_inside_the_step_names_its_line() -> None:
    p = program(lambda x: annotate(x, P("dat")), ((4,),), MESH)
    with pytest.raises(SpecError, match=r"pinned at .*test_build_graph.py:\d+: .*'dat'.*did you mean 'data'"):
        build_graph(p)


def test_an_unknown_trip_count_is_a_diagnostic() -> None:
    g = graph(lambda x: jax.lax.while_loop(lambda c: c.sum() < 3, jnp.sin, x), ((4,),), MESH)
    assert any("its trip count is unknown" in str(d) for d in g.diagnostics)


def test_equal_nodes_share_their_kind() -> None:
    g = build_graph(program(lambda x: jnp.sin(jnp.sin(jnp.sin(x))), ((4, 4),), MESH))
    assert len({id(n.kind) for n in g.nodes}) == 1


def test_graphs_of_one_planning_share_kinds_and_report_each_for_itself() -> None:
    one, other = (program(lambda x, n=n: odd_p.bind(jnp.sin(x)) * n, ((4, 8),), MESH) for n in (2.0, 3.0))
    kinds = OpKinds()
    first, second = (build_graph(p, kinds=kinds) for p in (one, other))
    assert [a.kind is b.kind for a, b in zip(first.nodes, second.nodes, strict=True)] == [True] * len(first.nodes)
    assert [d.text for d in first.diagnostics] == [d.text for d in second.diagnostics] != []
    assert build_graph(other).nodes[0].kind is not first.nodes[0].kind
    with pytest.raises(RuleError, match="odd is kept whole"):
        build_graph(other, strict=True, kinds=kinds)


def test_what_is_known_of_shared_kinds_is_of_one_mesh() -> None:
    """Graphs with merged axes have the kinds of the whole one."""
    kinds = OpKinds()
    kind = build_graph(program(lambda x, w: x @ w, ((8, 8), (8, 8)), MESH), kinds=kinds).nodes[0].kind
    assert kinds.node_costs(MESH) is kinds.node_costs(mesh(data=4))
    assert kinds.node_costs(MESH) is not kinds.node_costs(mesh(data=8))
    assert kinds.proposals(MESH) is not kinds.proposals(mesh(data=8))
    assert kinds.variant(kind, combined_count=2) is kinds.variant(kind, combined_count=2)
    assert kinds.variant(kind, combined_count=2) is not kinds.variant(kind, combined_count=3)
