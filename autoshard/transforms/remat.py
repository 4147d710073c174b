"""Replay: running forward work again in the backward part instead of holding what it made.

A *residual* is a value that the forward part of a differentiated step makes and the backward part reads. Which
part an equation belongs to is read off its name stack; a wrong guess there costs memory, never correctness.

Two forms, told apart by how the loop over layers was written:

- `scans`: a forward scan stacks residuals for a backward one. Position i of both is the same turn of the loop,
  whichever way each runs, so the backward body can make them from that turn's inputs: the loop's constants and
  slices, which exist anyway, and the carry, which is stacked instead.
- `line`: straight code. It is cut into segments (`autoshard.transforms.remat_segments`); what crosses a cut is held, and each
  segment but the last is run again right before the backward part first reads of it. The last one is read at
  once, so that making it again would free nothing.

In both, what `keep` says of an equation decides whether its results may be held.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autoshard import jaxpr as jx
from autoshard.ir.program import Program
from autoshard.ir.rule_registry import Rules
from autoshard.transforms.remat_segments import Value, choose_cuts

SavePolicy = Callable[[jx.JaxprEqn], bool]
"""Whether an equation's results are held rather than made again."""


def is_recomputable(eqn: jx.JaxprEqn, rules: Rules) -> bool:
    """Whether running the equation twice gives the same values, does nothing else twice, and calls no host."""
    if eqn.effects or rules.traits(eqn.primitive).runs_once:
        return False
    return all(is_recomputable(inner, rules) for body in jx.subjaxprs(eqn) for inner in body.eqns)


def is_forward(eqn: jx.JaxprEqn) -> bool:
    """Whether the equation is in the forward part of a differentiated function."""
    return jx.is_differentiated(eqn) and not jx.is_backward(eqn)


def residuals(jaxpr: jx.Jaxpr) -> dict[jx.Var, jx.JaxprEqn]:
    """What equations that are not backward make and backward ones read, with its maker; top level only."""
    made = {v: e for e in jaxpr.eqns if not jx.is_backward(e) for v in e.outvars}
    return {v: made[v] for e in jaxpr.eqns if jx.is_backward(e) for v in _variables(e.invars) if v in made}


def residual_bytes(program: Program) -> int:
    """Bytes that cross from the forward to the backward part; what scans stack counts whole, inputs do not.

    A loop whose turns each have both parts (accumulation over microbatches) counts one turn.
    """
    return _bytes(v for body in differentiated_bodies(program.jaxpr) for v in residuals(body))


def differentiated_bodies(jaxpr: jx.Jaxpr) -> Iterator[jx.Jaxpr]:
    """``jaxpr``, and every body in it, outside differentiated code, that may have both parts itself."""
    yield jaxpr
    for eqn in jaxpr.eqns:
        if not jx.is_differentiated(eqn):
            for region in jx.regions(eqn):
                yield from differentiated_bodies(region.body)


@dataclass(frozen=True)
class ProgramSlice:
    """Equations to run again, in order, and what they read but do not make."""

    eqns: tuple[jx.JaxprEqn, ...]
    inputs: tuple[jx.Var, ...]


def program_slice(eqns: Sequence[jx.JaxprEqn], targets: Iterable[jx.Var], held: Collection[jx.Var]) -> ProgramSlice:
    """The least of ``eqns`` that make ``targets`` from ``held`` values and from what ``eqns`` do not make."""
    needed = dict.fromkeys(targets)
    chosen: list[jx.JaxprEqn] = []
    for eqn in reversed(eqns):
        if any(v in needed and v not in held for v in eqn.outvars):
            chosen.append(eqn)
            needed |= dict.fromkeys(_variables(eqn.invars))
    made = {v for e in chosen for v in e.outvars if v not in held}
    return ProgramSlice(tuple(reversed(chosen)), tuple(v for v in needed if v not in made))


def recompute_in_scans(jaxpr: jx.Jaxpr, keep: SavePolicy) -> jx.Jaxpr:
    """``jaxpr`` with its backward scans making residuals themselves; the same object where none can.

    Left as they are: scans whose stacked results are read other than slice by slice in backward scans of the
    same length, scans over mutable arrays, and those where as much would have to be stacked as is freed.
    Stacked results that nothing reads any more stay, for dead code elimination.
    """
    eqns = list(jaxpr.eqns)
    readers: dict[jx.Var, set[int]] = defaultdict(set)
    for i, eqn in enumerate(eqns):
        for v in _variables(eqn.invars):
            readers[v].add(i)
    results = set(_variables(jaxpr.outvars))
    changed = False
    for i, eqn in enumerate(jaxpr.eqns):
        shape = jx.scan_groups(eqn) if is_forward(eqn) else None
        if shape is None:
            continue
        stacked = eqn.outvars[shape.carry :]
        free = {
            v
            for v in stacked
            if v not in results and readers[v] and all(_reads_slices(eqns[j], v, shape.length) for j in readers[v])
        }
        pair = _Pair(eqn, shape, keep, free)
        pair.plan({j: eqns[j] for j in sorted({j for v in free for j in readers[v]})})
        if pair.freed > pair.stacked:
            eqns[i] = pair.forward()
            for j in pair.slices:
                eqns[j] = pair.backward(eqns[j], j)
            changed = True
    return jx.with_eqns(jaxpr, eqns) if changed else jaxpr


