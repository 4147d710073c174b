"""Computes experts, to which programs sort their tokens' rows, by one operation that takes rows in their own order.

A mixture of experts without dropped tokens sorts the rows of all tokens by expert, runs ragged products
(`jax.lax.ragged_dot`) and sorts the rows back: MegaBlocks (arXiv:2211.15841), MaxText, most implementations of Mixtral
and DeepSeek. Sorted by all devices together, each row may come from any device. But rows do not depend on one another,
so that each device may sort its own, or exchange them with the devices that have their experts; or devices that all
have the same rows compute those of their experts, and what tokens make of these is summed
(`autoshard.transforms.grouped_rows`).

The forward and the backward part are an operation each. What the backward part reads of the products of the forward
part is handed over in the rows' own order; with ``"experts:recompute"`` it is computed again, which is cheaper where
rows are exchanged, since all that is handed over would be sent twice. Results are the same up to the order in which
the gradients of weights are summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from jax import lax
from jax import numpy as jnp

from autoshard import jaxpr as jx
from autoshard.errors import PassError
from autoshard.ir.program import Program
from autoshard.passes.experts.picks import Picks
from autoshard.passes.experts.positions import constants, with_constants, without_repeats
from autoshard.passes.experts.region import Region
from autoshard.passes.experts.sorted_rows import Exit, SortedRows, sorts
from autoshard.transforms.grouped_rows import grouped_rows_p
from autoshard.transforms.pipeline import Pass

RECOMPUTE = "recompute"


@dataclass(frozen=True)
class Experts(Pass):
    """Replaces ragged products of sorted rows by operations on rows in their own order."""

    name: ClassVar[str] = "experts"
    makes_room: ClassVar[bool] = True

    option: str = ""
    """``"recompute"``: the backward part computes again what it reads of the forward part's products."""

    def __call__(self, program: Program) -> Program:
        if self.option not in ("", RECOMPUTE):
            raise PassError(f"{self}: the only option of this pass is {RECOMPUTE!r}")
        after = self._rewritten(program, program.jaxpr)
        return program if after is program.jaxpr else program.with_jaxpr(jx.eliminate_dead_code(after))

    def change(self, before: Program, after: Program) -> str:
        count = len(list(_operations(after)))
        return f"{count} operations on rows that are sorted by group"

    def variants(self, program: Program, batch_axes: Sequence[str] | None = None) -> tuple[Pass, ...]:
        """With and without computing again, where that makes a difference."""
        plain = replace(self, option="")(program)
        if plain is program:
            return ()
        again = replace(self, option=RECOMPUTE)
        steps = [sum(len(e.params["steps"]) for e in _operations(p)) for p in (plain, again(program))]
        return (replace(self, option=""),) if steps[0] == steps[1] else (replace(self, option=""), again)

    def _rewritten(self, program: Program, jaxpr: jx.Jaxpr) -> jx.Jaxpr:
        """``jaxpr`` with its sorted rows computed so, at every depth; the same object where there are none."""
        nested = {e: self._with_bodies(program, e, constants(jaxpr)) for e in jx.eqns_with_regions(jaxpr)}
        if any(now is not e for e, now in nested.items()):
            jaxpr = jx.with_eqns(jaxpr, [nested.get(e, e) for e in jaxpr.eqns])
        traits = program.rules.traits
        if jaxpr.effects or not any(traits(e.primitive).grouped_product for e in jaxpr.eqns):
            return jaxpr
        given, jaxpr = jaxpr, without_repeats(jaxpr)
        done, changed = 0, False
        while len(found := list(sorts(jaxpr))) > done:
            rows = SortedRows(program, jaxpr, found[done])
            rewriting = _Rewriting(rows, recompute=self.option == RECOMPUTE)
            if rewriting.regions:
                jaxpr, changed = jx.eliminate_dead_code(rewriting.jaxpr()), True
                done = 0
            else:
                done += 1
        return jx.with_eqns(jaxpr, list(_in_order(Picks(program, jaxpr).joined()))) if changed else given

    def _with_bodies(self, program: Program, eqn: jx.JaxprEqn, outside: Mapping[jx.Var, jx.JaxprEqn]) -> jx.JaxprEqn:
        """``eqn`` with its bodies rewritten; itself where nothing is.

        Args:
          outside: constants of the jaxpr that ``eqn`` is in, some of which its bodies read.
        """
        bodies = [with_constants(r, eqn, outside) for r in jx.regions(eqn)]
        after = [self._rewritten(program, body) for body in bodies]
        if all(a is b for a, b in zip(after, bodies, strict=True)):
            return eqn
        return jx.with_bodies(eqn, after)


