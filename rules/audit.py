"""The auditor: proves every rule and local form against the operation itself, in float64, on one device.

``python -m autoshard.rules.audit`` runs each sample whole, then splits its operands in every way that the rule
allows, runs the parts, puts their results together as the rule says, and compares. It does the same for what
the rule lets through: it writes operands as terms to be combined, runs the terms, and combines the results. It
also tries what the rules do not allow, and lists what would be right. Names of primitives after the command audit
the samples of those alone.

A comparison counts only if the result varies: a constant agrees with anything.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autoshard import jaxpr as jx
from autoshard.errors import RuleError, nearest
from autoshard.rule import Dims, Rule, RuleTable
from autoshard.rules import KEPT_WHOLE, STRUCTURAL, TABLE
from autoshard.rules.local import SIZED, Part, compute
from autoshard.rules.reasons import NOT_LET, NOT_SPLIT
from autoshard.rules.samples import Sample, samples
from autoshard.spec import KINDS

COMBINE = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
POSITIONAL = ("empty", "iota_2x32_shape", "random_bits", "random_split")
"""What their free factors hold depends on the position in the whole, or on nothing."""
UNCHECKED = ("geqp3", "ormqr")
"""LAPACK kernels that write out of bounds when their operands do not fit together."""


@dataclass(frozen=True)
class Finding:
    """One disagreement. ``kind``: "wrong", "missing" or "no evidence"."""

    kind: str
    name: str
    rule: str
    text: str
    whole: str = ""
    """Why the rule keeps its operation whole, where it does."""

    @property
    def reason(self) -> str:
        """Why the rule does not allow what is missing; "" if no reason is stated."""
        known = NOT_LET if self.text.startswith("lets ") else NOT_SPLIT
        return known.get(self.name, self.whole) if self.kind == "missing" else ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}: {self.rule}: {self.text}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True)
class Case:
    """A sample's equation with its rule, operands and results, all as numpy (keys as their words)."""

    eqn: jx.JaxprEqn
    rule: Rule
    sizes: dict[str, int]
    operands: tuple[np.ndarray, ...]
    results: tuple[np.ndarray, ...]

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    def ranks(self) -> list[int]:
        """Of the operands as the rule sees them: a key's words are no dimension."""
        return [len(a.aval.shape) for a in self.eqn.invars]

    def run(self, operands: Sequence[np.ndarray], part: Part | None = None) -> list[np.ndarray]:
        """The operation on these operands, as the whole or as ``part`` of it."""
        xs = [_device(x, a.aval.dtype) for x, a in zip(operands, self.eqn.invars, strict=True)]
        params = self.eqn.params
        if part is not None:
            return [_host(y) for y in compute(self.eqn.primitive, params, xs, part)]
        out = self.eqn.primitive.bind(*xs, **params)
        return [_host(y) for y in (out if self.eqn.primitive.multiple_results else [out])]

    def finding(self, kind: str, text: str) -> Finding:
        return Finding(kind, self.name, str(self.rule), text, self.rule.reason)


def load(sample: Sample, table: RuleTable = TABLE) -> Case | None:
    """Traces and runs a sample up to the equation it is for; None where this JAX has no such primitive."""
    if jx.primitive(sample.name) is None:
        return None
    jaxpr = jx.normalize(jax.make_jaxpr(sample.fn)(*sample.args))
    values: dict[Any, Any] = dict(zip(jaxpr.invars, sample.args, strict=True))
    values |= dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    found: Case | None = None
    for eqn in jaxpr.eqns:
        ins = [a.val if isinstance(a, jx.Literal) else values[a] for a in eqn.invars]
        out = eqn.primitive.bind(
            *(_device(_host(x), a.aval.dtype) for x, a in zip(ins, eqn.invars, strict=True)), **eqn.params
        )
        outs = list(out) if eqn.primitive.multiple_results else [out]
        values |= dict(zip(eqn.outvars, outs, strict=True))
        if eqn.primitive.name == sample.name:
            rule = table[eqn.primitive](*(a.aval for a in eqn.invars), **eqn.params)
            sizes = rule.factor_sizes([a.aval.shape for a in (*eqn.invars, *eqn.outvars)])
            found = Case(eqn, rule, sizes, tuple(map(_host, ins)), tuple(map(_host, outs)))
    if found is None:
        raise ValueError(f"the sample for {sample.name} does not contain it")
    return found


