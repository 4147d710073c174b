"""What plans ask of the compilers of their targets."""

import jax
import jax.numpy as jnp
import pytest

from autoshard import MeshConfig, jit
from autoshard.cost.compiler_options import NO_ALL_GATHER_FUSION, user_options
from autoshard.errors import MemoryBudgetError, PlanError
from benchmarks.target_cases import PROGRAMS

SLICE = MeshConfig(axes={"data": 4, "model": 4}, tpu="v5e:4x4", memory_budget="320KiB")
IMAGES, FILTERS = jax.ShapeDtypeStruct((16, 32, 32, 8), jnp.float32), jax.ShapeDtypeStruct((3, 3, 8, 8), jnp.float32)


def convolved(images, filters):
    return jax.lax.conv_general_dilated(images, filters, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def product(images, filters):
    return images @ filters[0, 0]


@pytest.mark.parametrize(
    ("step", "mesh", "wanted"),
    [
        (convolved, SLICE, NO_ALL_GATHER_FUSION),
        (convolved, SLICE.model_copy(update={"memory_budget": 2**19}), {}),
        (product, SLICE.model_copy(update={"memory_budget": 2**20 * 3 // 4}), {}),
        (convolved, MeshConfig(axes={"data": 8}, memory_budget="320KiB"), {}),
    ],
)
def test_gathers_stay_out_of_convolutions_that_fill_a_tpu_s_memory(step, mesh, wanted):
    plan = jit(step, mesh=mesh).plan(IMAGES, FILTERS)
    assert dict(plan.compiler_options) == wanted
    assert all(name in plan.explain() for name in wanted)


def test_a_plan_that_needs_it_is_foreseen_with_it():
    """A gradient is written over what it is computed from unless a weight is gathered while that is computed."""
    step, state, batch = PROGRAMS["conv"]()

    def planned(budget):
        mesh = MeshConfig(axes={"data": 4, "model": 4}, tpu="v5e:4x4", memory_budget=budget)
        return jit(step, mesh=mesh, strategy="fsdp", donate_argnums=0).plan(state, batch)

    wide, narrow = planned("700MiB"), planned("500MiB")
    assert (dict(wide.compiler_options), dict(narrow.compiler_options)) == ({}, NO_ALL_GATHER_FUSION)
    result = 2048 * 64 * 64 * 128 * 2 / 16  # of the first convolution
    assert wide.memory.peak - narrow.memory.peak == pytest.approx(result, rel=1e-3)
    assert narrow.memory.peak < 500 * 2**20 < wide.memory.peak
    assert [p.spec for p in wide.inputs] == [p.spec for p in narrow.inputs]


def test_what_the_user_says_goes_before_it():
    said = dict.fromkeys(NO_ALL_GATHER_FUSION, True)
    assert dict(jit(convolved, mesh=SLICE, compiler_options=said).plan(IMAGES, FILTERS).compiler_options) == said


def test_memory_is_foreseen_as_the_user_says():
    step, state, batch = PROGRAMS["conv"]()
    given = {
        "mesh": MeshConfig(axes={"data": 4, "model": 4}, tpu="v5e:4x4", memory_budget="500MiB"),
        "donate_argnums": 0,
        "passes": ("dead_code", "transposed_products"),
    }
    plan = jit(step, strategy="fsdp", **given).plan(state, batch)
    fused = {"compiler_options": dict.fromkeys(NO_ALL_GATHER_FUSION, True), **given}
    with pytest.raises(MemoryBudgetError, match=r"500.00 MiB.*the least that would is 516"):
        jit(step, strategy="fsdp", **fused).plan(state, batch)
    with pytest.raises(
        PlanError, match=f"foreseen with compiler options that are given otherwise.*{next(iter(NO_ALL_GATHER_FUSION))}"
    ):
        jit(step, strategy=plan, **fused).plan(state, batch)


def test_a_plan_made_elsewhere_brings_it_only_where_the_compiler_knows_it():
    said = {"xla_backend_extra_options": ""}
    plan = jit(convolved, mesh=SLICE, compiler_options=said).plan(IMAGES, FILTERS)
    assert dict(plan.compiler_options) == {**NO_ALL_GATHER_FUSION, **said}
    # The same mesh, of devices of this process.
    here = MeshConfig(axes=SLICE.axes, hardware="tpu-v5e", memory_budget="320KiB")
    assert dict(jit(convolved, mesh=here, strategy=plan).plan(IMAGES, FILTERS).compiler_options) == said


def test_within_another_program_only_the_user_s_are_left_for_jax_to_refuse():
    said = {"xla_backend_extra_options": ""}
    plan = jit(convolved, mesh=SLICE, compiler_options=said).plan(IMAGES, FILTERS)
    assert dict(user_options(plan.compiler_options)) == said
