"""Processes of their own for tests, forked from one that has imported the program and done nothing else.

To import it takes a process seconds. The process to fork from is that of `multiprocessing`'s ``forkserver``, one for
each process of the tests; it starts no backend, so that each child starts its own, as a new interpreter would.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from autoshard.cli import main

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", "autoshard.cli"])
OPTIONS = {
    "JAX_NUM_CPU_DEVICES": ("jax_num_cpu_devices", int, -1),
    "JAX_COMPILATION_CACHE_DIR": ("jax_compilation_cache_dir", str, None),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": ("jax_persistent_cache_min_compile_time_secs", float, 1.0),
}
"""Variables that JAX reads when it is imported: its options, and their values where a variable is not there."""


class Forked:
    """A process that calls a function; as far as tests need it, what `subprocess.Popen` is with its output in pipes.

    Args:
      call: a function of a module that can be imported, and its ``arguments``. It ends as a program would: with the
        code of `SystemExit`, or with a traceback.
      environment: variables beside those of this process, and in place of `OPTIONS`.
    """

    def __init__(self, call: Callable[..., Any], arguments: tuple[Any, ...], environment: Mapping[str, str]) -> None:
        folder = Path(tempfile.mkdtemp())
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._output = [folder / name for name in ("out", "err")]
        given = (call, arguments, dict(environment), [str(path) for path in self._output])
        self._process = CONTEXT.Process(target=_run, args=given)
        self._process.start()
        self.pid = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """The exit code; that of a signal is negative; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """`returncode`."""
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Sends it a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it."""
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for its end: what it wrote to standard output and error.

        Raises:
          TimeoutError: it did not end within so many seconds.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise TimeoutError(f"process {self.pid} did not end within {timeout} seconds")
        out, err = (path.read_text() if path.exists() else "" for path in self._output)
        return out, err


def _run(call: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str], output: list[str]) -> None:
    for number, path in enumerate(output, 1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    for variable, (option, kind, otherwise) in OPTIONS.items():
        os.environ.pop(variable, None)
        jax.config.update(option, kind(environment[variable]) if variable in environment else otherwise)
    os.environ.update(environment)
    try:
        call(*arguments)
    finally:
        atexit._run_exitfuncs()  # processes of `multiprocessing` end without


def command(*arguments: object, **environment: str) -> Forked:
    """Starts ``autoshard ARGUMENTS``, by default with as many devices as it makes itself."""
    return Forked(_command, tuple(map(str, arguments)), environment)


def _command(*arguments: str) -> None:
    sys.argv = ["autoshard", *arguments]
    main()
