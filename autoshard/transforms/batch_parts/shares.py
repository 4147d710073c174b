"""What one part of the batch has of each value: a chunk, a term of a sum, or the whole.

The rules say it, at every depth of loops and branches. A value without a share is the same for every part. A value is a
*term* where a rule reduces the batch, and stays one through what is linear in it (the rule's partial passthrough).
Whatever is neither, such as a statistic that every example reads, is not computable in parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.errors import ChunkError
from autoshard.ir.rule_registry import Rules, has_own_rule, lookup_rule
from autoshard.machine.mesh import LogicalMesh
from autoshard.transforms.batch_parts.cut import Cut, CutEquation, cut_equation


@dataclass(frozen=True)
class Term:
    """A part has a term of the value; those of all parts are combined."""

    kind: str
    """A name in `REDUCTIONS`."""


Share = Cut | Term


@dataclass(frozen=True)
class Nested:
    """A loop, branch or call of which a part runs the bodies on its shares."""

    operands: tuple[Share | None, ...]
    results: tuple[Share | None, ...]


@dataclass(frozen=True)
class Linear:
    """The equation runs as it is, on terms."""


@dataclass(frozen=True)
class Sliced:
    """The equation runs whole, and a part takes its chunk of the results: random bits, or positions in the batch."""

    results: tuple[Cut | None, ...]


PartPlan = CutEquation | Nested | Linear | Sliced


class Shares:
    """The shares of the values of one jaxpr and of all in it, and how its equations are computed in parts."""

    def __init__(self, jaxpr: jx.Jaxpr, cuts: Mapping[jx.Var, Cut], rules: Rules, mesh: LogicalMesh) -> None:
        self.rules, self.mesh = rules, mesh
        self.of: dict[jx.Var, Share] = dict(cuts)
        self.plans: dict[jx.JaxprEqn, PartPlan] = {}
        """Of equations that depend on the batch, or make what is as long as it; others run as they are."""
        self.wanted: dict[jx.Var, Cut] = {}
        """Values that do not depend on the batch and of which a part reads a chunk: such as random bits."""
        self._sliced: set[jx.Var] = set()
        """Such values that are cut in several ways: they are computed whole and sliced where they are read."""
        self.changed = False
        """Whether more of ``wanted`` came to light than equations were read with: then all are to be read again."""
        self.made = {v: e for e in jx.walk(jaxpr) for v in e.outvars}
        self._outside: dict[jx.Var, tuple[jx.Atom, bool]] = {}
        """By input of a body that no loop carries: the operand, and whether it is stacked."""
        self._zeros = set[jx.Var]()
        """Inputs of bodies that loops carry and that are zero in every iteration, or so taken while a loop is read."""
        self._cuts: dict[tuple[object, ...], CutEquation | ChunkError] = {}

    def share(self, atom: jx.Atom) -> Share | None:
        """What a part has of ``atom``; None: the whole."""
        return self.of.get(atom) if isinstance(atom, jx.Var) else None

    def is_zero(self, atom: jx.Atom) -> bool:
        """Whether ``atom`` is known to be zero."""
        while isinstance(atom, jx.Var):
            if atom in self._zeros:
                return True
            if atom in self._outside:
                atom = self._outside[atom][0]
                continue
            eqn = self.made.get(atom)
            traits = self.rules.traits(eqn.primitive) if eqn is not None else None
            if eqn is None or traits is None or not (traits.keeps_constant or traits.casts):
                return False
            atom = eqn.invars[0]
        return not np.any(atom.val)

    def read(self, eqn: jx.JaxprEqn) -> None:
        """Finds the shares of the results of ``eqn``.

        Raises:
          ChunkError: it is not computable in parts.
        """
        self.plans.pop(eqn, None)
        for v in eqn.outvars:
            self.of.pop(v, None)
        shares = [self.share(a) for a in eqn.invars]
        wanted = {len(eqn.invars) + k: self.wanted[v] for k, v in enumerate(eqn.outvars) if v in self.wanted}
        if not any(shares):
            if wanted:
                self._read_wanted(eqn, wanted)
            return
        if jx.regions(eqn) and not has_own_rule(eqn, self.rules):
            self._read_nested(eqn, shares)
            return
        cuts = {i: s for i, s in enumerate(shares) if isinstance(s, Cut)}
        terms = {i: s.kind for i, s in enumerate(shares) if isinstance(s, Term)}
        if terms:
            self._read_terms(eqn, terms, bool(cuts))
        else:
            self._take(eqn, self._cut(eqn, cuts))

    def _cut(self, eqn: jx.JaxprEqn, known: Mapping[int, Cut]) -> CutEquation:
        key = eqn, tuple(known.items()), tuple(map(self.is_zero, eqn.invars))
        if key not in self._cuts:
            try:
                self._cuts[key] = cut_equation(eqn, known, self.rules, self.mesh, self.is_zero)
            except ChunkError as e:
                self._cuts[key] = e
        found = self._cuts[key]
        if isinstance(found, ChunkError):
            raise found
        return found

    def _take(self, eqn: jx.JaxprEqn, found: CutEquation) -> None:
        for a, cut in zip(eqn.invars, found.operands, strict=True):
            if cut is not None and isinstance(a, jx.Var):
                self.want(a, cut)
        self.plans[eqn] = found
        for v, cut in zip(eqn.outvars, found.results, strict=True):
            self.of[v] = Term(found.reduction) if cut is None else cut

    def _read_wanted(self, eqn: jx.JaxprEqn, wanted: Mapping[int, Cut]) -> None:
        """Of an equation that does not depend on the batch."""
        try:
            if jx.regions(eqn) and not has_own_rule(eqn, self.rules):
                self._read_nested(eqn, [None] * len(eqn.invars))
                return
            found = self._cut(eqn, wanted)
            if not found.reduction:
                self._take(eqn, found)
                return
        except ChunkError:
            if not self._repeats(eqn):
                return
        cuts = tuple(wanted.get(len(eqn.invars) + k) for k in range(len(eqn.outvars)))
        self.plans[eqn] = Sliced(cuts)
        self.of.update((v, c) for v, c in zip(eqn.outvars, cuts, strict=True) if c is not None)

    def _repeats(self, eqn: jx.JaxprEqn) -> bool:
        """Whether ``eqn`` may run once for each part: it has no effect and gives the same again."""
        inner = [e for r in jx.regions(eqn) for e in r.body.eqns]
        return not eqn.effects and not self.rules.traits(eqn.primitive).runs_once and all(map(self._repeats, inner))

    def want(self, atom: jx.Atom, cut: Cut) -> None:
        """A part reads this chunk of ``atom``: it is computed so where that is known of it, else sliced where it is
        read.

        Raises:
          ChunkError: parts have another share of it.
        """
        if not isinstance(atom, jx.Var):
            return
        share = self.of.get(atom)
        if cut not in (share or cut, self.wanted.get(atom, cut)):
            if atom not in self.wanted:
                eqn = self.made.get(atom)
                raise ChunkError("one value is cut in two ways", "" if eqn is None else jx.source(eqn))
            del self.wanted[atom]
            self._sliced.add(atom)
            self.changed = True
        if share is not None or atom in self.wanted or atom in self._sliced:
            return
        self.wanted[atom] = cut
        self.changed = True
        if atom in self._outside:
            operand, stacked = self._outside[atom]
            self.want(operand, replace(cut, dim=cut.dim + 1) if stacked else cut)
        elif (eqn := self.made.get(atom)) is not None:
            self._want_of(eqn, eqn.outvars.index(atom), cut)

    def _want_of(self, eqn: jx.JaxprEqn, result: int, cut: Cut) -> None:
        """What computes result ``result`` of ``eqn`` is wanted in chunks, where it can be."""
        for region in jx.regions(eqn):
            for w in region.outputs:
                if w.outside == result and (not w.stacked or cut.dim):
                    inside = replace(cut, dim=cut.dim - 1) if w.stacked else cut
                    self.want(region.body.outvars[w.inside], inside)
        if not jx.regions(eqn) and not any(map(self.share, eqn.invars)):
            try:
                found = self._cut(eqn, {len(eqn.invars) + result: cut})
            except ChunkError:
                return
            for a, c in zip(eqn.invars, found.operands, strict=True):
                if c is not None:
                    self.want(a, c)

    def _read_terms(self, eqn: jx.JaxprEqn, terms: Mapping[int, str], cut: bool) -> None:
        """Of an equation that reads terms."""
        kinds = set(terms.values())
        kind = next(iter(kinds))
        if not cut and len(kinds) == 1 and self._passes(eqn, kind, set(terms)):
            self.plans[eqn] = Linear()
            self.of.update(dict.fromkeys(eqn.outvars, Term(kind)))
            return
        raise ChunkError(f"{eqn.primitive.name} reads the {kind} over the whole batch", jx.source(eqn))

    def _passes(self, eqn: jx.JaxprEqn, kind: str, terms: set[int]) -> bool:
        """Whether terms of these operands make terms of the results; what is zero is a term too."""
        if eqn.effects or not all(map(jx.is_array, (*eqn.invars, *eqn.outvars))):
            return False
        if self.rules.traits(eqn.primitive).constrains:
            return True
        rule = lookup_rule(eqn, self.rules, self.mesh)
        passing = dict(rule.partial_passthrough).get(kind, ()) if rule is not None else ()
        zeros = {i for i, a in enumerate(eqn.invars) if kind == "sum" and i not in terms and self.is_zero(a)}
        return any(terms <= {*together} <= terms | zeros for together in passing)

    def _read_nested(self, eqn: jx.JaxprEqn, shares: Sequence[Share | None]) -> None:
        """Of a loop, branch or call: its bodies, until what loops carry has the same share in all iterations.

        What a loop carries from zero on is taken for zero until it has a share: a sum begins so. If it is not zero
        after an iteration and has none, it is read again as what it is.
        """
        known = jx.takes_other_sizes(eqn) or jx.calls_one_body(eqn)
        if not known or not self._repeats(eqn) or not all(map(jx.is_shaped, eqn.outvars)):
            raise ChunkError(f"{eqn.primitive.name} is not computed in parts", jx.source(eqn))
        operands, regions = list(shares), jx.regions(eqn)
        looping = {w.outside for r in regions for w in r.inputs if any(w.inside == start for _, start in r.carries)}
        carried = {r.body.invars[start]: r.body.outvars[end] for r in regions for end, start in r.carries}
        starts = {r.body.invars[w.inside]: eqn.invars[w.outside] for r in regions for w in r.inputs}
        self._zeros.difference_update(carried)
        self._zeros.update(v for v in carried if self.is_zero(starts[v]))
        while True:
            for r in regions:
                self._enter(eqn, r, operands, looping)
                for e in r.body.eqns:
                    self.read(e)
            changed = [self._carried(eqn, r, operands) for r in regions]
            others = {v for v in self._zeros & carried.keys() if not (any(changed) or self.is_zero(carried[v]))}
            self._zeros -= others
            if not any(changed) and not others:
                break
        if eqn.primitive is _prims.while_p and self.share(regions[0].body.outvars[0]) is not None:
            raise ChunkError("how often a loop runs depends on the batch", jx.source(eqn))
        if eqn.primitive is _prims.cond_p and operands[0] is not None:
            raise ChunkError("which branch runs depends on the batch", jx.source(eqn))
        results = tuple(self._leaving(eqn, regions, k) for k in range(len(eqn.outvars)))
        self.plans[eqn] = Nested(tuple(operands), results)
        self.of.update((v, s) for v, s in zip(eqn.outvars, results, strict=True) if s is not None)

    def _enter(self, eqn: jx.JaxprEqn, region: jx.Region, operands: Sequence[Share | None], looping: set[int]) -> None:
        """Gives the inputs of a body the shares of the operands; ``looping``: those that a loop carries."""
        for w in region.inputs:
            share, var = operands[w.outside], region.body.invars[w.inside]
            if w.stacked and isinstance(share, Cut):
                if not share.dim:
                    remedy = "let the loop of the step be the one over micro-batches"
                    raise ChunkError("a loop runs over the batch", jx.source(eqn), remedy, own_loop=True)
                share = replace(share, dim=share.dim - 1)
            if w.outside not in looping:
                self._outside[var] = eqn.invars[w.outside], w.stacked
            if share is None:
                self.of.pop(var, None)
            else:
                self.of[var] = share
                self._zeros.discard(var)

    def _carried(self, eqn: jx.JaxprEqn, region: jx.Region, operands: list[Share | None]) -> bool:
        """Gives what a loop carries the share that it has after an iteration; whether that is another one."""
        changed = False
        outside = {w.inside: w.outside for w in region.inputs}
        for end, start in region.carries:
            atom, at = region.body.outvars[end], outside[start]
            after, before = self.share(atom), operands[at]
            if after == before:
                continue
            if before is None and (isinstance(after, Cut) or self.is_zero(eqn.invars[at])):
                operands[at], changed = after, True
                if isinstance(after, Cut):
                    self.want(eqn.invars[at], after)
            elif after is None and isinstance(before, Cut):
                self.want(atom, before)
            elif not (after is None and isinstance(before, Term) and self.is_zero(atom)):
                raise ChunkError("a loop carries the batch in another form from iteration to iteration", jx.source(eqn))
        return changed

    def _leaving(self, eqn: jx.JaxprEqn, regions: Iterable[jx.Region], result: int) -> Share | None:
        """The share of a result: that of all branches."""
        found = [(r.body.outvars[w.inside], w.stacked) for r in regions for w in r.outputs if w.outside == result]
        shares = {self.share(a) for a, _ in found} - {None}
        if len(shares) > 1:
            raise ChunkError("the branches have the batch in different forms", jx.source(eqn))
        share = next(iter(shares), None)
        for atom, _ in found:
            if self.share(atom) is None and isinstance(share, Cut):
                self.want(atom, share)
            elif self.share(atom) is None and isinstance(share, Term) and not self.is_zero(atom):
                raise ChunkError("the branches have the batch in different forms", jx.source(eqn))
        stacked = any(stacked for _, stacked in found)
        return replace(share, dim=share.dim + 1) if isinstance(share, Cut) and stacked else share
