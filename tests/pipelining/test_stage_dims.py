"""Specs of what has a row for each layer, over the stages too."""

from __future__ import annotations

import pytest

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
