"""Several processes that train together: what the first one does for all, and what all agree on.

Where there is one process nothing is exchanged. Otherwise every process must call these functions, in the same order.
"""

from __future__ import annotations

import math
import os
import pickle
import re
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from autoshard.backend.process_local import local_dim
from autoshard.batches.prefetch import Prefetched
from autoshard.errors import ArgumentError, ConfigError, PeerError
from autoshard.jaxpr import dtype_from_name, product_flops
from autoshard.plan.decisions import Place
from autoshard.runs.device_probe import device_seconds
from autoshard.runs.host_times import HostTimes
from autoshard.runs.report import SlowDevicesEvent, StragglerEvent
from autoshard.runs.stragglers import PASSED, Findings, as_row, latest
from autoshard.runtime.plan import Plan
from autoshard.shared_folder import of_all
from autoshard.strict_files import shortened
from autoshard.train.peers import LOST_CODE, PeerWatch
from autoshard.train.sources import ChosenRows, arrays_only
from autoshard.train.stop_signals import StopSignals

_LOST = re.compile(r"Gloo|UNAVAILABLE|DEADLINE_EXCEEDED|[Hh]eartbeat|Connection (reset|closed|refused)")
"""In what JAX says where another process cannot be reached; it has no class or code of its own for that."""
PROBE_SECONDS = 60.0
"""Between two moments at which the devices are measured."""
MEET_SECONDS = 1.0
"""After which, or after each longer step, processes meet: a request to stop waits no longer."""


def lost_peer(error: BaseException, watch: PeerWatch | None) -> PeerError | None:
    """The error that says which other process was lost, if that is what ``error`` is about."""
    if jax.process_count() == 1 or not _LOST.search(str(error)):
        return None
    if watch is not None and (process := watch.lost()) is not None:
        return PeerError(watch.lost_text([process]))
    reason = shortened(str(error).splitlines()[0])
    return PeerError(f"process {jax.process_index()} of {jax.process_count()} lost another one: {reason}")


def connect(coordinator: str | None, processes: int | None, process_id: int | None, wait: int, heartbeat: int) -> None:
    """Connects this process to the others: to those named, or to those of the cluster that started it.

    Where they do not come the process ends, with a line that says so and `LOST_CODE`.

    Args:
      wait: seconds to wait for them.
      heartbeat: seconds after which a process that is not heard of counts as lost, and the others end.

    Raises:
      ConfigError: JAX finds no cluster, or the address is none.
    """
    if coordinator is not None and not re.fullmatch(r".+:\d{1,5}", coordinator):
        raise ConfigError(f"--coordinator {coordinator!r}: give a host and a port, such as 10.0.0.1:8476")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_recoverability", True)  # else JAX aborts where any process is lost
    where = "" if coordinator is None else f" to {coordinator}"
    line = f"error: not all {processes or ''} processes came{where} within {wait} seconds\n".replace("  ", " ")
    watch = threading.Timer(wait, _leave, (line,))  # JAX would abort, with a stack trace
    watch.daemon = True
    watch.start()
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
        found = "--coordinator: " if coordinator else "--distributed: JAX finds no cluster that started this process: "
        raise ConfigError(f"{found}{reason}") from None
    finally:
        watch.cancel()


def _leave(line: str) -> None:
    os.write(2, line.encode())
    os._exit(LOST_CODE)


def is_first() -> bool:
    """Whether this process is the one that writes the run's files and prints."""
    return jax.process_index() == 0


def from_first[T](call: Callable[[], T]) -> T:
    """What ``call`` returns in the first process, which alone calls it; what it raises there is raised in all."""
    if jax.process_count() == 1:
        return call()
    outcome = b""
    if is_first():
        try:
            outcome = pickle.dumps((call(), None))
        except Exception as error:
            outcome = pickle.dumps((None, error))
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(outcome))))
    sent = np.frombuffer(outcome or bytes(size), np.uint8)
    result, error = pickle.loads(np.asarray(multihost_utils.broadcast_one_to_all(sent), np.uint8).tobytes())
    if error is not None:
        raise error
    return result


def in_any(flag: bool) -> bool:
    """Whether ``flag`` is set in a process."""
    return bool(of_all(np.asarray(flag)).any())


def same_in_all(digest: int) -> bool:
    """Whether ``digest``, below 2^32, is the same in every process."""
    return len(set(of_all(np.asarray(digest, np.uint32)).tolist())) == 1


