"""Specs of what has a row for each layer, over the stages too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.cost.reshard import reshard_path
from autoshard.errors import MemoryBudgetError
from autoshard.ir.program import PipelineRequest
from autoshard.ir.spec import Axes, Spec
from autoshard.machine.mesh_config import MeshConfig
from autoshard.pipelining.chain import find_chain
from autoshard.pipelining.stage_dims import StageDims, over_stages
from autoshard.runtime.fit_memory import within_budget
from tests.programs import graph

MESH = MeshConfig(axes={"stage": 4, "data": 2, "model": 2}).mesh()


@pytest.mark.parametrize(
    ("shape", "before", "after"),
    [
        ((8, 16, 6), ((), ("model",), ()), (("stage",), ("model",), ())),
        ((8, 16, 6), (("data",), (), ()), (("stage", "data"), (), ())),
        ((4, 6, 16), (("data",), (), ()), (("stage",), (), ("data",))),
        ((4, 2, 6, 16), (("data",), (), (), ()), (("stage",), (), (), ("data",))),  # in parts, not yet added up
        ((4, 16, 16), (("data",), (), ("model",)), (("stage",), (), ("model", "data"))),
        ((8, 16), (("data", "model"), ()), (("stage",), ("data", "model"))),
        ((4, 3), (("data",), ()), (("stage",), ())),
        ((6, 16), (("data",), ()), (("data",), ())),
    ],
)
def test_axes_of_layers_that_a_stage_has_too_few_of(
    shape: tuple[int, ...], before: tuple[Axes, ...], after: tuple[Axes, ...]
) -> None:
    assert over_stages(Spec(before), 0, shape, "stage", MESH) == Spec(after)


def test_rows_that_go_to_other_stages_are_whole() -> None:
    """Or they would go over the other axes too."""
    before = Spec((("data",), (), ("model",)))
    assert over_stages(before, 0, (8, 16, 6), "stage", MESH, moved=True) == Spec((("stage",), ("data",), ("model",)))


@pytest.mark.parametrize(("layers", "share"), [(8, 1 / 4), (6, 1)])
def test_more_state_than_a_device_has_is_refused_unsearched(
    layers: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that the stages do not divide are whole on each."""

    def train(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - jax.grad(lambda w: jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0].sum())(w)

    mesh = MeshConfig(axes={"stage": 4, "data": 2}, hardware="h100", pipeline="stage", memory_budget="1KB")
    monkeypatch.setattr("autoshard.runtime.stages.search", None)
    real, planned = within_budget.plan_program, list[object]()
    monkeypatch.setattr(
        within_budget, "plan_program", lambda *args, **options: planned.append(args) or real(*args, **options)
    )
    step = autoshard.jit(train, mesh=mesh, donate_argnums=0)
    w, x = jax.ShapeDtypeStruct((layers, 64, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32)
    with pytest.raises(MemoryBudgetError, match="the arguments of train as a pipeline over 'stage' need") as found:
        step.plan(w, x)
    assert found.value.least == 4 * (layers * 64 * 64 * share + 64 * 64) / 2
    assert found.value.of_arguments
    assert len(planned) == 1, "neither passes nor more micro-batches were tried"


LAYERS = 8


@pytest.fixture(scope="module")
def of_weights() -> tuple[StageDims, int]:
    """Of a step with weights of `LAYERS` layers over two stages, and the number of these weights."""

    def train(w: jax.Array, x: jax.Array) -> jax.Array:
        def part(sums: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return sums + jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0].sum(), None

        return jax.lax.scan(part, jnp.zeros(()), x)[0]

    on = MeshConfig(axes={"stage": 2, "data": 4, "model": 2}, tpu="v5e:4x4").mesh()
    step = graph(train, ((LAYERS, 1024, 1024), (4, 16, 1024)), on)
    chain = find_chain(step.program.jaxpr, "train", step.program.rules)
    return StageDims(step, chain, PipelineRequest(on, "stage")), step.inputs[0]


def test_a_reshard_that_splits_layers_more_finely_than_a_stage_has_them_takes_another_way(
    of_weights: tuple[StageDims, int],
) -> None:
    """On the devices of a stage alone, all gathers come last and at once, of layers that eight devices have."""
    split, w = of_weights
    stored, whole, by_columns = Spec((("data",), (), ("model",))), Spec(((), (), ())), Spec(((), (), ("data", "model")))
    shape = split.values[w].shape
    on_stage = [m.spec.dims[0] for m in reshard_path(stored, whole, shape, 32, split.stage_mesh)]
    assert on_stage == [("data", "model"), ()]
    assert not split.splits_as_planned(stored, whole, w)
    assert split.splits_as_planned(by_columns, whole, w)
    steps = [(c.kind, c.axes) for c in split.reshard(stored, whole, w)]
    assert steps == [("all-to-all", ("data",)), ("all-gather", ("data", "model"))]
    assert sum(c.bytes for c in split.reshard(by_columns, whole, w)) == LAYERS // 2 * 1024 * 1024 * 4
