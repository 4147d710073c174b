"""Collectives, planned and emitted, and their seconds by an alpha-beta (latency and bandwidth) model of rings.

One record serves both what a plan predicts (`autoshard.cost`) and what XLA emitted
(`autoshard.backend.hlo.collectives`), so that `autoshard.backend.audit` can compare them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from autoshard.machine.mesh import LogicalMesh
from autoshard.machine.torus import Span, torus_rates

type CollectiveKind = Literal["all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"]
"""The HLO opcode of a collective."""

ALL_GATHER: Final = "all-gather"
ALL_REDUCE: Final = "all-reduce"
ALL_TO_ALL: Final = "all-to-all"
COLLECTIVE_PERMUTE: Final = "collective-permute"
REDUCE_SCATTER: Final = "reduce-scatter"
MAX_RATES: Final = 1 << 12
"""Most results of `collective_rate` that are kept: some meshes with a few sets of axes each."""
COLLECTIVE_KINDS: Final = (ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COLLECTIVE_PERMUTE, REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective operation and how often one call of the step executes it.

    ``bytes`` is the payload per device of one execution:

    ================== ===========================================================
    all-gather         the result (gathered)
    reduce-scatter     the operand (not yet scattered)
    all-reduce         the operand (as large as the result)
    all-to-all         the operand, including the part that stays on the device
    collective-permute the operand (as large as the result)
    ================== ===========================================================

    It determines how long the collective takes; `wire_bytes` is what the device actually sends.
    """

    kind: CollectiveKind
    axes: tuple[str, ...] | None
    """Mesh axes in mesh order; None when the device groups match no set of axes of the mesh."""
    bytes: int
    count: int = 1
    """Executions per call of the step: the product of the enclosing loops' trip counts."""
    source: str = ""
    """``file:line`` of the user's code, or empty."""
    operation: str = ""
    """JAX's name for the operation it is emitted for (HLO metadata ``op_name``); empty when planned."""
    computation: str = ""
    """The HLO computation that contains it; empty when planned."""
    exact: bool = True
    """False when an enclosing loop's trip count is unknown, so that ``count`` is a lower bound."""
    share: float = 1.0
    """Of a collective-permute: the fraction of the devices that send to another device."""
    addends: int = 1
    """Emitted: how many values are added up to what it sends. XLA adds up first what is reduced alike."""
    redundant: bool = False
    """Emitted: whether the same computation has an identical collective on the same operands, or this is XLA's
    rematerialization of one. Planned: whether the value that its operand is a view of, or equal to, is resharded
    likewise, or sends the same halos, before; of a local form, whether one with the same first operand has sent as
    much."""

    parts: tuple[int, ...] = ()
    """Emitted: the bytes of each array, where the compiler has combined several; empty where there is one."""

    @property
    def total_bytes(self) -> int:
        """Payload per device over all executions, in bytes."""
        return self.bytes * self.count

    def wire_bytes(self, mesh: LogicalMesh) -> float:
        """Bytes that a device of ``mesh`` sends over all executions, on average, with ring algorithms."""
        n = mesh.size if self.axes is None else mesh.axes_size(self.axes)
        rounds = {ALL_REDUCE: 2 * (n - 1) / n, COLLECTIVE_PERMUTE: self.share}.get(self.kind, (n - 1) / n)
        return self.total_bytes * rounds

    def __str__(self) -> str:
        axes = "unknown groups" if self.axes is None else "+".join(self.axes) or "no axis"
        at = f" at {self.source}" if self.source else ""
        more = "" if self.exact else " or more"
        return f"{self.kind} over {axes}: {self.bytes:,} bytes x {self.count}{more}{at}"


def collective_seconds(kind: CollectiveKind, axes: tuple[str, ...], size: float, mesh: LogicalMesh) -> float:
    """Predicted seconds of one collective over ``axes``, with ``size`` in bytes as `Collective.bytes` defines it.

    The alpha-beta cost of ring algorithms (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
    Operations in MPICH", 2005), one ring per mesh axis as a hierarchical network runs them, or one for all axes that
    run along the torus of a TPU slice. With ``n`` devices, bandwidth ``b`` for its kind and latency ``l`` on a ring of
    ``h`` hops, and ``S`` the bytes that reach it:

    - all-gather, reduce-scatter: ``(n-1)/n * S / b + h * l``, fastest ring first; the next one gets ``S / n``;
    - all-reduce: twice that (a reduce-scatter, then an all-gather);
    - all-to-all: the same sum, slowest ring first (data for neighbours on the slow ring crosses only the fast one);
    - collective-permute: ``S / b + l``, with the least ``b`` and the largest ``l`` of the rings.

    All are linear in ``S``. On equal links the bandwidth terms of several axes add up to the ring over their product.
    Each collective also costs one kernel's overhead, so one over two axes is cheaper than two in a row.

    Raises:
      KeyError: ``kind`` or an axis is unknown.
    """
    fixed, per_byte = collective_rate(kind, axes, mesh)
    return fixed + per_byte * size


