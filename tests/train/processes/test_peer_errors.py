"""A lost process is one line, whoever finds it and whatever fails meanwhile; without one nothing is hidden."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import pytest
from absl import logging
from etils import epath

from autoshard import cli
from autoshard.checkpoint import async_write
from autoshard.errors import CheckpointError
from autoshard.jaxpr.process_store import ProcessStore
from autoshard.train.processes import peers
from autoshard.train.processes.peer_errors import may_be_of_peer
from autoshard.train.processes.peers import LOST_CODE, PeerWatch
from benchmarks.numbered_rows import training_config

GLOO = "UNKNOWN: Gloo AllGather failed: [pair.cc:538] Read error [127.0.0.1]:40329: Connection reset by peer"
FAILED = "_SignalingThread.run() raised an exception: "
BARRIER = "DEADLINE_EXCEEDED: Barrier timed out. Id: x::0."
LONG = 60
"""A heartbeat that no test waits for."""


@dataclass
class Store:
    """JAX's, of process 0 of 2. Process 1 says another word whenever it is read, or a given one, or nothing new."""

    word: str | None = ""
    is_reachable: bool = True
    read: threading.Event = field(default_factory=threading.Event)
    said: dict[str, str] = field(default_factory=dict[str, str])

    def key_value_set(self, key: str, word: str, allow_overwrite: bool) -> None:
        assert allow_overwrite
        self.said[key] = word

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        if not self.is_reachable:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE")
        if self.word is not None:
            self.said[f"{folder}1"] = self.word or str(time.monotonic())
            self.read.set()
        return list(self.said.items())


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store; beats are fast, and this process is one of two, which does not end."""
    found = Store()
    monkeypatch.setattr(peers, "process_store", lambda: ProcessStore(found, 0, 2))
    monkeypatch.setattr(peers, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"exit code {code}"))
    monkeypatch.delenv(peers.SUPERVISED, raising=False)
    return found


@contextlib.contextmanager
def watching(heartbeat: float) -> Generator[PeerWatch]:
    """A watch that is not to leave."""
    watch = PeerWatch(heartbeat, pytest.fail)
    try:
        yield watch
    finally:
        watch.end(finished=False)


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    """The error, raised from another one."""
    try:
        raise error from cause
    except Exception as caught:
        return caught


def save_fails(error: Exception) -> None:
    """Has a thread log the error, as Orbax does."""

    def run() -> None:
        try:
            raise error
        except Exception as failed:
            logging.exception(f"{FAILED}%s", failed)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("error", "may"),
    [
        (jax.errors.JaxRuntimeError(GLOO), True),
        (ValueError(GLOO), True),
        (TimeoutError("async_write_complete"), False),
        (raised(TimeoutError("async_write_complete"), jax.errors.JaxRuntimeError(BARRIER)), True),
        (raised(CheckpointError("step 4"), raised(TimeoutError(), jax.errors.JaxRuntimeError(BARRIER))), True),
        (ValueError("UNAVAILABLE: a storage's"), False),
        (ConnectionResetError("Connection reset by peer"), False),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), False),
        (raised(CheckpointError("step 4"), OSError("no space left")), False),
        (None, False),
    ],
)
def test_what_may_be_of_a_lost_process(error: Exception | None, may: bool):
    assert may_be_of_peer(error) == may


def test_a_loss_that_two_threads_find_is_said_once(store: Store, monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    twice, left, over = threading.Event(), threading.Event(), threading.Event()

    def say(why: str) -> None:
        said.append(why)
        if len(said) == 1:
            second.start()  # finds it while the first one says it
            twice.wait(0.2)
        else:
            twice.set()

    def end(code: int) -> None:  # after which nothing runs
        left.set()
        over.wait()
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", end)
    watch = PeerWatch(LONG, say)

    def leave() -> None:
        with contextlib.suppress(SystemExit):
            watch.leave("process 1 of 2 is lost")

    first, second = (threading.Thread(target=leave) for _ in range(2))
    first.start()
    assert left.wait(10)
    try:
        assert said == ["process 1 of 2 is lost"]
    finally:
        over.set()
        first.join()
        second.join()
        watch.end(finished=False)


def test_what_a_lost_process_explains_is_not_logged(store: Store, caplog: pytest.LogCaptureFixture):
    with watching(LONG) as watch:
        assert store.read.wait(10)
        store.word = None
        save_fails(jax.errors.JaxRuntimeError(GLOO))
        save_fails(raised(TimeoutError("async_write_complete"), jax.errors.JaxRuntimeError(BARRIER)))
        assert watch.lost() == 1
        assert not caplog.records


def test_what_no_process_explains_is_logged_at_once(store: Store, caplog: pytest.LogCaptureFixture):
    with watching(LONG):
        store.word = None
        save_fails(OSError("no space left"))
        logging.error("Gloo")
        assert [record.getMessage() for record in caplog.records] == [f"{FAILED}no space left", "Gloo"]


def test_what_was_held_back_is_logged_when_the_run_ends(store: Store, caplog: pytest.LogCaptureFixture):
    with watching(LONG):
        save_fails(jax.errors.JaxRuntimeError(GLOO))
        assert not caplog.records
    [record] = caplog.records
    assert record.exc_info
    assert (record.levelname, record.name, record.getMessage()) == ("ERROR", "absl", FAILED + GLOO)
    save_fails(jax.errors.JaxRuntimeError(GLOO))
    assert len(caplog.records) == 2


def test_what_was_held_back_is_logged_when_all_are_heard_of_for_a_heartbeat(
    store: Store, caplog: pytest.LogCaptureFixture
):
    with watching(1.0):
        save_fails(jax.errors.JaxRuntimeError(GLOO))
        until = time.monotonic() + 20
        while not caplog.records:
            assert time.monotonic() < until, "it was never logged"
            time.sleep(0.01)


def test_what_was_held_back_is_logged_where_no_lost_process_is_found(store: Store, caplog: pytest.LogCaptureFixture):
    store.word = "ended"
    with watching(0.1) as watch:
        for _ in range(2):
            store.read.clear()
            assert store.read.wait(10)
        store.is_reachable = False  # from here on the watch's own thread finds nothing
        save_fails(jax.errors.JaxRuntimeError(GLOO))
        assert watch.lost() is None
        assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError(GLOO),
        ValueError(GLOO),
        raised(CheckpointError("step 4 could not be written"), jax.errors.JaxRuntimeError(GLOO)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_command_that_loses_a_process_says_so_in_a_line(
    store: Store,
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoints = epath.Path(tmp_path / "run/checkpoints")
    saving = async_write.Saving(4, checkpoints / "4", concurrent.futures.Future())
    late = threading.Timer(10, saving.future.set_result, (None,))  # in Orbax, after many minutes

    def train(*_: Any, **__: Any) -> None:
        monkeypatch.setitem(async_write._in_flight, str(checkpoints), saving)
        late.start()
        assert store.read.wait(10)
        store.word = None
        save_fails(jax.errors.JaxRuntimeError(GLOO))
        raise error

    def end(code: int) -> None:
        assert not caplog.records
        raise SystemExit(code)

    monkeypatch.setenv(peers.SUPERVISED, "1")
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(cli, "connect", lambda *_: None)
    monkeypatch.setattr(cli, "use_platform", lambda *_, **__: None)
    monkeypatch.setattr(cli, "train", train)
    options = ["--coordinator", "here:1", "--processes", "2", "--id", "0", "--heartbeat", str(LONG)]
    with pytest.raises(SystemExit) as ended:
        cli.app(["train", str(training_config(tmp_path, "run", 4)), *options], standalone_mode=False)
    assert late.is_alive()
    late.cancel()
    assert ended.value.code == LOST_CODE
    assert re.fullmatch(r"error: process 1 of 2 is lost; nothing is saved yet, [^\n]*\n", capfd.readouterr().err)
