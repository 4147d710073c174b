"""Steps whose layers run as a pipeline, against `jax.jit` on one device; and pipelines that are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import MeshConfig, Schedule
from autoshard.api import DEFAULT_PASSES
from autoshard.backend.hlo.collectives import collectives
from autoshard.errors import (
    ArgumentError,
    AutoshardError,
    ConfigError,
    MemoryBudgetError,
    PassError,
    PipelineError,
    ScheduleError,
)
from autoshard.runtime.choose_mesh import PIPELINE_GAIN
from autoshard.schedule.slots import Operation, Slot
from autoshard.train.models.decoder import ModelConfig, make_steps
from autoshard.train.optimizer import OptimizerConfig
from tests.models import WIDTH, tokens
from tests.pipelined_steps import apart, decoder_loss, decoder_params, train_state, trained

STAGES = MeshConfig(axes={"stage": 4, "model": 2}, pipeline="stage")
FORWARDS = Schedule.named("gpipe", stages=4, microbatches=4).forward_only()
BACKWARD_FIRST = Schedule(((Slot(Operation.BACKWARD, 0, 0),), (Slot(Operation.FORWARD, 0, 0),)))


def assert_trains_as_on_one_device(step: Any, planned: Any, state: Any, steps: int) -> None:
    """Losses of each step and the state after the last, in float32."""
    expected, found, alone = state, jax.tree.map(jnp.copy, state), jax.jit(step)
    for i in range(steps):
        expected, wanted = alone(expected, tokens(i))
        found, metrics = planned(found, tokens(i))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), wanted, metrics)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), expected, found)


def test_ten_steps_of_a_step_that_says_nothing_of_stages_or_micro_batches(tmp_path: Path) -> None:
    step, state = trained(decoder_loss), train_state(decoder_params(4))
    planned = autoshard.jit(step, mesh=STAGES, microbatches=8, schedule="1f1b", donate_argnums=0)
    plan = planned.plan(state, tokens(0))
    pipeline = plan.pipeline
    assert pipeline is not None
    assert (pipeline.stages, pipeline.microbatches, pipeline.layers) == (4, 8, (1, 1, 1, 1))
    assert str(pipeline.schedule) == str(Schedule.named("1f1b", stages=4, microbatches=8))
    assert 0 < pipeline.bubble < 1
    assert len(pipeline.seconds) == len(pipeline.bytes) == 4
    assert plan.in_specs[0]["params"]["layers"]["up"][0] == "stage"
    assert "stage" not in str(plan.in_specs[0]["params"]["embed"])
    assert "Pipeline" in plan.explain()
    memory, placed = plan.memory, planned.lower(state, tokens(0)).compile().memory_analysis()
    count = 4  # bytes of the one scalar, which no part has
    assert memory.parameters + memory.optimizer + memory.inputs == placed.argument_size_in_bytes - count
    assert memory.parameters + memory.optimizer + memory.inputs + memory.residuals <= memory.peak
    plan.save(tmp_path / "plan.json")
    assert autoshard.Plan.load(tmp_path / "plan.json") == plan
    assert_trains_as_on_one_device(step, planned, state, 10)
    assert autoshard.audit(planned.lower(state, tokens(0)).compile(), plan).clean  # no weight leaves its stage


def test_other_axes_layers_that_do_not_divide_and_tied_embeddings() -> None:
    step, state = trained(decoder_loss), train_state(decoder_params(5, tied=True))
    mesh = MeshConfig(axes={"stage": 2, "data": 2, "model": 2}, pipeline="stage")
    planned = autoshard.jit(step, mesh=mesh, strategy="fsdp_tp", microbatches=4, schedule="gpipe")
    assert "scatter-add" in {i.op for i in planned.plan(state, tokens(0)).islands}
    assert_trains_as_on_one_device(step, planned, state, 2)


@pytest.mark.parametrize(
    ("schedule", "axes", "strategy"),
    [
        ("interleaved:2", {"stage": 2, "data": 2, "model": 2}, "fsdp_tp"),
        ("zb-v", {"stage": 4, "data": 2}, "auto"),
    ],
)
def test_layers_go_once_to_the_stages_that_run_them_and_their_gradients_back(
    schedule: str, axes: dict[str, int], strategy: str
) -> None:
    step, state = trained(decoder_loss), train_state(decoder_params(8))
    mesh = MeshConfig(axes=axes, pipeline="stage")
    planned = autoshard.jit(step, mesh=mesh, strategy=strategy, microbatches=4, schedule=schedule)
    plan, compiled = planned.plan(state, tokens(0)), planned.lower(state, tokens(0)).compile()
    assert autoshard.audit(compiled, plan).clean
    between = {c.kind for c in collectives(compiled.as_text(), plan.mesh) if c.axes == ("stage",)}
    assert between == {"all-reduce", "collective-permute"}  # no stage has the layers of all
    assert_trains_as_on_one_device(step, planned, state, 1)


def test_gradients_are_partial_sums_until_after_the_loop() -> None:
    """Each stage adds up those of its own, and what is gathered of them for every micro-batch comes once."""
    step, state = trained(decoder_loss), train_state(decoder_params(4, tied=True))
    mesh, passes = MeshConfig(axes={"stage": 2, "data": 4}, pipeline="stage"), ("accumulate:data", *DEFAULT_PASSES)
    planned = autoshard.jit(step, mesh=mesh, strategy="fsdp", microbatches=4, schedule="zb-h1", passes=passes)
    plan = planned.plan(state, tokens(0))
    weights = [c for c in plan.cost.collectives if c.bytes > 4 * WIDTH]
    assert {c.count for c in weights if c.kind in ("all-to-all", "reduce-scatter", "all-reduce")} == {1}
    assert_trains_as_on_one_device(step, planned, state, 2)
    compiled = planned.lower(state, tokens(0)).compile()
    assert autoshard.audit(compiled, plan).clean
    between = [c.bytes for c in collectives(compiled.as_text(), plan.mesh) if c.axes == ("stage",)]
    assert max(between) < state["params"]["embed"].nbytes / 2  # a shard of the sum over data, and not its four parts


def test_the_planner_keeps_gradients_partial_where_that_is_faster() -> None:
    step, state = trained(decoder_loss), train_state(decoder_params(4))
    mesh = MeshConfig(axes={"stage": 2, "data": 4}, pipeline="stage")
    planned = autoshard.jit(step, mesh=mesh, strategy="fsdp", microbatches=4, schedule="1f1b")
    in_parts = planned.plan(state, tokens(0))
    reduced = autoshard.jit(
        step, mesh=mesh, strategy="fsdp", microbatches=4, schedule="1f1b", passes=DEFAULT_PASSES
    ).plan(state, tokens(0))
    assert "accumulate" in {p.name for p in in_parts.passes}
    assert in_parts.cost.seconds < reduced.cost.seconds
    assert in_parts.memory.peak > reduced.memory.peak


def test_the_planner_decides_micro_batches_and_schedule() -> None:
    step, state = trained(decoder_loss), train_state(decoder_params(8))
    planned = autoshard.jit(step, mesh=STAGES)
    plan = planned.plan(state, tokens(0))
    pipeline = plan.pipeline
    assert pipeline is not None
    assert (pipeline.stages, sum(pipeline.layers), pipeline.schedule.microbatches) == (4, 8, pipeline.microbatches)
    assert all(a.seconds >= plan.cost.seconds for a in plan.alternatives if a.peak <= plan.memory_budget)
    twice_the_stages = autoshard.jit(step, mesh=STAGES, microbatches=8).plan(state, tokens(0))
    assert plan.cost.seconds < twice_the_stages.cost.seconds
    assert f"{pipeline.bubble:.0%} of the step" in plan.explain()
    assert f"it would be {pipeline.ideal_bubble:.0%}" in plan.explain()
    assert f"by {pipeline.order}" in plan.explain()
    assert_trains_as_on_one_device(step, planned, state, 2)


def decoder_plan(
    axes: dict[str, int], *, batch: int, link: str, hardware: str = "h100", **options: Any
) -> autoshard.Plan:
    """Of a decoder of 2,048 features and 8 layers on H100s, whose first axis has the given link."""
    model = ModelConfig(d_model=2048, heads=16, d_ff=8192, vocab=8192, seq=1024, layers=8, dtype="bfloat16")
    steps = make_steps(model, OptimizerConfig(), 100)
    state = jax.eval_shape(steps.init, jax.random.key(0))
    rows = {k: jax.ShapeDtypeStruct((batch, model.seq), jnp.int32) for k in ("inputs", "targets")}
    mesh = MeshConfig(axes=axes, hardware=hardware, links={next(iter(axes)): link}, pipeline="auto")
    return autoshard.jit(steps.train, mesh=mesh, donate_argnums=0, **options).plan(state, rows)


def test_weights_are_gathered_once_before_a_pipeline() -> None:
    """Not for each of its micro-batches, which would cost more than to move what they compute."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["w"])[0].mean()

    mesh = MeshConfig(axes={"stage": 2, "data": 4}, hardware="h100", links={"data": "infiniband"}, pipeline="stage")
    state = jax.eval_shape(train_state, {"w": jax.ShapeDtypeStruct((8, 4096, 4096), jnp.float32)})
    options: Any = {"microbatches": 16, "schedule": "1f1b", "passes": ["accumulate:data"]}
    step = autoshard.jit(trained(loss), mesh=mesh, memory_budget="1.1GB", **options)
    plan = step.plan(state, jax.ShapeDtypeStruct((4096, 4096), jnp.float32))
    gathered = {c.count for c in plan.cost.collectives if c.axes == ("data",) and c.bytes > 1 << 24}
    assert gathered == {1}


