"""Whole training runs in this process: phases on different meshes, finished runs, changed configurations."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from etils import epath
from rich.console import Console

from autoshard import checkpoint
from autoshard.errors import CheckpointError, ConfigError, MeshError, NonFiniteError
from autoshard.runs.curves import runs_in
from autoshard.runs.report import Report, StepEvent
from autoshard.runs.run_folder import RunFolder
from autoshard.train.config import TrainConfig
from autoshard.train.loop import train
from autoshard.train.phase import plan_phase
from tests.runs.test_wandb_run import StandIn
from tests.train.test_stop_signals import StoppedAfter

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
    assert report is not None
    return report, shown.getvalue()


def losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["event"] == "step"]


@pytest.fixture(scope="module")
def wandb() -> StandIn:
    """What `finished` is sent to."""
    return StandIn()


@pytest.fixture(scope="module")
def finished(text: Path, wandb: StandIn, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report, str]:
    """A finished run: its folder, its report, and what it printed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", wandb)
        return folder, *run(recipe(text, folder, wandb={"project": "trees"}))


def test_metrics_are_sent_where_the_configuration_asks(wandb: StandIn, finished: tuple[Path, Report, str]):
    (begun,) = wandb.begun
    assert (begun["project"], begun["config"]["batch"]) == ("trees", 8)
    assert [metrics["loss"] for _, metrics in wandb.logged if "loss" in metrics] == losses(finished[0])
    assert any("eval_loss" in metrics for _, metrics in wandb.logged)
    assert wandb.closed == 1


def test_a_run_learns_and_reports(finished: tuple[Path, Report, str]):
    folder, report, shown = finished
    first, second = report.phases
    assert [(phase.first, phase.last) for phase in report.phases] == [(0, 6), (6, 12)]
    assert second.loss_last < first.loss_first
    assert first.held_out_last == pytest.approx(second.held_out_first, rel=1e-5)
    assert report.scored == 4 * 8 * 16
    assert 0 < report.bigram_bits < 8
    assert checkpoint.latest(folder / "checkpoints") == 12
    assert [listed.state for listed in runs_in(epath.Path(folder))] == ["finished"]
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


