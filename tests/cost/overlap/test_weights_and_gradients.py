"""Which values are gathered ahead of the iteration that reads them."""

from __future__ import annotations

from dataclasses import replace

import jax

from autoshard.cost.overlap.weights_and_gradients import gathered_ahead
from autoshard.machine.mesh_config import MeshConfig
from tests.programs import graph
from tests.scanned_layers import HIDDEN, WEIGHTS, WIDTH, beside, train


def test_gpus_gather_weights_of_layers_an_iteration_ahead() -> None:
    """All products of the iteration are beside it; else none is beside what the first one reads."""
    cluster = MeshConfig(axes={"data": 4}, gpu="h100", nodes=4, per_node=1).mesh()
    other = replace(cluster, target=None, devices=tuple(jax.devices()))
    g, elsewhere = (graph(train, (WEIGHTS, (1 << 18, WIDTH)), m) for m in (cluster, other))
    assert {g.values[v].shape for v in gathered_ahead(g)} == {(HIDDEN, WIDTH), (WIDTH, HIDDEN)}
    assert not gathered_ahead(elsewhere)
    assert len(beside(g)) == len(beside(elsewhere)) + 1
