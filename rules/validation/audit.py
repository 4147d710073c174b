"""The auditor: checks every rule and local form against the operation itself, in float64, on one device.

``python -m autoshard.rules.validation.audit`` runs each sample as a whole, then shards its operands in every way that
the rule allows, runs the shards, combines their results as the rule says, and compares. It does the same for partial
passthrough: it writes operands as partial values, runs these, and combines the results. It also tries what the rules
do not allow, and lists what would be right. Names of primitives after the command audit the samples of those only.
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
from autoshard.rules.validation.case import (
    COMBINE,
    Case,
    Finding,
    all_close,
    combine,
    load,
    reducible,
    shard_of,
    shard_shape,
    to_jax,
    to_numpy,
    tolerance,
    unshard,
    varies,
)
from autoshard.rules.validation.missing_splits import audit_missing_splits
from autoshard.rules.validation.samples import Sample, samples
from autoshard.rules.validation.shard import Shard


def audit_factors(case: Case) -> Iterator[Finding]:
    """Checks every factor that the rule allows to shard, with 2 and 3 shards."""
    for factor in case.rule.factors:
        kind, size = case.rule.kind(factor), case.sizes[factor]
        free = not any(factor in dim for dims in case.rule.operands for dim in dims)
        if kind == "whole" or (free and case.traits.position_dependent):
            continue
        for parts in (p for p in (2, 3) if size % p == 0 and size >= p):
            if kind == "halo":
                right = _halo_suffices(case, factor, parts)
            elif kind == "local":
                results = _results_of_local_form(case, factor, parts)
                right = results is None or all_close(results, case.results, tolerance(case))
            else:
                right = all_close(_results_of_shards(case, factor, parts), case.results, tolerance(case))
            if not right:
                yield case.finding("wrong", f"{factor} over {parts} devices gives other numbers")
    if not all(map(varies, case.results)) and case.rule.factors and not case.traits.position_dependent:
        yield case.finding("no evidence", "the result does not vary")


def _results_of_shards(case: Case, factor: str, parts: int) -> list[np.ndarray]:
    """The operation's results on each shard, combined as the rule says."""
    rule, sizes = case.rule, case.sizes
    shapes = tuple(tuple(x.shape) for x in case.operands)
    outs = []
    for k in range(parts):
        operands = [
            shard_of(x, dims, sizes, factor, parts, k) for x, dims in zip(case.operands, rule.operands, strict=True)
        ]
        result_shapes = tuple(
            shard_shape(dims, jx.aval(v).shape, factor, parts)
            for dims, v in zip(rule.results, case.eqn.outvars, strict=True)
        )
        if any(rule.halo_factor(h) == factor for h in rule.halos):
            outs.append(_results_with_halos(case, operands, factor, parts, k))
        else:
            outs.append(case.run(operands, Shard(rule, factor, k, shapes, result_shapes)))
    kind = rule.kind(factor)
    combined = []
    for r, dims in enumerate(rule.results):
        shards = [out[r] for out in outs]
        if any(factor in dim for dim in dims):
            combined.append(unshard(shards, dims, sizes, factor, parts))
        elif kind in COMBINE:
            combined.append(combine(kind, shards))
        else:  # the result does not depend on the factor: it must be the same on every device
            different = [x for x in shards if not all_close([x], [case.results[r]], tolerance(case))]
            combined.append(different[0] if different else shards[0])
    return combined


def _results_with_halos(
    case: Case, operands: Sequence[np.ndarray], factor: str, parts: int, k: int
) -> list[np.ndarray]:
    """The results of shard ``k`` of a reduced factor, whose operands get their neighbours' halos first."""
    rule, found = case.rule, list(operands)
    assert rule.local is not None
    assert rule.local.fun is not None
    for h in (h for h in rule.halos if rule.halo_factor(h) == factor):
        sides = h.window.halo_rows(parts)
        wide = np.pad(case.operands[h.operand], [sides if d == h.dim else (0, 0) for d in range(found[h.operand].ndim)])
        own = found[h.operand].shape[h.dim]
        found[h.operand] = np.take(wide, range(k * own, (k + 1) * own + sum(sides)), h.dim)
    xs = [to_jax(x, jx.aval(a).dtype) for x, a in zip(found, case.eqn.invars, strict=True)]
    return [to_numpy(y) for y in jax.tree.leaves(rule.local.fun((), *xs))]


