"""Runs a function in several connected processes on this machine, each with CPU devices of its own.

    run("tests.runtime.test_x:function", argument)

The processes find one another by `jax.distributed`; their collectives go through gloo. So a mesh may span them, as it
spans the hosts of a cluster.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parents[1]


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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(i) for i in range(processes)]
        errors = [path.with_suffix(".err").open("w+") for path in files]
        command = [sys.executable, "-m", "tests.two_processes", function, json.dumps(args), str(port), str(processes)]
        started = [
            subprocess.Popen([*command, str(i), str(file)], env=env, cwd=ROOT, stdout=err, stderr=err)
            for i, (file, err) in enumerate(zip(files, errors, strict=True))
        ]
        try:
            until = time.monotonic() + timeout
            while any(p.poll() is None for p in started) and not any(p.poll() for p in started):
                if time.monotonic() > until:
                    break
                time.sleep(0.1)
        finally:
            ended = [p.poll() for p in started]  # None: did not end
            for process in started:
                process.kill()
                process.wait()
        written = []
        for err in errors:
            err.seek(0)
            written.append(err.read())
            err.close()
        report = "\n".join(
            f"process {i}: exit code {c}\n{t}" for i, (c, t) in enumerate(zip(ended, written, strict=True))
        )
        assert ended == [0] * processes, report
        return [json.loads(file.read_text()) for file in files]


def main(function: str, args: str, port: str, processes: str, index: str, file: str) -> None:
    """One of the processes."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(index))
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(*json.loads(args))
    Path(file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
