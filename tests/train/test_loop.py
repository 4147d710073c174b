"""Whole training runs in this process: phases on different meshes, finished runs, changed configurations."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from autoshard import checkpoint
from autoshard.errors import CheckpointError, ConfigError
from autoshard.train.config import TrainConfig
from autoshard.train.loop import plan_phase, train
from autoshard.train.report import Report

WORDS = b"the mesh has eight devices and every axis of the mesh has a name ".split()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of forty small files, of which some are held out."""
    folder = tmp_path_factory.mktemp("text")
    chosen = np.random.default_rng(0)
    for number in range(40):
        (folder / f"{number}.txt").write_bytes(b" ".join(chosen.choice(WORDS, 200)))
    return folder


def recipe(text: Path, run: Path, **entries: object) -> TrainConfig:
    """A run of twelve steps that changes its mesh after the sixth."""
    phases = [
        {"mesh": {"axes": axes, "hardware": "cpu"}, "until": n}
        for n, axes in ((6, {"data": 4, "model": 2}), (12, {"data": 2}))
    ]
    return TrainConfig.model_validate(
        {
            "model": {"layers": 2, "d_model": 16, "heads": 2, "seq": 16},
            "data": {"source": str(text), "holdout": 4},
            "optimizer": {"learning_rate": 1e-2},
            "batch": 8,
            "phases": phases,
            "eval": {"every": 3, "batches": 2, "final_batches": 4},
            "checkpoint": {"dir": str(run), "every": 4},
        }
        | entries
    )


def run(config: TrainConfig, fresh: bool = False) -> tuple[Report, str]:
    shown = io.StringIO()
    report = train(config, fresh=fresh, console=Console(file=shown, soft_wrap=True))
    return report, shown.getvalue()


def losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["event"] == "step"]


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report, str]:
    """A finished run: its folder, its report, and what it printed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    return folder, *run(recipe(text, folder))


def test_a_run_learns_and_reports(finished: tuple[Path, Report, str]):
    folder, report, shown = finished
    first, second = report.phases
    assert [(phase.first, phase.last) for phase in report.phases] == [(0, 6), (6, 12)]
    assert second.loss_last < first.loss_first
    assert first.held_out_last == pytest.approx(second.held_out_first, rel=1e-5)
    assert report.scored == 4 * 8 * 16
    assert 0 < report.bigram_bits < 8
    assert checkpoint.latest(folder / "checkpoints") == 12
    assert report.checkpoint == str(folder / "checkpoints/12")
    for expected in (
        "phase 1 of 2: to step 6 on mesh (data=4, model=2)",
        "step 10/12",
        "tokens/s",
        "resumed at step 6",
    ):
        assert expected in shown


def test_a_finished_run_prints_its_report_again(text: Path, finished: tuple[Path, Report, str]):
    folder, report, _ = finished
    again, shown = run(recipe(text, folder))
    assert again == report
    assert "is finished" in shown
    assert str(report) in shown
    assert "phase 1 of 2" not in shown


def test_a_lost_report_is_written_again(text: Path, finished: tuple[Path, Report, str]):
    folder, report, _ = finished
    (folder / "report.json").unlink()
    assert run(recipe(text, folder))[0] == report


def test_one_mesh_gives_the_same_losses(text: Path, tmp_path: Path, finished: tuple[Path, Report, str]):
    one = recipe(text, tmp_path / "one", phases=(), mesh={"axes": {"data": 1}, "hardware": "cpu"}, steps=12)
    run(one)
    np.testing.assert_allclose(losses(tmp_path / "one"), losses(finished[0]), rtol=1e-5)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model": {"layers": 3, "d_model": 16, "heads": 2, "seq": 16}}, r"model\.layers is 3, .* begun with 2"),
        ({"optimizer": {"learning_rate": 2e-2}}, r"optimizer\.learning_rate is 0\.02, .* begun with 0\.01"),
        ({"seed": 1}, "seed is 1, .* begun with 0"),
    ],
)
def test_a_changed_configuration_is_refused(
    text: Path, finished: tuple[Path, Report, str], entries: dict[str, object], message: str
):
    with pytest.raises(ConfigError, match=message):
        run(recipe(text, finished[0], **entries))


def test_a_shorter_configuration_is_refused(text: Path, finished: tuple[Path, Report, str]):
    short = recipe(
        text,
        finished[0],
        phases=(),
        mesh={"axes": {"data": 1}, "hardware": "cpu"},
        steps=8,
        optimizer={"learning_rate": 1e-2, "decay_steps": 12},
    )
    with pytest.raises(ConfigError, match="is at step 12, beyond this configuration's last step 8"):
        run(short)


def test_fresh_starts_over_and_ends_the_same(text: Path, tmp_path: Path, finished: tuple[Path, Report, str]):
    folder, report, _ = finished
    shutil.copytree(folder, tmp_path / "run")
    again, shown = run(recipe(text, tmp_path / "run"), fresh=True)
    assert "deleted checkpoints, log.jsonl, plan-0.json, plan-1.json, report.json, run.json" in shown
    assert again.model_copy(update={"checkpoint": report.checkpoint}) == report
    assert losses(tmp_path / "run") == losses(folder)


def test_fresh_deletes_nothing_of_anyone_else(text: Path, tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        run(recipe(text, tmp_path / "run"), fresh=True)
    assert (tmp_path / "run/notes.txt").read_text() == "mine"


def test_a_plan_needs_no_devices(text: Path, tmp_path: Path):
    mesh = {"axes": {"data": 64, "model": 8}, "hardware": "tpu-v5e"}
    config = recipe(text, tmp_path / "run", phases=(), mesh=mesh, steps=2, batch=64)
    plan = plan_phase(config, config.all_phases[0]).plan
    assert plan.mesh.size == 512
    assert not (tmp_path / "run").exists()