def _results_of_local_form(case: Case, factor: str, parts: int) -> list[np.ndarray] | None:
    """The combined results of the rule's local form on all shards at once, its collectives run by `jax.vmap`.

    None where the local form is not used with this many shards.
    """
    rule, local = case.rule, case.rule.local
    assert local is not None
    assert local.fun is not None
    values = zip((*case.operands, *case.results), (*rule.operands, *rule.results), strict=True)
    sizes = [x.nbytes // (parts if any(factor in d for d in dims) else 1) for x, dims in values]
    if local.collectives(parts, sizes) is None:
        return None
    stacked = [
        np.stack([shard_of(x, dims, case.sizes, factor, parts, k) for k in range(parts)])
        for x, dims in zip(case.operands, rule.operands, strict=True)
    ]
    operands = [to_jax(x, jx.aval(v).dtype) for x, v in zip(stacked, case.eqn.invars, strict=True)]
    trace = jax.make_jaxpr(functools.partial(local.fun, ("parts",)), axis_env=[("parts", parts)])
    jaxpr = jx.normalize(trace(*(jax.typeof(x[0]) for x in operands)))
    jaxpr = jx.with_eqns(jaxpr, [_with_full_permutation(eqn, parts) for eqn in jaxpr.eqns])
    outs = jax.jit(jax.vmap(jx.as_fun(jaxpr), axis_name="parts"))(*operands)
    combined = []
    for out, dims, whole in zip(outs, rule.results, case.results, strict=True):
        shards = list(to_numpy(out))
        if any(factor in dim for dim in dims):
            combined.append(unshard(shards, dims, case.sizes, factor, parts))
        else:  # it must be the same on every device
            combined.append(next((x for x in shards if not all_close([x], [whole], tolerance(case))), shards[0]))
    return combined


def _with_full_permutation(eqn: jx.JaxprEqn, parts: int) -> jx.JaxprEqn:
    """A `ppermute` in which all devices send, as `jax.vmap` requires; others receive garbage, not zeros."""
    if eqn.primitive.name != "ppermute":
        return eqn
    pairs = dict(eqn.params["perm"])
    idle_senders = (p for p in range(parts) if p not in pairs)
    idle_receivers = (p for p in range(parts) if p not in pairs.values())
    perm = (*pairs.items(), *zip(idle_senders, idle_receivers, strict=True))
    return eqn.replace(params={**eqn.params, "perm": perm})


def _halo_suffices(case: Case, factor: str, parts: int) -> bool:
    """Whether each shard of the results depends only on its own rows and on those that it reads of its neighbours.

    Which these are the rule's halos say; without, all rows of the nearest neighbours. All other rows are changed.
    """
    rng = np.random.default_rng(1)
    halos = {(h.operand, h.dim): h.window.halo_rows(parts) for h in case.rule.halos}
    for k in range(parts):
        changed = []
        for i, (x, dims) in enumerate(zip(case.operands, case.rule.operands, strict=True)):
            x = x.copy()
            for d in (d for d, dim in enumerate(dims) if factor in dim):
                own = x.shape[d] // parts
                before, behind = halos.get((i, d), (own, own))
                far = [r for r in range(x.shape[d]) if not k * own - before <= r < (k + 1) * own + behind]
                at = (*(slice(None),) * d, far)
                x[at] = rng.permutation(x[at].ravel()).reshape(x[at].shape) * 1.7
            changed.append(x)
        for new, old, dims in zip(case.run(changed), case.results, case.rule.results, strict=True):
            shards = [shard_of(y, dims, case.sizes, factor, parts, k) for y in (new, old)]
            if not all_close(shards[:1], shards[1:], tolerance(case)):
                return False
    return True


def audit_passthrough(case: Case) -> Iterator[Finding]:
    """Checks every set of operands that may be partial together, whether the rule allows it or not."""
    count = len(case.operands)
    sizes = range(1, count + 1) if count <= 4 else (1, count)
    allowed = dict(case.rule.partial_passthrough)
    for kind in REDUCTION_KINDS:
        can_be_partial = {i for i in _numbers(case) if reducible(kind, jx.aval(case.eqn.invars[i]).dtype)}
        for operands in (s for n in sizes for s in itertools.combinations(range(count), n)):
            results_can = all(reducible(kind, jx.aval(v).dtype) for v in case.eqn.outvars)
            if not set(operands) <= can_be_partial or not results_can:
                continue
            claimed = operands in allowed.get(kind, ())
            seen = [_passes_through(case, kind, operands, seed) for seed in range(3)]
            what = f"partial {kind} of operand {'+'.join(map(str, operands))}"
            if claimed and False in seen:
                yield case.finding("wrong", f"{what} does not pass through", passthrough=True)
            elif claimed and True not in seen:
                yield case.finding("no evidence", f"{what} passes to a result that does not vary", passthrough=True)
            elif not claimed and all(seen):
                yield case.finding("missing", f"{what} passes through", passthrough=True)


def _numbers(case: Case) -> list[int]:
    """The operands that may be partial: not indices and conditions where there are floats as well."""
    ranks = ["b" if x.dtype == np.bool_ else "i" if np.issubdtype(x.dtype, np.integer) else "x" for x in case.operands]
    return [i for i, rank in enumerate(ranks) if rank == max(ranks)]


def _passes_through(case: Case, kind: str, partial: Sequence[int], seed: int) -> bool | None:
    """Whether these operands, partial over two devices, give partial results; None where so, but they do not vary."""
    rng = np.random.default_rng(seed)
    whole, on_devices = list(case.operands), [list(case.operands), list(case.operands)]
    for i in partial:
        for operands in on_devices:
            operands[i] = _another(rng, case.operands[i])
        whole[i] = combine(kind, [operands[i] for operands in on_devices])
    with np.errstate(all="ignore"):
        expected = case.run(whole)
        got = [combine(kind, ys) for ys in zip(*map(case.run, on_devices), strict=True)]
    return all_close(got, expected, tolerance(case)) and (any(map(varies, expected)) or None)


def _another(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """An array with the elements of ``x`` in another order, and scaled where they are floats."""
    mixed = rng.permutation(x.ravel()).reshape(x.shape)
    if np.issubdtype(x.dtype, np.inexact):
        return (mixed * rng.uniform(0.3, 1.0, x.shape)).astype(x.dtype)
    return mixed if x.size > 1 or x.dtype == np.bool_ else mixed + x.dtype.type(rng.integers(0, 3))


AUDITS = (audit_factors, audit_passthrough, audit_missing_splits)


def audit_samples(which: Iterable[Sample] | None = None) -> tuple[int, list[Finding]]:
    """Audits samples (all by default); returns how many were run, and the findings without duplicates."""
    findings: list[Finding] = []
    count = 0
    with jax.enable_x64(True):
        for sample in samples() if which is None else which:
            case = load(sample)
            if case is not None:
                count += 1
                findings += [f for check in AUDITS for f in check(case)]
    return count, list(dict.fromkeys(findings))


def samples_of(names: Sequence[str]) -> tuple[Sample, ...]:
    """The samples of these primitives; all samples without names.

    Raises:
      RuleError: a name without a rule, or without a sample in this version of JAX.
    """
    known = [s for s in samples() if jx.find_primitive(s.name) is not None]
    for name in names:
        if name in KEPT_WHOLE or name in STRUCTURAL:
            raise RuleError(f"{name!r} has no rule to audit: {KEPT_WHOLE.get(name) or STRUCTURAL[name]}")
        if name not in {s.name for s in known}:
            raise RuleError(f"there is no sample of {name!r}{nearest(name, {s.name for s in known})}")
    return tuple(s for s in known if not names or s.name in names)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the findings; 1 if a rule is wrong, lacks evidence, or lacks something without a stated reason."""
    parser = argparse.ArgumentParser(
        prog="python -m autoshard.rules.validation.audit",
        description="Checks the rules against the operations themselves, sharded in every way that they allow.",
        epilog="Exits with 1 if a rule is wrong, lacks evidence, or lacks something without a stated reason.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a primitive, such as dot_general; none means all")
    try:
        which = samples_of(parser.parse_args(argv).names)
    except RuleError as e:
        parser.error(str(e))
    count, findings = audit_samples(which)
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
