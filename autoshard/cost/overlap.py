"""Which reshards run beside products: what of their seconds a device does not wait for, and values that it waits for.

XLA starts a collective as early as its operand is there, waits for it as late as its result is read, and computes
meanwhile. Between two products of a chain there is nothing to compute, so that activations are waited for. Two sorts of
values have time (`OpKind.beside`):

- *weights*, computed of carried arguments alone: there from the beginning of a step, or of an iteration of the loop
  over layers, to the product that reads them;
- *gradients* of weights, which no product reads: from the product that makes them to the end of the iteration or step.

Products of an inner loop do not count: XLA runs no collective beside a loop.

Their collectives run one after the other: gathers first, in the order in which they are read, then reductions, in the
order in which they are made. How long those before take is counted as if every weight was split over all devices, on
GPUs over those between which the link is slowest.

On GPUs loops do more. Weights of the next layer are gathered beside all products of this one (`gathered_ahead`), and
its gradients are reduced beside those of the next (`autoshard.cost.compiler_options`). And what moves activations of
the backward pass runs beside the products that only gradients wait for (`_beside_gradients`).

Where the chip would wait for gathers and scatters all the same, an all-gather of a product's operand and a
reduce-scatter of its result are lowered as collective matmuls (Wang et al., ASPLOS 2023; see
`autoshard.backend.rings`): permutes along a *ring*, each beside a part of that product. So are activations there, and
gradients. In a stage of a pipeline nothing else is counted as hidden.

The share `Hardware.hidden_collectives` of a reshard is hidden, as far as the products last (`seconds_waited`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from autoshard.ir.dim_classes import argument_roles
from autoshard.ir.graph import Graph, OpKind
from autoshard.ir.spec import Axes, Spec
from autoshard.machine.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    COLLECTIVE_PERMUTE,
    REDUCE_SCATTER,
    CollectiveKind,
    collective_rate,
    collective_seconds,
)
from autoshard.machine.host_link import FROM_HOST, TO_HOST, copies_beside_products, hides_copies, layer_seconds
from autoshard.machine.mesh import LogicalMesh

NOWHERE, PARTIAL = -1, -2
"""In the place of a dimension (`slow_placement`): an axis shards none and sums over it are not partial, or are."""
STEP = -1
"""What is in no loop, as a loop's number."""
MAX_PARTS = 8
"""Devices of a ring: each part is an instruction of its own."""
MIN_LAYERS = 3
"""Fewest layers that are gathered ahead: the last one's weights are gathered once more."""
RING_GAIN = 0.72
"""Of the seconds of what runs in a ring beside a product, those that are saved where all of it is hidden: the product's
parts take longer together, and read and write sums. Of three decoders that libtpu 0.0.50 compiles for v5e in two plans
each, 0.25 of the ring's seconds more, where 0.9 of it is hidden."""
MIN_PRODUCT = 1 << 20
"""Elements of a part of a product in a ring: smaller ones leave the chip's units idle."""


Resharding = Callable[[int, int], tuple[Spec, Spec] | None]
"""Of a node and a value that it reads: its specs before and after the node reshards it."""


class _Window(NamedTuple):
    """When the collective of a value can run, in seconds of products since the iteration began."""

    value: int
    opens: float
    closes: float
    seconds: float
    """Most that it can take."""


class Hideable(NamedTuple):
    """What of the seconds of a reshard can be hidden, as numbers or arrays."""

    share: Any = 1.0
    """Where it is done before the products beside it are."""
    outlasts: Any = 0.0
    """By how much longer it takes in a ring than that, of its seconds: what no product is left for is waited for."""


ALL, NOTHING = Hideable(), Hideable(0.0)


def seconds_waited(seconds: Any, kind: OpKind, position: int, mesh: LogicalMesh, part: Hideable = ALL) -> Any:
    """The part of ``seconds``, a number or an array, in which a device waits for the reshard of the operand or result
    at this position.

    Args:
      part: `hideable`.
    """
    beside = kind.beside[position] if kind.beside is not None else 0.0
    if not beside:
        return seconds
    hidden = mesh.hardware.hidden_collectives * part.share * seconds
    return seconds - np.maximum(np.minimum(hidden, beside - part.outlasts * seconds), 0.0)


