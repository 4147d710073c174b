"""The list of runs and their curves."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from etils import epath

from autoshard.errors import ConfigError
from autoshard.runs.curves import HEIGHT, WIDTH, curves_of, drawn, failure_of, find_run, run_table, runs_in
from autoshard.runs.report import EndEvent, HeldOutEvent, PhaseEvent, StepEvent
from autoshard.runs.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> epath.Path:
    """Three runs, one of them finished and one failed, and something else."""
    for name, steps in (("a", 3), ("c", 1), ("deep/b", 2)):
        run = RunFolder(epath.Path(tmp_path / name))
        run.root.mkdir(parents=True)
        run.append([PhaseEvent(step=0, mesh="(data=2)", collectives="")])
        run.append([StepEvent.of(n, {"loss": 1 / n, "norm": 2.0}) for n in range(1, steps + 1)])
    run.append([HeldOutEvent.of(2, {"loss": 0.25}), EndEvent(step=2, how="finished")])
    RunFolder(epath.Path(tmp_path / "c")).append([EndEvent(step=1, how="failed", error="OSError: no space left")])
    (tmp_path / "other").mkdir()
    return epath.Path(tmp_path)


def test_runs_are_listed(folder: epath.Path):
    runs = {run.name: run for run in runs_in(folder)}
    assert set(runs) == {"a", "c", "deep/b"}
    assert (runs["c"].state, runs["c"].steps) == ("failed", 1)
    assert (runs["a"].state, runs["a"].steps, runs["a"].held_out) == ("stopped", 3, None)
    assert (runs["deep/b"].state, runs["deep/b"].loss, runs["deep/b"].held_out) == ("finished", 0.5, 0.25)
    assert run_table([*runs.values()]).row_count == 3
    with find_run("a", folder).locked():
        assert {run.name: run.state for run in runs_in(folder)}["a"] == "running"
    assert {run.name: run.state for run in runs_in(folder)}["a"] == "stopped"


def test_a_run_is_found_by_its_name_or_folder(folder: epath.Path):
    assert find_run("deep/b", folder).root == folder / "deep/b"
    assert find_run(str(folder / "a"), epath.Path("none")).root == folder / "a"
    with pytest.raises(ConfigError, match="no run is called 'dep/b' in .*; did you mean 'deep/b'"):
        find_run("dep/b", folder)


def test_a_run_that_failed_says_why(folder: epath.Path):
    assert failure_of(find_run("c", folder)) == "failed after step 1: OSError: no space left"
    assert failure_of(find_run("a", folder)) is None
    assert failure_of(find_run("deep/b", folder)) is None
    with (run := find_run("c", folder)).locked():  # it goes on
        assert failure_of(run) is None
    early = RunFolder(folder / "d")
    early.root.mkdir()
    early.append([EndEvent(step=0, how="failed", error="TypeError: no width")])
    assert failure_of(early) == "failed before its first step: TypeError: no width"


def test_curves_have_names(folder: epath.Path):
    curves = curves_of(find_run("deep/b", folder))
    assert curves == {"loss": [(1, 1.0), (2, 0.5)], "norm": [(1, 2.0), (2, 2.0)], "eval_loss": [(2, 0.25)]}


def test_a_curve_falls_from_its_first_corner_to_its_last():
    lines = drawn("loss", [(n, 100.0 - n) for n in range(101)]).splitlines()
    assert lines[0] == "loss"
    assert len(lines) == 1 + HEIGHT + 2
    assert lines[1].startswith("100 │")  # a dot of the first column
    assert ord(lines[1].removeprefix("100 │")[0]) & 0x01
    assert lines[HEIGHT].startswith("  0 │")
    assert len(lines[HEIGHT].removeprefix("  0 │")) == WIDTH
    assert lines[-1].split() == ["0", "100"]


def test_what_is_not_finite_is_left_out():
    assert drawn("loss", [(1, math.nan)]) == "loss, without 1 values that are not finite"
    lines = drawn("loss", [(1, 2.0), (2, math.inf), (3, 2.0)]).splitlines()
    assert lines[0].endswith("without 1 values that are not finite")
    assert lines[1].startswith("2 │")
