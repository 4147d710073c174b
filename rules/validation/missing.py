"""missing: what a rule does not allow, tried all the same: splits in two that would give equal numbers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from autoshard import jaxpr as jx
from autoshard.ir.rule import Rule
from autoshard.ir.spec import REDUCTION_KINDS
from autoshard.rules.validation.evidence import (
    POSITIONAL,
    Case,
    Finding,
    combine,
    reducible,
    same,
    tolerance_of,
    varies,
)
from autoshard.rules.validation.part import SIZED, Part

UNCHECKED = ("geqp3", "ormqr")
"""LAPACK kernels that write out of bounds when their operands do not fit together."""


def audit_missing(case: Case) -> Iterator[Finding]:
    """Splits of whole dimensions into 2 parts that give equal numbers and that the rule does not allow."""
    if case.name in (*POSITIONAL, *UNCHECKED):
        return
    for split in _splits(case):
        for outs in _trial(case, split):
            if any(len(out) != len(case.results) for out in outs):
                continue
            options = [list(_options(case, r, [out[r] for out in outs])) for r in range(len(case.results))]
            found = [o for o in itertools.product(*options) if not _idle(o, case)]
            if found and not any(_covered(case.rule, split, o) for o in found):
                yield case.finding("missing", f"operands split at {_dims(split)} -> {', '.join(map(str, found[0]))}")


def _splits(case: Case) -> Iterator[tuple[int | None, ...]]:
    """A dimension, or none, of each operand; of many operands, those alike are split alike."""
    shapes = [x.shape[:rank] for x, rank in zip(case.operands, case.ranks(), strict=True)]
    few = len(shapes) <= 3
    kinds = list(range(len(shapes))) if few else [shapes.index(s) for s in shapes]
    choices = {k: [None, *(d for d, n in enumerate(shapes[k]) if n and n % 2 == 0)] for k in dict.fromkeys(kinds)}
    for chosen in itertools.product(*choices.values()):
        of = dict(zip(choices, chosen, strict=True))
        split = tuple(of[k] for k in kinds)
        if any(d is not None for d in split):
            yield split


def _trial(case: Case, split: Sequence[int | None]) -> Iterator[list[list[np.ndarray]]]:
    """The results of both parts, for every guess of sizes among the parameters that runs."""
    halves = [
        [x if d is None else np.split(x, 2, d)[k] for x, d in zip(case.operands, split, strict=True)] for k in (0, 1)
    ]
    shape = tuple(jx.aval(case.eqn.outvars[0]).shape) if case.eqn.outvars else ()
    guesses = [shape]
    if case.name in SIZED:
        guesses += [(*shape[:d], n // 2, *shape[d + 1 :]) for d, n in enumerate(shape) if n % 2 == 0]
    labels = tuple(
        tuple(("half",) if d == e else () for e in range(rank)) for d, rank in zip(split, case.ranks(), strict=True)
    )
    for guess in guesses:
        results = tuple(
            tuple(("half",) if m < n else () for n, m in zip(jx.aval(v).shape, guess, strict=False))
            for v in case.eqn.outvars
        )
        part = Part(Rule(labels, results), "half", 0, tuple(x.shape for x in case.operands), (guess,))
        try:
            yield [case.run(half, dataclasses.replace(part, index=k)) for k, half in enumerate(halves)]
        except Exception:  # of any kind: the halves do not fit together, so there is no such strategy
            continue


def _options(case: Case, r: int, terms: list[np.ndarray]) -> Iterator[str | int]:
    """The ways in which two terms make up result ``r``: a dimension to join them along, or a reduction."""
    whole, tolerance = case.results[r], tolerance_of(case)
    if not varies(whole):
        return
    for d in range(len(jx.aval(case.eqn.outvars[r]).shape)):
        if all(t.ndim == whole.ndim for t in terms):
            shapes = [t.shape[:d] + t.shape[d + 1 :] for t in (*terms, whole)]
            if len(set(shapes)) == 1 and same([np.concatenate(terms, d)], [whole], tolerance):
                yield d
    if all(t.shape == whole.shape for t in terms):
        if all(same([t], [whole], tolerance) for t in terms):
            yield "whole"
            return
        for kind in REDUCTION_KINDS:
            if reducible(kind, whole.dtype) and same([combine(kind, terms)], [whole], tolerance):
                yield kind


def _idle(options: Sequence[str | int], case: Case) -> bool:
    return all(o == "whole" for o in options)


def _covered(rule: Rule, split: Sequence[int | None], options: Sequence[str | int]) -> bool:
    """Whether the strategy is one that the rule's factors make."""
    dims: set[tuple[int, int]] = {(i, d) for i, d in enumerate(split) if d is not None}
    dims |= {(len(split) + r, o) for r, o in enumerate(options) if isinstance(o, int)}
    places = [*rule.operands, *rule.results]
    factors = {places[i][d][0] for i, d in dims if places[i][d]}
    made = {(i, d) for i, ds in enumerate(places) for d, dim in enumerate(ds) if dim and dim[0] in factors}
    kinds = {rule.kind(f) for f in factors}
    reduced = {o for o in options if isinstance(o, str) and o != "whole"}
    return made == dims and "whole" not in kinds and reduced <= kinds


def _dims(split: Sequence[int | None]) -> str:
    return "(" + ", ".join("-" if d is None else str(d) for d in split) + ")"
