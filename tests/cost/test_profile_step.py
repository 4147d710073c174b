"""The profile of a step adds up to its cost and memory, names what it is about, and stays small."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost import profile_step as walk
from autoshard.cost.cost import CostModel
from autoshard.cost.memory import MemoryModel
from autoshard.search.search import search
from tests.programs import graph, mesh, mlp_args, mlp_step


def profiled(strategy="fsdp", fun=mlp_step, args=None, **axes):
    g = graph(fun, args or mlp_args(64, 16, 32), mesh(**(axes or {"a": 4})), donate_argnums=0)
    best = search(g, strategy)[0]
    model = MemoryModel(g, CostModel(g))
    return best, walk.profile_step(model, best.layout)


def deep_step(ws, x):
    def loss(ws):
        h = x
        for w in ws:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws))


def strategy_step(state, x):
    w, m = state
    m = 0.9 * m + jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) @ w.T - x) ** 2))(w)
    return w - m, m


def check_sums(best, profile):
    seconds = pytest.approx(best.cost.seconds, rel=1e-9)
    assert sum(s.seconds for s in profile.spans) == seconds
    assert sum(x.compute + x.transfers for x in profile.lines) == seconds
    assert sum(m.seconds for m in profile.moves) == pytest.approx(best.cost.transfers, rel=1e-9)
    assert sum(m.count for m in profile.moves) == sum(c.count for c in best.cost.collectives)
    top = profile.moments[profile.peak]
    m = best.memory
    assert m.parameters + m.optimizer + m.inputs + top.residuals + top.temporaries == m.peak
    assert sum(x.bytes for x in profile.live) - profile.on_chip == top.residuals + top.temporaries
    last = profile.spans[-1].seconds if profile.spans[-1].kind != "compute" else 0.0
    assert profile.moments[-1].seconds >= best.cost.transfers - last
    assert all(a.seconds <= b.seconds for a, b in zip(profile.moments, profile.moments[1:], strict=False))


@pytest.mark.parametrize("strategy", ["fsdp", "dp", "tp", "replicated"])
def test_it_adds_up_to_cost_and_memory(strategy):
    check_sums(*profiled(strategy))


@pytest.mark.parametrize(
    ("limit", "most", "name"),
    [("MAX_SPANS", 6, "spans"), ("MAX_LINES", 3, "lines"), ("MAX_MOMENTS", 3, "moments"), ("MAX_ROWS", 3, "values")],
)
def test_it_is_bounded_and_still_adds_up(monkeypatch, limit, most, name):
    args = ((64, 64),) * 12, (32, 64)
    best, whole = profiled("fsdp", deep_step, args)
    monkeypatch.setattr(walk, limit, most)
    _, short = profiled("fsdp", deep_step, args)
    check_sums(best, short)
    assert len(getattr(whole, name)) > most >= len(getattr(short, name))
    assert sum(v.count for v in whole.values) == sum(v.count for v in short.values) + short.values_left_out


def test_a_gather_names_the_argument_its_specs_and_the_operation():
    _, profile = profiled("fsdp")
    gathers = [m for m in profile.moves if m.kind == "all-gather"]
    assert {name for m in gathers for name in m.names} == {"params['w1']", "params['w2']"}
    assert all(m.before != m.after and m.op == "dot_general" for m in gathers)
    assert all("programs.py:" in m.source for m in gathers)


def test_what_replaces_an_argument_is_named_where_it_is_gathered():
    _, profile = profiled("zero1", strategy_step, (((16, 32), (16, 32)), (64, 16)))
    gathers = [m for m in profile.moves if m.kind == "all-gather"]
    assert {(m.names, m.of_result) for m in gathers} == {(("new state[0]",), True)}


def test_what_a_loop_reads_of_an_argument_has_its_name():
    def fun(ws, x):
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w.astype(jnp.float32)), None), x, ws)[0])

    def step(ws, x):
        return ws - jax.grad(fun)(ws, x)

    _, profile = profiled("fsdp", step, ((4, 16, 16), (32, 16)))
    assert ("ws",) in {m.names for m in profile.moves if m.kind == "all-gather"}


def test_residuals_are_live_from_the_forward_to_the_backward_part():
    _, profile = profiled("replicated")
    kept = [m.residuals for m in profile.moments]
    assert kept[-1] == 0 < max(kept)
    assert any(x.role == "residual" for x in profile.live)