def test_a_pipeline_is_taken_where_it_pays(tmp_path: Path) -> None:
    """Over a slow network gradients take longer than a bubble. Over InfiniBand they run beside products. In between a
    pipeline is only taken where it gains more than predictions are off by."""
    h100 = (Path(autoshard.__file__).parent / "configs" / "hardware" / "h100.yaml").read_text()
    axes = {"pod": 4, "data": 8}

    def over_network(rate: str) -> autoshard.Plan:
        (tmp_path / f"{rate}.yaml").write_text(h100.replace("bandwidth: 50e9", f"bandwidth: {rate}"))
        return decoder_plan(axes, batch=32, link="infiniband", hardware=str(tmp_path / f"{rate}.yaml"))

    slow = over_network("10e9")
    assert slow.pipeline is not None
    assert slow.pipeline.axis == "pod"
    without = [a for a in slow.alternatives if a.text.startswith("the mesh") and "pipeline" not in a.text]
    assert [a.seconds > slow.cost.seconds for a in without] == [True]
    medium, fast = over_network("26e9"), over_network("50e9")
    for plan, least, most in ((medium, 1 - PIPELINE_GAIN, 1.0), (fast, 1.05, 2.0)):
        assert plan.pipeline is None
        over = [a.seconds for a in plan.alternatives if "with a pipeline over pod" in a.text]
        assert [least < s / plan.cost.seconds < most for s in over] == [True]
    tpu = decoder_plan({"slice": 4, "data": 8}, batch=16, link="dcn", hardware="tpu-v5p")
    assert tpu.pipeline is None, "XLA for TPUs runs more beside compute than what products send"
    over = [a.seconds for a in tpu.alternatives if "with a pipeline over slice" in a.text]
    hidden = tpu.mesh.hardware.hidden_collectives
    assert [tpu.cost.scheduled(hidden) < s < (1 - PIPELINE_GAIN) * tpu.cost.seconds for s in over] == [True]


