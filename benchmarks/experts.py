"""Experts whose tokens are sorted: our plan against sharding by hand, and against dispatch into dense blocks.

    python -m benchmarks.experts [WORD]

Training steps of decoders with the experts of Mixtral 8x7B and of DeepSeek-V2-Lite on four machines, as planned: the
time is the cost model's. By hand, parameters and moments are placed as a table of `benchmarks.baselines` says, and all
else is left to the planner, so that a table never costs more than by hand. Dense dispatch is GShard's: blocks with a
capacity of 1.25, which drop tokens; planned by us, and with parameters by the same tables. What XLA makes of a ragged
product on GPUs, where it has no kernel for it, is not in the model: there a device with several experts, as DeepSeek's
have, takes longer. Needs no compiler and no devices. The table is `benchmarks/results/experts.md`; of cells that WORD
is not in it keeps the rows that are there.
"""

from __future__ import annotations

import sys
from datetime import date
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec

import autoshard
from autoshard.errors import PlanError
from benchmarks.baselines import BASELINES, abstract, spec
from benchmarks.cells import COLUMNS, MIXTRAL, Column
from benchmarks.zoo import Model, decoder, is_named

RESULT = Path(__file__).parent / "results" / "experts.md"
DEEPSEEK = {"width": 2048, "heads": 16, "mlp": 1408, "vocab": 102400, "gated": True, "experts": 64, "picks": 6}
SHAPES = {"Mixtral": MIXTRAL, "DeepSeek": DEEPSEEK}
SIZES = {
    ("Mixtral", "v5e:4x4"): (4, 32),
    ("Mixtral", "v5p:4x4x4"): (32, 256),
    ("Mixtral", "8xH100"): (8, 64),
    ("Mixtral", "4x8xH100"): (32, 128),
    ("DeepSeek", "v5e:4x4"): (8, 32),
    ("DeepSeek", "v5p:4x4x4"): (27, 256),
    ("DeepSeek", "8xH100"): (27, 64),
    ("DeepSeek", "4x8xH100"): (27, 128),
}
"""Layers, and rows of 2048 tokens in a batch."""
HAND = ("fsdp", "tp", "fsdp_tp")
HEAD = "| experts | machine | layers, rows | ours (ms) | best by hand | ratio | dense (ms) | ratio | date |"


def seconds(model: Model, column: Column, table: str | None = None) -> float | None:
    """The price of a planned step; None where none fits into memory. With a table, state and batch are placed by it."""
    state, batch = abstract(model)
    options: dict[str, Any] = {}
    if table is not None:
        sizes = {"data": column.data, "model": column.model}

        def placed(tree: Any, names: Any) -> Any:
            return jax.tree.map(lambda x: spec(x.shape, x.names, names, sizes), tree, is_leaf=is_named)

        places = placed(model.state, BASELINES[table].params)
        options["in_shardings"] = (places, placed(model.batch, BASELINES[table].acts))
        options["out_shardings"] = (places, PartitionSpec())
    try:
        plan = autoshard.jit(model.step(), mesh=column.mesh(), donate_argnums=0, **options).plan(state, batch)
    except PlanError:
        return None
    return plan.cost.seconds


def row(shape: str, column: str) -> str:
    """A line of the table."""
    (layers, rows), where = SIZES[shape, column], COLUMNS[column]
    kinds = {drops: decoder(rows, 2048, **SHAPES[shape], layers=layers, drops=drops, remat=True) for drops in (0, 1)}
    ours = seconds(kinds[0], where)
    by_hand = {name: found for name in HAND if (found := seconds(kinds[0], where, name)) is not None}
    dense = [found for name in (None, *HAND) if (found := seconds(kinds[1], where, name)) is not None]
    if ours is None or not by_hand or not dense:
        told = " / ".join("none fits" if not found else "fits" for found in (ours, by_hand, dense))
        return f"| {shape} | {column} | {layers}, {rows} | {told} | - | - | - | - | {date.today()} |"
    best = min(by_hand, key=by_hand.__getitem__)
    return (
        f"| {shape} | {column} | {layers}, {rows} | {1e3 * ours:,.1f} | {1e3 * by_hand[best]:,.1f} ({best}) "
        f"| {ours / by_hand[best]:.3f} | {1e3 * min(dense):,.1f} | {ours / min(dense):.3f} | {date.today()} |"
    )


def main() -> None:
    """Makes the rows, and writes the page after each."""
    word = " ".join(sys.argv[1:])
    text = (__doc__ or "").split("\n\n")[2]
    lines = RESULT.read_text().splitlines() if RESULT.exists() else []
    kept = {tuple(line.split(" | ")[:2]): line for line in lines if line.startswith("| ") and line != HEAD}
    for shape, column in SIZES:
        if word in f"{shape} {column}":
            new = row(shape, column)
            print(new, flush=True)
            kept[tuple(new.split(" | ")[:2])] = new
            table = [HEAD, "|---|---|---|--:|--:|--:|--:|--:|---|", *(kept[key] for key in sorted(kept))]
            RESULT.write_text("\n".join(["# Experts", "", "`python -m benchmarks.experts`", "", text, "", *table, ""]))


if __name__ == "__main__":
    main()
