"""The ends of a call: arrays of the batch are split for loading, a token that comes back keeps its spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.ir.annotate import annotate
from autoshard.ir.graph import Graph
from autoshard.ir.spec import Spec
from autoshard.machine.mesh import LogicalMesh
from autoshard.search.call_ends import EQUALLY_FAST, MAX_SLOWER, loaded_dims, returned_pairs, revise_ends
from autoshard.search.candidates import Candidate, Search
from autoshard.search.search import explore
from autoshard.search.solved_layouts import solve_layouts
from tests.programs import CHIP, graph

F32, I32 = jnp.float32, jnp.int32
DATA, BOTH = ("data",), ("data", "model")


def on(host: float = 1e8) -> LogicalMesh:
    """16 chips, each with so many bytes/s to its host; among each other they send 1e10."""
    return LogicalMesh(("data", "model"), (4, 4), replace(CHIP, host_bandwidth=host))


def arrays(*shapes: tuple[Any, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for *shape, dtype in shapes]


def images(w: Any, x: Any, y: Any) -> Any:
    """A training step of a convolution that computes a fourth of the images on each device."""

    def loss(w: Any) -> Any:
        z = jax.lax.conv_general_dilated(annotate(x, P("data")), w, (1, 1), "SAME", dimension_numbers=DIMS)
        z = annotate(jax.nn.relu(z).mean((1, 2)), P("data"))
        return -jnp.take_along_axis(jax.nn.log_softmax(z), annotate(y, P("data"))[:, None], 1).mean()

    return w - 0.1 * jax.grad(loss)(w)


DIMS = ("NHWC", "HWIO", "NHWC")
IMAGES = arrays((3, 3, 8, 512, F32), (256, 64, 64, 8, F32), (256, I32))


def texts(table: Any, tokens: Any, targets: Any, mask: Any) -> Any:
    """A training step of a bigram model that reads its tokens whole on each device, its targets in four parts."""

    def loss(table: Any) -> Any:
        h = annotate(table[annotate(tokens, P())], P("data"))
        logits = jax.nn.log_softmax(jnp.tanh(h) @ annotate(table, P()).T)
        picked = jnp.take_along_axis(logits, annotate(targets, P("data"))[..., None], -1)[..., 0]
        return -(picked * mask).sum()

    return table - 0.1 * jax.grad(loss)(table)


TEXTS = arrays((1024, 512, F32), (64, 512, I32), (64, 512, I32), (64, 512, F32))


def traced(fun: Any, args: Sequence[Any], mesh: LogicalMesh, **options: Any) -> Graph:
    return graph(fun, args, mesh, donate_argnums=0, **options)


def found(g: Graph, budget: float = 16e9) -> tuple[Candidate, Candidate]:
    """The best layout as solved, and with its ends revised."""
    s = Search(g, budget)
    before = s.best(solve_layouts(s))
    return before, revise_ends(s, before)


def inputs(g: Graph, c: Candidate) -> list[Spec]:
    return [c.layout.specs[v] for v in g.inputs]


def loading(g: Graph, c: Candidate) -> float:
    """Seconds over the host's link."""
    mesh = g.program.mesh
    local = sum(g.values[v].bytes / c.layout.specs[v].num_shards(mesh.shape) for v in loaded_dims(Search(g, 1e9)))
    return local / mesh.hardware.host_bandwidth


@pytest.mark.parametrize(("fun", "args"), [(images, IMAGES), (texts, TEXTS)], ids=["images", "texts"])
def test_every_array_of_a_batch_is_split_over_all_devices(fun: Any, args: Any) -> None:
    g = traced(fun, args, on())
    before, after = found(g)
    assert any(spec.dims[0] != BOTH for spec in inputs(g, before)[1:])
    assert [spec.dims[0] for spec in inputs(g, after)[1:]] == [BOTH] * (len(args) - 1)
    added, saved = after.cost.seconds - before.cost.seconds, loading(g, before) - loading(g, after)
    assert added <= saved + EQUALLY_FAST * before.cost.seconds
    assert inputs(g, after)[0] == inputs(g, before)[0]


def test_the_search_revises_what_auto_finds_and_a_preset_not() -> None:
    g = traced(images, IMAGES, on())
    best, s = explore(g)
    assert inputs(g, best)[1].dims[0] == BOTH
    assert s.tried[best.choice] is best
    solved = Search(g, 16e9)
    assert solved.best(solve_layouts(solved)).layout.specs not in [c.layout.specs for c in s.tried.values()]
    for preset in ("dp", "tp", "fsdp_tp", "replicated"):
        assert "loading" not in explore(g, preset)[0].layout.origins.values()