def _reads_slices(eqn: jx.JaxprEqn, var: jx.Var, length: int) -> bool:
    shape = jx.scan_groups(eqn) if jx.is_backward(eqn) else None
    return shape is not None and shape.length == length and var not in eqn.invars[: shape.consts + shape.carry]


class _Pair:
    """One forward scan, and the backward scans that read what it stacks."""

    def __init__(self, eqn: jx.JaxprEqn, shape: jx.ScanGroups, keep: SavePolicy, free: set[jx.Var]) -> None:
        self.eqn, self.shape, self.body = eqn, shape, jx.regions(eqn)[0].body
        self.held = {v for e in self.body.eqns if keep(e) for v in e.outvars}
        inputs = self.body.invars
        n = shape.consts + shape.carry
        self.sources = dict(
            zip([*inputs[: shape.consts], *inputs[n:]], [*eqn.invars[: shape.consts], *eqn.invars[n:]], strict=True)
        )
        """Body inputs that exist outside anyway -> what they are there."""
        self.consts = set(inputs[: shape.consts])
        stay = self.held | set(inputs[shape.consts : n])
        ends = list(zip(self.body.outvars, eqn.outvars, strict=True))[shape.carry :]
        self.outside = {a: v for a, v in ends if isinstance(a, jx.Var) and (a in stay or v not in free)}
        """Body values that are stacked and stay so -> the stacks."""
        self.dropped = {v: a for a, v in ends if isinstance(a, jx.Var) and a not in self.outside}
        """Stacks to make again -> the body values."""
        self.slices: dict[int, ProgramSlice] = {}
        self.new: dict[jx.Var, jx.Var] = {}
        """Body values to be stacked in their place -> the stacks."""

    def plan(self, readers: Mapping[int, jx.JaxprEqn]) -> None:
        """What each reader has to run, and what has to be stacked for it."""
        for j, reader in readers.items():
            targets = [self.dropped[v] for v in _variables(reader.invars) if v in self.dropped]
            if targets:
                self.slices[j] = program_slice(self.body.eqns, targets, self.held | set(self.outside))
        for v in (v for s in self.slices.values() for v in s.inputs):
            if v not in self.sources and v not in self.outside:
                self.new.setdefault(v, jx.stacked_var(v, self.shape.length))

    @property
    def freed(self) -> int:
        return _bytes(self.dropped)

    @property
    def stacked(self) -> int:
        return _bytes(self.new.values())

    def forward(self) -> jx.JaxprEqn:
        """The forward scan, stacking the new values too."""
        body = jx.with_eqns(self.body, self.body.eqns, outvars=[*self.body.outvars, *self.new])
        groups = (self.shape.consts, self.shape.carry, self.shape.xs)
        return jx.rebuild_scan(self.eqn, body, groups, self.eqn.invars, [*self.eqn.outvars, *self.new.values()])

    def backward(self, eqn: jx.JaxprEqn, j: int) -> jx.JaxprEqn:
        """The backward scan, making what is no longer stacked at the start of each turn."""
        shape, body, work = jx.scan_groups(eqn), jx.regions(eqn)[0].body, self.slices[j]
        assert shape is not None
        n, m = shape.consts, shape.consts + shape.carry
        consts, xs = (list(zip(eqn.invars[s], body.invars[s], strict=True)) for s in (slice(n), slice(m, None)))
        here: dict[jx.Var, jx.Var] = {}
        for v in work.inputs:
            group = consts if v in self.consts else xs
            outer = next(found[v] for found in (self.sources, self.outside, self.new) if v in found)
            inner = next((b for a, b in group if a is outer), None)
            if inner is None:
                inner = jx.new_var(v)
                group.append((outer, inner))
            here[v] = inner
        begin: list[jx.JaxprEqn] = []
        if not shape.iterates and here:  # the body stands beside the forward one, where a compiler could see both
            wall = jx.optimization_barrier(list(dict.fromkeys(here.values())), eqn)
            begin.append(wall)
            behind = dict(zip(_variables(wall.invars), wall.outvars, strict=True))
            here = {v: behind[b] for v, b in here.items()}
        begin += _run(work.eqns, here)
        swap = {b: here[self.dropped[a]] for a, b in xs if a in self.dropped}
        code = jx.with_eqns(
            body,
            [*begin, *(_reading(e, swap) for e in body.eqns)],
            invars=[*(b for _, b in consts), *body.invars[n:m], *(b for _, b in xs)],
            outvars=_swapped(body.outvars, swap),
        )
        operands = [*(a for a, _ in consts), *eqn.invars[n:m], *(a for a, _ in xs)]
        return jx.rebuild_scan(eqn, code, (len(consts), shape.carry, len(xs)), operands, eqn.outvars)


