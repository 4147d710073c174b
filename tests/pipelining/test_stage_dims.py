"""Specs of what has a row for each layer, over the stages too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.errors import MemoryBudgetError
from autoshard.ir.spec import Axes, Spec
from autoshard.machine.mesh_config import MeshConfig
from autoshard.pipelining.stage_dims import over_stages

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
    step = autoshard.jit(train, mesh=mesh, microbatches=4, donate_argnums=0)
    w, x = jax.ShapeDtypeStruct((layers, 64, 64), jnp.float32), jax.ShapeDtypeStruct((8, 64), jnp.float32)
    with pytest.raises(MemoryBudgetError, match="as a pipeline over 'stage' fits the memory budget") as found:
        step.plan(w, x)
    assert found.value.least == 4 * (layers * 64 * 64 * share + 8 * 64) / 2
