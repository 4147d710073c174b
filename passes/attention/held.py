"""Backward scans read the attention of forward scans instead of computing it again.

The gradient of attention needs the output and the statistics of each softmax row. Both are small beside what it takes
to compute them, so a scan over layers stacks them for the backward scan, as it stacks other residuals. Slice i of both
scans is the same iteration, whichever way each runs; the attentions are the same where their operands are read from
the same arrays. Where queries, keys and values are recomputed, as under `jax.checkpoint`, so is the attention: whoever
saves so little does not want its output saved. The pass `recompute` saves it before all matrix products, by FLOPs per
byte.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from autoshard import jaxpr as jx
from autoshard.transforms import remat
from autoshard.transforms.attention_op import AttentionConfig, attention_backward_p, attention_p


def hold_results(jaxpr: jx.Jaxpr) -> jx.Jaxpr:
    """``jaxpr`` without attentions of backward scans that forward scans compute, at every depth; the same object where
    there are none."""
    eqns = [e if jx.is_differentiated(e) else jx.map_bodies(e, hold_results) for e in jaxpr.eqns]
    forward = [i for i, e in enumerate(eqns) if remat.is_forward(e) and _attentions(e)]
    backward = [j for j, e in enumerate(eqns) if jx.is_backward(e) and _attentions(e)]
    for i, j in itertools.product(forward, backward):
        eqns[i], eqns[j] = _held(eqns[i], eqns[j])
    same = all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if same else jx.with_eqns(jaxpr, eqns)


def _attentions(scan: jx.JaxprEqn) -> list[jx.JaxprEqn]:
    """The attentions in the body of a scan; none for any other equation."""
    if jx.scan_groups(scan) is None:
        return []
    return [e for e in jx.regions(scan)[0].body.eqns if e.primitive is attention_p]


def _held(forward: jx.JaxprEqn, backward: jx.JaxprEqn) -> tuple[jx.JaxprEqn, jx.JaxprEqn]:
    """Both scans, where the backward one reads the attentions that the forward one stacks for it."""
    groups, back = jx.scan_groups(forward), jx.scan_groups(backward)
    assert groups is not None
    assert back is not None
    found = _computed_again(forward, backward) if groups.length == back.length else {}
    if not found:
        return forward, backward
    body, later = jx.regions(forward)[0].body, jx.regions(backward)[0].body
    stacked = list(zip(body.outvars, forward.outvars, strict=True))[groups.carry :]
    stacks = {v: outer for v, outer in stacked if isinstance(v, jx.Var)}
    results = dict.fromkeys(v for same in found.values() for v in same.outvars)
    added = {v: jx.stacked_var(v, groups.length) for v in results if v not in stacks}
    stacks |= added
    by_result = {v: (eqn, same) for eqn, same in found.items() for v in eqn.outvars}
    configs: dict[jx.JaxprEqn, AttentionConfig] = {}
    eqns: list[jx.JaxprEqn] = []
    for eqn in later.eqns:
        held = next((by_result[a] for a in eqn.invars if isinstance(a, jx.Var) and a in by_result), None)
        if held is not None:
            own, given = eqn.params["config"], held[1].params["config"]
            eqn = eqn.replace(
                params={**eqn.params, "config": replace(own, out_dims=given.out_dims, out_dtype=given.out_dtype)}
            )
            configs[held[1]] = replace(
                given, cotangent_dims=own.cotangent_dims, grad_dims=own.grad_dims, grad_dtypes=own.grad_dtypes
            )
        if eqn not in found:
            eqns.append(eqn)
    read = [
        (stacks[v], inner) for eqn, same in found.items() for inner, v in zip(eqn.outvars, same.outvars, strict=True)
    ]
    inner = [jx.new_var(v) for same in found.values() for v in same.outvars]
    rename = {old: new for (_, old), new in zip(read, inner, strict=True)}
    eqns = [e.replace(invars=[rename.get(a, a) if isinstance(a, jx.Var) else a for a in e.invars]) for e in eqns]
    later = jx.with_eqns(later, eqns, invars=[*later.invars, *inner])
    operands = [*backward.invars, *(outer for outer, _ in read)]
    backward = jx.rebuild_scan(
        backward, later, (back.consts, back.carry, back.xs + len(read)), operands, backward.outvars
    )
    own_eqns = [e.replace(params={**e.params, "config": configs[e]}) if e in configs else e for e in body.eqns]
    body = jx.with_eqns(body, own_eqns, outvars=[*body.outvars, *added])
    stacking = jx.rebuild_scan(
        forward,
        body,
        (groups.consts, groups.carry, groups.xs),
        forward.invars,
        [*forward.outvars, *added.values()],
    )
    return stacking, backward


def _computed_again(forward: jx.JaxprEqn, backward: jx.JaxprEqn) -> dict[jx.JaxprEqn, jx.JaxprEqn]:
    """The attentions of a backward scan that only gradients read -> the same ones in the forward scan."""
    body, later = jx.regions(forward)[0].body, jx.regions(backward)[0].body
    known = _same_values(forward, backward)
    computed = {_key(e, e.invars): e for e in body.eqns if e.primitive is attention_p}
    found: dict[jx.JaxprEqn, jx.JaxprEqn] = {}
    for eqn in _attentions(backward):
        readers = [e for e in later.eqns if any(a in eqn.outvars for a in e.invars if isinstance(a, jx.Var))]
        if all(e.primitive is attention_backward_p for e in readers) and not set(eqn.outvars) & set(later.outvars):
            operands = [known.get(a, a) if isinstance(a, jx.Var) else a for a in eqn.invars]
            if (same := computed.get(_key(eqn, operands))) is not None:
                found[eqn] = same
    return found


def _same_values(forward: jx.JaxprEqn, backward: jx.JaxprEqn) -> dict[jx.Var, jx.Atom]:
    """Variables of the backward body -> the values of the forward body, in the same iteration, that they are."""
    groups, back = jx.scan_groups(forward), jx.scan_groups(backward)
    assert groups is not None
    assert back is not None
    body, later = jx.regions(forward)[0].body, jx.regions(backward)[0].body
    n, m = groups.consts, groups.consts + groups.carry
    consts: dict[jx.Atom, jx.Atom] = dict(zip(forward.invars[:n], body.invars[:n], strict=True))
    slices: dict[jx.Atom, jx.Atom] = dict(zip(forward.invars[m:], body.invars[m:], strict=True))
    slices |= dict(zip(forward.outvars[groups.carry :], body.outvars[groups.carry :], strict=True))
    known: dict[jx.Var, jx.Atom] = {}
    end = back.consts + back.carry
    for outer, inner in zip(backward.invars[: back.consts], later.invars[: back.consts], strict=True):
        if isinstance(outer, jx.Var) and outer in consts:
            known[inner] = consts[outer]
    for outer, inner in zip(backward.invars[end:], later.invars[end:], strict=True):
        if isinstance(outer, jx.Var) and outer in slices:
            known[inner] = slices[outer]
    return known


def _key(eqn: jx.JaxprEqn, operands: Sequence[jx.Atom]) -> object:
    """Equal for attentions of the same operands that differ in the layout of their output at most."""
    config = replace(
        eqn.params["config"], out_dims="", out_dtype="", cotangent_dims="", grad_dims=("",) * 3, grad_dtypes=("",) * 3
    )
    return tuple(map(id, operands)), config