def test_of_axes_that_are_alike_but_for_their_names_one_is_planned_as_stages() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]

    def planned(pipeline: str, links: Mapping[str, str] | None = None, **options: Any) -> autoshard.Plan:
        mesh = MeshConfig(axes={"a": 2, "b": 2}, hardware="h100", links=dict(links or {}), pipeline=pipeline)
        return autoshard.jit(step, mesh=mesh, **options).plan(jnp.ones((4, 8, 8)), jnp.ones((16, 8)))

    def tried(plan: autoshard.Plan) -> list[str]:
        over = [a.text.partition("with a pipeline over ")[2] for a in plan.alternatives]
        return sorted({*filter(None, over), *([plan.pipeline.axis] if plan.pipeline else [])})

    assert tried(planned("auto")) == ["a"]
    over_a, over_b = planned("a"), planned("b")
    assert over_a.cost.seconds == over_b.cost.seconds
    assert over_a.memory.peak == over_b.memory.peak
    assert tried(planned("auto", {"b": "infiniband"})) == ["a", "b"]
    assert tried(planned("auto", in_shardings=(None, P("b")))) == ["a", "b"]


def test_a_plan_without_a_pipeline_says_why_none_was_considered() -> None:
    mesh = MeshConfig(axes={"stage": 4, "model": 2}, pipeline="auto")
    step = autoshard.jit(no_chain, mesh=mesh)
    w, x = jnp.eye(8), jnp.ones((16, 8))
    plan = step.plan(w, x)
    assert plan.pipeline is None
    assert any("no pipeline was considered: no_chain has no chain of layers" in str(d) for d in plan.diagnostics)
    np.testing.assert_allclose(step(w, x), no_chain(w, x), rtol=1e-6)


