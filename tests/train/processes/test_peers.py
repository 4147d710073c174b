"""Processes that are started one by one, as on hosts: of one that is killed or halted the others say which it was."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from autoshard.train.processes.peers import LOST_CODE
from benchmarks.numbered_rows import end_seconds, launched_process, losses, training_config
from tests.forked import command

ROOT = Path(__file__).parents[3]
HEARTBEAT = 5
"""In seconds."""
SLOW = 2
"""Times as long as on a machine without other work."""


@pytest.mark.parametrize(
    ("number", "victim", "which"),
    [
        (signal.SIGSTOP, 1, "process 1 of 2"),
        (signal.SIGKILL, 0, "process 0, which keeps the processes together,"),
    ],
)
def test_a_process_that_is_lost_ends_the_others_with_a_line(
    tmp_path: Path, number: signal.Signals, victim: int, which: str
) -> None:
    path = training_config(tmp_path, "run", 4)
    (tmp_path / "slow").touch()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = ("--coordinator", address, "--processes", 2, "--heartbeat", HEARTBEAT)
    running = [command("train", path, *options, "--id", n, PYTHONPATH=str(ROOT)) for n in range(2)]
    halted = None
    try:
        until = time.monotonic() + 120
        while not losses(tmp_path / "run"):
            assert time.monotonic() < until, "no step was taken"
            time.sleep(0.02)
        halted = launched_process(running[victim].pid, victim)
        assert halted is not None
        os.kill(halted, number)
        other = running[1 - victim]
        said = other.communicate(timeout=SLOW * end_seconds(HEARTBEAT))[1]
    finally:
        if halted is not None and number is signal.SIGSTOP:
            os.kill(halted, signal.SIGKILL)
        for each in running:
            each.kill()
    assert other.returncode == LOST_CODE, said
    assert re.fullmatch(rf"error: {which} is lost; (step \d+|nothing) is saved[^\n]*\n", said), said
