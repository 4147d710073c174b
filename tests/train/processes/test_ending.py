"""What an error leaves of a run: the checkpoint that was being written is complete."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from etils import epath

from autoshard import checkpoint, cli
from autoshard.checkpoint import array_store
from autoshard.errors import ArgumentError, CheckpointError
from autoshard.runs.report import EndEvent
from autoshard.runs.run_folder import RunFolder
from autoshard.train import fit
from autoshard.train.processes import ending
from autoshard.train.processes.ending import failure_logged
from autoshard.train.stop_signals import StopSignals
from tests.forked import Forked

HERE = "tests.train.processes.test_ending"
WRITE_SECONDS = 1.0
"""That a write takes: longer than the program goes on after its error."""


def added(state: Any, batch: Any) -> Any:
    return state + batch["x"].sum(), {"loss": batch["x"].sum()}


def histogram() -> Any:
    """A step for a configuration."""
    return (lambda key: jnp.zeros(4)), added


def numbered(bad: int = 0) -> Any:
    """Five batches, and then an end; one may not be read."""
    for n in range(1, 6):
        if n == bad:
            raise ValueError(f"batch {n} cannot be read")
        yield {"x": np.ones(8, np.float32)}


def written_slowly(folder: str, bad: int, by_command: bool) -> None:
    """A program that ends by an error, and whose writes take long."""
    write = array_store.write

    def slow(*arguments: Any) -> None:
        time.sleep(WRITE_SECONDS)
        write(*arguments)

    array_store.write = slow
    if by_command:
        cli.app(["train", str(Path(folder) / "run.yaml")], standalone_mode=False)
        return
    every = bad - 1 if bad else None
    fit(added, jnp.zeros(4), numbered(bad), steps=9, checkpoints=Path(folder) / "checkpoints", every=every)


@pytest.mark.parametrize(
    ("bad", "by_command", "saved", "error"),
    [
        (0, False, 5, "ArgumentError: the batches ended after step 5 of 9, whose state is saved"),
        (3, False, 2, "ValueError: batch 3 cannot be read"),
        (0, True, 5, "ArgumentError: the batches ended after step 5 of 9, whose state is saved"),
    ],
)
def test_what_was_being_saved_is_complete_after_an_error(
    bad: int, by_command: bool, saved: int, error: str, tmp_path: Path
) -> None:
    entries = {
        "step": {"call": f"{HERE}:histogram"},
        "data": {"call": f"{HERE}:numbered"},
        "batch": 8,
        "mesh": {"axes": {"data": 2}, "hardware": "cpu"},
        "steps": 9,
        "checkpoint": {"dir": str(tmp_path), "every": 100},
        "platform": "cpu",
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(entries))
    process = Forked(written_slowly, (str(tmp_path), bad, by_command), {"JAX_NUM_CPU_DEVICES": "2"})
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 1
    assert said.strip().splitlines()[-1].removeprefix("autoshard.errors.").startswith(error), said
    assert "orbax" not in said
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == [str(saved)]
    state = checkpoint.restore(folder, like=jax.ShapeDtypeStruct((4,), jnp.float32))
    np.testing.assert_array_equal(state, np.full(4, 8.0 * saved))


def test_a_save_that_fails_too_is_a_note_and_a_lost_process_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def finish(folder: Any) -> None:
        asked.append(folder)
        raise CheckpointError("step 2 could not be written")

    monkeypatch.setattr(ending.checkpoint, "finish", finish)
    folder = epath.Path("run")
    with pytest.raises(ArgumentError, match="the first") as raised, ending.saves_finished(folder):
        raise ArgumentError("the first")
    assert raised.value.__notes__ == ["also: step 2 could not be written"]
    with pytest.raises(CheckpointError, match="step 2"), ending.saves_finished(folder):
        pass
    assert asked == [folder] * 2
    with pytest.raises(jax.errors.JaxRuntimeError), ending.saves_finished(folder):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: Connection reset by peer")
    with pytest.raises(ArgumentError), ending.saves_finished(None):
        raise ArgumentError("nothing is saved")
    assert asked == [folder] * 2


@pytest.mark.parametrize(("interrupted", "ends"), [(False, ["failed"]), (True, [])])
def test_what_became_of_a_signal_is_no_failure(interrupted: bool, ends: list[str], tmp_path: Path) -> None:
    """Such as the error that a hash which JAX calls makes of the interrupt."""
    folder, stop = RunFolder(epath.Path(tmp_path)), StopSignals()
    stop.interrupted = interrupted
    with pytest.raises(ValueError, match="not hashable"), failure_logged(folder, stop):
        raise ValueError("not hashable")
    assert [event.how for event in folder.events() if isinstance(event, EndEvent)] == ends