@functools.lru_cache(maxsize=MAX_RATES)
def collective_rate(kind: CollectiveKind, axes: tuple[str, ...], mesh: LogicalMesh) -> tuple[float, float]:
    """Seconds of a collective over ``axes`` however small it is, and seconds of each byte.

    A reduce-scatter over several axes is one after the other, as it is lowered, or an all-reduce of which each device
    keeps its part, where that is faster. XLA may make the second of one over an axis that is all of a slice.
    """
    over, overhead = rings(axes, mesh), mesh.hardware.overhead
    if kind != REDUCE_SCATTER:
        return _linear(kind, over, overhead)
    by_axis = _linear(kind, [ring for axis in axes for ring in rings((axis,), mesh)], overhead)
    all_reduce = _linear(ALL_REDUCE, over, overhead)
    if len(axes) == 1:
        return all_reduce if _becomes_all_reduce(axes[0], mesh) else by_axis
    return min(by_axis, all_reduce, key=lambda seconds: seconds[1])


def _becomes_all_reduce(axis: str, mesh: LogicalMesh) -> bool:
    """Whether XLA for TPU (JAX 0.12) turns a reduce-scatter over one axis into an all-reduce, in all dimensions of the
    torus at once: where it takes every chip of a slice of four by four or more, or of three dimensions. Those over part
    of a slice, two by two chips, or a rectangle of unequal sides stay as they are, and those that SparseCores run.
    """
    if mesh.hardware.sparse_core_collectives:
        return False
    sides = [span.devices for span in mesh.along(axis) if span.of_whole_slice]
    return len(sides) > 2 or (len(sides) == 2 and sides[0] == sides[1] > 2)


def _linear(kind: CollectiveKind, over: list[Ring], overhead: float) -> tuple[float, float]:
    fixed = ring_seconds(kind, over, 0.0, overhead)
    return fixed, ring_seconds(kind, over, 1.0, 0.0) - ring_seconds(kind, over, 0.0, 0.0)


class Ring(NamedTuple):
    """Devices between which a collective sends as in a ring; bandwidths in bytes/s of each."""

    devices: int
    ring_hops: int
    """From the first device to the last, in all-gathers and reduce-scatters."""
    hops: int
    """The same in other collectives."""
    latency: float
    """Seconds of one hop."""
    gather: float
    """Bandwidth of all-gathers and reduce-scatters."""
    reduce: float
    """Of all-reduces."""
    exchange: float
    """Of all-to-alls."""
    shift: float
    """Of collective-permutes."""

    def bandwidth(self, kind: CollectiveKind) -> float:
        """Bytes/s of a collective of this kind."""
        return {ALL_REDUCE: self.reduce, ALL_TO_ALL: self.exchange, COLLECTIVE_PERMUTE: self.shift}.get(
            kind, self.gather
        )


def rings(axes: tuple[str, ...], mesh: LogicalMesh) -> list[Ring]:
    """The rings of a collective over ``axes``, each of two devices or more."""
    found: list[Ring] = []
    along: list[tuple[Span, ...]] = []
    for axis in axes:
        n, link = mesh.shape[axis], mesh.slowest_link((axis,))
        if spans := mesh.along(axis):
            along.append(spans)
        elif n > 1:
            found.append(Ring(n, n - 1, n - 1, link.latency, *[link.bandwidth] * 4))
    if along:
        link = next(iter(mesh.hardware.links.values()))
        for devices, ring_hops, hops, *rates in torus_rates(tuple(along)):
            found.append(Ring(devices, ring_hops, hops, link.latency, *[rate * link.bandwidth for rate in rates]))
    return found


def ring_seconds(kind: CollectiveKind, over: list[Ring], size: float, overhead: float) -> float:
    """`collective_seconds` over rings already looked up."""
    if not over:
        return 0.0
    if kind == COLLECTIVE_PERMUTE:
        return overhead + size / min(r.shift for r in over) + max(r.latency for r in over)
    rounds = {ALL_GATHER: 1, REDUCE_SCATTER: 1, ALL_REDUCE: 2, ALL_TO_ALL: 1}[kind]
    seconds = 0.0
    for ring in sorted(over, key=lambda ring: ring.bandwidth(kind), reverse=kind != ALL_TO_ALL):
        n = ring.devices
        hops = ring.ring_hops if kind in (ALL_GATHER, REDUCE_SCATTER) else ring.hops
        seconds += (n - 1) / n * size / ring.bandwidth(kind) + hops * ring.latency
        size /= n
    return rounds * seconds + overhead
