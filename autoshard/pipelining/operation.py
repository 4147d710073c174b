"""What the stages run at a tick: each a branch of its own; or, where that would have devices of one stage wait in a
collective for those of another, all of them whatever one of them runs, of which each keeps what is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from autoshard import jaxpr as jx
from autoshard.pipelining.rings import kept_where, without_specs
from autoshard.pipelining.tick_tables import TickTables

type Branch = Callable[[Any, Any], Any]
"""State and row of the tables -> state and what is sent."""


def rows_of_ticks(tables: TickTables, stage: Any) -> dict[str, Any]:
    """What a stage reads of ``tables``, a row for each tick, by name; of routes ``a0``, ..., ``g0``, ... the slots."""
    own = ("operation", "chunk", "microbatch", "part", "activation", "gradient", "residual", "kept", "final")
    found = {name: jnp.asarray(getattr(tables, name))[:, stage] for name in own}
    found |= {"exchange": jnp.asarray(tables.exchange), "anywhere": jnp.asarray(tables.anywhere)}
    for name, routes in (("a", tables.activations), ("g", tables.gradients)):
        found |= {f"{name}{n}": jnp.asarray(r.slot)[:, stage] for n, r in enumerate(routes)}
    return found


def operate(branches: Sequence[Branch], tables: TickTables, state: Any, row: Any) -> Any:
    """Runs the branch of this stage's operation; one of an operation that no other stage may run."""
    opened = [lambda *xs, run=run: without_specs(run(*xs)) for run in branches]
    runs = np.bincount(tables.operation[:, 0], minlength=len(branches)).tolist()
    with jx.branch_runs(runs, len(tables.ticks)):
        return lax.switch(row["operation"], opened, state, row)


def operate_together(branches: Sequence[Branch], tables: TickTables, state: Any, row: Any) -> Any:
    """Runs, on all stages, every operation that one of them has at this tick, and keeps that of this stage."""
    found, ticks = branches[0](state, row), len(tables.ticks)
    for n, run in enumerate(branches[1:], 1):

        def own(found: Any, row: Any, n: int = n, run: Branch = run) -> Any:
            return without_specs(kept_where(row["operation"] == n, run(found[0], row), found))

        count = int(tables.anywhere[:, n].sum())
        with jx.branch_runs((ticks - count, count), ticks, together=True):
            found = lax.cond(row["anywhere"][n], own, lambda found, row: without_specs(found), found, row)
    return found
