"""Finds the collectives of a compiled program in its HLO text, with their mesh axes, payloads and number of runs.

The text is that of ``compiled.as_text()`` on CPU, GPU and TPU:

- An asynchronous collective is a ``-start`` and a ``-done``; only the start is counted.
- The TPU compiler spreads one asynchronous collective over several fusions with the same ``chain_id``; only the first
  is counted. It emits a reduce-scatter as a fusion named ``all-reduce-scatter`` around an all-reduce of the padded
  operand: that is counted as a reduce-scatter of the fusion's operands. A collective-permute then moves the rows that
  padding put on a neighbour: that is counted as part of the reduce-scatter.
- A loop's body is in the text once; `autoshard.backend.hlo.trip_counts` gives its runs.
- Device groups are lists ``{{0,1},{2,3}}``, iotas ``[4,2]<=[2,4]T(1,0)``, or axes of a mesh with names of the
  compiler's own, ``mesh['axis_0'=2,'axis_1'=4] {'axis_1'}``. Device numbers are row-major positions in the mesh.
- Collectives between TPU slices are a ``send`` and a ``recv`` of the host (`autoshard.backend.hlo.slices`); the
  ``send`` is counted.
- Every branch of a conditional is counted as taken, but where that is known (`autoshard.jaxpr.branch_runs`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from autoshard.backend.hlo.slices import of_every_slice, slice_transfer
from autoshard.backend.hlo.text import Computation, Instruction, Module, called, element_bits, parse_hlo
from autoshard.backend.hlo.trip_counts import run_counts
from autoshard.machine.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    COLLECTIVE_KINDS,
    COLLECTIVE_PERMUTE,
    REDUCE_SCATTER,
    Collective,
    CollectiveKind,
)
from autoshard.machine.mesh import LogicalMesh

Groups = tuple[tuple[int, ...], ...]

_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<= ]*)\]")
PAIRS = re.compile(r"source_target_pairs=\{([\d,{} ]*)\}")
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d, ]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
_CHAIN = re.compile(r'\bchain_id="(\d+)"')
_TPU_REDUCE_SCATTER = "all-reduce-scatter"
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")


def collectives(text: str, mesh: LogicalMesh) -> tuple[Collective, ...]:
    """Every collective of a compiled module, in the order of the text.

    Args:
      text: HLO as from `jax.stages.Compiled.as_text`.
      mesh: the mesh that the program was compiled for, which maps device groups to axes.
    """
    return module_collectives(parse_hlo(text), mesh)


def module_collectives(module: Module, mesh: LogicalMesh) -> tuple[Collective, ...]:
    """`collectives` of a parsed module, those that run when its entry does."""
    return tuple(located_collectives(module, mesh).values())


def located_collectives(module: Module, mesh: LogicalMesh) -> dict[tuple[str, str], Collective]:
    """The same, each by the computation and the instruction that starts it."""
    runs, callers = run_counts(module), module.caller_sources()
    group_axes = _GroupAxes(mesh, module.partitions)
    async_parts: set[str] = set()
    earlier: set[tuple[str, str, str, tuple[str, ...] | None, int]] = set()
    found: dict[tuple[str, str], Collective] = {}

    def add(
        computation: Computation,
        instruction: Instruction,
        kind: CollectiveKind,
        axes: tuple[str, ...] | None,
        payloads: tuple[int, ...],
        *,
        share: float = 1.0,
        redundant: bool = False,
        addends: int = 1,
    ) -> None:
        """The collective that ``instruction`` starts, in ``computation``."""
        count, exact = runs[computation.name]
        found[computation.name, instruction.name] = Collective(
            kind=kind,
            axes=axes,
            bytes=sum(payloads),
            count=count,
            source=module.source(instruction) or callers.get(computation.name, ""),
            operation=module.operation(instruction),
            computation=computation.name,
            exact=exact,
            share=share,
            redundant=redundant,
            addends=addends,
            parts=payloads if len(payloads) > 1 else (),
        )

    for computation in module.computations.values():
        if computation.name not in runs:
            continue
        for instruction in computation.instructions.values():
            if instruction.opcode == "send" and (transfer := slice_transfer(instruction, module.partitions)):
                axes, size = group_axes.of(transfer.kind, transfer.groups)
                sent = shape_bytes(tuple_elements(instruction.shape)[0])
                payload = sent * (size if transfer.kind == ALL_GATHER else 1)
                share = _senders(transfer.groups) / mesh.size if transfer.kind == COLLECTIVE_PERMUTE else 1.0
                add(computation, instruction, transfer.kind, axes, (payload,), share=share)
                continue
            kind = instruction.opcode.removesuffix("-start")
            if (
                kind not in COLLECTIVE_KINDS
                or _wraps_computation(instruction, module)
                or _is_later_part(instruction, async_parts)
            ):
                continue
            axes, size = group_axes(kind, instruction.attributes)
            is_scatter = computation.name.startswith(_TPU_REDUCE_SCATTER) and kind == ALL_REDUCE
            ends_scatter = kind == COLLECTIVE_PERMUTE and _moves_scatter_padding(instruction, computation)
            payloads = (_parameter_bytes(computation),) if is_scatter else _payloads(kind, instruction, size)
            same = computation.name, kind, instruction.operands, axes, sum(payloads)
            redundant = ".remat" in instruction.name or (bool(instruction.operands.strip()) and same in earlier)
            earlier.add(same)
            share = group_axes.sending(instruction.attributes) if kind == COLLECTIVE_PERMUTE else 1.0
            kind = REDUCE_SCATTER if is_scatter or ends_scatter else kind
            addends = _addends(instruction, computation) if kind == ALL_REDUCE and len(payloads) == 1 else 1
            add(computation, instruction, kind, axes, payloads, share=share, redundant=redundant, addends=addends)
    return found


def _addends(reduction: Instruction, computation: Computation) -> int:
    """How many values the computation adds up to what ``reduction`` sends."""
    found, left = 0, [*reduction.names]
    while left:
        instruction = computation.instructions.get(left.pop())
        if instruction is not None and instruction.opcode == "add":
            left += instruction.names
        else:
            found += 1
    return found


def computations_below(module: Module, root: Instruction) -> set[str]:
    """Computations that ``root`` calls, and those that these call."""
    found: set[str] = set()
    inner = [name for _, name in called(root)]
    while inner:
        name = inner.pop()
        if name not in found and name in module.computations:
            found.add(name)
            inner += [n for i in module.computations[name].instructions.values() for _, n in called(i)]
    return found


def _moves_scatter_padding(permute: Instruction, computation: Computation) -> bool:
    """Whether a permute completes a padded reduce-scatter: it sends a slice of the result of ``all-reduce-scatter``."""
    body = computation.instructions
    rows = body.get(permute.names[0]) if permute.names else None
    fusion = body.get(rows.names[0]) if rows is not None and rows.opcode == "slice" else None
    return fusion is not None and any(
        name.startswith(_TPU_REDUCE_SCATTER) for key, name in called(fusion) if key == "calls"
    )


def _wraps_computation(instruction: Instruction, module: Module) -> bool:
    """Whether an async start wraps a computation that is in the text too: that has the collective itself."""
    return instruction.opcode.endswith("-start") and any(
        name in module.computations for key, name in called(instruction) if key == "calls"
    )


def _senders(pairs: Groups) -> int:
    """Number of devices that a collective-permute sends from to another device."""
    return len({pair[0] for pair in pairs if pair[0] != pair[1]})


def _is_later_part(instruction: Instruction, seen: set[str]) -> bool:
    """Whether this is a later part of an asynchronous collective in ``seen``; adds it if it is the first."""
    chain = chain_of(instruction)
    is_later = chain in seen
    seen.update([chain] if chain else ())
    return is_later


def chain_of(instruction: Instruction) -> str:
    """What is the same of all parts of one asynchronous collective that fusions share; empty for other instructions."""
    chain, channel = _CHAIN.search(instruction.attributes), _CHANNEL.search(instruction.attributes)
    return f"{chain[1]}, {channel[1]}" if chain and channel else ""


def shape_bytes(shape: str) -> int:
    """Bytes of an HLO shape or tuple of shapes, each array rounded up to whole bytes: ``(bf16[8,4]{1,0}, s4[3])``."""
    total = 0
    for dtype, dims in _SHAPE.findall(shape):
        elements = math.prod(int(d.strip("<= ")) for d in dims.split(",") if d.strip())
        total += -(-elements * element_bits(dtype) // 8)
    return total


def _payloads(kind: str, instruction: Instruction, group: int) -> tuple[int, ...]:
    """Bytes of one run on one device, as `Collective.bytes` defines them, of each array."""
    shape = instruction.shape
    if instruction.opcode.endswith("-start"):
        parts = tuple_elements(
            shape
        )  # operand, result, and for some contexts; of an all-reduce the operands only as a tuple
        apart = kind != ALL_REDUCE or parts[0].startswith("(")
        shape = parts[1] if apart and len(parts) > 1 else shape
    return tuple(shape_bytes(s) * (group if kind == REDUCE_SCATTER else 1) for s in tuple_elements(shape))


def tuple_elements(shape: str) -> list[str]:
    """The top-level elements of a tuple shape; of an array, the array alone."""
    if not shape.startswith("("):
        return [shape]
    parts, depth, start = [], 0, 1
    for i, c in enumerate(shape):
        depth += (c in "([{") - (c in ")]}")
        if (c == "," and depth == 1) or depth == 0:
            parts.append(shape[start:i].strip())
            start = i + 1
    return parts


def _parameter_bytes(computation: Computation) -> int:
    return sum(shape_bytes(i.shape) for i in computation.instructions.values() if i.opcode == "parameter")


class _GroupAxes:
    """Maps device groups to mesh axes; each distinct text of ``replica_groups`` is parsed once."""

    def __init__(self, mesh: LogicalMesh, partitions: int = 0) -> None:
        self.mesh, self.partitions = mesh, partitions
        self.names = [a for a, n in mesh.shape.items() if n > 1]
        self.ids = np.arange(mesh.size).reshape(mesh.axis_sizes)
        self.by_text: dict[str, tuple[tuple[str, ...] | None, int]] = {}
        self.by_groups: dict[frozenset[frozenset[int]], tuple[str, ...]] = {}
        for n in range(len(self.names) + 1):
            for axes in itertools.combinations(self.names, n):
                dims = [mesh.axis_names.index(a) for a in axes]
                self.by_groups[_unordered(_groups_along(self.ids, dims))] = axes

    def __call__(self, kind: str, attributes: str) -> tuple[tuple[str, ...] | None, int]:
        """The axes, None where no set of axes has these groups, and the number of devices in a group."""
        if kind == COLLECTIVE_PERMUTE:
            return self.of(kind, pairs) if (pairs := self._pairs(attributes)) is not None else (None, 1)
        spelling = re.search(r"replica_groups=.*?(?=, [a-z_]+=(?!\()|$)", attributes)
        key = spelling[0] if spelling else ""
        if key not in self.by_text:
            groups = replica_groups(key, self.partitions or self.mesh.size)
            self.by_text[key] = self.of(kind, self._everywhere(groups)) if groups else (None, 1)
        return self.by_text[key]

    def of(self, kind: str, groups: Groups) -> tuple[tuple[str, ...] | None, int]:
        """`__call__` of groups of devices of the whole mesh, or of pairs of a source and a target."""
        if kind == COLLECTIVE_PERMUTE:
            return self._permuted_axes(groups), 2
        return self.by_groups.get(_unordered(groups)), max((len(g) for g in groups), default=1)

    def sending(self, attributes: str) -> float:
        """The share of devices that a collective-permute sends from to another device."""
        return _senders(self._pairs(attributes) or ()) / self.mesh.size

    def _pairs(self, attributes: str) -> Groups | None:
        pairs = PAIRS.search(attributes)
        return self._everywhere(listed_groups(pairs[1])) if pairs else None

    def _everywhere(self, groups: Groups) -> Groups:
        return of_every_slice(groups, self.partitions, self.mesh.size)

    def _permuted_axes(self, pairs: Groups) -> tuple[str, ...] | None:
        """The axes in which some source-target pair differs."""
        if any(d >= self.mesh.size for pair in pairs for d in pair):
            return None
        places = [np.unravel_index(list(pair), self.mesh.axis_sizes) for pair in pairs if len(pair) == 2]
        return tuple(
            a for i, a in enumerate(self.mesh.axis_names) if any(int(at[i][0]) != int(at[i][1]) for at in places)
        )


def replica_groups(text: str, devices: int) -> Groups | None:
    """The device groups of ``replica_groups=...`` in any of its three forms; None for any other form.

    Args:
      devices: number of devices; ``{}`` means one group of all.
    """
    if mesh := _MESH.search(text):
        return _mesh_groups(mesh[1], mesh[2], mesh[3])
    if iota := _IOTA.search(text):
        dims, reshape, perm = (_ints(part or "") for part in iota.groups())
        ids = np.arange(math.prod(reshape)).reshape(reshape)
        return _rows((ids.transpose(perm) if perm else ids).reshape(dims))
    if listed := _LISTED.search(text):
        return listed_groups(listed[1]) or (tuple(range(devices)),)
    return None


def _mesh_groups(mesh: str, order: str | None, group: str) -> Groups:
    """Groups of ``mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b':(2)2}``: axes, device order, grouped axes."""
    sizes = {name.strip("' "): int(size) for name, size in (part.split("=") for part in mesh.split(","))}
    # A sub-axis `'b':(major)size` splits the axis into (major, size, minor), of which the middle one is grouped.
    parts = {name: (1, size, 1) for name, size in sizes.items()}
    chosen: dict[str, int] = {}
    for name, major, part in re.findall(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?", group):
        if part:
            parts[name] = int(major), int(part), sizes[name] // int(major) // int(part)
        chosen[name] = list(sizes).index(name) * 3 + 1
    ids = np.arange(math.prod(sizes.values()))
    if order and order.startswith("["):
        reshape, perm = (_ints(p) for p in re.findall(r"[\[(]([\d,]+)[\])]?", order)[:2])
        ids = ids.reshape(reshape).transpose(perm)
    elif order:
        ids = np.asarray(_ints(order))
    return _groups_along(ids.reshape([n for name in sizes for n in parts[name]]), list(chosen.values()))


def _groups_along(ids: np.ndarray, dims: Sequence[int]) -> Groups:
    """Groups of the devices that differ in ``dims`` only."""
    others = [d for d in range(ids.ndim) if d not in dims]
    return _rows(ids.transpose(*others, *dims).reshape(-1, math.prod(ids.shape[d] for d in dims)))


def _rows(ids: np.ndarray) -> Groups:
    return tuple(tuple(int(d) for d in row) for row in ids)


def listed_groups(text: str) -> Groups:
    return tuple(_ints(row) for row in re.findall(r"\{([\d, ]*)\}", text))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(_numbers(text))


def _numbers(text: str) -> Iterator[int]:
    for digits in re.findall(r"\d+", text):
        yield int(digits)


def _unordered(groups: Groups) -> frozenset[frozenset[int]]:
    return frozenset(frozenset(g) for g in groups)