def recompute_in_straight_line(jaxpr: jx.Jaxpr, keep: SavePolicy) -> jx.Jaxpr:
    """``jaxpr`` with segments of its straight forward code run again; the same object where nothing is gained.

    Values that are read outside both parts, or are results, are held whatever ``keep`` says; so are those that
    loops and branches make, which are never run again as a whole.
    """
    back = [jx.is_backward(e) for e in jaxpr.eqns]
    first: dict[jx.Var, int] = {}
    pinned = set(_variables(jaxpr.outvars))
    groups: list[list[jx.JaxprEqn]] = [[]]
    for i, eqn in enumerate(jaxpr.eqns):
        if back[i]:
            for v in _variables(eqn.invars):
                first.setdefault(v, i)
            if groups[-1]:
                groups.append([])  # what comes later is another function's forward part
        elif is_forward(eqn):
            groups[-1].append(eqn)
        else:
            pinned |= set(_variables(eqn.invars))
    crossing = residuals(jaxpr)
    due: dict[int, list[tuple[ProgramSlice, list[jx.Var]]]] = defaultdict(list)
    for group in groups:
        for work, targets in _segments(group, crossing, pinned, keep):
            due[min(first[v] for v in targets)].append((work, targets))
    if not due:
        return jaxpr
    cotangents = {v for e, b in zip(jaxpr.eqns, back, strict=True) if b for v in e.outvars}
    code: list[jx.JaxprEqn] = []
    swap: dict[jx.Var, jx.Var] = {}
    latest: jx.Var | None = None
    for i, eqn in enumerate(jaxpr.eqns):
        for work, targets in due.get(i, ()):
            arriving = next((v for v in _variables(eqn.invars) if v in cotangents), latest)
            # A cotangent goes behind the barrier too, or the work could start long before its turn.
            inputs = work.inputs if arriving is None or arriving in work.inputs else (*work.inputs, arriving)
            wall = jx.optimization_barrier([swap.get(v, v) for v in inputs], eqn)
            here = dict(zip(inputs, wall.outvars, strict=True))
            if arriving is not None:
                swap[arriving] = here[arriving]
            code += [wall, *_run(work.eqns, here, eqn)]
            swap |= {v: here[v] for v in targets}
        code.append(_reading(eqn, swap) if back[i] else eqn)
        if back[i] and eqn.outvars:
            latest = eqn.outvars[0]
    return jx.with_eqns(jaxpr, code)


def _segments(
    group: Sequence[jx.JaxprEqn], crossing: Collection[jx.Var], pinned: Collection[jx.Var], keep: SavePolicy
) -> Iterator[tuple[ProgramSlice, list[jx.Var]]]:
    """What to run again, and for which residuals, one segment at a time."""
    kept = {v for e in group if jx.regions(e) or keep(e) for v in e.outvars}
    held = kept | {v for e in group for v in e.outvars if v in pinned}
    wanted = {v: None for e in group for v in e.outvars if v in crossing and v not in held}
    eqns = program_slice(group, wanted, held).eqns
    at = {v: i for i, e in enumerate(eqns) for v in e.outvars if v not in held}
    last = dict(at)
    for i, eqn in enumerate(eqns):
        last |= {v: i for v in _variables(eqn.invars) if v in at}
    made = {v: Value(at[v], last[v], jx.aval_bytes(v.aval)) for v in at}
    leaves = [_bytes(v for v in e.outvars if v in wanted) for e in eqns]
    places = choose_cuts(len(eqns), list(made.values()), leaves, _bytes(v for v in crossing if v not in wanted))
    held |= {v for v, m in made.items() if any(m.at < c <= m.last for c in places)}
    for a, b in pairwise((0, *places)):
        targets = [v for e in eqns[a:b] for v in e.outvars if v in wanted and v not in held]
        if targets:
            yield program_slice(eqns[a:b], targets, held), targets


def _run(eqns: Iterable[jx.JaxprEqn], here: dict[jx.Var, jx.Var], like: jx.JaxprEqn | None = None) -> list[jx.JaxprEqn]:
    """Copies of ``eqns`` that read through ``here``, which gains what they make."""
    code: list[jx.JaxprEqn] = []
    for eqn in eqns:
        code.append(jx.clone_eqn(eqn, _swapped(eqn.invars, here), like))
        here |= zip(eqn.outvars, code[-1].outvars, strict=True)
    return code


def _swapped(atoms: Iterable[jx.Atom], swap: Mapping[jx.Var, jx.Var]) -> list[jx.Atom]:
    return [swap.get(a, a) if isinstance(a, jx.Var) else a for a in atoms]


def _reading(eqn: jx.JaxprEqn, swap: Mapping[jx.Var, jx.Var]) -> jx.JaxprEqn:
    if swap.keys().isdisjoint(_variables(eqn.invars)):
        return eqn
    return eqn.replace(invars=_swapped(eqn.invars, swap))


def _variables(atoms: Iterable[jx.Atom]) -> list[jx.Var]:
    return [a for a in atoms if isinstance(a, jx.Var)]


def _bytes(variables: Iterable[jx.Var]) -> int:
    return sum(jx.aval_bytes(v.aval) for v in variables)