def same_entries(own: dict[str, Any], what: str) -> None:
    """Compares the entries that every process has of ``what`` by name.

    Raises:
      ConfigError: in every process, if they differ; in that where they do, with the name of the first.
    """
    first = from_first(lambda: own)
    name = next((name for name in sorted(own | first) if own.get(name) != first.get(name)), None)
    different = np.flatnonzero(of_all(np.asarray(name is not None)))
    if name is not None:
        raise ConfigError(
            f"{name} is {shortened(own.get(name))} in process {jax.process_index()}, and {shortened(first.get(name))} "
            "in process 0: all take the same steps"
        )
    if different.size:
        raise ConfigError(f"process {different[0]} has another {what}; its error says in what")


class BatchPlacer:
    """Puts batches on the mesh of a plan, as its argument 1: a process copies to its devices the rows that they hold.

    A process brings a whole batch, or, of several processes, only the rows that `Plan.local_rows` names, of each array
    its own, along the first dimension that is split between processes. Whole batches
    are the same in every process: their digest is kept to compare.
    """

    def __init__(self, plan: Plan) -> None:
        start, end = (jax.tree.structure(plan.in_avals[:n]).num_leaves for n in (1, 2))
        self._plan, self._tree = plan, jax.tree.structure(plan.in_avals[1])
        self._places = plan.inputs[start:end]
        self._shardings = plan.flat_in_shardings[start:end]
        self._stored = any(place.stored is not None for place in self._places)
        self.digest = 0
        """Of all whole batches placed so far, below 2^32; 0 where there is one process."""

    def __call__(self, batch: Any) -> Any:
        """``batch`` on the mesh.

        Raises:
          ArgumentError: it is not what the planned step takes; names the first array that differs.
        """
        leaves, tree = jax.tree.flatten(arrays_only(batch))
        if tree != self._tree:
            raise ArgumentError(
                f"the batch has the structure {tree}, and {self._plan.name} was planned for {self._tree}"
            )
        pairs = zip(leaves, self._places, self._shardings, strict=True)
        placed = [self._placed(x, place, sharding) for x, place, sharding in pairs]
        return self._tree.unflatten(placed)

    def _placed(self, x: Any, place: Place, sharding: NamedSharding) -> Any:
        several, dtype, dim = jax.process_count() > 1, dtype_from_name(place.dtype), 0
        x = x if isinstance(x, ChosenRows | jax.Array) else np.asarray(x)
        if jax.dtypes.canonicalize_dtype(x.dtype) != dtype:
            raise ArgumentError(f"{place.path} of {self._plan.name} is {place.dtype}, and a batch has {x.dtype}")
        whole = x.shape == place.shape
        part = None
        if several and place.shape and not whole:
            dim = local_dim(sharding, place.stored_shape)
            part = (*place.shape[:dim], len(self._plan.local_rows(place.path, dim)), *place.shape[dim + 1 :])
        if not whole and x.shape != part:
            named = "" if part is None else f"{place.path!r}{f', {dim}' if dim else ''}"
            brought = "" if part is None else f"; or {list(part)} of it, of the rows of plan.local_rows({named})"
            raise ArgumentError(
                f"{place.path} of {self._plan.name} is {list(place.shape)}{brought}, and a batch has {list(x.shape)}: "
                "batches of other sizes need a step planned for them"
            )
        if isinstance(x, jax.Array) and not (several and x.is_fully_addressable):
            return x if self._stored else jax.device_put(x, sharding)
        if self._stored:
            return np.asarray(x, dtype)  # the step pads it
        if part is not None:
            return jax.make_array_from_process_local_data(sharding, np.asarray(x, dtype), place.shape)
        if several and not isinstance(x, ChosenRows):
            self.digest = zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8), self.digest)

        def block(index: Any) -> np.ndarray:
            return np.asarray(x[index], dtype)

        return jax.make_array_from_callback(place.shape, sharding, block)


