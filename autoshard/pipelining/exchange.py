"""What goes from stage to stage after a tick: sent, and how long stages wait for each other by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from autoshard import jaxpr as jx
from autoshard.pipelining.rings import without_specs
from autoshard.pipelining.tick_tables import Exchange, TickTables


def exchanged(tables: TickTables, axis: str, activations: list[Any], gradients: list[Any], number: Any) -> Any:
    """What arrives on each route of activations, and on each of gradients; of a route on which nothing does, anything.

    Args:
      number: which of the exchanges of ``tables``, the same on every stage.
    """
    sent = [*[activations] * len(tables.activations), *[gradients] * len(tables.gradients)]

    def send(pairs: Exchange, sent: list[list[Any]]) -> list[list[Any]]:
        routes = zip(sent, pairs, strict=True)
        return [[lax.ppermute(x, axis, p) for x in values] if p else values for values, p in routes]

    if len(tables.exchanges) == 1:
        arrived = send(tables.exchanges[0], sent)
    else:
        branches = [lambda sent, pairs=pairs: without_specs(send(pairs, sent)) for pairs in tables.exchanges]
        runs = np.bincount(tables.exchange, minlength=len(branches)).tolist()
        with jx.branch_runs(runs, len(tables.ticks), together=True):
            arrived = lax.switch(number, branches, sent)
    return arrived[: len(tables.activations)], arrived[len(tables.activations) :]


def seconds_of_ticks(tables: TickTables, ticks: Sequence[Sequence[float]], sending: Sequence[float]) -> float:
    """Seconds from the first tick's beginning to the last one's end, on the stage that ends last.

    Args:
      ticks: ``ticks[tick][stage]``: seconds of what the stage runs.
      sending: of each route, activations before gradients, seconds of an exchange; both sides wait for it.
    """
    now = [0.0] * len(ticks[0])
    for row, number in zip(ticks, tables.exchange.tolist(), strict=True):
        now = [a + b for a, b in zip(now, row, strict=True)]
        for pairs, seconds in zip(tables.exchanges[number], sending, strict=True):
            after = [*now]
            for a, b in pairs:
                done = max(now[a], now[b]) + seconds
                after[a], after[b] = max(after[a], done), max(after[b], done)
            now = after
    return max(now)