def audit_factors(case: Case) -> Iterator[Finding]:
    """Every split that the rule allows, into 2 and 3 parts."""
    for factor in case.rule.factors:
        kind, size = case.rule.kind(factor), case.sizes[factor]
        free = not any(factor in dim for dims in case.rule.operands for dim in dims)
        if kind == "whole" or (free and case.name in POSITIONAL):
            continue
        for parts in (p for p in (2, 3) if size % p == 0 and size >= p):
            if kind == "halo":
                right = _near(case, factor, parts)
            elif kind == "local":
                formed = _formed(case, factor, parts)
                right = formed is None or _same(formed, case.results, _tolerance(case))
            else:
                right = _same(_joined(case, factor, parts), case.results, _tolerance(case))
            if not right:
                yield case.finding("wrong", f"{factor} in {parts} parts gives other numbers")
    if not all(map(_varies, case.results)) and case.rule.factors and case.name not in POSITIONAL:
        yield case.finding("no evidence", "the result does not vary")


def _joined(case: Case, factor: str, parts: int) -> list[np.ndarray]:
    """The results of the parts, put together as the rule says."""
    rule, sizes = case.rule, case.sizes
    shapes = tuple(tuple(x.shape) for x in case.operands)
    outs = []
    for k in range(parts):
        operands = [
            _block(x, dims, sizes, factor, parts, k) for x, dims in zip(case.operands, rule.operands, strict=True)
        ]
        local = tuple(
            _local_shape(dims, v.aval.shape, factor, parts)
            for dims, v in zip(rule.results, case.eqn.outvars, strict=True)
        )
        if any(rule.along(h) == factor for h in rule.halos):
            outs.append(_with_edges(case, operands, factor, parts, k))
        else:
            outs.append(case.run(operands, Part(rule, factor, k, shapes, local)))
    kind = rule.kind(factor)
    joined = []
    for r, dims in enumerate(rule.results):
        terms = [out[r] for out in outs]
        if any(factor in dim for dim in dims):
            joined.append(_join(terms, dims, sizes, factor, parts))
        elif kind in COMBINE:
            joined.append(_combine(kind, terms))
        else:  # the result does not depend on the factor: every part has it whole
            different = [t for t in terms if not _same([t], [case.results[r]], _tolerance(case))]
            joined.append(different[0] if different else terms[0])
    return joined


def _with_edges(case: Case, operands: Sequence[np.ndarray], factor: str, parts: int, k: int) -> list[np.ndarray]:
    """The results of part ``k``, to whose operands the edges of its neighbours come."""
    rule, found = case.rule, list(operands)
    assert rule.local is not None
    assert rule.local.fun is not None
    for h in (h for h in rule.halos if rule.along(h) == factor):
        sides = h.window.rows(parts)
        wide = np.pad(case.operands[h.operand], [sides if d == h.dim else (0, 0) for d in range(found[h.operand].ndim)])
        own = found[h.operand].shape[h.dim]
        found[h.operand] = np.take(wide, range(k * own, (k + 1) * own + sum(sides)), h.dim)
    xs = [_device(x, a.aval.dtype) for x, a in zip(found, case.eqn.invars, strict=True)]
    return [_host(y) for y in jax.tree.leaves(rule.local.fun((), *xs))]


