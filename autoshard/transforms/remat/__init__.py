"""remat: the backward part of a traced step recomputes residuals instead of keeping them in memory.

A *residual* is a value that the forward part of a differentiated step computes and the backward part reads. Which
part an equation belongs to is read off its name stack; a wrong guess there costs memory, never correctness.

There are two rewrites, depending on how the loop over layers was written:

- `recompute_in_scans`: a forward scan stacks residuals for a backward one. Slice i of both is the same iteration,
  whichever way each runs, so the backward body can recompute them from that iteration's inputs: the loop's constants
  and slices, which exist anyway, and the carry, which is stacked instead.
- `recompute_in_straight_line`: unrolled layers. The forward part is cut into segments
  (`autoshard.transforms.remat.segments`); what crosses a cut is saved, and each segment but the last is recomputed
  right before the backward part first reads a value of it. The last one is read at once, so that recomputing it would
  free nothing.

In both, a `SavePolicy` decides whether the results of an equation may be saved.

May import: ir, and what it may.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autoshard import jaxpr as jx
from autoshard.ir.program import Program
from autoshard.ir.rule_registry import Rules
from autoshard.jaxpr.arguments import in_host_memory
from autoshard.transforms.remat.segments import LiveValue, choose_cuts

SavePolicy = Callable[[jx.JaxprEqn], bool]
"""Whether the results of an equation are saved rather than recomputed."""


def is_recomputable(eqn: jx.JaxprEqn, rules: Rules) -> bool:
    """Whether running the equation twice gives the same values, does nothing else twice, and calls no host."""
    if eqn.effects or rules.traits(eqn.primitive).runs_once:
        return False
    return all(is_recomputable(inner, rules) for body in jx.subjaxprs(eqn) for inner in body.eqns)


def is_forward(eqn: jx.JaxprEqn) -> bool:
    """Whether the equation is in the forward part of a differentiated function."""
    return jx.is_differentiated(eqn) and not jx.is_backward(eqn)


def residuals(jaxpr: jx.Jaxpr) -> dict[jx.Var, jx.JaxprEqn]:
    """The values that backward equations read and others compute, each with its equation; top level only."""
    made = {v: e for e in jaxpr.eqns if not jx.is_backward(e) for v in e.outvars}
    return {v: made[v] for e in jaxpr.eqns if jx.is_backward(e) for v in _variables(e.invars) if v in made}


def residual_bytes(program: Program) -> int:
    """Bytes on devices of all residuals of a program; the whole of what a scan stacks, but not the program's inputs.

    Of a loop whose iterations each have a forward and a backward part (gradient accumulation), one iteration counts.
    """
    found = (v for body in differentiated_bodies(program.jaxpr) for v in residuals(body))
    return _bytes(v for v in found if not in_host_memory(v.aval))


def differentiated_bodies(jaxpr: jx.Jaxpr) -> Iterator[jx.Jaxpr]:
    """``jaxpr`` and every body nested in it, outside differentiated code: each may have a forward and a backward
    part."""
    yield jaxpr
    for eqn in jaxpr.eqns:
        if not jx.is_differentiated(eqn):
            for region in jx.regions(eqn):
                yield from differentiated_bodies(region.body)


@dataclass(frozen=True)
class ProgramSlice:
    """Equations in order, and the variables that they read but do not compute."""

    eqns: tuple[jx.JaxprEqn, ...]
    inputs: tuple[jx.Var, ...]


def program_slice(eqns: Sequence[jx.JaxprEqn], targets: Iterable[jx.Var], saved: Collection[jx.Var]) -> ProgramSlice:
    """The fewest of ``eqns`` that compute ``targets`` from ``saved`` values and from what ``eqns`` do not compute."""
    needed = dict.fromkeys(targets)
    chosen: list[jx.JaxprEqn] = []
    for eqn in reversed(eqns):
        if any(v in needed and v not in saved for v in eqn.outvars):
            chosen.append(eqn)
            needed |= dict.fromkeys(_variables(eqn.invars))
    computed = {v for e in chosen for v in e.outvars if v not in saved}
    return ProgramSlice(tuple(reversed(chosen)), tuple(v for v in needed if v not in computed))


def recompute_in_scans(jaxpr: jx.Jaxpr, is_saved: SavePolicy) -> jx.Jaxpr:
    """``jaxpr`` with its backward scans recomputing residuals; the same object where none can.

    Left as they are: scans whose stacked results are read other than slice by slice in backward scans of the
    same length, scans over mutable arrays, and those where as much would have to be stacked as is freed.
    Stacked results that nothing reads any more stay; dead code elimination removes them.
    """
    eqns = list(jaxpr.eqns)
    readers = _readers(jaxpr)
    changed = False
    for i, eqn in enumerate(jaxpr.eqns):
        groups = jx.scan_groups(eqn) if is_forward(eqn) else None
        if groups is None:
            continue
        removable = {
            v
            for v in eqn.outvars[groups.carry :]
            if readers[v] and all(j is not None and _reads_slices(eqns[j], v, groups.length) for j in readers[v])
        }
        scans = _ScanPair(eqn, groups, is_saved, removable)
        scans.slice_bodies({j: eqns[j] for j in sorted({j for v in removable for j in readers[v] if j is not None})})
        if scans.freed_bytes > scans.added_bytes:
            eqns[i] = scans.forward()
            for j in scans.slices:
                eqns[j] = scans.backward(eqns[j], j)
            changed = True
    return jx.with_eqns(jaxpr, eqns) if changed else jaxpr


def stacked_residuals(jaxpr: jx.Jaxpr, scan: jx.JaxprEqn) -> set[jx.Var]:
    """The values in the body of a forward scan of ``jaxpr`` that it stacks for backward scans alone, and that these may
    make again."""
    groups, body, readers = jx.scan_groups(scan), jx.regions(scan)[0].body, _readers(jaxpr)
    if groups is None:
        return set()
    ys = zip(body.outvars[groups.carry :], scan.outvars[groups.carry :], strict=True)
    return {
        a
        for a, v in ys
        if isinstance(a, jx.Var)
        and a not in body.invars
        and readers[v]
        and all(j is not None and _reads_slices(jaxpr.eqns[j], v, groups.length) for j in readers[v])
    }


def _readers(jaxpr: jx.Jaxpr) -> defaultdict[jx.Var, set[int | None]]:
    """By variable, the equations that read it; None stands for the results."""
    readers: defaultdict[jx.Var, set[int | None]] = defaultdict(set)
    for i, eqn in enumerate(jaxpr.eqns):
        for v in _variables(eqn.invars):
            readers[v].add(i)
    for v in _variables(jaxpr.outvars):
        readers[v].add(None)
    return readers


def _reads_slices(eqn: jx.JaxprEqn, var: jx.Var, length: int) -> bool:
    """Whether ``eqn`` is a backward scan of this length that reads ``var`` one slice per iteration, and only so."""
    groups = jx.scan_groups(eqn) if jx.is_backward(eqn) else None
    return groups is not None and groups.length == length and var not in eqn.invars[: groups.consts + groups.carry]


class _ScanPair:
    """One forward scan, and the backward scans that read what it stacks."""

    def __init__(self, eqn: jx.JaxprEqn, groups: jx.ScanGroups, is_saved: SavePolicy, removable: set[jx.Var]) -> None:
        self.eqn, self.groups, self.body = eqn, groups, jx.regions(eqn)[0].body
        self.saved = {v for e in self.body.eqns if is_saved(e) for v in e.outvars}
        inputs = self.body.invars
        n = groups.consts + groups.carry
        outer = [*eqn.invars[: groups.consts], *eqn.invars[n:]]
        self.loop_inputs = dict(zip([*inputs[: groups.consts], *inputs[n:]], outer, strict=True))
        """Body constants and slices -> the operands of the scan that they are, or are slices of."""
        self.consts = set(inputs[: groups.consts])
        keep = self.saved | set(inputs[groups.consts : n])
        ys = list(zip(self.body.outvars, eqn.outvars, strict=True))[groups.carry :]
        self.still_stacked = {a: v for a, v in ys if isinstance(a, jx.Var) and (a in keep or v not in removable)}
        """Body values -> their stacks, of what stays stacked."""
        self.recomputed = {v: a for a, v in ys if isinstance(a, jx.Var) and a not in self.still_stacked}
        """Stacks -> the body values, of what backward scans recompute."""
        self.slices: dict[int, ProgramSlice] = {}
        """What each backward scan recomputes, by the index of its equation."""
        self.newly_stacked: dict[jx.Var, jx.Var] = {}
        """Body values -> their stacks, of what is stacked so that the others can be recomputed."""

    def slice_bodies(self, readers: Mapping[int, jx.JaxprEqn]) -> None:
        """Fills ``slices`` for these backward scans, and ``newly_stacked`` with what the slices need."""
        for j, reader in readers.items():
            targets = [self.recomputed[v] for v in _variables(reader.invars) if v in self.recomputed]
            if targets:
                self.slices[j] = program_slice(self.body.eqns, targets, self.saved | set(self.still_stacked))
        for v in (v for s in self.slices.values() for v in s.inputs):
            if v not in self.loop_inputs and v not in self.still_stacked:
                self.newly_stacked.setdefault(v, jx.stacked_var(v, self.groups.length))

    @property
    def freed_bytes(self) -> int:
        return _bytes(self.recomputed)

    @property
    def added_bytes(self) -> int:
        return _bytes(self.newly_stacked.values())

    def forward(self) -> jx.JaxprEqn:
        """The forward scan, stacking the new values too."""
        body = jx.with_eqns(self.body, self.body.eqns, outvars=[*self.body.outvars, *self.newly_stacked])
        groups = (self.groups.consts, self.groups.carry, self.groups.xs)
        outvars = [*self.eqn.outvars, *self.newly_stacked.values()]
        return jx.rebuild_scan(self.eqn, body, groups, self.eqn.invars, outvars)

    def backward(self, eqn: jx.JaxprEqn, j: int) -> jx.JaxprEqn:
        """Backward scan ``j``, recomputing what is no longer stacked at the start of each iteration."""
        groups, body, work = jx.scan_groups(eqn), jx.regions(eqn)[0].body, self.slices[j]
        assert groups is not None
        n, m = groups.consts, groups.consts + groups.carry
        consts, xs = (list(zip(eqn.invars[s], body.invars[s], strict=True)) for s in (slice(n), slice(m, None)))
        env: dict[jx.Var, jx.Var] = {}  # variables of the forward body -> of this body
        for v in work.inputs:
            group = consts if v in self.consts else xs
            stacks = (self.loop_inputs, self.still_stacked, self.newly_stacked)
            outer = next(found[v] for found in stacks if v in found)
            inner = next((b for a, b in group if a is outer), None)
            if inner is None:
                inner = jx.new_var(v)
                group.append((outer, inner))
            env[v] = inner
        code: list[jx.JaxprEqn] = []
        if not groups.iterates and env:  # an unrolled scan: XLA could find the forward body's equal work (CSE)
            barrier = jx.optimization_barrier(list(dict.fromkeys(env.values())), eqn)
            code.append(barrier)
            behind = dict(zip(_variables(barrier.invars), barrier.outvars, strict=True))
            env = {v: behind[b] for v, b in env.items()}
        code += _clone_eqns(work.eqns, env)
        instead = {b: env[self.recomputed[a]] for a, b in xs if a in self.recomputed}
        body = jx.with_eqns(
            body,
            [*code, *(_with_operands(e, instead) for e in body.eqns)],
            invars=[*(b for _, b in consts), *body.invars[n:m], *(b for _, b in xs)],
            outvars=_substituted(body.outvars, instead),
        )
        operands = [*(a for a, _ in consts), *eqn.invars[n:m], *(a for a, _ in xs)]
        return jx.rebuild_scan(eqn, body, (len(consts), groups.carry, len(xs)), operands, eqn.outvars)


def recompute_in_straight_line(jaxpr: jx.Jaxpr, is_saved: SavePolicy) -> jx.Jaxpr:
    """``jaxpr`` with segments of its unrolled forward part recomputed; the same object where nothing is gained.

    Values that are read outside both parts, or are results, are saved whatever ``is_saved`` says; so are the results of
    loops and branches, which are never recomputed as a whole.
    """
    backward = [jx.is_backward(e) for e in jaxpr.eqns]
    first_use: dict[jx.Var, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        for v in _variables(eqn.invars) if backward[i] else ():
            first_use.setdefault(v, i)
    recomputed_at: dict[int, list[tuple[ProgramSlice, list[jx.Var]]]] = defaultdict(list)
    for work, targets in _straight_segments(jaxpr, is_saved):
        recomputed_at[min(first_use[v] for v in targets)].append((work, targets))
    if not recomputed_at:
        return jaxpr
    cotangents = {v for e, b in zip(jaxpr.eqns, backward, strict=True) if b for v in e.outvars}
    code: list[jx.JaxprEqn] = []
    instead: dict[jx.Var, jx.Var] = {}
    latest: jx.Var | None = None
    for i, eqn in enumerate(jaxpr.eqns):
        for work, targets in recomputed_at.get(i, ()):
            # A cotangent that arrives now goes through the barrier too, or XLA could recompute long before.
            arriving = next((v for v in _variables(eqn.invars) if v in cotangents), latest)
            inputs = work.inputs if arriving is None or arriving in work.inputs else (*work.inputs, arriving)
            barrier = jx.optimization_barrier([instead.get(v, v) for v in inputs], eqn)
            env = dict(zip(inputs, barrier.outvars, strict=True))
            if arriving is not None:
                instead[arriving] = env[arriving]
            code += [barrier, *_clone_eqns(work.eqns, env, eqn)]
            instead |= {v: env[v] for v in targets}
        code.append(_with_operands(eqn, instead) if backward[i] else eqn)
        if backward[i] and eqn.outvars:
            latest = eqn.outvars[0]
    return jx.with_eqns(jaxpr, code)


def unrolled_residuals(jaxpr: jx.Jaxpr, is_saved: SavePolicy) -> tuple[set[jx.Var], set[jx.Var]]:
    """Of unrolled layers, the residuals that would be recomputed, and what would be saved to recompute them from."""
    segments = list(_straight_segments(jaxpr, is_saved))
    return {v for _, targets in segments for v in targets}, {v for work, _ in segments for v in work.inputs}


def _straight_segments(jaxpr: jx.Jaxpr, is_saved: SavePolicy) -> Iterator[tuple[ProgramSlice, list[jx.Var]]]:
    """What to recompute of the unrolled forward parts of ``jaxpr``, and for which residuals."""
    read_elsewhere = set(_variables(jaxpr.outvars))
    forward_parts: list[list[jx.JaxprEqn]] = [[]]
    for eqn in jaxpr.eqns:
        if jx.is_backward(eqn):
            if forward_parts[-1]:
                forward_parts.append([])  # what comes later is another function's forward part
        elif is_forward(eqn):
            forward_parts[-1].append(eqn)
        else:
            read_elsewhere |= set(_variables(eqn.invars))
    crossing = residuals(jaxpr)
    for part in forward_parts:
        yield from _segments(part, crossing, read_elsewhere, is_saved)


def _segments(
    part: Sequence[jx.JaxprEqn],
    crossing: Collection[jx.Var],
    read_elsewhere: Collection[jx.Var],
    is_saved: SavePolicy,
) -> Iterator[tuple[ProgramSlice, list[jx.Var]]]:
    """What to recompute of a forward part, and for which residuals, segment by segment.

    Args:
      crossing: the residuals of the program.
      read_elsewhere: values that neither a forward nor a backward equation reads, which are saved anyway.
    """
    saved = {v for e in part if jx.regions(e) or is_saved(e) for v in e.outvars}
    saved |= {v for e in part for v in e.outvars if v in read_elsewhere}
    recomputed = {v: None for e in part for v in e.outvars if v in crossing and v not in saved}
    eqns = program_slice(part, recomputed, saved).eqns
    defined_at = {v: i for i, e in enumerate(eqns) for v in e.outvars if v not in saved}
    last_use = dict(defined_at)
    for i, eqn in enumerate(eqns):
        last_use |= {v: i for v in _variables(eqn.invars) if v in defined_at}
    values = {v: LiveValue(defined_at[v], last_use[v], jx.aval_bytes(v.aval)) for v in defined_at}
    residual_bytes = [_bytes(v for v in e.outvars if v in recomputed) for e in eqns]
    saved_anyway = _bytes(v for v in crossing if v not in recomputed)
    cuts = choose_cuts(len(eqns), list(values.values()), residual_bytes, saved_anyway)
    saved |= {v for v, value in values.items() if any(value.crosses(c) for c in cuts)}
    for a, b in pairwise((0, *cuts)):
        targets = [v for e in eqns[a:b] for v in e.outvars if v in recomputed and v not in saved]
        if targets:
            yield program_slice(eqns[a:b], targets, saved), targets


def _clone_eqns(
    eqns: Iterable[jx.JaxprEqn], env: dict[jx.Var, jx.Var], like: jx.JaxprEqn | None = None
) -> list[jx.JaxprEqn]:
    """Copies of ``eqns`` with new results, which are added to ``env``; operands in ``env`` are replaced.

    Args:
      like: the backward equation whose name stack the copies get; None keeps their own.
    """
    code: list[jx.JaxprEqn] = []
    for eqn in eqns:
        code.append(jx.clone_eqn(eqn, _substituted(eqn.invars, env), like))
        env |= zip(eqn.outvars, code[-1].outvars, strict=True)
    return code


def _substituted(atoms: Iterable[jx.Atom], env: Mapping[jx.Var, jx.Var]) -> list[jx.Atom]:
    return [env.get(a, a) if isinstance(a, jx.Var) else a for a in atoms]


def _with_operands(eqn: jx.JaxprEqn, env: Mapping[jx.Var, jx.Var]) -> jx.JaxprEqn:
    if env.keys().isdisjoint(_variables(eqn.invars)):
        return eqn
    return eqn.replace(invars=_substituted(eqn.invars, env))


def _variables(atoms: Iterable[jx.Atom]) -> list[jx.Var]:
    return [a for a in atoms if isinstance(a, jx.Var)]


def _bytes(variables: Iterable[jx.Var]) -> int:
    return sum(jx.aval_bytes(v.aval) for v in variables)