def test_a_pin_is_kept() -> None:
    g = traced(images, IMAGES, on(), in_shardings=(None, P("data"), P()))
    _, after = found(g)
    assert inputs(g, after)[1:] == [Spec((DATA, (), (), ())), Spec(((),))]


def test_what_costs_more_than_loading_saves_stays() -> None:
    g = traced(images, IMAGES, on(1e13))
    before, after = found(g)
    assert inputs(g, after)[1] == inputs(g, before)[1]
    assert after.cost.seconds <= before.cost.seconds * (1 + EQUALLY_FAST)


def test_a_step_that_hides_its_loading_hardly_gets_slower() -> None:
    """Loading takes less time than the step: the sum of both falls, but with loading ahead the step alone counts."""
    for host in (1e9, 2e9, 4e9, 8e9):
        for args in (IMAGES, arrays((3, 3, 8, 64, F32), (256, 64, 64, 8, F32), (256, I32))):
            g = traced(images, args, on(host))
            before, after = found(g)
            longest = [max(c.cost.seconds, loading(g, c)) for c in (before, after)]
            assert longest[1] <= longest[0] * (1 + MAX_SLOWER + EQUALLY_FAST)


def test_without_a_link_to_the_host_the_step_gets_no_slower() -> None:
    g = traced(texts, TEXTS, on(0.0))
    before, after = found(g)
    assert after.cost.seconds <= before.cost.seconds


def test_the_plan_says_how_loading_is_counted(tmp_path: Any) -> None:
    plan = autoshard.jit(images, mesh=on(), donate_argnums=0).plan(*IMAGES)
    size = 256 * 64 * 64 * 8 * 4 + 256 * 4
    assert [p.path for p in plan.loaded] == ["x", "y"]
    assert plan.loading == pytest.approx(size / 16 / 1e8)
    assert [p.reason for p in plan.inputs[1:]] == ["loading", "loading"]
    text = " ".join(plan.explain().split())
    assert "Loading 2 arrays of the batch, 2.0 MiB per device, takes 21.0 ms over the host's link, and is not " in text
    assert "split further than it is read, so that less is loaded" in plan.why("x")
    plan.save(tmp_path / "plan.json")
    assert autoshard.Plan.load(tmp_path / "plan.json") == plan


def decode(cache: Any, token: Any) -> Any:
    """Reads the token in four parts, and makes the next one whole."""
    h = annotate(jax.nn.one_hot(annotate(token, P("data")), 128), P("data"))
    h = cache["h"] * 0.9 + h
    return {"h": h, "n": cache["n"] + 1}, annotate(jnp.argmax(h, -1).astype(token.dtype), P())


def test_a_token_that_comes_back_has_one_spec() -> None:
    g = graph(decode, ({"h": (32, 128), "n": ()}, arrays((32, I32))[0]), on())
    assert list(returned_pairs(g)) == [(2, 2)]
    before, after = found(g)
    token, result = g.inputs[2], g.outputs[2]
    assert before.layout.specs[token] != before.layout.specs[result]
    assert after.layout.specs[token] == after.layout.specs[result]


def test_the_memory_budget_is_kept() -> None:
    """A token that is whole where it comes back takes some bytes more."""
    g = graph(decode, ({"h": (32, 128), "n": ()}, arrays((32, I32))[0]), on())
    before, after = found(g)
    assert before.memory.peak < after.memory.peak
    assert found(g, after.memory.peak)[1].layout.specs == after.layout.specs
    assert found(g, before.memory.peak)[1].layout.specs == before.layout.specs


def test_what_comes_back_only_perhaps_is_left_where_that_is_dear() -> None:
    def wide(x: Any, w: Any) -> Any:
        return annotate(annotate(x, P("data", None)) @ w, P(None, "model"))

    g = graph(wide, ((4096, 2048), (2048, 2048)), on(0.0))
    assert list(returned_pairs(g)) == [(0, 0)]
    before, after = found(g)
    assert inputs(g, after) == inputs(g, before)
    assert inputs(g, after)[0] != after.layout.specs[g.outputs[0]]


def test_pairs_are_of_one_shape_and_dtype_and_as_many() -> None:
    def step(state: Any, a: Any, b: Any, c: Any) -> Any:
        return {k: v + 1 for k, v in state.items()}, b * 2, a * 2, c.sum(0), c[0], c.astype(I32)

    g = graph(step, ({"k": (8,), "m": (8,)}, (4, 4), (4, 4), (4,)), on())
    assert list(returned_pairs(g)) == [(2, 2), (3, 3)]
