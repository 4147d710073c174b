"""Experts whose tokens are sorted: our plan against sharding by hand, and against dispatch into dense blocks.

    python -m benchmarks.experts [--compiled tpu|gpu] [--maxtext FOLDER] [WORD]

Training steps of decoders with the experts of Mixtral 8x7B and of DeepSeek-V2-Lite on four machines, as planned: the
time is the cost model's, without what runs beside products. By hand, parameters and moments are placed as a table of
`benchmarks.baselines` says, and all else is left to the planner, so that a table never costs more than by hand. Dense
dispatch is GShard's: blocks with a capacity of 1.25, which drop tokens; planned by us, and with parameters by the same
tables. With --compiled, ours and the fastest of both others by their plans are compiled for machines of that kind,
which takes its extra and no devices; times are those of the compiled steps as XLA scheduled them, with an even load,
for which one round of our blocks suffices: a collective is hidden as far as what is computed beside it lasts
(`autoshard.backend.hlo.waits`), and kernels for grouped products count by the roofline, with the rows of that load:
they skip tiles without rows. Sorts and scatters of the rows' numbers, of which no compiler estimates the time, count as
none. Nothing is run. Dense dispatch on 4x8 H100 is predicted to be faster than ours, and comes out slower: kernels
beside its products are priced too low. The page is `benchmarks/results/experts.md`; of cells that WORD is not in it
keeps the rows that are there.

With --maxtext, steps of MaxText 0.2.5 are read in the same way, which `benchmarks/maxtext_steps.py` compiled with the
same compiler for the same chips and kept in FOLDER: the same layers, sizes, experts and batch in its Mixtral decoder
(the model called DeepSeek has neither its attention nor shared experts here), parameters and moments in float32,
products in bfloat16, each layer recomputed, gradients not clipped, attention by the same kernels in blocks of 1024, and
the compiler options of MaxText's scripts for these chips. Rows of the batch are split over all chips, and so are
parameters, which are gathered (FSDP); over 4, each of four chips has a part of the experts, and only the rest of their
matrices is gathered. ``megablox`` is products of ragged groups by MegaBlocks' kernels. XLA estimates them no more than
its own; they count as ours do, by the roofline: operations of the rows of an even load, bytes of all places. Rows get
to their experts by an all-to-all, which counts with those rows too, or by a ring, which gathers the rows of all four
chips and scatters the sums. With all places there is room for the worst load, and what is beside products is computed
of all of them. With places for 1.25 times an even load, rows beyond are dropped, as they are with dense dispatch, the
capacity of 1.25; for the latter XLA is told to leave products whole, as MaxText's recipes for v6e do: it takes longer
without. With these options XLA hides little of what is gathered beside MegaBlocks' kernels, and nothing on v5p with
FSDP alone. Norms of parameters and gradients, which MaxText's step computes for its log, are counted. Its option
``check_vma``, which it recommends, is left out: with it, nothing in the compiled step adds up the gradients of the
experts' matrices over the chips. With ``megablox=False``, which is XLA's own kernel, the compiler refuses the one step
that was tried, Mixtral on v5e: tiles of the size that MaxText gives it need more VMEM than there is by default. Forms
without a row were not compiled.
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
from autoshard.backend.compilation import compile_plan, parse_out_of_memory
from autoshard.backend.estimate import estimate
from autoshard.errors import PlanError
from benchmarks.baselines import BASELINES, abstract, spec
from benchmarks.cells import COLUMNS, MIXTRAL, Column
from benchmarks.maxtext_answers import kept_answer
from benchmarks.maxtext_steps import EXPERT_FORMS
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
SEQ = 2048
PLANNED, COMPILED, MAXTEXT = "As planned", "As compiled", "Beside MaxText's own steps, as compiled"
HEAD = (
    "| experts | machine | layers, rows | ours (ms) | best by hand | ratio | dense (ms) | ratio | date |",
    "|---|---|---|--:|--:|--:|--:|--:|---|",
)
HEADS = {
    PLANNED: HEAD,
    COMPILED: HEAD,
    MAXTEXT: (
        "| experts | machine | MaxText's form | MaxText's (ms) | ours (ms) | ratio | MaxText's memory | date |",
        "|---|---|---|--:|--:|--:|--:|---|",
    ),
}
type Rows = dict[tuple[str, ...], str]
"""Lines of a table, by their first cells: as many as tell them apart."""


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
        model = decoder(rows, SEQ, **SHAPES[shape], layers=layers, drops=drops, remat=True)
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


def maxtext_row(steps: Path, shape: str, column: str, form: str) -> str | None:
    """The line of one of MaxText's steps, with ours as it is on the page; None where it is not kept."""
    (_, rows), where = SIZES[shape, column], COLUMNS[column]
    mesh, even = where.mesh().mesh(), rows * SEQ * SHAPES[shape].get("picks", 2) // (where.data * where.model)
    found = kept_answer(steps, f"{shape} {column} {form}", SEQ, even)
    if found is None:
        return None
    begins, used = f"| {shape} | {column} | {form} |", found.memory_usage(mesh)
    if used is None:
        lacks = parse_out_of_memory(found.refusal)
        why = f"needs {lacks.needed_bytes / lacks.available_bytes:.0%} of the memory" if lacks else "does not compile"
        return f"{begins} {why} | - | - | - | {date.today()} |"
    ours = float(kept_rows()[COMPILED][shape, column].split(" | ")[3].replace(",", ""))
    theirs, share = 1e3 * estimate(found, mesh).scheduled, used.peak / mesh.hardware.memory
    return f"{begins} {theirs:,.1f} | {ours:,.1f} | {ours / theirs:.3f} | {share:.0%} | {date.today()} |"