def test_layers_one_after_the_other_run_as_if_they_were_scanned() -> None:
    """The state keeps its form: weights of each layer apart, whole on every stage. Embedding and head are one."""
    step, state = trained(decoder_loss), train_state(apart(decoder_params(4, tied=True)))
    mesh = MeshConfig(axes={"stage": 4, "model": 2}, pipeline="stage")
    planned = autoshard.jit(step, mesh=mesh, microbatches=4, schedule="1f1b")
    plan = planned.plan(state, tokens(0))
    assert plan.pipeline is not None
    assert (plan.pipeline.layers, plan.pipeline.stored) == ((1, 1, 1, 1), False)
    assert "stage" not in str(plan.in_specs)
    assert "Each layer has arguments of its own" in plan.explain()
    assert autoshard.audit(planned.lower(state, tokens(0)).compile(), plan).clean
    assert_trains_as_on_one_device(step, planned, state, 2)


def test_a_loop_over_micro_batches_that_the_user_wrote_runs_as_a_pipeline() -> None:
    step, state = trained(decoder_loss, microbatches=2), train_state(decoder_params(8))
    planned = autoshard.jit(step, mesh=MeshConfig(axes={"stage": 8}, pipeline="stage"))
    assert_trains_as_on_one_device(step, planned, state, 2)


def plan(mesh: Any = STAGES, layers: int = 4, **options: Any) -> Any:
    return autoshard.jit(trained(decoder_loss), mesh=mesh, **options).plan(
        train_state(decoder_params(layers)), tokens(0)
    )


def test_one_micro_batch_passes_all_stages() -> None:
    pipeline = plan(microbatches=1, schedule="1f1b").pipeline
    assert pipeline is not None
    assert (pipeline.stages, pipeline.microbatches, len(pipeline.schedule.table)) == (4, 1, 8)


def no_chain(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - jax.grad(lambda w: jnp.tanh(x @ w).mean())(w)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (
            {"layers": 3, "microbatches": 4},
            PipelineError,
            r"4 stages need 4 layers, and the chain .* has 3: give the axis 'stage' 3 devices or fewer$",
        ),
        ({"microbatches": 3}, PassError, "16 examples, which 3 micro-batches do not divide"),
        ({"microbatches": 0}, ArgumentError, "microbatches=0"),
        ({"microbatches": 4, "schedule": "1f2b"}, ScheduleError, "1f2b"),
        (
            {"microbatches": 4, "schedule": "zb-v"},
            PipelineError,
            "2 chunks need 8 layers, and the chain .* has 4: .* 2 d.* 1 c",
        ),
        ({"schedule": Schedule(())}, ScheduleError, "the table has no operation"),
        ({"strategy": "fsdp+pipeline:model"}, ArgumentError, "'pipeline:model' with pipeline='stage': give mesh="),
        ({"mesh": {"stage": 4}, "strategy": "pipeline:stages"}, ConfigError, "did you mean 'stage'"),
        ({"microbatches": 4, "schedule": 3}, ArgumentError, "schedule=3"),
        ({"microbatches": 4, "schedule": FORWARDS}, PipelineError, "has no backwards, and the chain .* has one"),
        ({"schedule": "1f1b", "mesh": {"stage": 4, "model": 2}}, ArgumentError, "the mesh has none: name an axis"),
        (
            {"microbatches": 4, "schedule": Schedule.named("1f1b", stages=4, microbatches=8)},
            PipelineError,
            "4 stages and 8 micro-batches, the mesh axis 'stage' has 4 devices and the step 4 micro-batches: make",
        ),
        (
            {
                "microbatches": 1,
                "schedule": Schedule(((Slot(Operation.BACKWARD, 0, 0),), (Slot(Operation.FORWARD, 0, 0),))),
            },
            ScheduleError,
            "needs F0 of stage 0 at an earlier tick",
        ),
        ({"microbatches": 4, "memory_budget": "20KiB"}, MemoryBudgetError, "as a pipeline over 'stage' .* 20.00 KiB"),
        ({"microbatches": 4, "strategy": "dp", "refine": 2}, ArgumentError, "refine="),
    ],
)
def test_what_is_no_pipeline_is_one_clear_error(options: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        plan(**options)


def test_a_strategy_names_the_stages_and_a_schedule_of_ones_own_the_micro_batches() -> None:
    schedule = Schedule.named("1f1b", stages=4, microbatches=2)
    found = plan({"stage": 4, "model": 2}, strategy="tp+pipeline:stage", schedule=schedule)
    assert (found.strategy, found.pipeline.schedule) == ("tp", schedule)


def test_a_batch_that_is_no_power_of_two_is_cut_too() -> None:
    step = autoshard.jit(trained(decoder_loss), mesh=MeshConfig(axes={"stage": 2}, pipeline="stage"))
    pipeline = step.plan(train_state(decoder_params(4)), jax.tree.map(lambda x: x[:9], tokens(0))).pipeline
    assert pipeline is not None
    assert pipeline.microbatches in (3, 9)


@pytest.mark.parametrize(
    ("layers", "why"),
    [(4, "the fastest pipeline takes .* and this step"), (0, "no pipeline was planned, and this step")],
)
def test_a_schedule_that_no_pipeline_takes_is_remarked_on(layers: int, why: str) -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            return (jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0] if layers else x @ w).sum()

        return w - jax.grad(loss)(w)

    auto = autoshard.jit(step, mesh=MeshConfig(axes={"data": 2}, pipeline="auto"), microbatches=4, schedule="1f1b")
    found = auto.plan(jnp.ones((layers, 8, 8) if layers else (8, 8)), jnp.ones((16, 8)))
    assert found.pipeline is None
    assert any(re.search(f"schedule='1f1b' has no use: {why}", str(d)) for d in found.diagnostics)


