"""Seconds of a compiled step with a pipeline: each stage's operations as compiled, in the order of its schedule.

Compiled, a pipeline is a loop over ticks with a conditional that has a branch for each operation. A branch is read as
a step is (`autoshard.backend.estimate`), once as the first and the last stage run it and once as the others do. Ticks
then follow one another as the schedule has them, and stages that send something wait for each other: so the time that
a stage is idle counts. What stands outside of the loop is read as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from autoshard.backend.estimate import Estimate, module_estimate, total_seconds
from autoshard.backend.hlo.collectives import located_collectives
from autoshard.backend.hlo.text import Computation, Instruction, Module, called, parse_hlo
from autoshard.backend.hlo.trip_counts import run_counts
from autoshard.machine.collective import COLLECTIVE_PERMUTE
from autoshard.pipelining.exchange import seconds_of_ticks
from autoshard.pipelining.tick_tables import FORWARD, IDLE, TickTables, tick_tables
from autoshard.plan.record import PlanRecord

_ENDS = re.compile(r"/runs_\d+_1_of_\d+/cond$")
"""Name of a conditional of which one stage runs the second branch."""


def staged_seconds(text: str, plan: PlanRecord) -> float:
    """Seconds of a call of a compiled step with a pipeline, on the stage that ends last.

    Args:
      text: HLO.
      plan: of the step; it has a pipeline.

    Raises:
      ValueError: there is no loop over the ticks of its schedule with one over a stage's layers, two or more, in it.
    """
    assert plan.pipeline is not None
    module, tables = parse_hlo(text), tick_tables(plan.pipeline.schedule)
    parts = plan.pipeline.schedule.stages * plan.pipeline.schedule.chunks
    switches = list(_switches(module, tables))
    if not switches:
        raise ValueError("the compiled program has no conditional with the ticks of the plan's schedule")
    _, switch = switches[0]
    branches = [name for _, name in called(switch)]
    read: dict[tuple[int, bool, bool], float] = {}

    def seconds(operation: int, part: int) -> float:
        first, last = part == 0, part == parts - 1
        before, after = (first, last) if operation == FORWARD else (last, first)
        if (operation, before, after) not in read:
            branch = _with_ends(module, branches[operation], before=before, after=after)
            read[operation, before, after] = module_estimate(branch, plan.mesh).scheduled
        return read[operation, before, after]

    pairs = zip(tables.operation.tolist(), tables.part.tolist(), strict=True)
    ticks = [[0.0 if o == IDLE else seconds(o, p) for o, p in zip(*row, strict=True)] for row in pairs]
    outside, sending = _outside(module, switches, tables, plan)
    return outside.scheduled + seconds_of_ticks(tables, ticks, sending)


def _switches(module: Module, tables: TickTables) -> Iterator[tuple[Computation, Instruction]]:
    """The conditionals of a stage's operation at a tick."""
    branches = int(tables.operation.max()) + 1
    runs = np.bincount(tables.operation[:, 0], minlength=branches)
    named = f"/runs_{'_'.join(map(str, runs))}_of_{len(tables.ticks)}/cond"
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode == "conditional" and module.operation(instruction).endswith(named):
                found = [name for _, name in called(instruction)]
                if len(found) == branches and any(_holds_a_loop(module, name) for name in found):
                    yield computation, instruction


def _holds_a_loop(module: Module, name: str) -> bool:
    return any(i.opcode == "while" for i in module.computations[name].instructions.values())


def _with_ends(module: Module, branch: str, *, before: bool, after: bool) -> Module:
    """``branch`` as a module of its own, in which the conditionals before and after the loop over layers, which ask
    whether the stage is the first or the last, have one branch."""
    computation = module.computations[branch]
    changed, is_after = dict(computation.instructions), False
    for name, instruction in computation.instructions.items():
        if instruction.opcode == "while":
            is_after = True
        elif instruction.opcode == "conditional" and _ENDS.search(module.operation(instruction)):
            inside = dict(called(instruction))
            names = [n for _, n in called(instruction)]
            if "true_computation" in inside:
                names = [inside["false_computation"], inside["true_computation"]]
            taken = names[after if is_after else before]
            changed[name] = replace(instruction, opcode="call", attributes=f"to_apply=%{taken}")
    computations = {**module.computations, branch: replace(computation, instructions=changed)}
    return replace(module, computations=computations, entry=branch)


def _outside(
    module: Module, switches: list[tuple[Computation, Instruction]], tables: TickTables, plan: PlanRecord
) -> tuple[Estimate, list[float]]:
    """What is outside of the branches, without what stages send each other after ticks; and seconds of that, by
    route."""
    assert plan.pipeline is not None
    computations = dict(module.computations)
    for computation, switch in switches:
        left = dict(computations[computation.name].instructions)
        left[switch.name] = replace(switch, attributes="")
        computations[computation.name] = replace(computation, instructions=left)
    rest = replace(module, computations=computations)
    counts, axis = run_counts(rest), (plan.pipeline.axis,)
    sent = {
        key: c
        for key, c in located_collectives(rest, plan.mesh).items()
        if c.kind == COLLECTIVE_PERMUTE and c.axes == axis and counts[c.computation].runs > 1
    }
    total = sum(total_seconds(c, plan.mesh) for c in sent.values())
    for name, instruction in sent:
        left = dict(computations[name].instructions)
        left[instruction] = replace(left[instruction], opcode="bitcast")
        computations[name] = replace(computations[name], instructions=left)
    found = module_estimate(rest, plan.mesh)
    # Each route carries as much as the others: activations, or gradients of them.
    routes = len(tables.activations) + len(tables.gradients)
    times = sum(bool(pairs) for number in tables.exchange.tolist() for pairs in tables.exchanges[number])
    return found, [total / times if times else 0.0] * routes


def step_seconds(text: str, plan: PlanRecord) -> float:
    """Seconds of a call of a compiled step, with a pipeline or without."""
    if plan.pipeline is not None:
        return staged_seconds(text, plan)
    return module_estimate(parse_hlo(text), plan.mesh).scheduled