class SizedPlacer:
    """Puts batches of one size, or of a few, on the mesh, each by the plan for its size.

    Args:
      plan: for the first size.
      plan_for: plans for batches of another size, `jax.ShapeDtypeStruct`s; None where there is no other.
    """

    def __init__(self, plan: Plan, plan_for: Callable[[Any], Plan] | None = None) -> None:
        self._first, self._plan_for = BatchPlacer(plan), plan_for
        self._placers = {_shapes(plan.in_avals[1]): self._first}
        self.digest = 0
        """As `BatchPlacer.digest`, of batches of all sizes."""

    def knows(self, batch: Any) -> bool:
        """Whether there is a plan for the size of ``batch``."""
        return self._plan_for is None or _shapes(arrays_only(batch)) in self._placers

    def __call__(self, batch: Any) -> Any:
        """``batch`` on the mesh; as `BatchPlacer`."""
        placer = self._first
        if self._plan_for is not None:
            arrays = arrays_only(batch)
            shapes = _shapes(arrays)
            if shapes not in self._placers:
                self._placers[shapes] = BatchPlacer(self._plan_for(jax.tree.map(abstract, arrays)))
            placer = self._placers[shapes]
        placer.digest = self.digest
        placed = placer(batch)
        self.digest = placer.digest
        return placed


def _shapes(batch: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(np.shape(x)) for x in jax.tree.leaves(batch))


def abstract(x: Any) -> jax.ShapeDtypeStruct:
    """An array of a batch as `jax.ShapeDtypeStruct`, without reading it."""
    x = x if isinstance(x, ChosenRows | jax.Array) else np.asarray(x)
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))


def peak_seconds(step: Callable[[Any, Any], Any], plan: Plan) -> float | None:
    """Seconds that the products of ``step`` would take at the peak of the plan's chips: those that it is written with,
    without what a plan recomputes. None on CPUs, which have no peak of their own.
    """
    if plan.jax_mesh.devices.flat[0].platform == "cpu":
        return None
    hardware, traced = plan.mesh.hardware, jax.make_jaxpr(step)(*plan.in_avals)
    seconds = [flops / hardware.peak_flops(dtype) for dtype, flops in product_flops(traced.jaxpr).items()]
    return math.fsum(seconds) / plan.mesh.size


class Meeting:
    """What several processes exchange every few steps: whether to stop, whether their batches are the same, and
    who keeps the others waiting.

    Args:
      stop: whether this process was asked to.
      ready: this process's batches.
      host: how late this process's host was.
      every: steps between two meetings, at most.
      last: the last step, after which all meet too.
      report: called in all processes with what was found about one.
      probe: seconds that this process's devices take for a product.
    """

    def __init__(
        self,
        stop: StopSignals,
        ready: Prefetched,
        host: HostTimes,
        every: int,
        last: int,
        report: Callable[[StragglerEvent | SlowDevicesEvent], None],
        probe: Callable[[], float] = device_seconds,
    ) -> None:
        self._stop, self._ready, self._host, self._every, self._last = stop, ready, host, every, last
        self._report, self._probe = report, probe
        self._since = self._probed = time.perf_counter()
        self._measured = 0.0
        self._steps = 0
        """Taken since the last meeting."""
        self._between = 1
        """Steps from the last meeting to the next."""
        self._found = Findings()

    def __call__(self, number: int) -> bool:
        """Whether to stop after step ``number``; all processes say the same.

        Raises:
          ConfigError: in every process, if the batches that they placed differ.
        """
        if jax.process_count() == 1:
            return self._stop.requested
        self._steps += 1
        if self._steps < self._between and number != self._last:
            return False
        now = time.perf_counter()
        flags = [int(self._stop.requested), int(now - self._probed >= PROBE_SECONDS), self._ready.digest]
        batches, host = (latest(number, times) for times in (self._ready.take_waits(), self._host.take()))
        table = of_all(as_row(flags, batches, host, now - self._since, self._measured))
        if len(set(table[:, 2].tolist())) != 1:
            raise ConfigError(
                f"the batches up to step {number} are not the same in all {jax.process_count()} processes: give each "
                "the same, such as by a fixed seed, or, with a plan, the rows that plan.local_rows names"
            )
        for event in self._found(number, table[:, 3:]):
            self._report(event)
        # From what passed in any process, so that all say the same.
        seconds = max(float(table[:, PASSED].max()) / 1e6 / self._steps, 1e-6)
        self._between, self._steps = max(1, min(self._every, int(MEET_SECONDS / seconds))), 0
        self._measured = 0.0
        if table[0, 1]:  # all at once, now that their devices have nothing to do
            self._probed, self._measured = now, self._probe()
        self._since = time.perf_counter()
        return bool(table[:, 0].any())
