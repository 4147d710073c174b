"""Compiler options that plans set for their targets."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autoshard import MeshConfig, Plan, jit
from autoshard.cost.compiler_options import (
    ALL_REDUCES_COMBINED,
    ASYNC_ALL_TO_ALL,
    HARMLESS,
    LATE_ALL_REDUCES,
    LATE_REMATERIALIZATION,
    MORE_MEMORY,
    NO_ALL_GATHER_FUSION,
    OWN_OPTIONS,
    SCHEDULER_LIMIT,
    SCOPED_VMEM,
    SPARSE_CORE_COLLECTIVES,
    STREAM_WITHIN_NODES,
    effective_options,
    user_options,
)
from autoshard.errors import MemoryBudgetError, PlanError
from autoshard.machine.collective import ALL_REDUCE, Collective
from benchmarks.target_cases import PROGRAMS
from tests.experts import added_up, arrays, gradient

SLICE = MeshConfig(axes={"data": 4, "model": 4}, tpu="v5e:4x4", memory_budget="320KiB")
IMAGES, FILTERS = jax.ShapeDtypeStruct((16, 32, 32, 8), jnp.float32), jax.ShapeDtypeStruct((3, 3, 8, 8), jnp.float32)
VMEM = {SCOPED_VMEM: 49152}
"""Of v5e and v5p."""


def convolution(images, filters):
    return jax.lax.conv_general_dilated(images, filters, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def product(images, filters):
    return images @ filters[0, 0]


@pytest.mark.parametrize(
    ("step", "mesh", "expected"),
    [
        (convolution, SLICE, NO_ALL_GATHER_FUSION | VMEM),
        (convolution, SLICE.model_copy(update={"memory_budget": 2**19}), VMEM),
        (product, SLICE.model_copy(update={"memory_budget": 2**20 * 3 // 4}), VMEM),
        (convolution, MeshConfig(axes={"data": 8}, memory_budget="320KiB"), {}),
    ],
)
def test_all_gather_fusion_is_disabled_for_convolutions_that_fill_tpu_memory(step, mesh, expected):
    plan = jit(step, mesh=mesh).plan(IMAGES, FILTERS)
    assert dict(plan.compiler_options) == expected
    assert all(name in plan.explain() for name in expected)


def test_memory_is_predicted_with_the_option_that_the_plan_sets():
    """A gradient is written in place of a convolution's result, unless an all-gather is fused into the convolution."""
    step, state, batch = PROGRAMS["conv"]()

    def planned(budget):
        mesh = MeshConfig(axes={"data": 4, "model": 4}, tpu="v5e:4x4", memory_budget=budget)
        return jit(step, mesh=mesh, strategy="fsdp", donate_argnums=0).plan(state, batch)

    wide, narrow = planned("700MiB"), planned("500MiB")
    assert (dict(wide.compiler_options), dict(narrow.compiler_options)) == (VMEM, VMEM | NO_ALL_GATHER_FUSION)
    result = 2048 * 64 * 64 * 128 * 2 / 16  # the first convolution's result
    assert wide.memory.peak - narrow.memory.peak == pytest.approx(result, rel=1e-3)
    assert narrow.memory.peak < 500 * 2**20 < wide.memory.peak
    assert [p.spec for p in wide.inputs] == [p.spec for p in narrow.inputs]


FILLING = 14 * 2**30 // 4 * 16
"""Elements of float32 that fill 14 of a v5e's 15.75 GiB when split over 16."""