def test_a_lost_or_damaged_report_is_written_again(text: Path, finished: tuple[Path, Report, str]):
    folder, report, _ = finished
    stored = (folder / "report.json").read_text()
    (folder / "report.json").write_text(stored[: len(stored) // 2])
    assert run(recipe(text, folder))[0] == report
    assert (folder / "report.json").read_text() == stored


def test_a_damaged_log_is_read_where_it_can_be(text: Path, tmp_path: Path, finished: tuple[Path, Report, str]):
    folder, report, _ = finished
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run/report.json").unlink()
    lines = (folder / "log.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run/log.jsonl").write_text("".join([*lines[:3], lines[3][:20] + "\n", *lines[4:]]))
    again, shown = run(recipe(text, tmp_path / "run"))
    assert "log.jsonl has 1 damaged lines, which are dropped" in shown
    assert again.held_out_bits == report.held_out_bits
    assert again.phases[1] == report.phases[1]
    (tmp_path / "run/log.jsonl").unlink()
    (tmp_path / "run/report.json").unlink()
    assert run(recipe(text, tmp_path / "run"))[0].phases == ()


def test_a_stopped_run_is_saved_and_ends_the_same(text: Path, tmp_path: Path, finished: tuple[Path, Report, str]):
    config = recipe(text, tmp_path / "run")
    for taken, saved in ((0, None), (1, 1)):
        stop = StoppedAfter(taken)
        assert train(config, console=Console(file=io.StringIO()), stop=stop) is None
        assert checkpoint.latest(tmp_path / "run/checkpoints") == saved
        assert [listed.state for listed in runs_in(epath.Path(tmp_path))] == ["stopped"]
    report, shown = run(config)
    assert "from its checkpoint at step 1 of 12" in shown
    assert report.model_copy(update={"checkpoint": ""}) == finished[1].model_copy(update={"checkpoint": ""})
    assert losses(tmp_path / "run") == losses(finished[0])


def test_more_steps_extend_a_finished_run(text: Path, tmp_path: Path, finished: tuple[Path, Report, str]):
    """What was stays: the learning rate has decayed when the run was to end, and does not decay again."""
    longer = recipe(text, tmp_path / "run")
    phases = (longer.phases[0], longer.phases[1].model_copy(update={"until": 15}))
    longer = longer.model_copy(update={"phases": phases})
    shutil.copytree(finished[0], tmp_path / "run")
    report, shown = run(longer)
    assert "from its checkpoint at step 12 of 15" in shown
    assert "the learning rate decays until step 12" in shown
    assert "until step 15, are taken at 0.001, which is 0.1 (`final`) of the largest" in shown
    assert [(phase.first, phase.last) for phase in report.phases] == [(0, 6), (6, 15)]
    events = [e for e in RunFolder(epath.Path(tmp_path / "run")).events() if isinstance(e, StepEvent)]
    assert [e.step for e in events] == list(range(1, 16))
    assert [e.loss for e in events[:12]] == losses(finished[0])
    np.testing.assert_allclose([e.learning_rate for e in events[12:]], 1e-3, rtol=1e-6)
    assert run(longer)[1].startswith("the run in ")


def test_a_run_on_another_chip_than_it_is_predicted_for_says_so(
    text: Path, tmp_path: Path, finished: tuple[Path, Report, str]
):
    other = {"phases": (), "steps": 1, "mesh": {"axes": {"data": 2}, "hardware": "tpu-v5e"}, "strategy": "dp"}
    _, shown = run(recipe(text, tmp_path / "run", **other))
    assert "  predicted for tpu-v5e, and run on cpu: steps here take other times than are predicted\n" in shown
    assert "predicted for" not in finished[2]


def test_a_failure_before_the_first_step_leaves_nothing_that_refuses(text: Path, tmp_path: Path):
    large = {"phases": (), "steps": 2, "mesh": {"axes": {"data": 16}, "hardware": "cpu"}}
    with pytest.raises(MeshError, match="needs 16 devices and this process has 8"):
        run(recipe(text, tmp_path / "run", **large))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="there is no text source"):
        run(recipe(tmp_path / "none", tmp_path / "run"))
    assert RunFolder(epath.Path(tmp_path / "run")).settings() is None


def test_one_mesh_gives_the_same_losses(text: Path, tmp_path: Path, finished: tuple[Path, Report, str]):
    one = recipe(text, tmp_path / "one", phases=(), mesh={"axes": {"data": 1}, "hardware": "cpu"}, steps=12)
    run(one)
    np.testing.assert_allclose(losses(tmp_path / "one"), losses(finished[0]), rtol=1e-5)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model": {"layers": 3, "d_model": 16, "heads": 2, "seq": 16}}, r"model\.layers is 3, .* begun with 2"),
        ({"optimizer": {"learning_rate": 2e-2}}, r"optimizer\.learning_rate is 0\.02, .* begun with 0\.01"),
        ({"optimizer": {"learning_rate": 1e-2, "decay_steps": 9}}, r"^optimizer: decay_steps is 9, .* begun with 12"),
        ({"seed": 1}, "seed is 1, .* begun with 0"),
    ],
)
def test_a_changed_configuration_is_refused(
    text: Path, finished: tuple[Path, Report, str], entries: dict[str, object], message: str
):
    with pytest.raises(ConfigError, match=message):
        run(recipe(text, finished[0], **entries))


