"""Spec: the sharding of one value over a mesh, including partial values.

A spec has, for each dimension, the mesh axes that split it (major to minor), and the axes over which the value is
*partial*: each device has a partial result, and reducing them over the axis (sum, max, ...) gives the value. Text form:
``[data, _, model+seq] sum(pipe)``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from autoshard.errors import SpecError, nearest

Axes = tuple[str, ...]
DimAxes = tuple[Axes, ...]
"""For each dimension of a value the mesh axes that split it."""
REDUCTION_KINDS = ("sum", "max", "min", "prod", "and", "or")
"""Reductions by which the partial values on several devices are combined."""


@dataclass(frozen=True, slots=True)
class Spec:
    """The sharding of a value: mesh axes by dimension, and partial axes."""

    dims: DimAxes
    """For each dimension the mesh axes that split it, major to minor."""
    partial: tuple[tuple[str, str], ...] = ()
    """(mesh axis, reduction kind) pairs."""

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def axes(self) -> Axes:
        """Every mesh axis in the spec, partial ones last."""
        return tuple(a for d in self.dims for a in d) + tuple(a for a, _ in self.partial)

    def with_dim(self, dim: int, axes: Axes) -> Spec:
        """This spec with dimension ``dim`` split over ``axes``."""
        return Spec(self.dims[:dim] + (axes,) + self.dims[dim + 1 :], self.partial)

    def without(self, axes: Collection[str]) -> Spec:
        """This spec with no dimension split over ``axes``."""
        return Spec(tuple(tuple(a for a in d if a not in axes) for d in self.dims), self.partial)

    def reduced(self) -> Spec:
        """The spec after an all-reduce over the partial axes."""
        return Spec(self.dims) if self.partial else self

    def num_shards(self, sizes: Mapping[str, int]) -> int:
        """Number of distinct shards, for mesh axes of these ``sizes``."""
        return math.prod([sizes[a] for d in self.dims for a in d])

    def partition_spec(self) -> PartitionSpec:
        """As a `PartitionSpec` without trailing Nones, and without the partial axes, which it cannot express."""
        entries = [None if not d else d[0] if len(d) == 1 else d for d in self.dims]
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def __str__(self) -> str:
        dims = "[" + ", ".join("+".join(d) or "_" for d in self.dims) + "]"
        kinds = sorted({k for _, k in self.partial})
        return " ".join([dims, *(f"{k}({'+'.join(a for a, x in self.partial if x == k)})" for k in kinds)])


def replicated(rank: int) -> Spec:
    """The spec under which every device has the whole value."""
    return Spec(((),) * rank)


def checked_spec(entries: PartitionSpec, shape: Sequence[int], sizes: Mapping[str, int], what: str) -> Spec:
    """A user's `PartitionSpec` as a `Spec`, checked against a value's ``shape`` and a mesh with axis ``sizes``.

    Axes of size 1 are dropped.

    Raises:
      SpecError: an axis that the mesh lacks or that is used twice, more entries than the value has dimensions, or a
        dimension that is not divisible by its axes' sizes. ``what`` names the value in the message.
    """
    if len(entries) > len(shape):
        raise SpecError(
            f"{what} has {len(shape)} dimensions {tuple(shape)} but its spec {entries} has {len(entries)} entries; "
            f"the longest spec that fits is P({', '.join(repr(e) for e in list(entries)[: len(shape)])})"
        )
    seen: dict[str, int] = {}
    dims: list[Axes] = []
    for i, entry in enumerate(entries):
        axes = _entry(entry)
        for axis in axes:
            if axis not in sizes:
                raise SpecError(
                    f"{what}: spec {entries} names mesh axis {axis!r}, and the mesh has {dict(sizes)}"
                    f"{nearest(axis, sizes)}"
                )
            if axis in seen:
                raise SpecError(f"{what}: spec {entries} uses mesh axis {axis!r} on dimensions {seen[axis]} and {i}")
            seen[axis] = i
        parts = math.prod(sizes[a] for a in axes)
        if shape[i] % parts:
            fits = [n for n in range(1, shape[i] + 1) if shape[i] % n == 0 and n <= parts]
            raise SpecError(
                f"{what}: dimension {i} of shape {tuple(shape)} has size {shape[i]}, which does not divide into "
                f"{parts} parts over {'+'.join(axes)}; it divides into {', '.join(map(str, fits[-4:]))}, or pad it to "
                f"{-(-shape[i] // parts) * parts}"
            )
        dims.append(tuple(a for a in axes if sizes[a] > 1) if shape[i] > 1 else ())
    return Spec((*dims, *((),) * (len(shape) - len(dims))))


def unconstrained_dims(entries: PartitionSpec) -> frozenset[int]:
    """The dimensions that a user's `PartitionSpec` leaves to the planner: its ``UNCONSTRAINED`` entries."""
    return frozenset(i for i, entry in enumerate(entries) if entry is PartitionSpec.UNCONSTRAINED)


def _entry(entry: object) -> Axes:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, (tuple, list)) and all(isinstance(a, str) for a in entry):
        return tuple(entry)
    raise SpecError(f"a spec entry is a mesh axis, a tuple of mesh axes or None, not {entry!r}")
