"""The equations that compute the batch, what they read, and what leaves them.

All of them run once for each part. What leaves them has the batch, so that the parts' values are joined, or is a sum
(or another reduction) over it. Before them runs what they read; after them what reads their results, such as an
optimizer.

What they read may be a total over the batch if no product is in it, such as the number of tokens that a loss divides
by: then it is computed before, of the whole batch. Any other total that a part would have to read stands against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard import jaxpr as jx
from autoshard.errors import ChunkError
from autoshard.ir.rule_registry import Rules
from autoshard.machine.mesh import LogicalMesh
from autoshard.transforms.batch_parts.cut import Cut
from autoshard.transforms.batch_parts.shares import Linear, Shares, Term


@dataclass(frozen=True)
class BatchRegion:
    """What runs for each part of the batch, and the code around it."""

    equations: tuple[jx.JaxprEqn, ...]
    """Those that run for each part, in order."""
    inputs: tuple[jx.Var, ...]
    """What they read, whole: arguments, and results of ``before``."""
    rows: tuple[tuple[jx.Var, Cut], ...]
    """Results that have the batch, with how they are cut."""
    totals: tuple[tuple[jx.Var, str], ...]
    """Results that are reduced over the batch, each with its name in `REDUCTIONS`."""
    before: tuple[jx.JaxprEqn, ...]
    after: tuple[jx.JaxprEqn, ...]
    """All other equations that something reads: those that the region needs, and the rest."""
    shares: Shares
    """What a part has of each value."""

    @property
    def results(self) -> tuple[jx.Var, ...]:
        """All results, in order."""
        return tuple(v for v, _ in (*self.rows, *self.totals))


def batch_region(jaxpr: jx.Jaxpr, cuts: Mapping[jx.Var, Cut], rules: Rules, mesh: LogicalMesh) -> BatchRegion:
    """The region of ``jaxpr`` that computes the batch.

    Args:
      jaxpr: a normalized one, of a whole step.
      cuts: how each input that has the batch is cut. All have as many chunks.

    Raises:
      ChunkError: products of the batch cannot be computed in parts, or there are none.
    """
    return _Finder(jaxpr, cuts, rules, mesh).region()


class _Finder:
    def __init__(self, jaxpr: jx.Jaxpr, cuts: Mapping[jx.Var, Cut], rules: Rules, mesh: LogicalMesh) -> None:
        self.jaxpr, self.cuts, self.rules = jaxpr, cuts, rules
        self.shares = Shares(jaxpr, cuts, rules, mesh)
        self.made = {v: e for e in jaxpr.eqns for v in e.outvars}
        self.uses = jx.use_counts(jaxpr)
        self.depends = set(cuts)
        """Values that depend on the batch."""
        self.costly = set[jx.Var]()
        """Values that are not computed twice: products are in them."""
        for eqn in jaxpr.eqns:
            read = {a for a in eqn.invars if isinstance(a, jx.Var)}
            if not self.depends.isdisjoint(read):
                self.depends.update(eqn.outvars)
            once = eqn.effects or rules.traits(eqn.primitive).runs_once or jx.regions(eqn)
            if once or jx.contraction_flops(eqn) or not self.costly.isdisjoint(read):
                self.costly.update(eqn.outvars)
        self.early = set[jx.Var]()
        """Totals that are computed before, of the whole batch."""
        self.late = dict[jx.Var, ChunkError]()
        """Values that are not computed in parts though they depend on the batch, and why."""

    def region(self) -> BatchRegion:
        """See `batch_region`."""
        while self._read_all():
            pass
        inside = self._inside()
        if not any(jx.has_product(e) for e in inside):
            raise ChunkError("no product is computed of the batch", "", remedy="")
        return self._assembled(inside)

    def _read_all(self) -> bool:
        """Reads all equations; whether they are to be read again."""
        shares, inputs = self.shares, (*self.jaxpr.invars, *self.jaxpr.constvars)
        shares.changed = False
        shares.of.update({v: c for v, c in shares.wanted.items() if v in inputs and v not in shares.of})
        self.late.clear()
        batched, early = set[jx.Var](), len(self.early)
        for eqn in self.jaxpr.eqns:
            if not self.early.isdisjoint(eqn.outvars):
                self._leave_out(eqn)
                continue
            read = [a for a in eqn.invars if isinstance(a, jx.Var)]
            cut = any(isinstance(shares.of.get(a), Cut) for a in read)
            totals = [a for a in read if a in self.late or isinstance(shares.of.get(a), Term)]
            if cut and totals and self.costly.isdisjoint(totals):
                self.early.update(totals)
                continue
            why = next((self.late[a] for a in read if a in self.late), None)
            if why is None:
                try:
                    shares.read(eqn)
                    continue
                except ChunkError as e:
                    why = e
            self._leave_out(eqn)
            self.late.update(dict.fromkeys(eqn.outvars, why))
            if cut or not batched.isdisjoint(read):
                if jx.has_product(eqn) and len(self.early) == early and not shares.changed:
                    raise why
                batched.update(eqn.outvars)
        return shares.changed or len(self.early) > early

    def _leave_out(self, eqn: jx.JaxprEqn) -> None:
        """``eqn`` is not computed in parts."""
        self.shares.plans.pop(eqn, None)
        for v in eqn.outvars:
            self.shares.of.pop(v, None)

    def _inside(self) -> set[jx.JaxprEqn]:
        """The equations to run for each part. Of those on terms alone, which may as well run on the totals, that is
        what adds terms to one, and what another needs: so there are few totals."""
        plans = [e for e in self.jaxpr.eqns if e in self.shares.plans]
        linear = {e for e in plans if self._is_linear(e)}
        read = {a for e in plans if e not in linear for a in e.invars if isinstance(a, jx.Var)}
        kept = set[jx.JaxprEqn]()
        for e in reversed(plans):
            if e not in linear or jx.has_product(e):
                continue
            operands = [a for a in e.invars if isinstance(a, jx.Var)]
            adds = self.rules.traits(e.primitive).adds and len({*operands}) == len(e.invars)
            if not read.isdisjoint(e.outvars) or (
                adds and all(self._is_term(a) and self.uses[a] == 1 for a in operands)
            ):
                kept.add(e)
                read.update(a for a in operands if self.uses[a] == 1 or not read.isdisjoint(e.outvars))
        inside = set[jx.JaxprEqn]()
        for e in plans:
            terms = [self.made.get(a) for a in e.invars if isinstance(a, jx.Var) and self._is_term(a)]
            if (e not in linear or e in kept) and inside.issuperset(m for m in terms if m is not None):
                inside.add(e)
            elif e not in linear:
                raise ChunkError("a loop over all layers reads a product of a total over the batch", jx.source(e))
        return inside

    def _is_term(self, atom: jx.Atom) -> bool:
        return isinstance(self.shares.share(atom), Term)

    def _is_linear(self, eqn: jx.JaxprEqn) -> bool:
        """Whether ``eqn`` reads terms alone."""
        if isinstance(self.shares.plans[eqn], Linear):
            return True
        shares = [*map(self.shares.share, (*eqn.invars, *eqn.outvars))]
        return any(isinstance(s, Term) for s in shares[: len(eqn.invars)]) and not any(
            isinstance(s, Cut) for s in shares
        )

    def _assembled(self, inside: set[jx.JaxprEqn]) -> BatchRegion:
        eqns = self.jaxpr.eqns
        given = {v for e in inside for v in e.outvars if v in self.depends and self.shares.share(v) is not None}
        needed = {a for a in self.jaxpr.outvars if isinstance(a, jx.Var)}
        outside: dict[jx.JaxprEqn, jx.JaxprEqn] = {}
        for e in reversed(eqns):
            mine = [v for v in e.outvars if v in needed and v not in given]
            if mine or (e.effects and e not in inside):
                outside[e] = _with_results(self.jaxpr, e, mine) if e in inside else e
                needed.update(a for a in outside[e].invars if isinstance(a, jx.Var))
        read, run = needed & given, list[jx.JaxprEqn]()
        for e in reversed(eqns):
            if (e in inside or self._is_constant(e)) and not read.isdisjoint(e.outvars):
                run.append(e)
                read.update(a for a in e.invars if isinstance(a, jx.Var))
        computed = {v for e in run for v in e.outvars}
        inputs = tuple(
            v for v in dict.fromkeys((*self.jaxpr.invars, *self.jaxpr.constvars, *self.made)) if v in read - computed
        )
        first, before = set(inputs), list[jx.JaxprEqn]()
        for e in reversed(eqns):
            if not first.isdisjoint(e.outvars):
                before.append(e)
                first.update(a for a in e.invars if isinstance(a, jx.Var))
        self._check_order(before[::-1])
        early, made = {*before}, {v for e in before for v in e.outvars}
        results = [v for e in eqns for v in e.outvars if v in needed & given and v not in made]
        return BatchRegion(
            tuple(run[::-1]),
            inputs,
            tuple((v, s) for v in results if isinstance(s := self.shares.share(v), Cut)),
            tuple((v, s.kind) for v in results if isinstance(s := self.shares.share(v), Term)),
            tuple(before[::-1]),
            tuple(e for old, e in reversed(outside.items()) if old not in early),
            self.shares,
        )

    def _is_constant(self, eqn: jx.JaxprEqn) -> bool:
        """Whether ``eqn`` makes a constant, such as the zeros that a gradient is added to: it is made where it is read,
        and not held."""
        literal = all(isinstance(a, jx.Literal) for a in eqn.invars)
        return literal and self.rules.traits(eqn.primitive).broadcasts

    def _check_order(self, before: Sequence[jx.JaxprEqn]) -> None:
        """Raises `ChunkError` where ``before`` has an effect that others come before."""
        effects = [e for e in self.jaxpr.eqns if e.effects]
        late = next((i for i, e in enumerate(effects) if e not in before), len(effects))
        for e in effects[late:]:
            if e in before:
                raise ChunkError(f"{e.primitive.name} has effects, and parts of the batch need it", jx.source(e))


def _with_results(jaxpr: jx.Jaxpr, eqn: jx.JaxprEqn, results: Sequence[jx.Var]) -> jx.JaxprEqn:
    """``eqn``, which runs in parts too, for these results alone: others get new variables."""
    alone = jx.eliminate_dead_code(jx.with_eqns(jaxpr, [eqn], outvars=results))
    (left,) = alone.eqns
    return left.replace(outvars=[v if v in results else jx.new_var(v) for v in left.outvars])
