"""What an error proposes in the place of a name that is not known."""

from __future__ import annotations

import pytest

from autoshard.errors import closest, nearest

KEYS = ["batch", "data", "learning_rate", "mesh", "model", "step", "steps"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("bach", ["batch"]),
        ("num_steps", ["steps"]),
        ("step_count", ["steps", "step"]),
        ("mesh_shape", ["mesh"]),
        ("rate", ["learning_rate"]),
        ("lr", []),
        ("epochs", []),
    ],
)
def test_the_closest_name_is_spelt_alike_or_a_part(name: str, meant: list[str]):
    assert closest(name, KEYS) == meant


def test_where_none_is_close_all_are_named():
    assert nearest("step_count", KEYS) == "; did you mean 'steps' or 'step'?"
    assert nearest("epochs", ["mesh", "batch"]) == "; known: 'batch', 'mesh'"
    assert nearest("epochs", []) == ""


def test_a_part_of_many_names_is_close_to_none():
    paths = [f"state.layers.{n}.weights" for n in range(4)]
    assert sorted(closest("layers", paths[:3])) == paths[:3]
    assert closest("layers", paths) == []
