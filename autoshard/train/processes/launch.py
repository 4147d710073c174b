"""launch: several processes of one run on one machine, started together and ended together.

Each is the same command, with the address of the first one, their number, and its own. The first one prints. What the
others write is kept, and shown where one of them is the first to fail.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoshard.train.processes.peers import LOST_CODE, SUPERVISED
from autoshard.train.stop_signals import SIGNALS

POLL_SECONDS = 0.02
LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
STOPPED = tuple(128 + each for each in SIGNALS)
"""Exit codes of a process that saved its state because a signal asked it to stop."""
GRACE_SECONDS = 2.0
"""In which the others may end by themselves where one ended with an error, that all of them may have found."""
HELD_SECONDS = 0.1
"""For which what the first process writes to standard error is held back: it may only be that another is gone."""
ABORT_SECONDS = 0.5
"""For which what a supervised process writes there is held back: JAX may be aborting it, and write where."""
STACK_SECONDS = 15.0
"""The same where JAX has written that it cannot reach another process: until it has aborted, with a stack trace."""
_UNREACHED = re.compile(rb"^[EFW]\d{4} .*(preemption_sync_manager|coordination_service_agent|client\.h:)", re.MULTILINE)
"""JAX's log where it does."""
SHOWN = 20_000
"""Characters of what a failed process wrote, the last."""


@dataclass(frozen=True)
class Ended:
    """How the processes ended."""

    code: int
    """Exit code of the first to fail, as shells give it; 0 where all are finished."""
    process: int | None = None
    """Which failed first, or was lost."""
    by: signal.Signals | None = None
    """The signal that ended it from outside."""
    errors: str = ""
    """What it wrote, where that has not been shown."""
    lost: bool = False
    """Whether the others could not reach it."""


def launch(arguments: Sequence[str], environments: Sequence[Mapping[str, str]], wait: float) -> Ended:
    """Runs ``python -m autoshard ARGUMENTS`` in several processes until all have ended.

    SIGINT and SIGTERM are passed on to all. Where a process fails, the others are ended: they would wait for it.

    Args:
      environments: of each process, the variables beside those of this one.
      wait: seconds that the others have to save their state once one has stopped at a signal.
    """
    with socket.socket() as port, tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # kept for the first process, whose server shares it
        port.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{port.getsockname()[1]}"
        options = ["--coordinator", address, "--processes", str(len(environments))]
        command = [sys.executable, "-m", "autoshard", *arguments, *options]
        errors = [Path(folder) / str(n) for n in range(len(environments))]
        started: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, started)
        stack.enter_context(_passed_on(started))
        for n, (path, environment) in enumerate(zip(errors, environments, strict=True)):
            kept: Any = stack.enter_context(path.open("wb")) if n else None
            each = [*command, "--id", str(n)]
            started.append(_start(each, environment, stdout=kept, stderr=kept or subprocess.PIPE))
        shown = threading.Thread(target=_show_errors, args=(started, errors[0]))
        shown.start()
        ended = _watched(started, errors, wait)
        _end(started)
        shown.join()
        if ended.process == 0 and not ended.lost and errors[0].exists():
            ended = replace(ended, errors=_end_of(errors[0]))
        return ended


def supervised(arguments: Sequence[str]) -> int:
    """Runs ``python -m autoshard ARGUMENTS`` in a process of its own, and passes signals on to it.

    Returns:
      Its exit code, as shells give it. What JAX wrote where it aborted the process, or was about to when this one
      left for a process that is lost, is left out.
    """
    with contextlib.ExitStack() as stack:
        process = _start([sys.executable, "-m", "autoshard", *arguments], {}, stderr=subprocess.PIPE)
        stack.callback(_end, [process])
        stack.enter_context(_passed_on([process]))
        assert process.stderr is not None
        pipe = stack.enter_context(process.stderr)
        while written := os.read(pipe.fileno(), 1 << 16):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STACK_SECONDS if _UNREACHED.search(written) else ABORT_SECONDS)
            if process.returncode == LOST_CODE:
                written = b"".join(line for line in written.splitlines(keepends=True) if line.startswith(b"error: "))
            if process.returncode != -signal.SIGABRT:
                sys.stderr.write(written.decode(errors="replace"))
                sys.stderr.flush()
        code = process.wait()
    return code if code >= 0 else 128 - code


def _start(
    command: Sequence[str], given: Mapping[str, str], stdout: Any = None, stderr: Any = None
) -> subprocess.Popen[bytes]:
    """Starts a process that knows of being waited for, in a group of its own: Ctrl-C reaches it from here alone."""
    environment = {**os.environ, SUPERVISED: "1", **given}
    if environment.get(LOG_LEVEL, "1") == "1":  # what JAX sets: with the warnings of its own runtime
        environment[LOG_LEVEL] = "2"
    return subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment, process_group=0)


def _show_errors(started: Sequence[subprocess.Popen[bytes]], rest: Path) -> None:
    """Shows what the first process writes to standard error, until another one is ended by a signal; the ``rest``, most
    of which JAX writes of that, goes to a file.
    """
    first, *others = started
    assert first.stderr is not None
    with first.stderr as pipe:
        while written := os.read(pipe.fileno(), 1 << 16):
            time.sleep(HELD_SECONDS)
            if any((process.poll() or 0) < 0 for process in others):
                with rest.open("ab") as file:
                    file.write(written)
            else:
                sys.stderr.write(written.decode(errors="replace"))
                sys.stderr.flush()


def _watched(started: Sequence[subprocess.Popen[bytes]], errors: Sequence[Path], wait: float) -> Ended:
    """How the processes end."""
    while not (failed := [n for n, process in enumerate(started) if process.poll()]):
        if all(process.poll() == 0 for process in started):
            return Ended(0)
        time.sleep(POLL_SECONDS)
    first = min(failed, key=lambda n: started[n].returncode > 0)  # the others may have ended for that it was killed
    code: int = started[first].returncode
    if code == -signal.SIGABRT and first:  # JAX: process 0 cannot be reached; it may be about to end with an error
        _wait(started[:1], GRACE_SECONDS)
        if (own := started[0].poll()) is None:
            return Ended(LOST_CODE, 0, lost=True)
        first, code = (0, own) if own else (first, code)
    if code < 0:
        return Ended(128 - code, first, signal.Signals(-code))
    _wait(started, wait if code in STOPPED else GRACE_SECONDS)
    if code in STOPPED:
        return Ended(code, first)
    shown = first == 0 or started[0].poll() == code  # the first process found the same, and said so
    return Ended(code, first, errors="" if shown else _end_of(errors[first]))


def _end_of(errors: Path) -> str:
    return errors.read_text(errors="replace")[-SHOWN:]


def _wait(started: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Waits until all have ended, for so long at most."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(process.poll() is None for process in started):
        time.sleep(POLL_SECONDS)


def _end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in started:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _passed_on(started: Sequence[subprocess.Popen[bytes]]) -> Generator[None]:
    """Passes the signals that ask to stop on to the processes."""

    def passed(number: int, _: Any) -> None:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    before = {each: signal.signal(each, passed) for each in SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