def _formed(case: Case, factor: str, parts: int) -> list[np.ndarray] | None:
    """The results of the rule's local form, its parts run side by side with the collectives between them; None where
    it does not serve so many."""
    rule, local = case.rule, case.rule.local
    assert local is not None
    sides = zip((*case.operands, *case.results), (*rule.operands, *rule.results), strict=True)
    if local.moves(parts, [x.nbytes // (parts if any(factor in d for d in dims) else 1) for x, dims in sides]) is None:
        return None
    stacked = [
        np.stack([_block(x, dims, case.sizes, factor, parts, k) for k in range(parts)])
        for x, dims in zip(case.operands, rule.operands, strict=True)
    ]
    operands = [_device(x, v.aval.dtype) for x, v in zip(stacked, case.eqn.invars, strict=True)]
    form = jax.make_jaxpr(functools.partial(local.fun, ("parts",)), axis_env=[("parts", parts)])
    jaxpr = jx.normalize(form(*(jax.typeof(x[0]) for x in operands)))
    jaxpr = jx.with_code(jaxpr, [_permuting(eqn, parts) for eqn in jaxpr.eqns])
    outs = jax.vmap(jx.as_fun(jaxpr), axis_name="parts")(*operands)
    joined = []
    for out, dims, whole in zip(outs, rule.results, case.results, strict=True):
        terms = list(_host(out))
        if any(factor in dim for dim in dims):
            joined.append(_join(terms, dims, case.sizes, factor, parts))
        else:  # every part has it whole
            joined.append(next((t for t in terms if not _same([t], [whole], _tolerance(case))), terms[0]))
    return joined


def _permuting(eqn: jx.JaxprEqn, parts: int) -> jx.JaxprEqn:
    """A permute in which all parts send, as `jax.vmap` wants it; to those that should get nothing comes anything."""
    if eqn.primitive.name != "ppermute":
        return eqn
    pairs = dict(eqn.params["perm"])
    silent = (p for p in range(parts) if p not in pairs)
    free = (p for p in range(parts) if p not in pairs.values())
    return eqn.replace(params={**eqn.params, "perm": (*pairs.items(), *zip(silent, free, strict=True))})


def _near(case: Case, factor: str, parts: int) -> bool:
    """Whether each part of the result stays as it is when all operands change but for its own rows and those that the
    rule says it reads of its neighbours; of a rule that does not say, all of its neighbours' rows."""
    rng = np.random.default_rng(1)
    said = {(h.operand, h.dim): h.window.rows(parts) for h in case.rule.halos}
    for k in range(parts):
        changed = []
        for i, (x, dims) in enumerate(zip(case.operands, case.rule.operands, strict=True)):
            x = x.copy()
            for d in (d for d, dim in enumerate(dims) if factor in dim):
                own = x.shape[d] // parts
                before, behind = said.get((i, d), (own, own))
                far = [r for r in range(x.shape[d]) if not k * own - before <= r < (k + 1) * own + behind]
                at = (*(slice(None),) * d, far)
                x[at] = rng.permutation(x[at].ravel()).reshape(x[at].shape) * 1.7
            changed.append(x)
        for new, old, dims in zip(case.run(changed), case.results, case.rule.results, strict=True):
            mine = [_block(y, dims, case.sizes, factor, parts, k) for y in (new, old)]
            if not _same(mine[:1], mine[1:], _tolerance(case)):
                return False
    return True


def audit_lets(case: Case) -> Iterator[Finding]:
    """Every way in which operands may be partial, allowed or not."""
    count = len(case.operands)
    sizes = range(1, count + 1) if count <= 4 else (1, count)
    allowed = dict(case.rule.lets)
    for kind in KINDS:
        able = [i for i in _terms(case) if _reducible(kind, case.eqn.invars[i].aval.dtype)]
        for some in (s for n in sizes for s in itertools.combinations(range(count), n)):
            if not set(some) <= set(able) or not all(_reducible(kind, v.aval.dtype) for v in case.eqn.outvars):
                continue
            claimed = some in allowed.get(kind, ())
            seen = [_passes(case, kind, some, seed) for seed in range(3)]
            sets = "+".join(map(str, some))
            if claimed and False in seen:
                yield case.finding("wrong", f"does not let {kind}: {sets} through")
            elif claimed and True not in seen:
                yield case.finding("no evidence", f"lets {kind}: {sets} through, to a result that does not vary")
            elif not claimed and all(seen):
                yield case.finding("missing", f"lets {kind}: {sets} through")


def _terms(case: Case) -> list[int]:
    """The operands that may be partial: not the positions and conditions that stand beside numbers."""
    ranks = ["b" if x.dtype == np.bool_ else "i" if np.issubdtype(x.dtype, np.integer) else "x" for x in case.operands]
    return [i for i, rank in enumerate(ranks) if rank == max(ranks)]


def _passes(case: Case, kind: str, some: Sequence[int], seed: int) -> bool | None:
    """Whether partial operands ``some`` give a partial result; None where it would, but does not vary."""
    rng = np.random.default_rng(seed)
    whole, terms = list(case.operands), [list(case.operands), list(case.operands)]
    for i in some:
        for t in terms:
            t[i] = _term(rng, case.operands[i])
        whole[i] = _combine(kind, [t[i] for t in terms])
    with np.errstate(all="ignore"):
        expected = case.run(whole)
        got = [_combine(kind, ys) for ys in zip(*map(case.run, terms), strict=True)]
    return _same(got, expected, _tolerance(case)) and (any(map(_varies, expected)) or None)


def _term(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """Another array of the same kind: the elements in another order, and scaled where that is possible."""
    mixed = rng.permutation(x.ravel()).reshape(x.shape)
    if np.issubdtype(x.dtype, np.inexact):
        return (mixed * rng.uniform(0.3, 1.0, x.shape)).astype(x.dtype)
    return mixed if x.size > 1 or x.dtype == np.bool_ else mixed + x.dtype.type(rng.integers(0, 3))


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
    shape = tuple(case.eqn.outvars[0].aval.shape) if case.eqn.outvars else ()
    guesses = [shape]
    if case.name in SIZED:
        guesses += [(*shape[:d], n // 2, *shape[d + 1 :]) for d, n in enumerate(shape) if n % 2 == 0]
    labels = tuple(
        tuple(("half",) if d == e else () for e in range(rank)) for d, rank in zip(split, case.ranks(), strict=True)
    )
    for guess in guesses:
        results = tuple(
            tuple(("half",) if m < n else () for n, m in zip(v.aval.shape, guess, strict=False))
            for v in case.eqn.outvars
        )
        part = Part(Rule(labels, results), "half", 0, tuple(x.shape for x in case.operands), (guess,))
        try:
            yield [case.run(half, dataclasses.replace(part, index=k)) for k, half in enumerate(halves)]
        except Exception:  # of any kind: the halves do not fit together, so there is no such strategy
            continue


def _options(case: Case, r: int, terms: list[np.ndarray]) -> Iterator[str | int]:
    """The ways in which two terms make up result ``r``: a dimension to join them along, or a reduction."""
    whole, tolerance = case.results[r], _tolerance(case)
    if not _varies(whole):
        return
    for d in range(len(case.eqn.outvars[r].aval.shape)):
        if all(t.ndim == whole.ndim for t in terms):
            shapes = [t.shape[:d] + t.shape[d + 1 :] for t in (*terms, whole)]
            if len(set(shapes)) == 1 and _same([np.concatenate(terms, d)], [whole], tolerance):
                yield d
    if all(t.shape == whole.shape for t in terms):
        if all(_same([t], [whole], tolerance) for t in terms):
            yield "whole"
            return
        for kind in KINDS:
            if _reducible(kind, whole.dtype) and _same([_combine(kind, terms)], [whole], tolerance):
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


def _factored(x: np.ndarray, dims: Dims, sizes: dict[str, int]) -> list[int]:
    """The shape of ``x`` with every compound dimension taken apart."""
    shape: list[int] = []
    for dim, n in zip(dims, x.shape, strict=False):
        shape += [sizes[f] for f in dim] if dim else [n]
    return shape + list(x.shape[len(dims) :])


def _axis(dims: Dims, factor: str) -> int | None:
    flat = [f for dim in dims for f in (dim or (None,))]
    return flat.index(factor) if factor in flat else None


def _local_shape(dims: Dims, shape: Sequence[int], factor: str, parts: int) -> tuple[int, ...]:
    return tuple(n // parts if factor in dim else n for dim, n in zip(dims, shape, strict=True))


def _block(x: np.ndarray, dims: Dims, sizes: dict[str, int], factor: str, parts: int, k: int) -> np.ndarray:
    """Part ``k`` of ``x`` along a factor."""
    axis = _axis(dims, factor)
    if axis is None:
        return x
    split = np.split(x.reshape(_factored(x, dims, sizes)), parts, axis)[k]
    return split.reshape(*_local_shape(dims, x.shape[: len(dims)], factor, parts), *x.shape[len(dims) :])


def _join(blocks: Sequence[np.ndarray], dims: Dims, sizes: dict[str, int], factor: str, parts: int) -> np.ndarray:
    """The array of which these are the parts along a factor."""
    axis = _axis(dims, factor)
    assert axis is not None
    local = {**sizes, factor: sizes[factor] // parts}
    joined = np.concatenate([b.reshape(_factored(b, dims, local)) for b in blocks], axis)
    first = blocks[0].shape
    shape = [n * parts if factor in dim else n for dim, n in zip(dims, first, strict=False)]
    return joined.reshape(*shape, *first[len(dims) :])


def _combine(kind: str, terms: Iterable[np.ndarray]) -> np.ndarray:
    first, *rest = terms
    for term in rest:
        first = np.asarray(COMBINE[kind](first, term), first.dtype)
    return first


def _reducible(kind: str, dtype: Any) -> bool:
    """Whether values of this type are ever partial in this way."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return False
    if dtype == np.bool_:
        return kind in ("and", "or")
    if np.issubdtype(dtype, np.integer):
        return True
    return kind in ("sum", "prod") or (kind in ("max", "min") and np.issubdtype(dtype, np.floating))


def _tolerance(case: Case) -> float:
    types = [x.dtype for x in (*case.operands, *case.results) if np.issubdtype(x.dtype, np.inexact)]
    return max((float(np.finfo(t).eps) for t in types), default=0.0) * 1e4


def _same(got: Sequence[np.ndarray], expected: Sequence[np.ndarray], tolerance: float) -> bool:
    """Whether all are equal, up to rounding that grows with the largest element."""
    for a, b in zip(got, expected, strict=True):
        if a.shape != b.shape:
            return False
        if np.issubdtype(b.dtype, np.inexact):
            finite = np.abs(b[np.isfinite(b)])
            scale = float(finite.max()) if finite.size else 1.0
            if not np.allclose(a, b, rtol=tolerance, atol=tolerance * max(scale, 1e-30), equal_nan=True):
                return False
        elif not np.array_equal(a, b):
            return False
    return True


def _varies(x: np.ndarray) -> bool:
    """Whether a result says anything: two different finite numbers, or a single one."""
    if x.dtype.kind in "fc":
        x = x[np.isfinite(x)]
    return x.size == 1 or (x.size > 1 and bool((x != x.flat[0]).any()))


def _host(x: Any) -> np.ndarray:
    if hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return np.asarray(jax.random.key_data(x))
    return np.asarray(x)


def _device(x: np.ndarray, dtype: Any) -> Any:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return jax.random.wrap_key_data(x, impl=_KEYS[str(dtype)])
    return jax.numpy.asarray(x, dtype)


_KEYS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}
AUDITS = (audit_factors, audit_lets, audit_missing)


def audit(which: Iterable[Sample] | None = None) -> tuple[int, list[Finding]]:
    """Audits samples (all by default). Returns how many were run, and what was found."""
    findings: list[Finding] = []
    count = 0
    with jax.enable_x64(True):
        for sample in samples() if which is None else which:
            case = load(sample)
            if case is not None:
                count += 1
                findings += [f for check in AUDITS for f in check(case)]
    return count, list(dict.fromkeys(findings))


def chosen(names: Sequence[str]) -> tuple[Sample, ...]:
    """The samples of these primitives; all where none is named.

    Raises:
      RuleError: a name that has no rule, or no sample in this JAX.
    """
    known = [s for s in samples() if jx.primitive(s.name) is not None]
    for name in names:
        if name in KEPT_WHOLE or name in STRUCTURAL:
            raise RuleError(f"{name!r} has no rule to audit: {KEPT_WHOLE.get(name) or STRUCTURAL[name]}")
        if name not in {s.name for s in known}:
            raise RuleError(f"there is no sample of {name!r}{nearest(name, {s.name for s in known})}")
    return tuple(s for s in known if not names or s.name in names)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what the auditor finds; 1 if a rule is wrong, lacks evidence, or lacks something without a reason."""
    parser = argparse.ArgumentParser(
        prog="python -m autoshard.rules.audit",
        description="Proves the rules against the operations themselves, split in every way that they allow.",
        epilog="Exits with 1 if a rule is wrong, lacks evidence, or lacks something without a reason.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a primitive, such as dot_general; none means all")
    try:
        which = chosen(parser.parse_args(argv).names)
    except RuleError as e:
        parser.error(str(e))
    count, findings = audit(which)
    for finding in findings:
        print(finding)
    kinds = [f.kind for f in findings]
    missing = [f for f in findings if f.kind == "missing"]
    print(
        f"{count} samples: {kinds.count('wrong')} wrong, {kinds.count('no evidence')} without evidence, "
        f"{len(missing)} missing, {sum(not f.reason for f in missing)} of them without a reason"
    )
    return int(any(not f.reason for f in findings))


if __name__ == "__main__":
    sys.exit(main())
