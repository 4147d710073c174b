"""study: what a plan can still be asked while the step that it was made for is there: what if, and why."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jax.sharding import PartitionSpec

from autoshard.compare import signed
from autoshard.dims import classes
from autoshard.errors import ConfigError, SpecError, nearest
from autoshard.graph import Graph
from autoshard.layouts import marginals
from autoshard.planner import Wish, make
from autoshard.program import Program
from autoshard.rule import RuleTable
from autoshard.sections import Section, Table
from autoshard.spec import check

if TYPE_CHECKING:
    from autoshard.plan import Plan


@dataclass(frozen=True, eq=False)
class Study:
    """The program that a plan was made for, with what was asked of planning."""

    graph: Graph
    table: RuleTable
    wish: Wish

    def what_if(self, pins: Mapping[str, PartitionSpec]) -> Plan:
        """The plan under further pins, by argument path or glob.

        Raises:
          ConfigError, SpecError, MemoryBudgetError: as planning does.
        """
        plan, graph = make(pinned(self.graph.program, pins, "the pin", over=True), self.table, self.wish)
        return replace(plan, study=replace(self, graph=graph))

    def why(self, plan: Plan, path: str) -> Iterator[Section]:
        """Of one argument: what its dimensions belong to, and what the best plan would cost if it lay otherwise.

        Raises:
          SpecError: no argument is called so.
        """
        paths = [p.path for p in plan.inputs]
        if path not in paths:
            raise SpecError(f"no argument of {plan.name} is called {path!r}{nearest(path, paths)}")
        place, v = plan.inputs[paths.index(path)], self.graph.inputs[paths.index(path)]
        words = [f"{place.dtype}{list(place.shape)} lies as {place.spec}{': ' + place.why if place.why else ''}."]
        for c in classes(self.graph):
            for u, d in c.inputs:
                if u == v:
                    others = len({w for w, _ in c.inputs}) - 1
                    shared = f"with {others} other arguments" if others else "of no other argument"
                    words.append(f"Dimension {d} is of {c.name}, {shared}.")
        yield Section(f"{path} of {plan.name}", tuple(words))
        found = marginals(self.graph, v)
        if not found:
            yield Section("Otherwise", ("It has nothing to split, or the user pinned it.",))
            return
        here = next((s for spec, s in found if spec == place.spec), min(s for _, s in found))
        order = sorted(found, key=lambda f: (f[0] != place.spec, f[1]))
        rows = [(str(spec), signed(s - here), f"{s / here - 1:+.1%}") for spec, s in order]
        table = Table(("lies as", "a call", ""), tuple(rows), frozenset({1, 2}))
        yield Section("Otherwise, with all else solved for anew, memory aside", (), table)


def pinned(program: Program, pins: Mapping[str, PartitionSpec], what: str, *, over: bool = False) -> Program:
    """``program`` with pins by argument-path glob; one that an argument has already wins, unless ``over``.

    Raises:
      ConfigError: a glob that matches nothing.
      SpecError: a spec that does not fit.
    """
    inputs = list(program.inputs)
    for pattern, spec in pins.items():
        hits = [i for i, leaf in enumerate(inputs) if fnmatch.fnmatchcase(leaf.path, pattern.replace("[", "[[]"))]
        if not hits:
            raise ConfigError(
                f"{what} {pattern!r} matches no argument of {program.name}"
                f"{nearest(pattern, [leaf.path for leaf in inputs])}"
            )
        for i in hits:
            leaf = inputs[i]
            if over or leaf.pin is None:
                inputs[i] = replace(leaf, pin=check(spec, leaf.aval.shape, program.mesh.shape, leaf.path))
    return replace(program, inputs=tuple(inputs))
