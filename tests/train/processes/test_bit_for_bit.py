"""A float32 decoder trained by one, two and four processes: the same losses and the same state, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import yaml
from rich.console import Console

from autoshard import checkpoint
from autoshard.train.config import named_config
from autoshard.train.loop import train
from benchmarks.numbered_rows import losses
from tests.forked import command
from tests.two_processes import run

ROOT = Path(__file__).parents[3]
DEVICES = 4


def config(folder: Path, run: str) -> Path:
    """The file of a run of three steps in ``folder / run``."""
    entries = {
        "model": {"layers": 2, "d_model": 16, "heads": 2, "seq": 16},
        "data": {"source": str(folder / "text.txt"), "holdout": 2},
        "optimizer": {"learning_rate": 1e-2},
        "batch": 8,
        "strategy": "fsdp",
        "mesh": {"axes": {"data": 2, "model": 2}, "hardware": "cpu"},
        "steps": 3,
        "eval": {"final_batches": 1},
        "checkpoint": {"dir": str(folder / run)},
        "log_every": 1,
        "platform": "cpu",
    }
    path = folder / f"{run}.yaml"
    path.write_text(yaml.safe_dump(entries))
    return path


def trained(path: str) -> None:
    """Runs in each of several processes."""
    train(named_config(Path(path)), console=Console(quiet=True))


def ended(run: Path) -> tuple[list[tuple[int, float]], dict[str, bytes]]:
    """The steps of a run with their losses, and its last state."""
    state = checkpoint.restore(run / "checkpoints")
    return losses(run), {path: np.asarray(value).tobytes() for path, value in state.items()}


def test_the_number_of_launched_processes_changes_no_bit(tmp_path: Path):
    (tmp_path / "text.txt").write_bytes(np.random.default_rng(0).integers(97, 123, 2000, np.uint8).tobytes())
    launch = command("launch", "--processes", 1, "--", "train", config(tmp_path, "1"), PYTHONPATH=str(ROOT))
    said = launch.communicate(timeout=240)[1]
    assert launch.returncode == 0, said
    whole = ended(tmp_path / "1")
    assert [step for step, _ in whole[0]] == [1, 2, 3]
    for n in (2, 4):
        given = str(config(tmp_path, str(n)))
        run("tests.train.processes.test_bit_for_bit:trained", given, processes=n, devices=DEVICES // n)
        assert ended(tmp_path / str(n)) == whole
