"""Finds what rules lack: ways to shard operands over two devices that are right and that the rule does not allow."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from autoshard import jaxpr as jx
from autoshard.ir.rule import Rule
from autoshard.ir.spec import REDUCTION_KINDS
from autoshard.rules.validation.case import (
    Case,
    Finding,
    all_close,
    combine,
    reducible,
    tolerance,
    varies,
)
from autoshard.rules.validation.shard import SHAPE_PARAMS, Shard


def audit_missing_splits(case: Case) -> Iterator[Finding]:
    """Tries every way to halve dimensions of the operands: those that are right and that the rule does not allow."""
    if case.traits.position_dependent or case.traits.unchecked_shapes:
        return
    for split in _operand_splits(case):
        for outs in _run_halves(case, split):
            if any(len(out) != len(case.results) for out in outs):
                continue
            options = [list(_combinations(case, r, [out[r] for out in outs])) for r in range(len(case.results))]
            found = [o for o in itertools.product(*options) if not _all_replicated(o)]
            if found and not any(_is_allowed(case.rule, split, o) for o in found):
                how = ", ".join(map(str, found[0]))
                yield case.finding("missing", f"operands split along {_dims_text(split)} -> {how}")


def _operand_splits(case: Case) -> Iterator[tuple[int | None, ...]]:
    """The dimension of each operand to halve, or None; of many operands, the same for those of one shape."""
    shapes = [x.shape[:rank] for x, rank in zip(case.operands, case.ranks(), strict=True)]
    groups = list(range(len(shapes))) if len(shapes) <= 3 else [shapes.index(s) for s in shapes]
    choices = {g: [None, *(d for d, n in enumerate(shapes[g]) if n and n % 2 == 0)] for g in dict.fromkeys(groups)}
    for chosen in itertools.product(*choices.values()):
        dim_of = dict(zip(choices, chosen, strict=True))
        split = tuple(dim_of[g] for g in groups)
        if any(d is not None for d in split):
            yield split


def _run_halves(case: Case, split: Sequence[int | None]) -> Iterator[list[list[np.ndarray]]]:
    """The results of both halves, for each guess of the shape parameters with which the operation runs."""
    halves = [
        [x if d is None else np.split(x, 2, d)[k] for x, d in zip(case.operands, split, strict=True)] for k in (0, 1)
    ]
    shape = tuple(jx.aval(case.eqn.outvars[0]).shape) if case.eqn.outvars else ()
    guesses = [shape]
    if case.name in SHAPE_PARAMS:
        guesses += [(*shape[:d], n // 2, *shape[d + 1 :]) for d, n in enumerate(shape) if n % 2 == 0]
    labels = tuple(
        tuple(("half",) if d == e else () for e in range(rank)) for d, rank in zip(split, case.ranks(), strict=True)
    )
    for guess in guesses:
        results = tuple(
            tuple(("half",) if m < n else () for n, m in zip(jx.aval(v).shape, guess, strict=False))
            for v in case.eqn.outvars
        )
        shard = Shard(Rule(labels, results), "half", 0, tuple(x.shape for x in case.operands), (guess,))
        try:
            yield [case.run(half, dataclasses.replace(shard, index=k)) for k, half in enumerate(halves)]
        except Exception:  # of any type: the shapes of the halves do not match, so this is no way to shard them
            continue


def _combinations(case: Case, r: int, halves: list[np.ndarray]) -> Iterator[str | int]:
    """How two arrays combine to result ``r``: a dimension to concatenate, a reduction, or "whole" where each is it."""
    whole, rounding = case.results[r], tolerance(case)
    if not varies(whole):
        return
    for d in range(len(jx.aval(case.eqn.outvars[r]).shape)):
        if all(half.ndim == whole.ndim for half in halves):
            shapes = [half.shape[:d] + half.shape[d + 1 :] for half in (*halves, whole)]
            if len(set(shapes)) == 1 and all_close([np.concatenate(halves, d)], [whole], rounding):
                yield d
    if all(half.shape == whole.shape for half in halves):
        if all(all_close([half], [whole], rounding) for half in halves):
            yield "whole"
            return
        for kind in REDUCTION_KINDS:
            if reducible(kind, whole.dtype) and all_close([combine(kind, halves)], [whole], rounding):
                yield kind


def _all_replicated(options: Sequence[str | int]) -> bool:
    return all(o == "whole" for o in options)


def _is_allowed(rule: Rule, split: Sequence[int | None], options: Sequence[str | int]) -> bool:
    """Whether sharding some of the rule's factors gives this strategy."""
    dims: set[tuple[int, int]] = {(i, d) for i, d in enumerate(split) if d is not None}
    dims |= {(len(split) + r, o) for r, o in enumerate(options) if isinstance(o, int)}
    places = [*rule.operands, *rule.results]
    factors = {places[i][d][0] for i, d in dims if places[i][d]}
    made = {(i, d) for i, ds in enumerate(places) for d, dim in enumerate(ds) if dim and dim[0] in factors}
    kinds = {rule.kind(f) for f in factors}
    reduced = {o for o in options if isinstance(o, str) and o != "whole"}
    return made == dims and "whole" not in kinds and reduced <= kinds


def _dims_text(split: Sequence[int | None]) -> str:
    return "(" + ", ".join("-" if d is None else str(d) for d in split) + ")"
