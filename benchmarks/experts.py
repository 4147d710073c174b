"""Experts whose tokens are sorted: our plan against sharding by hand, and against dispatch into dense blocks.

    python -m benchmarks.experts [--compiled tpu|gpu] [WORD]

Training steps of decoders with the experts of Mixtral 8x7B and of DeepSeek-V2-Lite on four machines, as planned: the
time is the cost model's, without what runs beside products. By hand, parameters and moments are placed as a table of
`benchmarks.baselines` says, and all else is left to the planner, so that a table never costs more than by hand. Dense
dispatch is GShard's: blocks with a capacity of 1.25, which drop tokens; planned by us, and with parameters by the same
tables. With --compiled, ours and the fastest of both others by their plans are compiled for machines of that kind,
which takes its extra and no devices; times are those of the compiled steps as XLA scheduled them, with an even load,
for which one round of our blocks suffices: a collective is hidden as far as what is computed beside it lasts
(`autoshard.backend.hlo.waits`), and kernels for grouped products count by the roofline, with the rows of that load:
they skip tiles without rows. Sorts and scatters of the rows' numbers, of which no compiler estimates the time, count as
none. Nothing is run. The page is `benchmarks/results/experts.md`; of cells that WORD is not in it keeps the rows that
are there.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec

import autoshard
from autoshard.backend.compilation import compile_plan
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
OURS = "ours"
TITLES = {False: "As planned", True: "As compiled"}
HEAD = "| experts | machine | layers, rows | ours (ms) | best by hand | ratio | dense (ms) | ratio | date |"


@dataclass(frozen=True)
class Candidate:
    """A step with its plan."""

    name: str
    step: Any
    args: tuple[Any, Any]
    plan: autoshard.Plan

    @property
    def seconds(self) -> float:
        """The price of the plan."""
        return self.plan.cost.seconds

    def compiled_seconds(self) -> float | None:
        """Seconds of the compiled step as XLA scheduled it; None where it does not fit."""
        found = compile_plan(self.plan, self.step.lower(*self.args))
        return found.estimate.scheduled if found.estimate is not None and found.fits else None


def candidate(model: Model, column: Column, table: str = OURS) -> Candidate | None:
    """The planned step; None where none fits into memory. State and batch are placed by the table of this name."""
    state, batch = abstract(model)
    options: dict[str, Any] = {}
    if table != OURS:
        sizes = {"data": column.data, "model": column.model}

        def placed(tree: Any, names: Any) -> Any:
            return jax.tree.map(lambda x: spec(x.shape, x.names, names, sizes), tree, is_leaf=is_named)

        places = placed(model.state, BASELINES[table].params)
        options["in_shardings"] = (places, placed(model.batch, BASELINES[table].acts))
        options["out_shardings"] = (places, PartitionSpec())
    step = autoshard.jit(model.step(), mesh=column.mesh(), donate_argnums=0, **options)
    try:
        return Candidate(table, step, (state, batch), step.plan(state, batch))
    except PlanError:
        return None


def row(shape: str, column: str, *, compiled: bool) -> str:
    """A line of the table."""
    (layers, rows), where = SIZES[shape, column], COLUMNS[column]
    begins = f"| {shape} | {column} | {layers}, {rows} |"

    def fastest(drops: int, names: Iterable[str]) -> Candidate | None:
        model = decoder(rows, 2048, **SHAPES[shape], layers=layers, drops=drops, remat=True)
        found = [made for name in names if (made := candidate(model, where, name)) is not None]
        return min(found, key=lambda made: made.seconds, default=None)

    best = {"ours": fastest(0, (OURS,)), "by hand": fastest(0, HAND), "dense": fastest(1, (OURS, *HAND))}
    took: Mapping[str, float | None] = {
        kind: made and (made.compiled_seconds() if compiled else made.seconds) for kind, made in best.items()
    }
    ours, by_hand, dense = took.values()
    if best["by hand"] is None or ours is None or by_hand is None or dense is None:
        which = ", ".join(f"{kind}: {'fits' if seconds else 'none fits'}" for kind, seconds in took.items())
        return f"{begins} {which} | - | - | - | - | {date.today()} |"
    return (
        f"{begins} {1e3 * ours:,.1f} | {1e3 * by_hand:,.1f} ({best['by hand'].name}) | {ours / by_hand:.3f} "
        f"| {1e3 * dense:,.1f} | {ours / dense:.3f} | {date.today()} |"
    )


def kept_rows() -> dict[bool, dict[tuple[str, ...], str]]:
    """The rows of the tables on the page as it is, as planned and as compiled, by shape and machine."""
    found: dict[bool, dict[tuple[str, ...], str]] = {False: {}, True: {}}
    compiled = False
    for line in RESULT.read_text().splitlines() if RESULT.exists() else []:
        compiled = compiled or line == f"## {TITLES[True]}"
        if line.startswith("| ") and line != HEAD:
            found[compiled][tuple(line.split(" | ")[:2])] = line
    return found


def main() -> None:
    """Makes the rows, and writes the page after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experts")
    parser.add_argument("--compiled", choices=("tpu", "gpu"), help="compile the steps for machines of this kind")
    parser.add_argument("word", nargs="?", default="", help="only cells whose name contains this")
    asked = parser.parse_args()
    text, compiled = (__doc__ or "").split("\n\n")[2], asked.compiled is not None
    for shape, column in SIZES:
        if asked.word in f"{shape} {column}" and asked.compiled in (None, COLUMNS[column].platform):
            new = row(shape, column, compiled=compiled)
            print(new, flush=True)
            kept = kept_rows()
            kept[compiled][tuple(new.split(" | ")[:2])] = new
            lines = ["# Experts", "", "`python -m benchmarks.experts [--compiled tpu|gpu]`", "", text.strip()]
            for title, table in zip(TITLES.values(), kept.values(), strict=True):
                lines += ["", f"## {title}", "", HEAD, "|---|---|---|--:|--:|--:|--:|--:|---|"]
                lines += [table[key] for key in sorted(table)]
            RESULT.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
