"""The auditor: proves every rule and local form against the operation itself, in float64, on one device.

``python -m autoshard.rules.validation.audit`` runs each sample whole, then splits its operands in every way that the rule
allows, runs the parts, puts their results together as the rule says, and compares. It does the same for what
the rule lets through: it writes operands as terms to be combined, runs the terms, and combines the results. It
also tries what the rules do not allow, and lists what would be right. Names of primitives after the command audit
the samples of those alone.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np

from autoshard import jaxpr as jx
from autoshard.errors import RuleError, nearest
from autoshard.ir.spec import REDUCTION_KINDS
from autoshard.rules import KEPT_WHOLE, STRUCTURAL
from autoshard.rules.validation.evidence import (
    COMBINE,
    POSITIONAL,
    Case,
    Finding,
    block,
    combine,
    device,
    host,
    join,
    load,
    local_shape,
    reducible,
    same,
    tolerance_of,
    varies,
)
from autoshard.rules.validation.missing import audit_missing
from autoshard.rules.validation.part import Part
from autoshard.rules.validation.samples import Sample, samples


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
                right = formed is None or same(formed, case.results, tolerance_of(case))
            else:
                right = same(_joined(case, factor, parts), case.results, tolerance_of(case))
            if not right:
                yield case.finding("wrong", f"{factor} in {parts} parts gives other numbers")
    if not all(map(varies, case.results)) and case.rule.factors and case.name not in POSITIONAL:
        yield case.finding("no evidence", "the result does not vary")


def _joined(case: Case, factor: str, parts: int) -> list[np.ndarray]:
    """The results of the parts, put together as the rule says."""
    rule, sizes = case.rule, case.sizes
    shapes = tuple(tuple(x.shape) for x in case.operands)
    outs = []
    for k in range(parts):
        operands = [
            block(x, dims, sizes, factor, parts, k) for x, dims in zip(case.operands, rule.operands, strict=True)
        ]
        local = tuple(
            local_shape(dims, jx.aval(v).shape, factor, parts)
            for dims, v in zip(rule.results, case.eqn.outvars, strict=True)
        )
        if any(rule.halo_factor(h) == factor for h in rule.halos):
            outs.append(_with_edges(case, operands, factor, parts, k))
        else:
            outs.append(case.run(operands, Part(rule, factor, k, shapes, local)))
    kind = rule.kind(factor)
    joined = []
    for r, dims in enumerate(rule.results):
        terms = [out[r] for out in outs]
        if any(factor in dim for dim in dims):
            joined.append(join(terms, dims, sizes, factor, parts))
        elif kind in COMBINE:
            joined.append(combine(kind, terms))
        else:  # the result does not depend on the factor: every part has it whole
            different = [t for t in terms if not same([t], [case.results[r]], tolerance_of(case))]
            joined.append(different[0] if different else terms[0])
    return joined


def _with_edges(case: Case, operands: Sequence[np.ndarray], factor: str, parts: int, k: int) -> list[np.ndarray]:
    """The results of part ``k``, to whose operands the edges of its neighbours come."""
    rule, found = case.rule, list(operands)
    assert rule.local is not None
    assert rule.local.fun is not None
    for h in (h for h in rule.halos if rule.halo_factor(h) == factor):
        sides = h.window.halo_rows(parts)
        wide = np.pad(case.operands[h.operand], [sides if d == h.dim else (0, 0) for d in range(found[h.operand].ndim)])
        own = found[h.operand].shape[h.dim]
        found[h.operand] = np.take(wide, range(k * own, (k + 1) * own + sum(sides)), h.dim)
    xs = [device(x, jx.aval(a).dtype) for x, a in zip(found, case.eqn.invars, strict=True)]
    return [host(y) for y in jax.tree.leaves(rule.local.fun((), *xs))]


def _formed(case: Case, factor: str, parts: int) -> list[np.ndarray] | None:
    """The results of the rule's local form, its parts run side by side with the collectives between them; None where
    it does not serve so many."""
    rule, local = case.rule, case.rule.local
    assert local is not None
    assert local.fun is not None
    sides = zip((*case.operands, *case.results), (*rule.operands, *rule.results), strict=True)
    if local.collectives(parts, [x.nbytes // (parts if any(factor in d for d in dims) else 1) for x, dims in sides]) is None:
        return None
    stacked = [
        np.stack([block(x, dims, case.sizes, factor, parts, k) for k in range(parts)])
        for x, dims in zip(case.operands, rule.operands, strict=True)
    ]
    operands = [device(x, jx.aval(v).dtype) for x, v in zip(stacked, case.eqn.invars, strict=True)]
    form = jax.make_jaxpr(functools.partial(local.fun, ("parts",)), axis_env=[("parts", parts)])
    jaxpr = jx.normalize(form(*(jax.typeof(x[0]) for x in operands)))
    jaxpr = jx.with_eqns(jaxpr, [_permuting(eqn, parts) for eqn in jaxpr.eqns])
    outs = jax.vmap(jx.as_fun(jaxpr), axis_name="parts")(*operands)
    joined = []
    for out, dims, whole in zip(outs, rule.results, case.results, strict=True):
        terms = list(host(out))
        if any(factor in dim for dim in dims):
            joined.append(join(terms, dims, case.sizes, factor, parts))
        else:  # every part has it whole
            joined.append(next((t for t in terms if not same([t], [whole], tolerance_of(case))), terms[0]))
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
    said = {(h.operand, h.dim): h.window.halo_rows(parts) for h in case.rule.halos}
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
            mine = [block(y, dims, case.sizes, factor, parts, k) for y in (new, old)]
            if not same(mine[:1], mine[1:], tolerance_of(case)):
                return False
    return True


def audit_lets(case: Case) -> Iterator[Finding]:
    """Every way in which operands may be partial, allowed or not."""
    count = len(case.operands)
    sizes = range(1, count + 1) if count <= 4 else (1, count)
    allowed = dict(case.rule.partial_passthrough)
    for kind in REDUCTION_KINDS:
        able = [i for i in _terms(case) if reducible(kind, jx.aval(case.eqn.invars[i]).dtype)]
        for some in (s for n in sizes for s in itertools.combinations(range(count), n)):
            if not set(some) <= set(able) or not all(reducible(kind, jx.aval(v).dtype) for v in case.eqn.outvars):
                continue
            claimed = some in allowed.get(kind, ())
            seen = [_passes(case, kind, some, seed) for seed in range(3)]
            sets = "+".join(map(str, some))
            if claimed and False in seen:
                yield case.finding("wrong", f"does not let {kind}: {sets} through", passthrough=True)
            elif claimed and True not in seen:
                text = f"lets {kind}: {sets} through, to a result that does not vary"
                yield case.finding("no evidence", text, passthrough=True)
            elif not claimed and all(seen):
                yield case.finding("missing", f"lets {kind}: {sets} through", passthrough=True)


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
        whole[i] = combine(kind, [t[i] for t in terms])
    with np.errstate(all="ignore"):
        expected = case.run(whole)
        got = [combine(kind, ys) for ys in zip(*map(case.run, terms), strict=True)]
    return same(got, expected, tolerance_of(case)) and (any(map(varies, expected)) or None)


def _term(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """Another array of the same kind: the elements in another order, and scaled where that is possible."""
    mixed = rng.permutation(x.ravel()).reshape(x.shape)
    if np.issubdtype(x.dtype, np.inexact):
        return (mixed * rng.uniform(0.3, 1.0, x.shape)).astype(x.dtype)
    return mixed if x.size > 1 or x.dtype == np.bool_ else mixed + x.dtype.type(rng.integers(0, 3))


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
    known = [s for s in samples() if jx.find_primitive(s.name) is not None]
    for name in names:
        if name in KEPT_WHOLE or name in STRUCTURAL:
            raise RuleError(f"{name!r} has no rule to audit: {KEPT_WHOLE.get(name) or STRUCTURAL[name]}")
        if name not in {s.name for s in known}:
            raise RuleError(f"there is no sample of {name!r}{nearest(name, {s.name for s in known})}")
    return tuple(s for s in known if not names or s.name in names)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what the auditor finds; 1 if a rule is wrong, lacks evidence, or lacks something without a reason."""
    parser = argparse.ArgumentParser(
        prog="python -m autoshard.rules.validation.audit",
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
