"""How often each computation of an HLO module runs: the trip counts of its loops, multiplied."""

from __future__ import annotations

import re
from dataclasses import dataclass

from autoshard.backend.hlo_text import Computation, Instruction, Module, called

RunCount = tuple[int, bool]
"""Runs per call of the program, and whether that is known; when it is not, it is a lower bound."""

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_DIRECTION = re.compile(r"\bdirection=(\w\w)")
_INDEX = re.compile(r"\bindex=(\d+)")
_PASS_THROUGH = ("bitcast", "convert", "copy", "copy-done", "copy-start", "reshape")
_MIRROR = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


@dataclass(frozen=True, slots=True)
class _StateElement:
    """The element of a loop's state at ``index``."""

    index: int


_Value = int | _StateElement | None


def run_counts(module: Module) -> dict[str, RunCount]:
    """Runs of each computation that the entry reaches. A loop's condition runs once more than its body."""
    calls: dict[str, list[tuple[str, RunCount]]] = {name: [] for name in module.computations}
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            for key, callee in called(instruction):
                times = trip_count(instruction, computation, module) if instruction.opcode == "while" else (1, True)
                if key == "condition":
                    times = times[0] + 1, times[1]
                if callee in calls:
                    calls[callee].append((computation.name, times))
    found: dict[str, RunCount] = {module.entry: (1, True)}

    def runs(name: str) -> RunCount:
        if name not in found:
            reached = [(runs(caller), times) for caller, times in calls[name]]
            alive = [(a, b) for a, b in reached if a[0] > 0]
            found[name] = sum(a[0] * b[0] for a, b in alive), all(a[1] and b[1] for a, b in alive)
        return found[name]

    return {name: runs(name) for name in module.computations if runs(name)[0] > 0}


def trip_count(loop: Instruction, caller: Computation, module: Module) -> RunCount:
    """Trips of a while loop: the compiler's own count, else that of a counted loop, else 1 and unknown."""
    if known := _KNOWN.search(loop.attributes):
        return int(known[1]), True
    trips = _counted_loop_trips(loop, caller, module)
    return (1, False) if trips is None else (trips, True)


def _counted_loop_trips(loop: Instruction, caller: Computation, module: Module) -> int | None:
    """Trips of ``for (i = first; i < last; i += step)`` with all three constant, or None."""
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
    """What one trip adds to the counter."""
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
    """The constant that the loop's state starts with at ``index``."""
    state = caller.instructions.get(loop.names[0])
    if state is None or state.opcode != "tuple" or index >= len(state.names):
        return None
    value = _value(caller, state.names[index])
    return value if isinstance(value, int) else None


def _binary_operands(computation: Computation, name: str, module: Module) -> tuple[Instruction, tuple[_Value, _Value]]:
    """The instruction and its two operands; a fusion is looked into, one level deep."""
    instruction = computation.instructions[name]
    while instruction.opcode in _PASS_THROUGH and instruction.names[0] in computation.instructions:
        instruction = computation.instructions[instruction.names[0]]
    inputs: tuple[_Value, ...] | None = None
    if instruction.opcode == "fusion":
        inner = next((module.computations.get(callee) for _, callee in called(instruction)), None)
        if inner is not None:
            inputs = tuple(_value(computation, operand) for operand in instruction.names)
            computation, instruction = inner, inner.instructions[inner.root]
    values = [_value(computation, operand, inputs) for operand in instruction.names[:2]]
    return instruction, (values[0] if values else None, values[1] if len(values) > 1 else None)


def _value(computation: Computation, name: str, inputs: tuple[_Value, ...] | None = None) -> _Value:
    """A constant, an element of the state, or None for all else. ``inputs``: a fusion's operands."""
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
        return _value(computation, instruction.names[0], inputs)
    return None