def contrastive(params: Any, batch: Any) -> jax.Array:
    x = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, params)[0]
    return jax.nn.logsumexp(x @ x.T, 1).mean()


@pytest.mark.parametrize("mesh", [STAGES, MeshConfig(axes={"data": 2}, memory_budget="3KiB")])
def test_why_the_batch_is_not_cut_is_said(mesh: MeshConfig) -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - jax.grad(contrastive)(w, x)

    args = jnp.ones((4, 8, 8)), jnp.ones((16, 8))
    with pytest.raises(AutoshardError, match=r"dot_general joins two dimensions .* at .*test_pipelines\.py:\d+"):
        autoshard.jit(step, mesh=mesh).plan(*args)
    if mesh.pipeline is None:
        return
    found = autoshard.jit(step, mesh=MeshConfig(axes={"data": 2}, pipeline="auto")).plan(*args)
    assert any(
        "no pipeline was considered: step is not computed in 2 micro-batches" in str(d) for d in found.diagnostics
    )


def hidden(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), h), x, w)[1]


def worst(w: jax.Array, x: jax.Array) -> Any:
    h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]
    return h.max(), (h > 0.5).any(), h.argmax(1) == 1


def test_a_pipeline_without_a_backward_reduces_as_the_step_does_and_says_what_stands_against_it() -> None:
    w, x = jax.random.normal(jax.random.key(0), (4, 8, 8)), jax.random.normal(jax.random.key(1), (16, 8))
    step = autoshard.jit(worst, mesh=STAGES, microbatches=4)
    assert step.plan(w, x).pipeline is not None
    chex.assert_trees_all_close(step(w, x), jax.jit(worst)(w, x), rtol=1e-6)
    with pytest.raises(PipelineError, match=r"test_pipelines\.py:\d+: .* scan returns what each layer has"):
        autoshard.jit(hidden, mesh=STAGES, microbatches=4).plan(w, x)


def test_a_step_without_a_chain_of_layers_says_so() -> None:
    step = autoshard.jit(no_chain, mesh=STAGES)
    with pytest.raises(
        PipelineError, match=r"no_chain has no chain of layers .* FLOPs are at .*test_pipelines\.py:\d+"
    ):
        step.plan(jnp.ones((8, 8)), jnp.ones((16, 8)))


def test_a_pin_over_the_stages_is_kept_for_arguments_and_refused_inside() -> None:
    state = train_state(decoder_params(4))
    pins = jax.tree.map(lambda _: None, state)
    pins["params"]["embed"], pins["params"]["layers"]["up"] = P("stage"), P(None, "model")
    step = autoshard.jit(trained(decoder_loss), mesh=STAGES, microbatches=4, in_shardings=(pins, None))
    specs = step.plan(state, tokens(0)).in_specs[0]["params"]
    assert (specs["embed"], specs["layers"]["up"]) == (P("stage"), P(None, "model"))

    def pinned(params: Any, batch: Any) -> jax.Array:
        return decoder_loss({**params, "embed": autoshard.annotate(params["embed"], P("stage"))}, batch)

    with pytest.raises(PipelineError, match=r"test_pipelines\.py:\d+: its spec .* over 'stage'"):
        autoshard.jit(trained(pinned), mesh=STAGES, microbatches=4).plan(state, tokens(0))


def test_a_mesh_config_names_its_stages(tmp_path: Path) -> None:
    path = tmp_path / "mesh.yaml"
    path.write_text("axes: {stage: 4, model: 2}\npipeline: stage\n")
    assert MeshConfig.load(path) == STAGES
    for axes, pipeline, says in (
        ({"data": 8}, "stage", "'stage' is no axis of this mesh"),
        ("auto", "data", "needs axes with sizes"),
    ):
        with pytest.raises(ConfigError, match=says):
            MeshConfig(axes=axes, pipeline=pipeline)  # pyright: ignore[reportArgumentType]