def _operations(program: Program) -> Iterator[jx.JaxprEqn]:
    return (e for e in jx.walk(program.jaxpr) if e.primitive is grouped_rows_p)


class _Rewriting:
    """Replaces the steps on the rows of one sort."""

    def __init__(self, rows: SortedRows, *, recompute: bool) -> None:
        self.rows, self.recompute, self.eqns = rows, recompute, rows.jaxpr.eqns
        self.kept = self._of_products()
        self.level = self._levels()
        self.entered: dict[jx.Var, jx.Atom] = {}
        """Sorted rows -> the same rows in their own order."""
        self.before: dict[int, list[jx.JaxprEqn]] = {}
        """New equations to put before one."""
        self.regions: list[jx.JaxprEqn] = []
        if self.kept and len(set(rows.groups.values())) == 1:
            self._build_regions()

    def _of_products(self) -> Mapping[jx.Var, int]:
        """The steps whose results products are computed of, or that are computed of those of products."""
        rows, eqns = self.rows, self.eqns
        steps = {v: n for v, n in sorted(rows.steps.items(), key=lambda step: step[1]) if not self._is_spread(n)}
        products = {v for v, n in steps.items() if self._is_product(n)}
        before, after = {*products}, {*products}
        for v, n in steps.items():
            if any(a in after for a in eqns[n].invars if isinstance(a, jx.Var)):
                after.add(v)
        for v, n in reversed(steps.items()):
            if v in before:
                before.update(a for a in eqns[n].invars if isinstance(a, jx.Var) and a in steps)
        return {v: n for v, n in steps.items() if v in before or v in after}

    def _is_product(self, n: int) -> bool:
        return self.rows.traits(self.eqns[n]).grouped_product

    def _is_spread(self, n: int) -> bool:
        """Whether a step spreads a number over rows, which others may read too."""
        return all(isinstance(a, jx.Literal) for a in self.eqns[n].invars)

    def _levels(self) -> Mapping[jx.Var, int]:
        """By variable: of what is no sorted rows, how many operations it needs one after the other; of a step's result,
        how many its operation does."""
        rows, level = self.rows, dict[jx.Var, int]()
        for n, eqn in enumerate(self.eqns):
            is_step = bool(eqn.outvars) and self.kept.get(eqn.outvars[0]) == n
            found = [level.get(rows.group_of, 0) if is_step else 0]
            for a in eqn.invars:
                if isinstance(a, jx.Var):
                    after = a in self.kept and (not is_step or a in rows.sums)
                    found.append(level.get(a, 0) + after)
            level.update((v, max(found)) for v in eqn.outvars)
        return level

    def _build_regions(self) -> None:
        needed = self._read_outside()
        wanted: dict[int, list[jx.Var]] = {}
        for v in needed:
            wanted.setdefault(self.level[v], []).append(v)
        for level in sorted({self.level[v] for v in self.kept}, reverse=True):
            results = wanted.get(level, [])
            if not results:
                continue
            steps, sources = self._closure(results, level)
            for v in sources:
                if v in self.kept:  # a product of an earlier operation
                    earlier = wanted.setdefault(self.level[v], [])
                    earlier += [v] if v not in earlier else []
            self.regions.append(self._region(steps, sources, results))

    def _read_outside(self) -> list[jx.Var]:
        """The results of steps that other equations read, or the caller."""
        found: dict[jx.Var, None] = {}
        for n, eqn in enumerate(self.eqns):
            if not (eqn.outvars and self.kept.get(eqn.outvars[0]) == n):
                found.update((a, None) for a in eqn.invars if isinstance(a, jx.Var) and a in self.kept)
        found.update((a, None) for a in self.rows.jaxpr.outvars if isinstance(a, jx.Var) and a in self.kept)
        return list(found)

    def _closure(self, results: Sequence[jx.Var], level: int) -> tuple[list[int], list[jx.Var]]:
        """The equations that make ``results`` in one operation, in order, and the sorted rows that they start from."""
        steps, sources, todo = set[int](), dict[jx.Var, None](), [*results]
        while todo:
            v = todo.pop()
            n = self.rows.steps.get(v)
            if n is None or (self._is_product(n) and self.level[v] < level and not self.recompute):
                sources[v] = None
            elif n not in steps:
                steps.add(n)
                todo += [a for a in self.eqns[n].invars if isinstance(a, jx.Var) and self.rows.is_row(a)]
        return sorted(steps), list(sources)

    def _region(self, steps: Sequence[int], sources: Sequence[jx.Var], results: Sequence[jx.Var]) -> jx.JaxprEqn:
        eqns = [self.eqns[n] for n in steps]
        region = Region(self.rows, eqns, {v: self._own_order(v) for v in sources}, results)
        eqn = region.equation()
        fresh = [self._in_own_order(v) if self.rows.is_row(v) else v for v in results]
        return eqn.replace(outvars=fresh)

    def _in_own_order(self, v: jx.Var) -> jx.Var:
        found = self.entered.setdefault(v, jx.new_var(v))
        assert isinstance(found, jx.Var)
        return found

    def _own_order(self, v: jx.Var) -> jx.Atom:
        """The rows of ``v`` in their own order: of what entered, its source, each row as often as it stands there."""
        entry = self.rows.entries.get(v)
        if entry is None or v in self.entered:
            return self._in_own_order(v)
        rows = entry.source
        if entry.repeats > 1:
            at = next(n for n, e in enumerate(self.eqns) if v in e.outvars)
            eqns, (rows,) = jx.emit(lambda x: jnp.repeat(x, entry.repeats, axis=0), self.eqns[at], entry.source)
            self.before.setdefault(at, []).extend(eqns)
        self.entered[v] = rows
        return rows

    def jaxpr(self) -> jx.Jaxpr:
        """The jaxpr with operations in place of the steps."""
        done = {v for e in self.regions for v in e.outvars}
        units: list[jx.JaxprEqn] = [*self.regions]
        replaced: dict[jx.Var, jx.Atom] = {}
        """What reads the one is to read the other."""
        for n, eqn in enumerate(self.eqns):
            units += self.before.get(n, [])
            leaving = self.rows.exits.get(n)
            own = self.entered.get(leaving.rows) if leaving is not None else None
            if leaving is not None and own is not None and (leaving.rows not in self.kept or own in done):
                if leaving.repeats > 1 or leaving.onto is not None:
                    units += self._left(eqn, leaving, own)
                else:
                    replaced[eqn.outvars[0]] = own
            elif not (eqn.outvars and self.kept.get(eqn.outvars[0]) == n):
                units.append(eqn)
        read = {a for e in units for a in e.invars if isinstance(a, jx.Var)}
        read.update(a for a in self.rows.jaxpr.outvars if isinstance(a, jx.Var))
        like = self.regions[0]
        for v in [v for v in self.kept if v in read and v not in done]:
            own = self.entered[v]
            eqns, (again,) = jx.emit(lambda x, order: jnp.take(x, order, axis=0), like, own, self.rows.order)
            units += eqns
            replaced[v] = again

        def read_instead(atoms: Sequence[jx.Atom]) -> list[jx.Atom]:
            return [replaced.get(a, a) if isinstance(a, jx.Var) else a for a in atoms]

        units = [e.replace(invars=read_instead(e.invars)) for e in units]
        outvars = read_instead(self.rows.jaxpr.outvars)
        return jx.with_eqns(self.rows.jaxpr, list(_in_order(units)), outvars=outvars)

    def _left(self, eqn: jx.JaxprEqn, leaving: Exit, own: jx.Atom) -> list[jx.JaxprEqn]:
        def leave(x: Any, *onto: Any) -> Any:
            if leaving.repeats > 1:
                x = lax.reduce_sum(x.reshape(-1, leaving.repeats, *x.shape[1:]), (1,))
            return onto[0] + x if onto else x

        operands = [own] if leaving.onto is None else [own, leaving.onto]
        return jx.splice(leave, eqn, operands)


def _in_order(eqns: Sequence[jx.JaxprEqn]) -> Iterator[jx.JaxprEqn]:
    """``eqns``, each after those that it reads, else as they come."""
    made = {v: n for n, e in enumerate(eqns) for v in e.outvars}
    done = set[int]()
    for first in range(len(eqns)):
        todo = [first]
        while todo:
            n = todo[-1]
            before = {made[a] for a in eqns[n].invars if isinstance(a, jx.Var) and a in made} - done
            if n in done or not before:
                todo.pop()
                if n not in done:
                    done.add(n)
                    yield eqns[n]
            else:
                todo += sorted(before, reverse=True)
