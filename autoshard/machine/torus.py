"""Where a mesh lies in the torus of a TPU slice, and what collectives over its axes make of the links there.

A chip has two links in each dimension of its grid, one to each neighbour; a dimension whose ends are joined is a ring,
the others are lines. A mesh axis runs along one or more dimensions, or along a part of one: `spans` says of each axis
along which. What a collective then sends is bounded by the busiest link ("How to Scale Your Model", Google DeepMind,
2025, has the same for rings):

- all-gather and reduce-scatter: one ring through all devices, in both directions, as libtpu compiles them;
- all-reduce: a ring in each dimension at once, in both directions, as libtpu compiles it; at most twice as fast as the
  ring of an all-gather, so that it takes no less than a reduce-scatter;
- all-to-all: each byte goes the shortest way, a quarter round a ring on average, and dimensions are used at once;
- collective-permute: to the next device along the axis, over one link.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jax.experimental import mesh_utils

from autoshard.machine.tpu_slice import TpuSlice, slice_of


@dataclass(frozen=True, order=True)
class Span:
    """Devices along one dimension of a chip grid, evenly spaced."""

    dim: int
    devices: int
    stride: int
    """Chips from one to the next; devices of as many other groups are between them, on the same links."""
    is_ring: bool
    """Whether they are spaced over a whole dimension, whose ends are joined."""
    of_whole_slice: bool = False
    """Whether the axis that runs along it takes all chips of a slice."""


class Rates(NamedTuple):
    """Bytes/s of each device, in units of one direction of one link; what they are of is what `Ring` says."""

    devices: int
    ring_hops: int
    hops: int
    gather: float
    reduce: float
    exchange: float
    shift: float


def spans(target: TpuSlice, sizes: Sequence[int]) -> tuple[tuple[Span, ...], ...]:
    """Of each axis of a mesh of such sizes, the dimensions of a slice's grid along which it runs.

    Empty for an axis of one device or across slices, which are consecutive along the first; and for all axes where the
    devices along some are no evenly spaced block of the grid, or where a chip has two devices, which share its links.
    """
    first, *others = sizes
    found = _spans(target, (first // target.slices, *others))
    return ((), *found[1:]) if target.slices > 1 else found


def device_spans(devices: np.ndarray, crossing: Sequence[bool]) -> tuple[tuple[Span, ...], ...]:
    """The same of devices that are there, as an array in mesh order, of which some axes cross slices; all empty where
    the devices are no whole slices."""
    found = slice_of([*devices.flat])
    if found is None:
        return ((),) * devices.ndim
    return _spans_of(np.array([_place(d) for d in devices.flat]).reshape(*devices.shape, -1), found, crossing)


def places(target: TpuSlice, sizes: Sequence[int]) -> np.ndarray:
    """Where the devices of a mesh over one slice are, as `autoshard.machine.target.device_array` places them.

    Returns:
      [*sizes, 4]: coordinates in three dimensions, and the number of the core on its chip.
    """
    placed = mesh_utils.create_device_mesh(sizes, list(chips(target)), allow_split_physical_axes=True)
    return np.array([_place(chip) for chip in placed.ravel()]).reshape(*sizes, -1)


def _place(device: Any) -> tuple[int, ...]:
    return (*device.coords, device.core_on_chip)


@functools.lru_cache(maxsize=256)
def _spans(target: TpuSlice, sizes: tuple[int, ...]) -> tuple[tuple[Span, ...], ...]:
    try:
        at = places(target, sizes)
    except (RuntimeError, ValueError):  # JAX finds no way to place this mesh on the grid
        return ((),) * len(sizes)
    return _spans_of(at, target, (False,) * len(sizes))


def _spans_of(at: np.ndarray, target: TpuSlice, crossing: Sequence[bool]) -> tuple[tuple[Span, ...], ...]:
    """`spans` of devices at these places, [*sizes, 4]; of axes that cross slices, none."""
    sizes, found = at.shape[:-1], list[tuple[Span, ...]]()
    if target.chip.devices_per_chip > 1:
        return ((),) * len(sizes)
    for axis, size in enumerate(sizes):
        if crossing[axis]:
            found.append(())
            continue
        # Lines of devices along this axis: [line, device, dimension].
        lines = np.moveaxis(at, axis, -2).reshape(-1, size, at.shape[-1])
        each = {_line_spans(line, target) for line in lines}
        if len(each) > 1 or None in each:
            return ((),) * len(sizes)
        found.append(each.pop() or ())
    return tuple(found)


def _line_spans(line: np.ndarray, target: TpuSlice) -> tuple[Span, ...] | None:
    """The spans of devices at these places [device, dimension], major first; None where they are no evenly spaced
    block."""
    found, is_whole = list[tuple[int, Span]](), len(line) == math.prod(target.chip_grid)
    for dim, side in enumerate(target.chip_grid):
        at = np.unique(line[:, dim])
        if len(at) == 1:
            continue
        strides = np.unique(np.diff(at))
        if len(strides) > 1:
            return None
        stride, n = int(strides[0]), len(at)
        first_change = int(np.argmax(line[:, dim] != line[0, dim]))
        found.append((first_change, Span(dim, n, stride, target.wraps(dim) and n * stride == side, is_whole)))
    dense = math.prod(span.devices for _, span in found) == len(np.unique(line, axis=0))
    return tuple(span for _, span in sorted(found, reverse=True)) if dense else None


@dataclass(frozen=True)
class _Chip:
    """What JAX asks of a device to find its place in a mesh."""

    id: int
    device_kind: str
    coords: tuple[int, int, int]
    core_on_chip: int
    platform: str = "tpu"
    process_index: int = 0
    slice_index: int = 0


def chips(target: TpuSlice) -> Iterator[_Chip]:
    """The devices of a slice in the order of JAX: hosts of two by two chips one after the other."""
    x, y, z = (*target.chip_grid, 1)[:3]
    per_chip = target.chip.devices_per_chip
    for k, j, i in itertools.product(range(z), range(0, y, 2), range(0, x, 2)):
        for b, a in itertools.product(range(j, min(j + 2, y)), range(i, min(i + 2, x))):
            for core in range(per_chip):
                number = ((k * y + b) * x + a) * per_chip + core
                yield _Chip(number, target.chip.device_kinds[0], (a, b, k), core)


@functools.lru_cache(maxsize=4096)
def torus_rates(along: tuple[tuple[Span, ...], ...]) -> tuple[Rates, ...]:
    """What a collective over axes that run so reaches: all spans without gaps at once, then any other by itself."""
    joined = _joined([span for axis in along for span in axis])
    dense, shift = [s for s in joined if s.stride == 1], 1 / max(map(_shift_load, along))
    return tuple(_rates(group, shift) for group in (dense, *([s] for s in joined if s.stride > 1)) if group)


def _joined(of_axes: Sequence[Span]) -> list[Span]:
    """The same spans; those of one dimension that follow on each other as one."""
    found: list[Span] = []
    for span in sorted(of_axes, key=lambda s: (s.dim, s.stride)):
        last = found[-1] if found else None
        if last is not None and last.dim == span.dim and last.stride * last.devices == span.stride:
            found[-1] = Span(span.dim, last.devices * span.devices, last.stride, span.is_ring)
        else:
            found.append(span)
    return found


def _rates(group: Sequence[Span], shift: float) -> Rates:
    """Of spans that are used at once; only one by itself may have gaps, whose links it shares."""
    n, most = math.prod(s.devices for s in group), max(s.stride for s in group)
    # The ends of a path through two dimensions meet, but of an odd number of devices.
    closes = any(s.is_ring for s in group) or (len(group) > 1 and n % 2 == 0)
    one_ring = 2 if closes else 1
    all_rings = min(sum(2 if s.is_ring else 1 for s in group), 2 * one_ring)
    busiest = max(map(_exchange_load, group))
    hops = sum((s.devices - 1) * s.stride for s in group)
    ring_hops = (n // 2 if closes else n - 1) * most
    return Rates(n, ring_hops, hops, one_ring / most, all_rings / most, (n - 1) / n / busiest, shift)


def _shift_load(axis: Sequence[Span]) -> float:
    """Where each device sends to the next along an axis, what crosses the busiest link over what each sends."""
    loads, before = [], 1
    for span in reversed(axis):
        loads.append(span.stride / before)
        before *= span.devices
    return max(loads)


def _exchange_load(span: Span) -> float:
    """Of an all-to-all, what crosses the busiest link in one direction, over what each device holds."""
    n = span.devices
    hops = n * n // 4 / n  # of a byte: the mean way round a ring; a line's middle link carries as much both ways
    return hops * span.stride / (2 if span.is_ring else 1)
