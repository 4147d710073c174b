"""Tells XLA for GPUs how long collectives take, so that it starts them early enough.

XLA's scheduler takes every collective for as long as any other, and starts it a product or so before it is waited for;
what NCCL takes over InfiniBand is many times that. It schedules by real latencies where a profile of a run gives them
(`fdo_profile`). Here the profile is predicted: the step is compiled, its instructions are priced as
`autoshard.backend.estimate` reads them, and it is compiled again with these prices.
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


def compile_with_latencies(run: Callable[[Mapping[str, Any]], Any], mesh: LogicalMesh) -> Any:
    """The executable that is estimated to be faster of that without a profile and that with one.

    Args:
      run: compiles the step with more compiler options.
      mesh: that the step is planned over.
    """
    plain = run({})
    module = parse_hlo(plain.as_text() or "")
    waits = module_estimate(module, mesh)
    if waits.blocking < MIN_WAIT * waits.scheduled:
        return plain
    try:
        timed = run({"fdo_profile": latency_profile(module, mesh)})
    except jax.errors.JaxRuntimeError:  # what is started early may be too large
        return plain
    seconds = module_estimate(parse_hlo(timed.as_text() or ""), mesh).scheduled
    return timed if seconds < waits.scheduled else plain


def latency_profile(module: Module, mesh: LogicalMesh) -> bytes:
    """The seconds of the instructions of ``module`` as XLA reads them: a `ProfiledInstructionsProto`."""
    return b"".join(_costs(module, mesh))


def _costs(module: Module, mesh: LogicalMesh) -> Iterator[bytes]:
    """Each cost: field 1, a message of the name, field 1, and microseconds, field 2."""
    for name, seconds in seconds_by_name(module, mesh):
        text = name.encode()
        cost = b"\x0a" + _varint(len(text)) + text + b"\x11" + struct.pack("<d", 1e6 * seconds)
        yield b"\x0a" + _varint(len(cost)) + cost


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the highest bit says that more follow."""
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])
