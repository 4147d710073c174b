"""How long products run beside the reshards of each product's operands and result (`OpKind.beside`).

Products of an inner loop do not count: XLA runs no collective beside a loop.

Collectives of weights and gradients run one after the other: gathers first, in the order in which they are read, then
reductions, in the order in which they are made. How long those before take is counted as if every weight was split over
all devices, on GPUs over those between which the link is slowest.

On GPUs loops do more. Weights of the next layer are gathered beside all products of this one (`gathered_ahead`), and
its gradients are reduced beside those of the next (`autoshard.cost.compiler_options`). And what moves activations of
the backward pass runs beside the products that only gradients wait for (`_beside_gradients`).

Where the chip would wait for gathers and scatters all the same, activations and gradients go in rings, each beside its
own product (`autoshard.cost.overlap.rings`). In a stage of a pipeline nothing else is counted as hidden.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from autoshard.cost.overlap.host_copies import copied_beside_products
from autoshard.cost.overlap.products import STEP, innermost_loops, product_seconds, products_by_loop, read_after
from autoshard.cost.overlap.rings import has_rings
from autoshard.cost.overlap.weights_and_gradients import gathered_ahead, gradients_of, weights
from autoshard.ir.graph import Graph
from autoshard.machine.collective import ALL_GATHER, ALL_REDUCE, CollectiveKind, collective_seconds


class _Window(NamedTuple):
    """When the collective of a value can run, in seconds of products since the iteration began."""

    value: int
    opens: float
    closes: float
    seconds: float
    """Most that it can take."""


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


def _seconds_beside(graph: Graph) -> Mapping[int, float]:
    """How long products run beside the collective of each weight and gradient."""
    nodes, mesh, loop_of = graph.nodes, graph.program.mesh, innermost_loops(graph)
    of_weights, waits = weights(graph), mesh.hardware.blocking_reduce_scatters
    gradients = set[int]() if waits else gradients_of(graph)
    ahead = gathered_ahead(graph)
    over = (mesh.slow_axes if mesh.platform == "gpu" else ()) or mesh.nontrivial_axes
    parts = mesh.size // mesh.axes_size(over)

    def takes(kind: CollectiveKind, size: float) -> float:
        return collective_seconds(kind, over, size // parts, mesh)

    found: dict[int, float] = {}
    for inside in products_by_loop(graph):
        now, read, made, sizes = 0.0, dict[int, float](), dict[int, float](), defaultdict[int, float](float)
        for n in inside:
            seconds = product_seconds(nodes[n].kind, mesh)
            for i, v in enumerate(nodes[n].operands):
                if v in of_weights:
                    read.setdefault(v, now + read_after(nodes[n].kind, i) * seconds)
                    sizes[v] = max(sizes[v], nodes[n].kind.sent_bytes[i])
            now += seconds
            if not _is_put_off(n, graph, loop_of):
                made.update(dict.fromkeys(gradients.intersection(nodes[n].results), now))
        in_order = sorted(read, key=lambda v: read[v])
        early = ahead if not made else {}  # else not all of them are (`autoshard.plan.constraints.gathers_ahead`)
        gathers = [_Window(v, 0.0, now if v in early else read[v], takes(ALL_GATHER, sizes[v])) for v in in_order]
        late = mesh.platform == "gpu" and loop_of[inside[0]] != STEP  # in the next iteration
        sums = [(v, 0.0 if late else at, takes(ALL_REDUCE, graph.values[v].bytes)) for v, at in made.items()]
        found.update(_in_order([*gathers, *(_Window(v, opens, now, seconds) for v, opens, seconds in sums)]))
    return found


def _is_put_off(n: int, graph: Graph, loop_of: Sequence[int]) -> bool:
    """Whether XLA computes a gradient after a loop that follows it in the program, with nothing left beside its sum:
    that of a head, for TPUs, after the loop over layers that is the backward part (libtpu 0.0.50.1, Llama-3.1 8B)."""
    on_tpu = graph.program.mesh.platform == "tpu"
    return on_tpu and loop_of[n] == STEP and any(n < first for first, _ in graph.loops)


def _in_order(windows: Iterable[_Window]) -> Mapping[int, float]:
    """How long each runs within its window, one after the other."""
    free, found = 0.0, dict[int, float]()
    for w in windows:
        start = max(free, w.opens)
        found[w.value] = float(f"{max(0.0, min(w.seconds, w.closes - start)):.6g}")  # equal in equal layers
        free = start + found[w.value] if found[w.value] else free
    return found


def _beside_gradients(graph: Graph) -> Mapping[int, float]:
    """On GPUs, how long products that make gradients run beside activations of the backward pass: beside what another
    product makes of the same cotangent, and beside that cotangent, in equal parts. What only gradients are made of has
    that other product. Of slower links than others gradients and weights have need themselves."""
    found, nodes, mesh = defaultdict[int, float](float), graph.nodes, graph.program.mesh
    gradients = gradients_of(graph) if mesh.platform == "gpu" else set[int]()
    for inside in products_by_loop(graph) if gradients else ():
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
