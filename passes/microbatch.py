"""Computes a step in micro-batches: what depends on the batch runs in a loop over parts of it, and the rest once.

A step that fits only with a smaller batch then fits as it is, with no change to it. `autoshard.transforms.batch_parts`
finds what runs in the loop, and that its results are those of the whole batch: values that have the batch are joined,
sums over it (gradients, metrics) are added up, in float32 at least. What needs the whole batch at once, such as the
statistics of a batch norm, is refused, with its source line.

A part has examples of every device, so that a sharded batch stays where it is. That gradients are reduced once, after
the loop, the pass ``accumulate`` sees to, as in loops that users write.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from jax import lax
from jax import numpy as jnp

from autoshard import jaxpr as jx
from autoshard.errors import ChunkError, MicrobatchError, PassError
from autoshard.ir.batch import find_batch
from autoshard.ir.build_graph import build_graph
from autoshard.ir.dim_classes import label_dims
from autoshard.ir.program import Program
from autoshard.transforms.batch_parts.batched_indices import with_batched_indices
from autoshard.transforms.batch_parts.cut import REDUCTIONS, Cut
from autoshard.transforms.batch_parts.region import BatchRegion, batch_region
from autoshard.transforms.batch_parts.run import run_part, start_of
from autoshard.transforms.pipeline import InParts

MAX_PARTS = 64
"""Most micro-batches that are tried where their number is left open."""
Batch = tuple[tuple[int, int], ...]
"""The dimensions of flat arguments that are the batch."""


@dataclass(frozen=True)
class Microbatch(InParts):
    """Computes what depends on the batch in a loop over so many parts of it."""

    name: ClassVar[str] = "microbatch"
    saves_memory: ClassVar[bool] = True

    parts: int = 0
    """The number of micro-batches, which must divide the batch; 0 leaves it open, for `variants` to choose from. Of one
    alone there is a loop only for a pipeline, whose stages pass it on."""
    batch: Batch | None = None
    """The dimensions of the flat arguments that are the batch; None finds them."""

    def __post_init__(self) -> None:
        if type(self.parts) is not int or self.parts < 0:
            raise PassError(f"microbatch:{self.parts}: the number of micro-batches must be a whole number, 1 or more")

    @classmethod
    def from_option(cls, option: str | None) -> Self:
        """Of ``"4"``: the number of micro-batches."""
        if option is None or not option.isdecimal() or not int(option):
            raise PassError(f"the pass 'microbatch' needs a number of micro-batches, as microbatch:4, not {option!r}")
        return cls(int(option))

    def __call__(self, program: Program) -> Program:
        if self.parts < 1 or (self.parts == 1 and program.pipeline is None):
            return program
        jaxpr = _with_batched_indices(jx.eliminate_dead_code(program.jaxpr))
        cuts = self._cuts(program)
        try:
            try:
                return self._in_parts(program, jaxpr, cuts)
            except ChunkError:
                if len({cut.outer for cut in cuts.values()}) == 1:
                    raise
                # Patches of several images a row: the same examples are in the same part if all are cut the same way.
                outer = math.gcd(*(cut.outer for cut in cuts.values()))
                return self._in_parts(program, jaxpr, {i: replace(cut, outer=outer) for i, cut in cuts.items()})
        except ChunkError as e:
            line = f", at {e.source}" if e.source else ""
            remedy = f"{e.remedy}, or " if e.remedy else ""
            raise MicrobatchError(
                f"{program.name} is not computed in {self.parts} micro-batches: {e}{line}; {remedy}leave micro-batches "
                "out and pass passes=['recompute:full'] to save memory",
                e.source,
                e.own_loop,
            ) from None

    def _in_parts(self, program: Program, jaxpr: jx.Jaxpr, cuts: Mapping[int, Cut]) -> Program:
        """``program``, of these equations, with its flat arguments cut."""
        region = batch_region(jaxpr, {jaxpr.invars[i]: c for i, c in cuts.items()}, program.rules, program.mesh)
        return program.with_jaxpr(
            jx.eliminate_dead_code(_with_loop(jaxpr, region, self.parts, pipelined=program.pipeline is not None))
        )

    def _cuts(self, program: Program) -> dict[int, Cut]:
        """How the flat arguments that have the batch are cut.

        Raises:
          MicrobatchError: there are none, or the batch does not divide.
        """
        found = _batch(program) if self.batch is None else self.batch
        if not found:
            raise MicrobatchError(f"microbatches={self.parts}: {program.name} has no batch: no argument has examples")
        cuts: dict[int, Cut] = {}
        for i, d in found:
            leaf = program.inputs[i]
            size = leaf.aval.shape[d]
            if size % self.parts:
                fits = [n for n in range(1, size + 1) if size % n == 0]
                close = min(fits, key=lambda n: (abs(n - self.parts), n))
                raise MicrobatchError(
                    f"microbatches={self.parts}: dimension {d} of {leaf.path} {list(leaf.aval.shape)} has {size} "
                    f"examples, which {self.parts} micro-batches do not divide; {close} would"
                )
            if i in cuts:
                raise MicrobatchError(f"microbatches={self.parts}: two dimensions of {leaf.path} are the batch")
            cuts[i] = Cut(d, math.gcd(size // self.parts, program.mesh.size), self.parts)
        return cuts

    def change(self, before: Program, after: Program) -> str:
        if before.jaxpr is after.jaxpr:
            return "the batch is computed whole"
        return f"the batch is computed in {self.parts} parts, and sums over it are added up"

    def variants(self, program: Program, batch_axes: Sequence[str] | None = None) -> tuple[Microbatch, ...]:
        """One for each number of parts that divides the batch, each at least twice the one before; none where the step
        cannot be computed in parts (`why_none`)."""
        found = self._of_each_number(program)
        return found if self._refusal(program, found) is None else ()

    def why_none(self, program: Program) -> MicrobatchError | None:
        """Why the step is not computed in micro-batches, whatever their number; None where it can be."""
        return self._refusal(program, self._of_each_number(program))

    def _of_each_number(self, program: Program) -> tuple[Microbatch, ...]:
        batch = _batch(program) if self.batch is None else self.batch
        examples = math.gcd(*(program.inputs[i].aval.shape[d] for i, d in batch))
        counts: list[int] = []
        for n in range(2, min(examples, MAX_PARTS) + 1):
            if examples % n == 0 and n >= 2 * max(counts, default=1):
                counts.append(n)
        return tuple(replace(self, parts=n, batch=batch) for n in counts)

    def _refusal(self, program: Program, numbers: Sequence[Microbatch]) -> MicrobatchError | None:
        """What the least number of parts is refused with."""
        try:
            for least in numbers[:1] or [replace(self, parts=2)]:
                least(program)
        except MicrobatchError as e:
            return e
        return None

    def __str__(self) -> str:
        return f"{self.name}:{self.parts}"


def _batch(program: Program) -> Batch:
    """The dimensions of the flat arguments that are the batch."""
    graph = build_graph(program)
    dims = label_dims(graph)
    position = {v: i for i, v in enumerate(graph.inputs)}
    pairs = {pair for c in find_batch(graph, dims) for pair in dims.pairs(c.arguments)}
    return tuple(sorted((position[v], d) for v, d in pairs))


def _with_batched_indices(jaxpr: jx.Jaxpr) -> jx.Jaxpr:
    """``jaxpr`` with what is indexed along the batch by its own positions batched, at every depth."""
    nests = {e: jx.map_bodies(e, _with_batched_indices) for e in jx.eqns_with_regions(jaxpr)}
    if any(new is not e for e, new in nests.items()):
        jaxpr = jx.with_eqns(jaxpr, [nests.get(e, e) for e in jaxpr.eqns])
    return with_batched_indices(jaxpr)


def _with_loop(jaxpr: jx.Jaxpr, region: BatchRegion, parts: int, *, pipelined: bool) -> jx.Jaxpr:
    """``jaxpr`` with the region in a loop; where it is ``pipelined``, the loop carries sums alone, and what is reduced
    otherwise it returns of each part."""
    carried = [(v, kind) for v, kind in region.totals if kind == "sum" or not pipelined]
    returned = [total for total in region.totals if total not in carried]

    def loop(*values: Any) -> list[Any]:
        given = dict(zip(region.inputs, values, strict=True))

        def body(totals: list[Any], part: Any) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
            found = run_part(region, given, part)
            terms = {v: lax.convert_element_type(found[v], start.dtype) for v, start in starts.items()}
            added = [
                REDUCTIONS[kind].combine(total, terms[v]) for total, (v, kind) in zip(totals, carried, strict=True)
            ]
            return added, ([terms[v] for v, _ in returned], [found[v] for v, _ in region.rows])

        starts = {v: start_of(v, kind) for v, kind in region.totals}
        ends, (terms, rows) = lax.scan(body, [starts[v] for v, _ in carried], jnp.arange(parts))
        joined = [cut.join(x) for x, (_, cut) in zip(rows, region.rows, strict=True)]
        totals = {v: x for x, (v, _) in zip(ends, carried, strict=True)}
        for x, (v, kind) in zip(terms, returned, strict=True):
            totals[v] = functools.reduce(REDUCTIONS[kind].combine, list(x))
        return [*joined, *(lax.convert_element_type(totals[v], jx.aval(v).dtype) for v, _ in region.totals)]

    like = jx.outside_autodiff(region.equations[0]).replace(outvars=list(region.results))
    try:
        staged = jx.eliminate_dead_code(jx.normalize(jx.stage_out(loop, like, region.inputs)))
    except (TypeError, ValueError) as e:
        raise ChunkError(f"its operations do not run on parts: {e}", jx.source(like)) from e
    return jx.with_eqns(jaxpr, [*region.before, *jx.splice(staged, like, region.inputs), *region.after])
