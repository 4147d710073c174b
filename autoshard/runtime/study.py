"""What a plan can be asked as long as its step is in memory: the plan under other pins, and the cost of other specs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from jax.sharding import PartitionSpec

from autoshard.errors import SpecError, nearest
from autoshard.ir.batch import classes_with_batch
from autoshard.ir.graph import Graph
from autoshard.ir.program import with_pins
from autoshard.plan.diff import signed_time
from autoshard.plan.document import Section, Table, plural
from autoshard.plan.planner import PlanRequest
from autoshard.plan.reasons import place_reason
from autoshard.plan.record import PlanRecord
from autoshard.runtime.stages import plan_program
from autoshard.search.solved_layouts import min_marginals


@dataclass(frozen=True, eq=False)
class Study:
    """The graph that a plan was made for, and the request."""

    graph: Graph
    request: PlanRequest

    def what_if(self, pins: Mapping[str, PartitionSpec]) -> tuple[PlanRecord, Study]:
        """The plan under further pins, by argument path or glob, and the study of it.

        Raises:
          ConfigError, SpecError, MemoryBudgetError: as planning does.
        """
        program = with_pins(self.graph.program, pins, "the pin", overwrite=True)
        planned = plan_program(program, (), self.request)  # the passes have run
        return planned.plan, replace(self, graph=planned.graph)

    def why(self, plan: PlanRecord, path: str) -> Iterator[Section]:
        """The dimension classes of one argument, and what the best plan with each other spec of it would cost.

        Raises:
          SpecError: no argument has this path.
        """
        paths = [p.path for p in plan.inputs]
        if path not in paths:
            raise SpecError(f"no argument of {plan.name} is called {path!r}{nearest(path, paths)}")
        place, v = plan.inputs[paths.index(path)], self.graph.inputs[paths.index(path)]
        reason = place_reason(place)
        sentences = [f"{place.dtype}{list(place.shape)} has spec {place.spec}{': ' + reason if reason else ''}."]
        for c in classes_with_batch(self.graph):
            for u, d in c.inputs:
                if u == v:
                    others = len({w for w, _ in c.inputs}) - 1
                    shared = f"with {plural(others, 'other argument')}" if others else "with no other argument"
                    sentences.append(f"Dimension {d} is of class {c.name}, shared {shared}.")
        yield Section(f"{path} of {plan.name}", tuple(sentences))
        found = min_marginals(self.graph, v)
        if not found:
            yield Section("Other specs", ("None: it has no dimension to split, or the user pinned it.",))
            return
        here = next((s for spec, s in found if spec == place.spec), min(s for _, s in found))
        order = sorted(found, key=lambda f: (f[0] != place.spec, f[1]))
        rows = [(str(spec), signed_time(s - here), f"{s / here - 1:+.1%}") for spec, s in order]
        table = Table(("spec", "a call", ""), tuple(rows), frozenset({1, 2}))
        yield Section("Other specs, with everything else solved again and no memory budget", (), table)
