"""Memory over the step, as stacked areas: parameters, optimizer, inputs, residuals, temporaries; and the budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autoshard.cost.profile import Moment, StepProfile
from autoshard.pages.picture import WIDTH, Picture, box, line, tick_values, words
from autoshard.plan.record import PlanRecord
from autoshard.units import size_text, time_text

LEFT, RIGHT = 84, 16
"""Margins of what is drawn over the time of a step."""
_TOP, _HEIGHT = 46, 220
_AREAS = (("parameters", "c1"), ("optimizer", "c7"), ("inputs", "c0"), ("residuals", "c3"), ("temporaries", "c4"))
_LETTERS = "POIRT"
_COLUMNS, _ROWS = 72, 14


def stack(plan: PlanRecord, moment: Moment) -> tuple[int, int, int, int, int]:
    """Bytes per device of each area at one moment; arguments are live throughout."""
    m = plan.memory
    return m.parameters, m.optimizer, m.inputs, moment.residuals, moment.temporaries


def memory_over_time(plan: PlanRecord, profile: StepProfile) -> Picture:
    """Bytes per device, area by area, from the start of the step to its end."""
    end, budget = plan.cost.seconds or 1.0, plan.memory_budget
    stacks = [stack(plan, m) for m in profile.moments]
    top = max(plan.memory.peak, budget if budget is not None and budget < 3 * plan.memory.peak else 0, 1) * 1.06
    bottom = _TOP + _HEIGHT

    def x(seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(1.0, seconds / end)

    def y(size: float) -> float:
        return bottom - _HEIGHT * size / top

    parts = _legend([name for name, _ in _AREAS])
    for size in tick_values(top, binary=True):
        parts += [
            line(LEFT, y(size), WIDTH - RIGHT, y(size), "grid"),
            words(LEFT - 8, y(size) + 4, size_text(size), "soft", "end"),
        ]
    starts = [float(LEFT), *(x(m.seconds) for m in profile.moments[1:])]
    ends = [*starts[1:], x(end)]
    for i, (name, color) in enumerate(_AREAS):
        upper = [y(sum(s[: i + 1])) for s in stacks]
        lower = [y(sum(s[:i])) for s in stacks]
        there = _steps(zip(starts, ends, upper, strict=True))
        back = _steps((b, a, h) for a, b, h in reversed([*zip(starts, ends, lower, strict=True)]))
        sizes = " ".join(str(s[i]) for s in stacks)
        parts.append(
            f'<path d="M{LEFT} {bottom}{there}{back}Z" class="{color}" data-area="{name}" data-bytes="{sizes}"/>'
        )
    if budget is not None:
        if budget <= top:
            parts += [line(LEFT, y(budget), WIDTH - RIGHT, y(budget), "budget")]
            parts += [words(WIDTH - RIGHT, y(budget) - 5, f"budget {size_text(budget)}", "warn", "end")]
        else:
            parts += [words(WIDTH - RIGHT, 38, f"budget {size_text(budget)}, far above", "warn", "end")]
    peak = x(profile.moments[profile.peak].seconds)
    side = ("start", 6) if peak < WIDTH / 2 else ("end", -6)
    above = y(plan.memory.peak)
    parts += [line(peak, above, peak, bottom, "peak"), line(LEFT, bottom, WIDTH - RIGHT, bottom, "base")]
    if budget is not None and 0 <= above - y(budget) < 20:  # the name of the peak goes above the budget's line
        above = y(budget)
    parts.append(words(peak + side[1], above - 5, f"peak {size_text(plan.memory.peak)}", "strong", side[0]))
    parts += time_axis(end, bottom)
    title = f"memory of {plan.name} over one call, per device"
    label = (
        f"{title}: {size_text(plan.memory.peak)} at the peak, {time_text(profile.moments[profile.peak].seconds)} in."
    )
    return Picture(title, WIDTH, bottom + 28, "".join(parts), _as_text(plan, profile, stacks, end), label)


def _steps(pieces: Iterable[tuple[float, float, float]]) -> str:
    """The path through level pieces, (from, to, height); neighbours of one height are one piece."""
    parts: list[str] = []
    height = ""
    for _, end, h in pieces:
        level = f"{h:.1f}"
        if level == height:
            parts.pop()
        else:
            parts.append(f"V{level}")
        height = level
        parts.append(f"H{end:.1f}")
    return "".join(parts)


def time_axis(end: float, y: float) -> list[str]:
    """Times from the start of the step, beneath ``y``."""
    wide, parts = WIDTH - LEFT - RIGHT, list[str]()
    for t in tick_values(end):
        at = LEFT + wide * t / end
        anchor = "start" if not t else "end" if at > WIDTH - 2 * RIGHT else "middle"
        parts.append(
            words(min(at + RIGHT, WIDTH) if anchor == "end" else at, y + 18, time_text(t) if t else "0", "soft", anchor)
        )
    return parts


def _legend(names: Sequence[str]) -> list[str]:
    parts, x = list[str](), float(LEFT)
    for name, (_, color) in zip(names, _AREAS, strict=True):
        parts += [box(x, 8, 11, 11, color), words(x + 16, 18, name)]
        x += 34 + 7.2 * len(name)
    return parts


def _as_text(plan: PlanRecord, profile: StepProfile, stacks: Sequence[Sequence[int]], end: float) -> str:
    """Columns of letters, one for each area, the fullest moment in each column."""
    starts = [m.seconds for m in profile.moments]
    columns: list[Sequence[int]] = []
    at = 0
    for c in range(_COLUMNS):
        until = end * (c + 1) / _COLUMNS
        here = [stacks[at]]
        while at + 1 < len(stacks) and starts[at + 1] < until:
            at += 1
            here.append(stacks[at])
        columns.append(max(here, key=sum))
    top = max(plan.memory.peak, 1)
    rows: list[str] = []
    for r in range(_ROWS, 0, -1):
        level = top * (r - 0.5) / _ROWS
        cells = "".join(next((_LETTERS[i] for i in range(5) if sum(s[: i + 1]) >= level), " ") for s in columns)
        rows.append(f"{size_text(top * r / _ROWS) if r in (_ROWS, _ROWS // 2) else '':>10} |{cells}".rstrip())
    budget = "" if plan.memory_budget is None else f"; the budget is {size_text(plan.memory_budget)}"
    head = f"Memory per device over one call: {size_text(plan.memory.peak)} at the peak{budget}."
    legend = "Parameters, Optimizer, Inputs, Residuals, Temporaries, by their first letters."
    wide = _COLUMNS - len(time_text(end)) - 1
    return "\n".join([head, *rows, f"{'':>10} +{'-' * _COLUMNS}", f"{'':>12}0{'':{wide}}{time_text(end)}", legend])
