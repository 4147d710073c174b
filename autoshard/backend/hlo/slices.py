"""Collectives between TPU slices, in HLO text.

A program for several slices is compiled as that of one: its device groups name one slice's devices and hold in each.
What crosses slices goes through the host: a ``send`` and a ``recv`` with attributes ``_xla_megascale_*``, which say
what kind of collective they are parts of, by which name both are known, and between which devices: ``{1,2}x{0:15}``,
each device of the second list in all slices of the first; ``{{100000,200000},...}``, groups of devices, each of them
100,000 times its slice, from one on, plus its number in it; ``{{100000->200000},...}``, who sends to whom.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from autoshard.backend.hlo.text import Instruction
from autoshard.machine.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COLLECTIVE_PERMUTE,
    REDUCE_SCATTER,
    CollectiveKind,
)

_KINDS: Mapping[str, CollectiveKind] = {
    "ALL_GATHER": ALL_GATHER,
    "ALL_REDUCE": ALL_REDUCE,
    "ALL_TO_ALL": ALL_TO_ALL,
    "ONE_TO_ONE": COLLECTIVE_PERMUTE,
    "REDUCE_SCATTER": REDUCE_SCATTER,
}
_TYPE = re.compile(r'\b_xla_megascale_transfer_type="(\w+)"')
_NAME = re.compile(r'\b_xla_host_transfer_rendezvous="([^"]*)"')
_TARGET = re.compile(r'\b_xla_megascale_target="?(\{[^"]*?\})"?(?:,\w+=|\}[,\s]|\}$)')
_IN_EACH = re.compile(r"\{([\d,]+)\}x\{([\d,:]+)\}")
_OF_A_SLICE = 100_000
"""What a device's number is more in each next slice."""


class SliceTransfer(NamedTuple):
    """A collective between slices, as its ``send`` has it."""

    kind: CollectiveKind
    name: str
    """That of the ``send`` and ``recv`` that are parts of it."""
    groups: tuple[tuple[int, ...], ...]
    """Device groups, or pairs of a source and a target: row-major positions in a mesh whose first axes are slices."""


def slice_transfer(instruction: Instruction, partitions: int) -> SliceTransfer | None:
    """The collective between slices that a ``send`` or ``recv`` is part of; None for any other instruction.

    Args:
      partitions: devices of a slice.
    """
    found = _TYPE.search(instruction.attributes)
    if found is None or found[1] not in _KINDS:
        return None
    target = _TARGET.search(instruction.attributes)
    groups = _groups(target[1], partitions) if target else ()
    return SliceTransfer(_KINDS[found[1]], transfer_name(instruction), groups)


def transfer_name(instruction: Instruction) -> str:
    """The name that a ``send`` has in common with its ``recv``; empty of any other instruction."""
    found = _NAME.search(instruction.attributes)
    return found[1] if found else ""


def of_every_slice(groups: Iterable[tuple[int, ...]], partitions: int, devices: int) -> tuple[tuple[int, ...], ...]:
    """Device groups of a slice's program as those of all slices.

    Args:
      partitions: devices of the program; 0 where that is not known: as many as ``devices``.
    """
    slices = devices // partitions if partitions and devices % partitions == 0 else 1
    return tuple(tuple(d + s * partitions for d in group) for s in range(slices) for group in groups)


def _groups(text: str, partitions: int) -> tuple[tuple[int, ...], ...]:
    if found := _IN_EACH.fullmatch(text):
        slices, places = _numbers(found[1]), _numbers(found[2])
        return tuple(tuple((s - 1) * partitions + p for s in slices) for p in places)
    groups = (re.findall(r"\d+", group) for group in re.findall(r"\{([\d,>-]+)\}", text))
    return tuple(tuple(_position(int(d), partitions) for d in group) for group in groups)


def _position(device: int, partitions: int) -> int:
    return (device // _OF_A_SLICE - 1) * partitions + device % _OF_A_SLICE


def _numbers(text: str) -> list[int]:
    """Of ``0:3,8``: 0, 1, 2, 3, 8."""
    ends = ([int(n) for n in part.split(":")] for part in text.split(","))
    return [n for bounds in ends for n in range(bounds[0], bounds[-1] + 1)]
