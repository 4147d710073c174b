"""Runs a function in several connected processes on this machine, each with CPU devices of its own.

    run("tests.runtime.test_x:function", argument)

The processes find one another by `jax.distributed`; their collectives go through gloo. So a mesh may span them, as it
spans the hosts of a cluster.
"""

from __future__ import annotations

import importlib
import json
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from tests.forked import Forked


def run(function: str, *args: Any, processes: int = 2, devices: int = 2, timeout: float = 300) -> list[Any]:
    """Calls ``function`` with ``args`` in each process, and returns what each of the calls returned, by process.

    Args:
      function: ``"module:name"``, of a module that can be imported from the top folder of the project.
      args: JSON values, as is what the function returns.
      devices: CPU devices of each process.
      timeout: seconds after which all are ended.

    Raises:
      AssertionError: a process failed, or did not end in time; has the errors that each wrote. The others are ended.
    """
    with socket.socket() as port, tempfile.TemporaryDirectory() as folder:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # shared with the first process, and with no other
        port.bind(("127.0.0.1", 0))
        files = [Path(folder) / str(i) for i in range(processes)]
        given = (function, json.dumps(args), port.getsockname()[1], processes)
        environment = {"JAX_NUM_CPU_DEVICES": str(devices)}
        started = [Forked(_call, (*given, i, str(file)), environment) for i, file in enumerate(files)]
        until = time.monotonic() + timeout
        while any(p.returncode is None for p in started) and not any(p.returncode for p in started):
            if time.monotonic() > until:
                break
            time.sleep(0.02)
        ended = [process.returncode for process in started]  # None: did not end
        for process in started:
            process.kill()
        written = [process.communicate()[1] for process in started]
        report = "\n".join(
            f"process {i}: exit code {c}\n{t}" for i, (c, t) in enumerate(zip(ended, written, strict=True))
        )
        assert ended == [0] * processes, report
        return [json.loads(file.read_text()) for file in files]


def _call(function: str, args: str, port: int, processes: int, index: int, file: str) -> None:
    """One of the processes."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, index)
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(*json.loads(args))
    Path(file).write_text(json.dumps(result))
    jax.distributed.shutdown()  # which waits for the others
