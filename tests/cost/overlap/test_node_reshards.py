"""What of a node's reshards is hidden: over fast links, in rings, and of a whole call."""

from __future__ import annotations

import pytest

from autoshard.cost.cost import CostModel
from autoshard.cost.overlap.beside_products import with_hidden_transfers
from autoshard.cost.overlap.node_reshards import Resharded, hideable, seconds_waited_by
from autoshard.cost.overlap.rings import RING_GAIN
from autoshard.ir.propagate import propagate
from autoshard.ir.spec import Spec
from autoshard.machine.collective import collective_seconds
from autoshard.machine.mesh_config import MeshConfig
from tests.programs import CHIP, graph
from tests.scanned_layers import HIDING, LARGE, LAYERS, WAITING, WEIGHTS, WIDTH, on, product_seconds, products, train


def test_what_is_hidden_is_no_part_of_the_seconds_of_a_call() -> None:
    shapes = (WEIGHTS, (1 << 14, WIDTH))
    costs = []
    for hardware in (CHIP, HIDING):
        g = graph(train, shapes, on(hardware))
        rows, split = Spec((("data",), ())), Spec(((), ("data",), ()))
        pins = dict(zip(g.inputs, (split, split, rows), strict=True)) | dict.fromkeys(g.outputs, split)
        costs.append(CostModel(g).cost(propagate(CostModel(g).graph, [], pins)))
    plain, hiding = costs
    assert (plain.hidden, hiding.compute) == (0.0, plain.compute)
    assert hiding.seconds == pytest.approx(hiding.compute + hiding.transfers)
    assert hiding.sent == pytest.approx(plain.transfers)
    of_layers = [c for c in plain.collectives if c.kind != "all-to-all" and c.count == LAYERS]
    whole = sum(c.count * collective_seconds(c.kind, c.axes or (), c.bytes, on()) for c in of_layers)
    assert 0.75 * whole / 4 <= hiding.hidden <= 0.75 * whole


def test_what_moves_over_slow_links_is_not_hidden_beside_gradients() -> None:
    cluster = MeshConfig(axes={"node": 4, "model": 2}, gpu="h100", nodes=4, per_node=2).mesh()
    g = with_hidden_transfers(graph(train, (WEIGHTS, (1 << 18, WIDTH)), cluster))
    kinds = [n.kind for n in g.nodes if n.kind.on_fast_links]
    rows, within, between = Spec(((), ())), Spec((("model",), ())), Spec((("node",), ()))
    (i, *_) = kinds[0].on_fast_links
    assert [hideable(kinds[0], i, before, rows, cluster).share for before in (within, between)] == [1.0, 0.0]
    summed = Spec(((), ()), (("node", "sum"),))
    assert hideable(kinds[0], i, summed, between, cluster).share == 0.0
    assert hideable(kinds[0], i, rows, between, cluster).share == 1.0, "nothing is sent"
    other = next(j for j in range(3) if j not in kinds[0].on_fast_links)
    assert hideable(kinds[0], other, between, rows, cluster).share == 1.0


def test_all_rings_of_a_product_together_run_beside_it() -> None:
    kind = products(WAITING, LARGE)[0]
    whole, rows = Spec(((), ())), Spec((("data",), ()))
    seconds = 2 * product_seconds(LARGE)
    moved = [Resharded(0, rows, whole, seconds), Resharded(2, Spec(((), ()), (("data", "sum"),)), rows, seconds)]
    assert sum(seconds_waited_by(kind, moved, on(WAITING))) == pytest.approx(2 * seconds - product_seconds(LARGE))
    short = [m._replace(seconds=seconds / 16) for m in moved]
    assert seconds_waited_by(kind, short, on(WAITING)) == pytest.approx([seconds / 16 * (1 - 0.9 * RING_GAIN)] * 2)
