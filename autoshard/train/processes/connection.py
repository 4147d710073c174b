"""Connects the processes of a run, and says which of them was lost."""

from __future__ import annotations

import os
import re
import threading

import jax

from autoshard.checkpoint.manifest import first_line
from autoshard.errors import ConfigError, PeerError
from autoshard.strict_files import shortened
from autoshard.train.processes.peer_errors import may_be_of_peer
from autoshard.train.processes.peers import LOST_CODE, PeerWatch

_SIZES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "MEGASCALE_NUM_SLICES")
"""Environment variables with the number of processes that were started together, or of slices of TPUs."""
_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
"""Those with the hosts of a slice of TPUs, as Kubernetes Engine sets them."""

SAYS_AFTER = 30
"""Seconds after which a process that waits for others says so."""


def lost_peer(error: BaseException, watch: PeerWatch) -> PeerError | None:
    """The error that says which other process was lost, if that is what ``error`` is about."""
    if not may_be_of_peer(error) or jax.process_count() == 1:
        return None
    if (process := watch.lost()) is not None:
        return PeerError(watch.lost_text([process]))
    reason = shortened(first_line(error))
    return PeerError(f"process {jax.process_index()} of {jax.process_count()} lost another one: {reason}")


def has_peers() -> bool:
    """Whether Slurm's srun, Open MPI's mpirun or Kubernetes Engine on TPUs started this process as one of several."""
    several = any(os.environ.get(name, "1") != "1" for name in _SIZES)
    return several or any("," in os.environ.get(name, "") for name in _HOSTS)


def check_address(coordinator: str | None) -> None:
    """Raises ConfigError where ``coordinator`` is no host with a port."""
    if coordinator is not None and not re.fullmatch(r".+:\d{1,5}", coordinator):
        raise ConfigError(f"--coordinator {coordinator!r}: give a host and a port, such as 10.0.0.1:8476")


def connect(coordinator: str | None, processes: int | None, process_id: int | None, wait: int, heartbeat: int) -> None:
    """Connects this process to the others: to those named, or to those of the cluster that started it.

    Where they do not come the process ends, with a line that says so and `LOST_CODE`.

    Args:
      wait: seconds to wait for them.
      heartbeat: seconds after which a process that is not heard of counts as lost, and the others end.

    Raises:
      ConfigError: JAX finds no cluster.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_recoverability", True)  # else JAX aborts where any process is lost
    to, at = ("", "") if coordinator is None else (f" to {coordinator}", f" at {coordinator}")
    which = f"all {processes} processes" if processes else "all processes"
    line = f"error: not {which} came{to} within {wait} seconds\n"
    waits = f"waiting for {which}{at}: {wait} seconds at most\n"
    timers = [
        threading.Timer(wait, _leave, (line,)),  # JAX would abort, with a stack trace
        threading.Timer(SAYS_AFTER, os.write, (2, waits.encode())),
    ]
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process_id,
            initialization_timeout=wait + 30,
            heartbeat_timeout_seconds=heartbeat,
        )
    except (RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0]
        if coordinator is None:
            raise ConfigError(f"--distributed: JAX finds no cluster that started this process: {reason}") from None
        listens = ". Process 0 listens there: the host must be its own, and the port free" if process_id == 0 else ""
        raise ConfigError(f"--coordinator {coordinator}: {reason}{listens}") from None
    finally:
        for timer in timers:
            timer.cancel()


def _leave(line: str) -> None:
    os.write(2, line.encode())
    os._exit(LOST_CODE)
