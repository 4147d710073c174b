"""Run counts of the computations of an HLO module: the product of the trip counts of the loops around each.

Branches of a conditional count as if each ran whenever the conditional does, but where its name says how often each
does (`autoshard.jaxpr.branch_runs`), as those of a pipeline's ticks do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from autoshard import jaxpr as jx
from autoshard.backend.hlo.text import Computation, Instruction, Module, called


class RunCount(NamedTuple):
    """Runs per call of the program; a lower bound where it is not ``exact``."""

    runs: int
    exact: bool


ONCE = RunCount(1, True)

_KNOWN_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_DIRECTION = re.compile(r"\bdirection=(\w\w)")
_INDEX = re.compile(r"\bindex=(\d+)")
_PASS_THROUGH = ("bitcast", "convert", "copy", "copy-done", "copy-start", "reshape")
"""Opcodes whose scalar result is their operand."""
_MIRROR = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


@dataclass(frozen=True, slots=True)
class _StateElement:
    """The element of a loop's state at ``index``."""

    index: int


_Value = int | _StateElement | None


def run_counts(module: Module) -> dict[str, RunCount]:
    """Runs of each computation reachable from the entry. A loop's condition runs once more than its body."""
    calls: dict[str, list[tuple[str, Fraction, bool]]] = {name: [] for name in module.computations}
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            for (_, callee), times in zip(
                called(instruction), times_called(instruction, computation, module), strict=True
            ):
                if callee in calls:
                    calls[callee].append((computation.name, *times))
    found: dict[str, RunCount] = {module.entry: ONCE}

    def total(name: str) -> RunCount:
        if name not in found:
            callers = [(total(caller), times, exact) for caller, times, exact in calls[name]]
            live = [(caller, times, exact) for caller, times, exact in callers if caller.runs > 0]
            runs = round(sum(caller.runs * times for caller, times, _ in live))
            found[name] = RunCount(runs, all(caller.exact and exact for caller, _, exact in live))
        return found[name]

    return {name: total(name) for name in module.computations if total(name).runs > 0}


def times_called(instruction: Instruction, caller: Computation, module: Module) -> Iterator[tuple[Fraction, bool]]:
    """How often each computation that an instruction calls runs when it does, and whether that is known."""
    keys = [key for key, _ in called(instruction)]
    if instruction.opcode == "while":
        trips = trip_count(instruction, caller, module)
        yield from ((Fraction(trips.runs + (key == "condition")), trips.exact) for key in keys)
    elif instruction.opcode == "conditional" and (shares := jx.branch_shares(module.operation(instruction))):
        ordered = {"false_computation": shares[:1], "true_computation": shares[1:]}
        yield from ((share, True) for share in (shares if keys[0] not in ordered else [ordered[k][0] for k in keys]))
    else:
        yield from ((Fraction(1), True) for _ in keys)


def trip_count(loop: Instruction, caller: Computation, module: Module) -> RunCount:
    """Trip count of a while loop: ``known_trip_count``, else that of a counted loop, else 1 and not exact."""
    if known := _KNOWN_TRIP_COUNT.search(loop.attributes):
        return RunCount(int(known[1]), True)
    trips = _counted_loop_trips(loop, caller, module)
    return RunCount(1, False) if trips is None else RunCount(trips, True)


def _counted_loop_trips(loop: Instruction, caller: Computation, module: Module) -> int | None:
    """Trip count of ``for (i = first; i < last; i += step)`` with constant first, last and step; None otherwise."""
    parts = {key: module.computations.get(name) for key, name in called(loop)}
    condition, body = parts.get("condition"), parts.get("body")
    if condition is None or body is None:
        return None
    test, (left, right) = _binary_operands(condition, condition.root, module)
    direction = _DIRECTION.search(test.attributes) if test.opcode == "compare" else None
    if direction is None or direction[1] not in _MIRROR:
        return None
    order = direction[1]
    if not isinstance(left, _StateElement) or (isinstance(right, _StateElement) and _step(body, left, module) is None):
        left, right, order = right, left, _MIRROR[order]
    if not isinstance(left, _StateElement):
        return None
    step = _step(body, left, module)
    first = _initial_value(loop, caller, left.index)
    last = _initial_value(loop, caller, right.index) if isinstance(right, _StateElement) else right
    if step is None or first is None or last is None or step == 0:
        return None
    distance = (last - first) * (1 if step > 0 else -1)
    inclusive = order in ("LE", "GE")
    return max(0, -(-(distance + inclusive) // abs(step)))


def _step(body: Computation, counter: _StateElement, module: Module) -> int | None:
    """The constant that one iteration adds to the counter; None if it is none."""
    root = body.instructions[body.root]
    if root.opcode != "tuple" or counter.index >= len(root.names):
        return None
    update, values = _binary_operands(body, root.names[counter.index], module)
    if update.opcode == "add" and counter in values:
        step = values[1 - values.index(counter)]
        return step if isinstance(step, int) else None
    if update.opcode == "subtract" and values[0] == counter and isinstance(values[1], int):
        return -values[1]
    return None


def _initial_value(loop: Instruction, caller: Computation, index: int) -> int | None:
    """The constant initial value of the loop's state at ``index``; None if it is none."""
    state = caller.instructions.get(loop.names[0])
    if state is None or state.opcode != "tuple" or index >= len(state.names):
        return None
    value = _trace_value(caller, state.names[index])
    return value if isinstance(value, int) else None


def _binary_operands(computation: Computation, name: str, module: Module) -> tuple[Instruction, tuple[_Value, _Value]]:
    """The instruction that computes ``name``, past pass-through operations and one fusion, and its two operands."""
    instruction = computation.instructions[name]
    while instruction.opcode in _PASS_THROUGH and instruction.names[0] in computation.instructions:
        instruction = computation.instructions[instruction.names[0]]
    inputs: tuple[_Value, ...] | None = None
    if instruction.opcode == "fusion":
        inner = next((module.computations.get(callee) for _, callee in called(instruction)), None)
        if inner is not None:
            inputs = tuple(_trace_value(computation, operand) for operand in instruction.names)
            computation, instruction = inner, inner.instructions[inner.root]
    values = [_trace_value(computation, operand, inputs) for operand in instruction.names[:2]]
    return instruction, (values[0] if values else None, values[1] if len(values) > 1 else None)


def _trace_value(computation: Computation, name: str, inputs: tuple[_Value, ...] | None = None) -> _Value:
    """The constant or the element of the loop's state that ``name`` is; None for anything else.

    Args:
      inputs: the operands, where ``computation`` is that of a fusion.
    """
    instruction = computation.instructions.get(name)
    if instruction is None:
        return None
    if instruction.opcode == "constant":
        return int(instruction.operands) if re.fullmatch(r"-?\d+", instruction.operands) else None
    if instruction.opcode == "get-tuple-element" and (index := _INDEX.search(instruction.attributes)):
        return _StateElement(int(index[1]))
    if instruction.opcode == "parameter" and inputs is not None:
        return inputs[int(instruction.operands)]
    if instruction.opcode in _PASS_THROUGH and instruction.names:
        return _trace_value(computation, instruction.names[0], inputs)
    return None
