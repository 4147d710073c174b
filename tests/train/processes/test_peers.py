"""Processes that are started one by one, as on hosts: of one that is killed or halted the others say which it was."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from autoshard.jaxpr.process_store import ProcessStore
from autoshard.train.processes import peers
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


class Store:
    """The store of four processes, of which 2 says that it is there as often as it is read."""

    def __init__(self, words: dict[int, str]) -> None:
        self.words, self.reads = words, 0

    def key_value_set(self, key: str, word: str, allow_overwrite: bool) -> None:
        self.words[int(key.rpartition("/")[2])] = word

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        self.reads += 1
        self.words[2] = "left" if self.words[0].startswith("lost") else f"{self.reads}"
        return [(f"{folder}{n}", word) for n, word in self.words.items()]


def said_in_the_end(store: Store, process: int, heartbeat: float, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a watch says before its process is left."""
    said: list[str] = []
    left = threading.Event()

    def leave(code: int) -> None:
        assert code == LOST_CODE
        left.set()
        raise SystemExit

    monkeypatch.setattr(peers, "process_store", lambda: ProcessStore(store, process, 4))
    monkeypatch.setattr(peers.os, "_exit", leave)
    watch = peers.PeerWatch(heartbeat, said.append)
    assert left.wait(20)
    watch.end(finished=False)
    (line,) = said
    return line


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # in place of the exit
def test_process_0_says_which_is_lost_and_leaves_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store({0: "", 1: "7", 2: "0", 3: "ended"})
    assert said_in_the_end(store, 0, 1.5, monkeypatch) == "process 1 of 4 is lost"
    assert (store.words[0], store.words[2]) == ("lost 1", "left")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # in place of the exit
def test_the_others_hear_of_it_from_process_0(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store({0: "lost 1", 1: "7", 2: "0", 3: ""})
    assert said_in_the_end(store, 3, 600, monkeypatch) == "process 1 of 4 is lost"
    assert store.words[3] == "left"
