"""What a run leaves beside its checkpoints: claimed once, cut where it resumes, deleted only when it is a run's."""

from __future__ import annotations

from pathlib import Path

import pytest
from etils import epath

from autoshard.errors import CheckpointError, ConfigError
from autoshard.train.run_folder import RunFolder, write_json


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(epath.Path(tmp_path / "run"))


def test_the_log_is_cut_where_the_run_resumes(folder: RunFolder):
    folder.claim({})
    folder.append({"event": "step", "step": n} for n in range(1, 8))
    with folder.log.open("a") as file:
        file.write('{"event": "step", "st')  # killed in the middle of a line
    assert [record["step"] for record in folder.records()] == [1, 2, 3, 4, 5, 6, 7]
    folder.drop_events_after(5)
    folder.append([{"event": "step", "step": 6}])
    assert [record["step"] for record in folder.records()] == [1, 2, 3, 4, 5, 6]


def test_a_changed_entry_is_named(folder: RunFolder):
    folder.claim({"model.layers": 4, "model.heads": 2, "data.include": ("*.py",)})
    folder.claim({"model.layers": 4, "model.heads": 2, "data.include": ("*.py",)})
    with pytest.raises(ConfigError, match=r"model\.layers is 6, and the run in .* was begun with 4"):
        folder.claim({"model.layers": 6, "model.heads": 2, "data.include": ("*.py",)})


def test_checkpoints_of_an_unknown_run_are_left_alone(folder: RunFolder):
    folder.checkpoints.mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"checkpoints but no run\.json"):
        folder.claim({})


def test_clearing_says_what_it_deletes(folder: RunFolder):
    assert folder.clear() == []
    folder.claim({})
    folder.append([{"step": 1}])
    (folder.checkpoints / "5").mkdir(parents=True)
    write_json(folder.plan(0), {})
    assert folder.clear() == ["checkpoints", "log.jsonl", "plan-0.json", "run.json"]
    assert list(folder.root.iterdir()) == []


def test_clearing_refuses_a_folder_with_anything_else(folder: RunFolder):
    folder.claim({})
    (folder.root / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"thesis\.tex, which no training run writes; nothing was deleted"):
        folder.clear()
    assert (folder.root / "run.json").exists()