class Resharded(NamedTuple):
    """One operand or result of a node."""

    position: int
    before: Spec
    after: Spec
    seconds: float


def seconds_waited_by(kind: OpKind, moved: Sequence[Resharded], mesh: LogicalMesh) -> list[float]:
    """`seconds_waited` of each of what a node reshards: all of its rings together run beside it once."""
    waited = [
        float(seconds_waited(m.seconds, kind, m.position, mesh, hideable(kind, m.position, m.before, m.after, mesh)))
        for m in moved
    ]
    hidden = [m.seconds - w if m.position in kind.in_rings else 0.0 for m, w in zip(moved, waited, strict=True)]
    excess = sum(hidden) - product_seconds(kind, mesh) if any(hidden) else 0.0
    return [w + excess * h / sum(hidden) for w, h in zip(waited, hidden, strict=True)] if excess > 0 else waited


def hideable(kind: OpKind, position: int, before: Spec, after: Spec, mesh: LogicalMesh) -> Hideable:
    """What of the seconds of a reshard of the operand or result at this position can be hidden: what runs in a ring, or
    all of it, but over slow links where only others count."""
    if position in kind.in_rings:
        rings = ring_reshards(before, gathered_dims(kind, position), math.prod(kind.shapes[-1]), mesh)
        return rings.get(after, NOTHING)
    slow = position in kind.on_fast_links and takes_slow_link(slow_placement(before, mesh), slow_placement(after, mesh))
    return NOTHING if slow else ALL


