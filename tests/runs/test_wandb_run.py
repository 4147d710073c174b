"""Metrics go to Weights & Biases where they are asked for; a module in its place says what it was given."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from etils import epath

from autoshard.errors import ConfigError
from autoshard.runs.report import HeldOutEvent, PhaseEvent, StepEvent
from autoshard.runs.run_folder import RunFolder
from autoshard.runs.wandb_run import WandbRun


class StandIn(ModuleType):
    """In place of `wandb`, and of its run: keeps what it is given."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def init(self, **options: Any) -> StandIn:
        if options["project"] == "closed":
            raise RuntimeError("no login\nhere")
        self.begun.append(options)
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.closed += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    module = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_metrics_of_steps_and_evaluations_go_to_one_run_however_often_it_is_resumed(tmp_path: Path, wandb: StandIn):
    folder = RunFolder(epath.Path(tmp_path))
    for _ in range(2):
        run = WandbRun(folder, {"project": "trees", "mode": "offline"}, {"batch": 8})
        run.begin()
        run.append(PhaseEvent(step=0, mesh="(data=2)", collectives=""))
        run.append(StepEvent(step=1, loss=2.0))
        run.append(HeldOutEvent.of(1, {"loss": 3.0, "right": 0.5}))
        run.close()
    assert wandb.closed == 2
    assert wandb.logged == 2 * [(1, {"loss": 2.0}), (1, {"eval_loss": 3.0, "eval_right": 0.5})]
    first, second = wandb.begun
    assert first == second
    assert first["id"] == json.loads((tmp_path / "wandb.json").read_text())["id"]
    assert {**first, "id": ""} == {
        "project": "trees", "mode": "offline", "id": "", "resume": "allow", "dir": str(tmp_path), "config": {"batch": 8}
    }  # fmt: skip
    (tmp_path / "wandb.json").write_text("[")
    WandbRun(folder, {"project": "trees"}, {}).begin()
    assert wandb.begun[-1]["id"] != first["id"]
    (tmp_path / "wandb").mkdir()
    assert folder.clear() == ["wandb", "wandb.json"]


def test_nothing_is_sent_where_it_is_not_asked_for(tmp_path: Path, wandb: StandIn):
    run = WandbRun(RunFolder(epath.Path(tmp_path)), None, {})
    run.begin()
    run.append(StepEvent(step=1, loss=2.0))
    run.close()
    assert (wandb.begun, wandb.logged, wandb.closed, [*tmp_path.iterdir()]) == ([], [], 0, [])


def test_a_package_that_is_not_there_or_refuses_is_one_error(
    tmp_path: Path, wandb: StandIn, monkeypatch: pytest.MonkeyPatch
):
    folder = RunFolder(epath.Path(tmp_path))
    with pytest.raises(ConfigError, match="wandb: RuntimeError: no login$"):
        WandbRun(folder, {"project": "closed"}, {}).begin()
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="not installed: `pip install wandb`, or leave the entry out"):
        WandbRun(folder, {"project": "trees"}, {}).begin()