def key_of(line: str) -> tuple[str, ...]:
    """The shape and the machine of a line, and MaxText's form where it has one."""
    cells = tuple(line.strip("| ").split(" | "))
    return cells[: 3 if cells[2] in EXPERT_FORMS else 2]


def kept_rows() -> dict[str, Rows]:
    """The rows of the tables on the page as it is, by the tables' titles."""
    found: dict[str, Rows] = {title: {} for title in HEADS}
    title = PLANNED
    for line in RESULT.read_text().splitlines() if RESULT.exists() else []:
        title = line.removeprefix("## ") if line.startswith("## ") else title
        if line.startswith("| ") and line != HEADS[title][0]:
            found[title][key_of(line)] = line
    return found


def write(title: str, new: str) -> None:
    """The page with this row of a table, and all others as they are."""
    print(new, flush=True)
    kept = kept_rows()
    kept[title][key_of(new)] = new
    _, _, text, of_maxtext, *_ = (__doc__ or "").split("\n\n")
    said = {MAXTEXT: ["", of_maxtext.strip()]}
    lines = [
        "# Experts",
        "",
        "`python -m benchmarks.experts [--compiled tpu|gpu] [--maxtext FOLDER]`",
        "",
        text.strip(),
    ]
    for name, table in kept.items():
        lines += ["", f"## {name}", *said.get(name, []), "", *HEADS[name], *(table[key] for key in sorted(table))]
    RESULT.write_text("\n".join([*lines, ""]))


def main() -> None:
    """Makes the rows, and writes the page after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experts")
    parser.add_argument("--compiled", choices=("tpu", "gpu"), help="compile the steps for machines of this kind")
    parser.add_argument("--maxtext", type=Path, help="read the steps that `benchmarks/maxtext_steps.py` kept here")
    parser.add_argument("word", nargs="?", default="", help="only cells whose name contains this")
    asked = parser.parse_args()
    for shape, column in SIZES:
        if asked.word not in f"{shape} {column}":
            continue
        if asked.maxtext is not None:
            for form in EXPERT_FORMS:
                if (new := maxtext_row(asked.maxtext, shape, column, form)) is not None:
                    write(MAXTEXT, new)
        elif asked.compiled in (None, COLUMNS[column].platform):
            write(COMPILED if asked.compiled else PLANNED, row(shape, column, compiled=asked.compiled is not None))


if __name__ == "__main__":
    main()