@pytest.mark.parametrize(
    ("mesh", "elements", "expected"),
    [
        (
            MeshConfig(axes={"data": 16}, tpu="v5e:4x4"),
            FILLING,
            LATE_REMATERIALIZATION | {SCHEDULER_LIMIT: MORE_MEMORY} | VMEM,
        ),
        (MeshConfig(axes={"data": 16}, tpu="v5e:4x4"), FILLING * 13 // 14, {SCHEDULER_LIMIT: MORE_MEMORY} | VMEM),
        (MeshConfig(axes={"data": 16}, tpu="v5e:4x4"), FILLING // 2, VMEM),
        (MeshConfig(axes={"data": 8}, hardware="tpu-v5e"), FILLING // 2, {}),
    ],
)
def test_a_plan_that_fills_tpu_memory_recomputes_late_and_schedules_in_all_of_it(mesh, elements, expected):
    step = jit(lambda x: x * 2, mesh=mesh, donate_argnums=0)
    plan = step.plan(jax.ShapeDtypeStruct((elements,), jnp.float32))
    assert dict(plan.compiler_options) == expected
    assert not user_options(plan.compiler_options, plan.mesh)
    (name,) = LATE_REMATERIALIZATION
    given = jit(lambda x: x * 2, mesh=mesh, donate_argnums=0, compiler_options={name: 50})
    assert dict(given.plan(jax.ShapeDtypeStruct((elements,), jnp.float32)).compiler_options) == {**expected, name: 50}


def test_the_user_s_option_overrides_it():
    given_options = dict.fromkeys(NO_ALL_GATHER_FUSION, True)
    plan = jit(convolution, mesh=SLICE, compiler_options=given_options).plan(IMAGES, FILTERS)
    assert dict(plan.compiler_options) == VMEM | given_options


def test_memory_is_predicted_with_the_user_s_option():
    step, state, batch = PROGRAMS["conv"]()
    given = {
        "mesh": MeshConfig(axes={"data": 4, "model": 4}, tpu="v5e:4x4", memory_budget="500MiB"),
        "donate_argnums": 0,
        "passes": ("dead_code", "transposed_products"),
    }
    plan = jit(step, strategy="fsdp", **given).plan(state, batch)
    fused = {"compiler_options": dict.fromkeys(NO_ALL_GATHER_FUSION, True), **given}
    with pytest.raises(MemoryBudgetError, match=r"500.00 MiB.*the smallest needs 516"):
        jit(step, strategy="fsdp", **fused).plan(state, batch)
    with pytest.raises(
        PlanError, match=f"predicted with compiler options that these override.*{next(iter(NO_ALL_GATHER_FUSION))}"
    ):
        jit(step, strategy=plan, **fused).plan(state, batch)


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        (MeshConfig(axes={"data": 8}, tpu="v6e:2x4"), SPARSE_CORE_COLLECTIVES | {SCOPED_VMEM: 98304}),
        (MeshConfig(axes={"data": 8}, tpu="v5p:2x2x2"), SPARSE_CORE_COLLECTIVES | VMEM),
        (MeshConfig(axes={"data": 16}, tpu="v5e:4x4"), VMEM),
        (MeshConfig(axes={"data": 1}, tpu="v6e:1x1"), {SCOPED_VMEM: 98304}),
        (MeshConfig(axes={"data": 8}, hardware="tpu-v6e"), {}),
    ],
)
def test_sparse_cores_run_collectives_and_fusions_have_on_chip_memory_where_a_chip_has_them(mesh, expected):
    plan = jit(product, mesh=mesh).plan(IMAGES, FILTERS)
    assert dict(plan.compiler_options) == expected
    assert not user_options(plan.compiler_options, plan.mesh)
    (first, *_) = SPARSE_CORE_COLLECTIVES
    asked = {first: False, SCOPED_VMEM: 1024}
    given = jit(product, mesh=mesh, compiler_options=asked).plan(IMAGES, FILTERS)
    assert dict(given.compiler_options) == {**expected, **asked}
    assert dict(user_options(given.compiler_options, given.mesh)) == asked


@pytest.mark.parametrize(
    ("target", "own"),
    [
        ({"gpu": "h100"}, ALL_REDUCES_COMBINED),
        ({"tpu": "v5e:2x4"}, VMEM | ASYNC_ALL_TO_ALL),
        ({"tpu": "v5e:4x8"}, VMEM),
    ],
)
def test_where_experts_exchange_rows_all_to_alls_run_beside_products_and_all_reduces_are_combined(target, own):
    args: Any = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays(64, 16, 64, 8))
    experts = {name: P("data") if len(w.shape) == 3 else P() for name, w in args[0].items()}
    mesh = MeshConfig(axes={"data": 8, "model": -1}, **target)
    where: dict[str, Any] = {"mesh": mesh, "strategy": "replicated", "passes": ("dead_code", "experts")}
    specs = (experts, P("data"))
    plan = jit(gradient(added_up, 2), in_shardings=specs, out_shardings=(specs, P("data")), **where).plan(*args)
    assert dict(plan.compiler_options) == own
    assert not user_options(plan.compiler_options, plan.mesh)
    others = dict(jit(product, mesh=mesh).plan(IMAGES, FILTERS).compiler_options)
    assert not others.keys() & {*ALL_REDUCES_COMBINED, *ASYNC_ALL_TO_ALL}


