"""Finds what a compiled program copies between the memories of device and host, in its HLO text.

The layouts of arrays in the host's memory say so: ``bf16[8,4]{1,0:S(5)}``. A slice of such an array is read by a
``dynamic-slice`` and written by a ``dynamic-update-slice``, a whole one by a ``copy``; each is one instruction, or a
``-start`` and a ``-done``, of which the start is found. What only hands arrays on copies nothing.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from autoshard.backend.hlo.collectives import shape_bytes, tuple_elements
from autoshard.backend.hlo.text import Computation, Instruction, Module
from autoshard.machine.host_link import FROM_HOST, TO_HOST

_ON_HOST = re.compile(r"[:)]S\(5\)")


class HostCopy(NamedTuple):
    """One run of a copy on one device."""

    bytes: int
    way: str
    """`FROM_HOST` or `TO_HOST`."""


def host_copies(module: Module) -> dict[tuple[str, str], HostCopy]:
    """The copies, each by the computation and the instruction that starts it."""
    found: dict[tuple[str, str], HostCopy] = {}
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if (copy := _host_copy(instruction, computation)) is not None:
                found[computation.name, instruction.name] = copy
    return found


def _host_copy(instruction: Instruction, computation: Computation) -> HostCopy | None:
    """What ``instruction`` copies, if it is one that does."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode not in ("copy", "dynamic-slice", "dynamic-update-slice"):
        return None
    moved = 1 if opcode == "dynamic-update-slice" else 0  # the operand that is read, or the update
    read = _operand_shape(instruction, moved, computation)
    made = instruction.shape
    if opcode != instruction.opcode:  # a tuple: what is read and what is made, in this order or, of a copy, the other
        elements = tuple_elements(made)
        made = elements[0] if opcode == "copy" else elements[1]
    if bool(_ON_HOST.search(read)) == bool(_ON_HOST.search(made)):
        return None
    size = shape_bytes(read if opcode == "dynamic-update-slice" else made)
    return HostCopy(size, FROM_HOST if _ON_HOST.search(read) else TO_HOST)


def _operand_shape(instruction: Instruction, number: int, computation: Computation) -> str:
    names = instruction.names
    made_by = computation.instructions.get(names[number]) if number < len(names) else None
    return "" if made_by is None else made_by.shape
