"""Collective: one transfer between devices, and what it costs.

The same record describes what a plan expects (`autoshard.cost.reshard`, `autoshard.cost.cost`) and what the
compiler emitted (`autoshard.backend.hlo_collectives`), so that the two can be laid side by side (`autoshard.backend.audit`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from autoshard.machine.mesh import LogicalMesh

type CollectiveKind = Literal["all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"]
"""The HLO opcode of a collective."""

ALL_GATHER: Final = "all-gather"
ALL_REDUCE: Final = "all-reduce"
ALL_TO_ALL: Final = "all-to-all"
COLLECTIVE_PERMUTE: Final = "collective-permute"
REDUCE_SCATTER: Final = "reduce-scatter"
COLLECTIVE_KINDS: Final = (ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COLLECTIVE_PERMUTE, REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective, and how often a call of the program runs it.

    ``bytes`` is the payload of one run on one device:

    ================== ===========================================================
    all-gather         the result: the value once gathered
    reduce-scatter     the operand: the value before it is scattered
    all-reduce         the operand (as large as the result)
    all-to-all         the operand (as large as the result), the own part included
    collective-permute the operand (as large as the result)
    ================== ===========================================================

    It is what a device that takes part in full sends or receives, and so what the run lasts by. What crosses the wire
    in all is `sent`.
    """

    kind: CollectiveKind
    axes: tuple[str, ...] | None
    """Mesh axes in mesh order; None when the device groups match no set of axes of the mesh."""
    bytes: int
    count: int = 1
    """Runs per call of the program: the product of the enclosing loops' trip counts."""
    source: str = ""
    """``file:line`` of the user's code, or empty."""
    operation: str = ""
    """What it comes from, by JAX's name for it, or empty when planned."""
    computation: str = ""
    """Name of the HLO computation that holds it, or empty when planned."""
    exact: bool = True
    """False when an enclosing loop's trip count is not known, so that ``count`` is a lower bound."""
    share: float = 1.0
    """Of a collective-permute, the share of the devices that send to another one."""
    redundant: bool = False
    """Whether another one of the same computation does the same with the same operands, or the compiler made it again
    to save memory; when planned, whether one does with what its operand is a view of."""

    @property
    def total_bytes(self) -> int:
        """Bytes per device over all runs."""
        return self.bytes * self.count

    def wire_bytes(self, mesh: LogicalMesh) -> float:
        """Bytes that leave a device of ``mesh`` over all runs, on average, with reductions and gathers run as rings."""
        n = mesh.size if self.axes is None else mesh.axes_size(self.axes)
        rounds = {ALL_REDUCE: 2 * (n - 1) / n, COLLECTIVE_PERMUTE: self.share}.get(self.kind, (n - 1) / n)
        return self.total_bytes * rounds

    def __str__(self) -> str:
        axes = "unknown groups" if self.axes is None else "+".join(self.axes) or "no axis"
        at = f" at {self.source}" if self.source else ""
        more = "" if self.exact else " or more"
        return f"{self.kind} over {axes}: {self.bytes:,} bytes x {self.count}{more}{at}"


def collective_seconds(kind: CollectiveKind, axes: tuple[str, ...], size: float, mesh: LogicalMesh) -> float:
    """Seconds that one collective takes, with ``size`` in bytes as `Collective.bytes` defines it.

    Each axis is a ring of its own, as a torus and a hierarchical network both run them: with ``n``
    devices, bandwidth ``b`` and latency ``l`` on an axis and ``S`` the bytes that reach it,

    - all-gather, reduce-scatter: ``(n-1)/n * S / b + (n-1) * l``, fastest axis first, and the next
      axis sees ``S / n``;
    - all-reduce: twice that (a reduce-scatter, then an all-gather);
    - all-to-all: the same sum, slowest axis first (what stays within the slow axis's neighbours need
      cross only the fast one);
    - collective-permute: ``S / b + l``, with the least ``b`` and the largest ``l`` of the axes.

    So the time of each is linear in its bytes.

    On equal links the bandwidth terms of several axes add up to the ring over their product. Every
    collective also costs one kernel's overhead, so one over two axes is cheaper than two in a row.

    Raises:
      KeyError: ``kind`` or an axis is unknown.
    """
    return rings_seconds(kind, [ring for ring in rings(axes, mesh) if ring[0] > 1], size, mesh.hardware.overhead)


Ring = tuple[int, float, float]
"""Devices, bytes/s, seconds of latency."""


def rings(axes: tuple[str, ...], mesh: LogicalMesh) -> list[Ring]:
    """The ring of each axis in ``axes``."""
    shape = mesh.shape
    found: list[Ring] = []
    for axis in axes:
        link = mesh.slowest_link((axis,))
        found.append((shape[axis], link.bandwidth, link.latency))
    return found


def rings_seconds(kind: CollectiveKind, over: list[Ring], size: float, overhead: float) -> float:
    """`collective_seconds` for axes already looked up, each of two devices or more."""
    if not over:
        return 0.0
    if kind == COLLECTIVE_PERMUTE:
        return overhead + size / min(b for _, b, _ in over) + max(l for _, _, l in over)
    rounds = {ALL_GATHER: 1, REDUCE_SCATTER: 1, ALL_REDUCE: 2, ALL_TO_ALL: 1}[kind]
    seconds = 0.0
    for n, bandwidth, latency in sorted(over, key=lambda ring: ring[1], reverse=kind != ALL_TO_ALL):
        seconds += (n - 1) / n * size / bandwidth + (n - 1) * latency
        size /= n
    return rounds * seconds + overhead
