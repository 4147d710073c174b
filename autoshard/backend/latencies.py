"""Tells XLA for GPUs how long collectives take, so that it starts them early enough.

XLA's scheduler takes every collective for as long as any other, and starts it a product or so before it is waited for;
what NCCL takes over InfiniBand is many times that. It schedules by real latencies where a profile of a run gives them
(`fdo_profile`). Here the profile is predicted: the step is compiled, its instructions are priced as
`autoshard.backend.estimate` reads them, and it is compiled again with these prices, and, while it still waits, with
less for what takes the slowest links.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from autoshard.backend.estimate import module_estimate, seconds_by_name
from autoshard.backend.hlo.text import Module, parse_hlo
from autoshard.machine.mesh import LogicalMesh

MIN_WAIT = 0.02
"""Least share of the step in which a device waits for collectives for it to be compiled again."""
SCALES = (1.0, 0.7, 0.5)
"""What collectives over the slowest links take in the profiles, as shares of what they are predicted to take. XLA's
scheduler is greedy: of loops in which they take longer than all products it finds better orders with some of these."""


def compile_with_latencies(run: Callable[[Mapping[str, Any]], Any], mesh: LogicalMesh) -> Any:
    """The executable that is estimated to be the fastest of that without a profile and those with one; none is compiled
    any more once the best waits for less than `MIN_WAIT`.

    Args:
      run: compiles the step with more compiler options.
      mesh: that the step is planned over.
    """
    best = run({})
    module = parse_hlo(best.as_text() or "")
    least = module_estimate(module, mesh)
    for scale in SCALES:
        if least.blocking < MIN_WAIT * least.scheduled:
            break
        try:
            timed = run({"fdo_profile": latency_profile(module, mesh, scale)})
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e):
                return best
            continue  # what is started early may be too large
        found = module_estimate(parse_hlo(timed.as_text() or ""), mesh)
        if found.scheduled < least.scheduled:
            best, least = timed, found
    return best


def latency_profile(module: Module, mesh: LogicalMesh, scale: float = 1.0) -> bytes:
    """The seconds of the instructions of ``module`` as XLA reads them: a `ProfiledInstructionsProto`.

    Args:
      scale: of what collectives over the slowest links take.
    """
    return b"".join(_costs(module, mesh, scale))


def _costs(module: Module, mesh: LogicalMesh, scale: float) -> Iterator[bytes]:
    """Each cost: field 1, a message of the name, field 1, and microseconds, field 2."""
    slowest = mesh.slowest_link(mesh.nontrivial_axes).name
    for name, seconds, link in seconds_by_name(module, mesh):
        text, taken = name.encode(), seconds * (scale if link == slowest else 1.0)
        cost = b"\x0a" + _varint(len(text)) + text + b"\x11" + struct.pack("<d", 1e6 * taken)
        yield b"\x0a" + _varint(len(cost)) + cost


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the highest bit says that more follow."""
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])
