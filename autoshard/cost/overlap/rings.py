"""Which reshards of a product go in rings beside it, and what of their seconds can be hidden there.

Where the chip would wait for gathers and scatters, an all-gather of a product's operand and a reduce-scatter of its
result are lowered as collective matmuls (Wang et al., ASPLOS 2023; see `autoshard.backend.rings`): permutes along a
*ring*, each beside a part of that product.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping

from autoshard.cost.overlap.products import is_of_xla
from autoshard.cost.overlap.seconds_waited import Hideable
from autoshard.ir.graph import OpKind
from autoshard.ir.spec import Axes, Spec
from autoshard.machine.collective import (
    ALL_GATHER,
    COLLECTIVE_PERMUTE,
    REDUCE_SCATTER,
    CollectiveKind,
    collective_rate,
)
from autoshard.machine.mesh import LogicalMesh

MAX_PARTS = 8
"""Devices of a ring: each part is an instruction of its own."""
RING_GAIN = 0.72
"""Of the seconds of what runs in a ring beside a product, those that are saved where all of it is hidden: the product's
parts take longer together, and read and write sums. Of three decoders that libtpu 0.0.50 compiles for v5e in two plans
each, 0.25 of the ring's seconds more, where 0.9 of it is hidden."""
MIN_PRODUCT = 1 << 20
"""Elements of a part of a product in a ring: smaller ones leave the chip's units idle."""


def has_rings(kind: OpKind, mesh: LogicalMesh) -> bool:
    """Whether what a product gathers and scatters goes in rings where it can (`ring_reshards`): where the chip would
    wait for it."""
    return mesh.hardware.blocking_gathers and mesh.hardware.blocking_reduce_scatters and is_of_xla(kind)


def ring_dims(kind: OpKind, position: int) -> tuple[int, ...]:
    """The dimensions of a product's operand of which each part makes a part of the result."""
    rule = kind.rule
    return tuple([d for d, f in enumerate(rule.operands[position]) if len(f) == 1 and f in rule.results[0]])


def gathered_dims(kind: OpKind, position: int) -> tuple[int, ...] | None:
    """The dimensions of a product's operand that can be gathered in a ring: `ring_dims`, and those that it sums over
    where the result, of which each part makes a summand, is no larger than the operand. None of a result."""
    rule = kind.rule
    if position >= len(rule.operands):
        return None
    factors = rule.operands[position]
    adds = math.prod(kind.shapes[-1]) <= math.prod(kind.shapes[position])
    summed = [d for d, f in enumerate(factors) if adds and len(f) == 1 and rule.kind(f[0]) == "sum"]
    return tuple(sorted({*ring_dims(kind, position), *summed}))


def gathered_axis(before: Spec, after: Spec) -> tuple[int, str] | None:
    """The dimension that a reshard gathers over one mesh axis, and that axis; None where it does another thing."""
    changed = [d for d, (a, b) in enumerate(zip(before.dims, after.dims, strict=True)) if a != b]
    if len(changed) != 1 or before.partial or after.partial:
        return None
    split: Axes = before.dims[changed[0]]
    return (changed[0], split[-1]) if split[:-1] == after.dims[changed[0]] else None


@functools.lru_cache(maxsize=1 << 14)
def ring_reshards(spec: Spec, dims: tuple[int, ...] | None, made: int, mesh: LogicalMesh) -> Mapping[Spec, Hideable]:
    """The specs to which an operand or a result of a product with ``spec`` is resharded in a ring, and what of the
    reshard's seconds can be hidden: of an operand that is all-gathered over one axis, and of a result that is
    reduce-scattered, of which one axis of the first dimension goes in a ring and others after it. No ring has more than
    `MAX_PARTS` devices, and no part of a product fewer than `MIN_PRODUCT` elements.

    Args:
      dims: `gathered_dims`.
      made: elements of the result, unsharded.
    """
    parts = mesh.shape
    if dims is not None:
        most = min(MAX_PARTS, made // MIN_PRODUCT)
        split = [(d, spec.dims[d][-1]) for d in dims if spec.dims[d] and parts[spec.dims[d][-1]] <= most]
        gathered = {spec.with_dim(d, spec.dims[d][:-1]): _in_ring(ALL_GATHER, axis, (axis,), mesh) for d, axis in split}
        return {} if spec.partial else gathered
    sums = {a for a, kind in spec.partial if kind == "sum"}
    axes = tuple(a for a in mesh.axis_names if a in sums)
    most = min(MAX_PARTS, made // spec.num_shards(parts) // MIN_PRODUCT)
    if not axes or len(axes) < len(spec.partial):
        return {}
    found = dict[Spec, Hideable]()
    for scattered in itertools.product(range(spec.rank), repeat=len(axes)):
        after = spec.reduced()
        for d, axis in zip(scattered, axes, strict=True):
            after = after.with_dim(d, (*after.dims[d], axis))
        first = (a for d, a in zip(scattered, axes, strict=True) if d == min(scattered) and parts[a] <= most)
        if ring := next(first, None):
            found[after] = _in_ring(REDUCE_SCATTER, ring, axes, mesh)
    return found


def _in_ring(kind: CollectiveKind, axis: str, axes: Axes, mesh: LogicalMesh) -> Hideable:
    """What can be hidden of a collective over ``axes`` that is done over ``axis`` in a ring, and over the others after
    it."""
    (_, whole), (_, hop) = collective_rate(kind, axes, mesh), collective_rate(COLLECTIVE_PERMUTE, (axis,), mesh)
    sent = 1 - 1 / mesh.shape[axis]
    share = 1.0 if len(axes) == 1 else sent
    return Hideable(RING_GAIN * share, max(0.0, sent * hop / whole - share) if whole else 0.0)
