"""Several processes of one run on this machine: killed, stopped, resumed on another number; every row is seen once."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from autoshard import checkpoint, cli
from autoshard.errors import ConfigError
from autoshard.train.config import named_config
from autoshard.train.loop import train
from autoshard.train.processes import gpus
from autoshard.train.processes.connection import _HOSTS, _SIZES, has_peers
from autoshard.train.processes.launch import Ended, launch, supervised
from autoshard.train.processes.peers import SUPERVISED
from benchmarks.numbered_rows import LAST, ROWS, SlowRows, end_seconds, launched_process, losses, training_config
from tests.forked import command

ROOT = Path(__file__).parents[3]
SLOW = 2
"""Times as long as on a machine without other work; less than a hang takes."""


def launched(path: Path, moment: Callable[[], bool], number: signal.Signals) -> tuple[int | None, str]:
    """Runs two processes of two devices, and sends the second a signal at a moment: the exit code, and standard error.

    Raises:
      TimeoutError: they did not end in time; none of them is waited for as long as a heartbeat, 60 seconds.
    """
    process = command("launch", "--processes", 2, "--", "train", path, PYTHONPATH=str(ROOT), JAX_NUM_CPU_DEVICES="2")
    try:
        until = time.monotonic() + 120
        while process.returncode is None and not moment():
            assert time.monotonic() < until, "the moment never came"
            time.sleep(0.02)
        victim = launched_process(process.pid, 1)
        assert victim is not None
        os.kill(victim, number)
        errors = process.communicate(timeout=SLOW * end_seconds(heartbeat=0))[1]
    finally:
        process.kill()
    return process.returncode, errors


def test_killed_stopped_and_resumed_on_other_processes_and_devices_no_row_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file, whose mesh takes the devices that there are."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    train(named_config(training_config(tmp_path, "whole", 4)), console=Console(quiet=True))
    path, run = training_config(tmp_path, "run", -1), tmp_path / "run"
    (tmp_path / "slow").touch()

    code, said = launched(path, lambda: bool(checkpoint.latest(run / "checkpoints")), signal.SIGKILL)
    assert code == 128 + signal.SIGKILL
    saved = checkpoint.latest(run / "checkpoints")
    assert f"process 1 of 2 was ended by SIGKILL, and the others with it; step {saved} is saved" in said
    assert "Traceback" not in said

    code, said = launched(path, lambda: 7 in dict(losses(run)), signal.SIGTERM)
    assert code == 128 + signal.SIGTERM, said
    saved = checkpoint.latest(run / "checkpoints")
    assert saved is not None
    assert saved >= 7
    assert f"stopped; step {saved} is saved, and the same command resumes from there" in said
    assert max(losses(run))[0] == saved

    (tmp_path / "slow").unlink()
    shown = io.StringIO()
    train(named_config(path), console=Console(file=shown, width=200))  # in one process of eight devices
    assert (
        f"the mesh was (data=4) of cpu until step {saved}: the state is placed anew, and a step takes"
        in shown.getvalue()
    )
    np.testing.assert_array_equal(checkpoint.restore(run / "checkpoints")["seen"], np.ones(ROWS))
    assert losses(run) == losses(tmp_path / "whole")
    assert [step for step, _ in losses(run)] == list(range(1, LAST + 1))


class Signalled(SlowRows):
    """Rows before the first of which process 1 gets a signal, where the folder has a file ``signal``."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        if jax.process_index() == 1 and (Path(folder) / "signal").exists():
            (Path(folder) / "signal").unlink()
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("saved", [0, 2])
def test_a_signal_to_one_process_before_the_first_step_lets_all_leave_together(
    saved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = training_config(tmp_path, "run", 2)
    path.write_text(path.read_text().replace("benchmarks.numbered_rows:SlowRows", f"{__name__}:Signalled"))
    if saved:
        train(named_config(path).model_copy(update={"steps": saved}), console=Console(quiet=True))
    (tmp_path / "signal").touch()
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port.bind(("127.0.0.1", 0))
        cluster = ["--coordinator", f"127.0.0.1:{port.getsockname()[1]}", "--processes", 2, "--heartbeat", 30]
        environment = {"JAX_NUM_CPU_DEVICES": "1", SUPERVISED: "1"}
        started = [command("train", path, *cluster, "--id", n, **environment) for n in range(2)]
        said = [process.communicate(timeout=120)[1] for process in started]
    line = f"stopped; step {saved} is saved, and the same command resumes from there"
    line = line if saved else "stopped; nothing is saved yet, and the same command starts over"
    ours = ("stopped; ", "SIGTERM: ", "error: ", "Traceback")  # others are of JAX's runtime, which sees one leave
    own = [[line for line in text.splitlines() if line.startswith(ours)] for text in said]
    assert own == [[line], ["SIGTERM: stopping; the next signal stops at once", line]]
    assert [process.returncode for process in started] == [143, 143]
    assert checkpoint.latest(tmp_path / "run/checkpoints") == (saved or None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["launch", "--processes", "2", "--", "plan", "x.yaml"], "launch runs `train CONFIG`"),
        (["launch", "--processes", "2", "--", "train"], "launch runs `train CONFIG`"),
        (["launch", "--processes", "2", "--", "train", "--heartbeat", "5"], "launch runs `train CONFIG`"),
        (["launch", "--processes", "2", "--", "train", "--heartbeat", "5", "none.yaml"], "cannot read none.yaml"),
        (["train", "x.yaml", "--id", "0"], "belong together: give all three"),
        (["train", "x.yaml", "--coordinator", "here", "--processes", "2", "--id", "0"], "give a host and a port"),
    ],
)
def test_a_wrong_command_is_refused(arguments: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        cli.app(arguments, standalone_mode=False)


def test_peers_that_never_come_are_one_line(tmp_path: Path):
    arguments = ["--coordinator", "127.0.0.1:9", "--processes", "2", "--id", "1", "--wait", "1"]
    waits = command("train", training_config(tmp_path, "run", 2), *arguments)
    assert waits.communicate()[1] == "error: not all 2 processes came to 127.0.0.1:9 within 1 seconds\n"
    assert waits.returncode == 75


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        ("os._exit(75)", "error: lost\n"),
        ("os.abort()", ""),
        ("time.sleep(1.5); os.abort()", ""),
        ("os._exit(2)", None),
    ],
)
def test_what_jax_writes_where_a_process_is_lost_is_left_out(
    end: str, shown: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """JAX may write that it aborts a process which leaves at that moment."""
    written = "F1125 14:16:12 client.h:86] Terminating process\nerror: lost\n\n"
    code = f"import os, time; os.write(2, {written.encode()!r}); {end}"

    def start(*_: object, **__: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, process_group=0)

    monkeypatch.setattr("autoshard.train.processes.launch._start", start)
    supervised([])
    assert capsys.readouterr().err == (written if shown is None else shown)


def test_an_error_of_process_0_stands_though_another_one_aborts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX aborts the others once process 0 leaves the store, which may be long before it has ended."""

    def start(command: list[str], *_: object, **given: Any) -> subprocess.Popen[bytes]:
        fails = "import sys, time; time.sleep(0.5); sys.stderr.write('error: absent'); raise SystemExit(2)"
        code = fails if command[-1] == "0" else "import os; os.abort()"
        return subprocess.Popen([sys.executable, "-c", code], process_group=0, **given)

    monkeypatch.setattr("autoshard.train.processes.launch._start", start)
    assert launch([], [{}, {}], wait=1) == Ended(2, 0, errors="error: absent")


@pytest.mark.parametrize(
    ("name", "alone", "several"),
    [
        ("SLURM_STEP_NUM_TASKS", "1", "4"),
        ("OMPI_COMM_WORLD_SIZE", "1", "2"),
        ("MEGASCALE_NUM_SLICES", "1", "2"),
        ("TPU_WORKER_HOSTNAMES", "localhost", "host-0,host-1"),
        ("TPU_PROCESS_ADDRESSES", "host-0:8476", "host-0:8476,host-1:8476"),
    ],
)
def test_a_task_of_several_knows_of_its_peers(
    monkeypatch: pytest.MonkeyPatch, name: str, alone: str, several: str
) -> None:
    for each in (*_SIZES, *_HOSTS):
        monkeypatch.delenv(each, raising=False)
    assert not has_peers()
    monkeypatch.setenv(name, alone)
    assert not has_peers()
    monkeypatch.setenv(name, several)
    assert has_peers()


PYTHON = """#!/bin/sh
[ "$1" = -c ] && { echo 4; exit; }
for last in "$@"; do :; done
printf %s "$JAX_LOCAL_DEVICE_IDS" > "$0.$last"
"""


def test_each_process_gets_its_own_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, python = training_config(tmp_path, "run", 2), tmp_path / "python"  # one that says JAX finds four GPUs
    path.write_text(path.read_text().replace("platform: cpu", "platform: gpu"))
    python.write_text(PYTHON)
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(gpus, "entry_points", lambda group: [EntryPoint("xla_cuda13", "jax_plugins.xla_cuda13", group)])
    with pytest.raises(ConfigError, match="--processes 3: 4 GPUs cannot be divided evenly .* start 1 or 2 or 4, or"):
        cli.app(["launch", "--processes", "3", "--", "train", str(path)], standalone_mode=False)
    assert cli.app(["launch", "--processes", "2", "--", "train", str(path)], standalone_mode=False) == 0
    assert [(tmp_path / f"python.{n}").read_text() for n in range(2)] == ["0,1", "2,3"]
