"""How long products run beside copies of residuals to the host's memory and back (`OpKind.copied_beside`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from autoshard.cost.overlap.products import STEP, innermost_loops, product_seconds, products_by_loop
from autoshard.ir.graph import Graph
from autoshard.machine.host_link import FROM_HOST, TO_HOST, copies_beside_products, hides_copies, layer_seconds


def copied_beside_products(graph: Graph) -> Mapping[int, float]:
    """The nodes that copy residuals of a layer to the host's memory or back where XLA runs that beside the layer's
    products (`autoshard.backend.host_copies`), each with its share by bytes of the seconds of these; with 0 where XLA
    does so too late."""
    found, mesh, loop_of = dict[int, float](), graph.program.mesh, innermost_loops(graph)
    if not copies_beside_products(mesh) or graph.program.pipeline is not None:
        return found
    copies = defaultdict[tuple[int, str], list[int]](list)
    for n, node in enumerate(graph.nodes):
        if node.kind.host_transfer and node.trip_count and loop_of[n] != STEP:
            copies[loop_of[n], node.kind.host_transfer].append(n)
    for inside in products_by_loop(graph) if copies else ():
        products = sum(product_seconds(graph.nodes[n].kind, mesh) for n in inside) if hides_copies(mesh) else 0.0
        seconds = layer_seconds(products, mesh)
        for way in (TO_HOST, FROM_HOST):
            nodes = copies[loop_of[inside[0]], way]
            total = sum(graph.nodes[n].kind.bytes[0] for n in nodes)
            found.update((n, float(f"{seconds * graph.nodes[n].kind.bytes[0] / total:.6g}")) for n in nodes)
    return found