@pytest.mark.parametrize(
    ("axes", "nodes", "exchanged", "own"),
    [
        ({"data": 2, "model": 8}, 2, True, STREAM_WITHIN_NODES),
        ({"data": 2, "model": 8}, 2, False, {}),
        ({"data": 2, "model": 4}, 1, True, {}),
    ],
)
def test_collectives_within_a_node_have_a_stream_beside_others_between_nodes(
    axes, nodes, exchanged, own, monkeypatch: pytest.MonkeyPatch
):
    mesh, x = MeshConfig(axes=axes, gpu="h100", nodes=nodes), jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    moved = P(None, "model") if exchanged else P()

    def planned() -> Plan:
        specs: Any = {"in_shardings": (P("model"), P("data")), "out_shardings": (moved, P())}
        return jit(lambda a, b: (a, b), mesh=mesh, **specs).plan(x, x)

    plan = planned()
    kinds = {c.kind: c.axes for c in plan.cost.collectives}
    assert kinds["all-gather"] == ("data",) if exchanged else "all-to-all" not in kinds
    assert kinds.get("all-to-all") == (("model",) if exchanged else None)
    assert dict(plan.compiler_options) == (own if jax.__version_info__ >= (0, 12) else {})
    assert not user_options(plan.compiler_options, plan.mesh)
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    assert not planned().compiler_options


def test_a_loaded_plan_sets_it_only_where_the_compiler_has_it():
    given_options = {"xla_allow_excess_precision": True}
    plan = jit(convolution, mesh=SLICE, compiler_options=given_options).plan(IMAGES, FILTERS)
    assert dict(plan.compiler_options) == {**NO_ALL_GATHER_FUSION, **VMEM, **given_options}
    # The same mesh on devices of this process.
    here = MeshConfig(axes=SLICE.axes, hardware="tpu-v5e", memory_budget="320KiB")
    assert dict(jit(convolution, mesh=here, strategy=plan).plan(IMAGES, FILTERS).compiler_options) == given_options


def test_only_the_user_s_options_are_passed_on_inside_another_program():
    given_options = {"xla_backend_extra_options": ""}
    plan = jit(convolution, mesh=SLICE, compiler_options=given_options).plan(IMAGES, FILTERS)
    assert dict(user_options(plan.compiler_options, plan.mesh)) == given_options


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("xla_dump_to", "FOLDER"),
        ("xla_backend_extra_options", "xla_dump_to=FOLDER"),
        ("xla_gpu_cuda_data_dir", "FOLDER"),
    ],
)
def test_an_option_that_is_not_harmless_is_not_taken_from_a_plan(name, value, tmp_path):
    """A file from anywhere must not make XLA write, or load, what it names."""
    options = {name: value.replace("FOLDER", str(tmp_path / "written")), "xla_cpu_enable_fast_min_max": True}
    stored = jit(product, mesh={"data": 8}).plan(IMAGES, FILTERS).to_json()
    stored["compiler_options"] = [[name, value] for name, value in sorted(options.items())]
    plan = Plan.from_json(stored)
    step = jit(product, mesh={"data": 8}, strategy=plan)
    x, w = jnp.ones(IMAGES.shape), jnp.ones(FILTERS.shape)
    for attempt in (step, step.plan, step.lower, jax.jit(step)):
        with pytest.raises(PlanError, match=f"compiler options that may do more.*{name}.*compiler_options="):
            attempt(x, w)
    assert not list(tmp_path.iterdir())
    given = {name: options[name]}
    trusted = jit(product, mesh={"data": 8}, strategy=plan, compiler_options=given).plan(IMAGES, FILTERS)
    assert dict(trusted.compiler_options) == options


def test_what_a_plan_sets_itself_is_harmless():
    assert {name for name, _ in OWN_OPTIONS} <= HARMLESS


@pytest.mark.parametrize("value", [["a"], {"a": 1}, None])
def test_an_option_has_one_value(value):
    stored = jit(product, mesh={"data": 8}).plan(IMAGES, FILTERS).to_json()
    with pytest.raises(PlanError, match="compiler_options"):
        Plan.from_json({**stored, "compiler_options": [["xla_cpu_enable_fast_math", value]]})


def test_what_layers_all_reduce_on_gpus_is_reduced_a_layer_later():
    mesh, x = MeshConfig(axes={"data": 8}, gpu="h100"), jax.ShapeDtypeStruct((512, 512), jnp.float32)
    graph = jit(lambda x: x @ x, mesh=mesh).plan(x).study.graph

    def options(count: int) -> dict[str, Any]:
        reduced = Collective(ALL_REDUCE, ("data",), 1 << 25, count)
        return dict(effective_options(graph, 0.0, [reduced], disable_fusion=False, given=()))

    assert options(4) == LATE_ALL_REDUCES
    assert not user_options(tuple(LATE_ALL_REDUCES.items()), graph.program.mesh)
    assert not options(1)  # after the loops