def takes_slow_link(before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether a reshard moves data over links of the slowest kind, by the `slow_placement` before and after it."""
    return any(b not in (NOWHERE, a) for b, a in zip(before, after, strict=True))


@functools.lru_cache(maxsize=1 << 14)
def slow_placement(spec: Spec, mesh: LogicalMesh) -> tuple[int, ...]:
    """For each of `LogicalMesh.slow_axes`, the dimension that it shards, `PARTIAL`, or `NOWHERE`."""
    where = {a: d for d, axes in enumerate(spec.dims) for a in axes} | {a: PARTIAL for a, _ in spec.partial}
    return tuple([where.get(a, NOWHERE) for a in mesh.slow_axes])


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


def with_hidden_transfers(graph: Graph) -> Graph:
    """``graph`` with `OpKind.beside` of its products and `OpKind.copied_beside`; itself if it has that, and where the
    chip hides nothing."""
    program, nodes = graph.program, list(graph.nodes)
    if any(node.kind.beside is not None or node.kind.copied_beside is not None for node in nodes):
        return graph
    for n, seconds in copied_beside_products(graph).items():
        nodes[n] = nodes[n]._replace(kind=graph.kinds.variant(nodes[n].kind, copied_beside=seconds))
    if not program.mesh.hardware.hidden_collectives:
        return graph if nodes == list(graph.nodes) else replace(graph, nodes=tuple(nodes))
    alone = program.pipeline is None
    beside = _seconds_beside(graph) if alone else {}
    activations = _beside_gradients(graph) if alone else {}
    for n, node in enumerate(graph.nodes):
        kind, values = node.kind, node.values
        own = product_seconds(kind, program.mesh) if has_rings(kind, program.mesh) else 0.0
        found = tuple([beside.get(v, activations.get(v, own)) for v in values]) if kind.flops else ()
        if any(found):
            fast = frozenset(i for i, v in enumerate(values) if v in activations and v not in beside)
            rings = frozenset(i for i, v in enumerate(values) if own and v not in beside and v not in activations)
            nodes[n] = node._replace(kind=graph.kinds.variant(kind, beside=found, on_fast_links=fast, in_rings=rings))
    return replace(graph, nodes=tuple(nodes))


def has_rings(kind: OpKind, mesh: LogicalMesh) -> bool:
    """Whether what a product gathers and scatters goes in rings where it can (`ring_reshards`): where the chip would
    wait for it."""
    return mesh.hardware.blocking_gathers and mesh.hardware.blocking_reduce_scatters and is_of_xla(kind)


def _seconds_beside(graph: Graph) -> Mapping[int, float]:
    """How long products run beside the collective of each weight and gradient."""
    nodes, mesh, loop_of = graph.nodes, graph.program.mesh, _innermost_loops(graph)
    of_weights, waits = weights(graph), mesh.hardware.blocking_reduce_scatters
    gradients = set[int]() if waits else gradients_of(graph)
    ahead = gathered_ahead(graph)
    over = (mesh.slow_axes if mesh.platform == "gpu" else ()) or mesh.nontrivial_axes
    parts = mesh.size // mesh.axes_size(over)

    def takes(kind: CollectiveKind, size: float) -> float:
        return collective_seconds(kind, over, size // parts, mesh)

    found: dict[int, float] = {}
    for inside in _products_by_loop(graph):
        now, read, made, sizes = 0.0, dict[int, float](), dict[int, float](), defaultdict[int, float](float)
        for n in inside:
            seconds = product_seconds(nodes[n].kind, mesh)
            for i, v in enumerate(nodes[n].operands):
                if v in of_weights:
                    read.setdefault(v, now + read_after(nodes[n].kind, i) * seconds)
                    sizes[v] = max(sizes[v], nodes[n].kind.sent_bytes[i])
            now += seconds
            made.update(dict.fromkeys(gradients.intersection(nodes[n].results), now))
        in_order = sorted(read, key=lambda v: read[v])
        early = ahead if not made else {}  # else not all of them are (`autoshard.plan.constraints.gathers_ahead`)
        gathers = [_Window(v, 0.0, now if v in early else read[v], takes(ALL_GATHER, sizes[v])) for v in in_order]
        late = mesh.platform == "gpu" and loop_of[inside[0]] != STEP  # in the next iteration
        sums = [(v, 0.0 if late else at, takes(ALL_REDUCE, graph.values[v].bytes)) for v, at in made.items()]
        found.update(_in_order([*gathers, *(_Window(v, opens, now, seconds) for v, opens, seconds in sums)]))
    return found


def copied_beside_products(graph: Graph) -> Mapping[int, float]:
    """The nodes that copy residuals of a layer to the host's memory or back where XLA runs that beside the layer's
    products (`autoshard.backend.host_copies`), each with its share by bytes of the seconds of these; with 0 where XLA
    does so too late."""
    found, mesh, loop_of = dict[int, float](), graph.program.mesh, _innermost_loops(graph)
    if not copies_beside_products(mesh) or graph.program.pipeline is not None:
        return found
    copies = defaultdict[tuple[int, str], list[int]](list)
    for n, node in enumerate(graph.nodes):
        if node.kind.host_transfer and node.trip_count and loop_of[n] != STEP:
            copies[loop_of[n], node.kind.host_transfer].append(n)
    for inside in _products_by_loop(graph) if copies else ():
        products = sum(product_seconds(graph.nodes[n].kind, mesh) for n in inside) if hides_copies(mesh) else 0.0
        seconds = layer_seconds(products, mesh)
        for way in (TO_HOST, FROM_HOST):
            nodes = copies[loop_of[inside[0]], way]
            total = sum(graph.nodes[n].kind.bytes[0] for n in nodes)
            found.update((n, float(f"{seconds * graph.nodes[n].kind.bytes[0] / total:.6g}")) for n in nodes)
    return found


def _products_by_loop(graph: Graph) -> Iterable[list[int]]:
    """The products of each loop without those of loops inside it, and of what is in none."""
    loop_of, products = _innermost_loops(graph), defaultdict[int, list[int]](list)
    for n, node in enumerate(graph.nodes):
        if node.kind.flops and node.trip_count:
            products[loop_of[n]].append(n)
    return products.values()


def _beside_gradients(graph: Graph) -> Mapping[int, float]:
    """On GPUs, how long products that make gradients run beside activations of the backward pass: beside what another
    product makes of the same cotangent, and beside that cotangent, in equal parts. What only gradients are made of has
    that other product. Of slower links than others gradients and weights have need themselves."""
    found, nodes, mesh = defaultdict[int, float](float), graph.nodes, graph.program.mesh
    gradients = gradients_of(graph) if mesh.platform == "gpu" else set[int]()
    for inside in _products_by_loop(graph) if gradients else ():
        seconds = {n: product_seconds(nodes[n].kind, mesh) for n in inside}
        makes_gradient = {n: nodes[n].results[0] in gradients for n in inside}
        readers: dict[int, list[int]] = defaultdict(list)
        for n in inside:
            for v in dict.fromkeys(nodes[n].operands) if not makes_gradient[n] else ():
                readers[v].append(n)
        for n in filter(makes_gradient.__getitem__, inside):
            others = dict.fromkeys(m for v in nodes[n].operands for m in readers[v])
            made_of = dict.fromkeys(nodes[n].operands)
            claims = [v for v in made_of if readers[v]] + [v for m in others for v in nodes[m].results]
            for v in claims:
                found[v] += seconds[n] / len(claims)
            for v in made_of:
                if not readers[v]:
                    found[v] = max(found[v], sum(seconds[m] for m in others))
    return {v: float(f"{x:.6g}") for v, x in found.items()}


def gathered_ahead(graph: Graph) -> Mapping[int, int]:
    """The values that a loop can gather an iteration ahead (`autoshard.backend.gathers.early_gathers`), each with the
    number of its loop: rows of what is stacked, and casts of them."""
    program, found = graph.program, dict[int, int]()
    if program.mesh.platform != "gpu" or program.pipeline is not None:
        return found
    loop_of, of_weights = _innermost_loops(graph), weights(graph)
    for n, node in enumerate(graph.nodes):
        shapes = node.kind.shapes
        is_row = node.tie and len(shapes[0]) > len(shapes[-1]) and shapes[0][0] >= MIN_LAYERS
        same = node.kind.traits.casts or node.kind.traits.constrains
        if loop_of[n] != STEP and (is_row or (same and found.keys() >= {*node.operands})):
            found.update(dict.fromkeys(of_weights.intersection(node.results), loop_of[n]))
    return found


def loops_with_gradients(graph: Graph) -> set[int]:
    """The loops in which products make gradients of weights."""
    gradients, loop_of = gradients_of(graph), _innermost_loops(graph)
    return {loop_of[n] for n, node in enumerate(graph.nodes) if not gradients.isdisjoint(node.results)}


def _in_order(windows: Iterable[_Window]) -> Mapping[int, float]:
    """How long each runs within its window, one after the other."""
    free, found = 0.0, dict[int, float]()
    for w in windows:
        start = max(free, w.opens)
        found[w.value] = float(f"{max(0.0, min(w.seconds, w.closes - start)):.6g}")  # equal in equal layers
        free = start + found[w.value] if found[w.value] else free
    return found


def read_after(kind: OpKind, operand: int) -> float:
    """Which part of its own products a node computes before it reads this operand."""
    local = kind.rule.local
    return local.read_after[operand] if local is not None and local.read_after else 0.0


def product_seconds(kind: OpKind, mesh: LogicalMesh) -> float:
    """Least seconds of one execution of a product: its FLOPs on all devices."""
    rate = mesh.hardware.product_rate(kind.product_dtype, convolution=kind.convolution is not None)
    return kind.flops / rate / mesh.size


def _innermost_loops(graph: Graph) -> list[int]:
    found = [STEP] * len(graph.nodes)
    for i, (first, last) in reversed([*enumerate(graph.loops)]):
        found[first : last + 1] = [i] * (last + 1 - first)
    return found


def weights(graph: Graph) -> set[int]:
    """The values that are computed of arguments alone that calls carry, without a product: parameters, slices of them
    in loops, casts, and on GPUs, which gather them ahead, stacks of these that a loop leaves to the next."""
    carried, on_gpus = _carried(graph), graph.program.mesh.platform == "gpu"
    batch = argument_roles(graph).batch
    found = {v for i, v in enumerate(graph.inputs) if i not in batch}
    for node in graph.nodes:
        read = [v for v in node.operands if v]
        if read and not node.kind.flops and found.issuperset(read):
            stacks = on_gpus and node.tie and len(node.kind.shapes[0]) < len(node.kind.shapes[-1])
            found.update(v for v in node.results if stacks or v not in carried)
    return found


def _carried(graph: Graph) -> set[int]:
    """What a loop's iterations carry from one to the next, and results of loops."""
    ties = [n for n in graph.nodes if n.tie and n.operands]
    return {n.results[0] for n in ties if n.results[0] < n.operands[0]}


def gradients_of(graph: Graph) -> set[int]:
    """The results of products that no other product reads, nor what is computed of them."""
    read, before, inputs = set[int](), -1, set(graph.inputs)
    while len(read) > before:  # once more for what goes round a loop
        before = len(read)
        for node in reversed(graph.nodes):
            if node.kind.flops or not read.isdisjoint(node.results):
                read.update(v for v in node.operands if v not in inputs)  # the next call's products do not count
    return {v for node in graph.nodes if node.kind.flops for v in node.results if v not in read}


def exposed_values(graph: Graph, resharded: Resharding = lambda node, value: None) -> frozenset[int]:
    """The values that a product reads before any other has run since what they are computed from, or since the
    iteration of the loop has begun; activations, before others have run for as long as it takes to gather them.

    Kernels of their own count for nothing, nor do products that gather such a value in a ring: XLA gathers beside its
    own products alone.

    Args:
      resharded: the specs of a value before and after a node reshards it; None where it does not.
    """
    carried, of_weights, mesh = _carried(graph), weights(graph), graph.program.mesh
    made: dict[int, float] = {}  # seconds of products up to the last one that a value is computed from
    defined, read = dict[int, int](), dict[int, int]()  # by which node a value is made, and first gathered
    now, found = 0.0, set[int]()
    for n, node in enumerate(graph.nodes):
        if node.kind.flops and not is_kernel(node.kind):
            in_ring = False
            for i, v in enumerate(node.operands):
                if v not in made:
                    continue
                specs = resharded(n, v)
                axis = gathered_axis(*specs) if specs else None
                size = node.kind.sent_bytes[i] // specs[1].num_shards(mesh.shape) if specs else 0
                takes = collective_seconds(ALL_GATHER, axis[1:], size, mesh) if axis and v not in of_weights else 0.0
                if made[v] == now or now - made[v] < takes:
                    found.add(v)
                    if axis and mesh.shape[axis[1]] <= MAX_PARTS and axis[0] in ring_dims(node.kind, i):
                        first = read.setdefault(v, n)
                        in_ring |= all(defined.get(u, -1) < first for u in node.operands)
            now += 0.0 if in_ring else product_seconds(node.kind, mesh)
        is_slice = node.tie and len(node.kind.shapes[0]) > len(node.kind.shapes[-1])
        begins = node.kind.flops or is_slice or not carried.isdisjoint(node.results)
        since = now if begins else max((made.get(v, -1.0) for v in node.operands), default=-1.0)
        made.update(dict.fromkeys(node.results, since))
        defined.update(dict.fromkeys(node.results, n))
    return frozenset(found)


def is_of_xla(kind: OpKind) -> bool:
    """Whether it is a product without halos that has no form of its own on shards."""
    rule = kind.rule
    return bool(kind.flops) and not (rule.local and rule.local.fun) and not rule.halos


def is_kernel(kind: OpKind) -> bool:
    """Whether products run in a local form, beside which XLA gathers nothing; convolutions are XLA's there too."""
    in_own_form = kind.rule.local is not None and kind.rule.local.fun is not None
    return bool(kind.flops) and in_own_form and kind.convolution is None


def gathered_axis(before: Spec, after: Spec) -> tuple[int, str] | None:
    """The dimension that a reshard gathers over one mesh axis, and that axis; None where it does another thing."""
    changed = [d for d, (a, b) in enumerate(zip(before.dims, after.dims, strict=True)) if a != b]
    if len(changed) != 1 or before.partial or after.partial:
        return None
    split: Axes = before.dims[changed[0]]
    return (changed[0], split[-1]) if split[:-1] == after.dims[changed[0]] else None