def test_a_changed_state_is_refused_before_anything_is_planned(
    text: Path, tmp_path: Path, finished: tuple[Path, Report, str]
):
    """As where code has changed: the settings are the same, the state is not."""
    shutil.copytree(finished[0], tmp_path / "run")
    config = recipe(text, tmp_path / "run", model={"layers": 2, "d_model": 32, "heads": 2, "seq": 16})
    (tmp_path / "run/run.json").write_text(json.dumps(config.state_settings()))
    (tmp_path / "run/report.json").unlink()
    shown = io.StringIO()
    with pytest.raises(CheckpointError, match=r"another state .*: params/.* is float32\[.*--fresh"):
        train(config, console=Console(file=shown, soft_wrap=True))
    assert "phase" not in shown.getvalue()


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
    again, shown = run(recipe(text, tmp_path / "run", profile={"steps": [6, 7]}), fresh=True)  # over the change of mesh
    plans = "plan-0.html, plan-0.json, plan-1.html, plan-1.json"
    assert "deleted checkpoints, events.out.tfevents." in shown
    assert f"log.jsonl, metrics.csv, {plans}, report.json, run.json" in shown
    assert shown.count("the plan drawn: ") == 2
    assert (tmp_path / "run/plan-1.html").read_text().startswith("<!doctype html>")
    assert again.model_copy(update={"checkpoint": report.checkpoint}) == report
    assert losses(tmp_path / "run") == losses(folder)
    assert list((tmp_path / "run/plugins/profile").glob("*/*.xplane.pb"))
    assert "plugins" in RunFolder(epath.Path(tmp_path / "run")).clear()
    with pytest.raises(ConfigError, match=r"profile: .*steps are \[7, 6\]: give the first and the last"):
        recipe(text, tmp_path / "run", profile={"steps": [7, 6]})


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


def test_a_config_may_ask_what_is_done_of_steps_that_are_not_finite(text: Path, tmp_path: Path):
    mesh = {"axes": {"data": 2}, "hardware": "cpu"}
    endless = {"learning_rate": 1e30, "warmup": 0}  # the second step sees what the first one made of the parameters
    entries: dict[str, object] = {"phases": (), "mesh": mesh, "steps": 3, "optimizer": endless}
    with pytest.raises(
        NonFiniteError, match=r"step 2: not finite: grad_norm, state.*; its batch is finite; the run ends, and nothing"
    ):
        run(recipe(text, tmp_path / "run", nan="stop", **entries))
    assert [listed.state for listed in runs_in(epath.Path(tmp_path))] == ["failed"]
    _, shown = run(recipe(text, tmp_path / "run", nan="skip", **entries))
    assert "step 2: not finite: grad_norm" in shown
    assert shown.count("the step is skipped") == 2
    assert "since step" not in shown
    _, shown = run(recipe(text, tmp_path / "run", **entries), fresh=True)
    (said,) = re.findall("the loss is NaN or infinite since step ., and the run went on: with `nan: stop`, .*", shown)
    assert "since step 3" in said
    with pytest.raises(ConfigError, match="nan"):
        recipe(text, tmp_path / "run", nan="halt")


def test_a_config_may_ask_for_micro_batches(text: Path, tmp_path: Path):
    mesh = {"axes": {"data": 4}, "hardware": "cpu"}
    config = recipe(text, tmp_path / "run", phases=(), mesh=mesh, steps=2, microbatches=2)
    assert plan_phase(config, config.all_phases[0]).plan.passes[0].written == "microbatch:2"
    derived = recipe(text, tmp_path / "run", phases=(), mesh=mesh, steps=2, micro_batch=1)
    assert plan_phase(derived, derived.all_phases[0]).plan.passes[0].written == "microbatch:2"
    with pytest.raises(ConfigError, match=r"micro_batch: on .*data=4.*: a batch of 8 is not a multiple of 3 .* = 12"):
        derived.model_copy(update={"micro_batch": 3}).microbatches_on(derived.all_phases[0].mesh)
    with pytest.raises(ConfigError, match="microbatches"):
        recipe(text, tmp_path / "run", microbatches=0)
