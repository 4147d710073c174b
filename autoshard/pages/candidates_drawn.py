"""The layouts that were weighed, as points of time against memory, with the chosen one and the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.pages.picture import WIDTH, Picture, escaped, line, shown, tick_values, words
from autoshard.plan.document import plural
from autoshard.plan.record import PlanRecord
from autoshard.plan.review_cost import drawback
from autoshard.units import size_text, time_text

_LEFT, _TOP, _HEIGHT, _RIGHT = 84, 16, 240, 24
_SPREAD = 10.0
"""Layouts that take this many times the chosen one's seconds, or its memory or the budget, or more, are at the edge."""


@dataclass(frozen=True)
class Weighed:
    """A layout as a point."""

    number: int
    """0: the chosen one."""
    text: str
    seconds: float
    peak: int
    """Bytes per device."""
    why: str
    """Why it lost, or that it was chosen."""


def weighed(plan: PlanRecord) -> list[Weighed]:
    """The chosen layout, then those of the plan's alternatives."""
    split = [f"{d.name} over {'+'.join(d.axes)}" for d in plan.dim_splits if d.axes]
    if plan.zero_stage:
        split.append(
            f"{'state' if plan.zero_stage == 3 else 'optimizer state'} sharded over {'+'.join(plan.storage_axes)}"
        )
    if plan.pipeline:
        stages, order = plural(plan.pipeline.stages, "stage"), plan.pipeline.order or "the given schedule"
        split.insert(0, f"{stages} along {plan.pipeline.axis} by {order}")
    found = [Weighed(0, "; ".join(split) or "nothing split", plan.cost.seconds, plan.memory.peak, "chosen")]
    found += [Weighed(i, a.text, a.seconds, a.peak, drawback(a, plan)) for i, a in enumerate(plan.alternatives, 1)]
    return found


def candidates_drawn(plan: PlanRecord) -> Picture:
    """Points of seconds against bytes; down and to the left is better."""
    points, budget = weighed(plan), plan.memory_budget
    right = max(p.seconds for p in points if p.seconds <= _SPREAD * plan.cost.seconds or p.number == 0) * 1.08 or 1.0
    near, most = plan.memory.peak, max(p.peak for p in points)
    if budget is not None and budget < 3 * most:
        near = max(near, round(budget))
    top = max(near, *(p.peak for p in points if p.peak <= _SPREAD * near), 1) * 1.1
    bottom, wide = _TOP + _HEIGHT, WIDTH - _LEFT - _RIGHT
    parts: list[str] = []
    for size in tick_values(top, binary=True):
        y = bottom - _HEIGHT * size / top
        parts += [line(_LEFT, y, WIDTH - _RIGHT, y, "grid"), words(_LEFT - 8, y + 4, size_text(size), "soft", "end")]
    for t in tick_values(right):
        parts.append(words(_LEFT + wide * t / right, bottom + 18, time_text(t) if t else "0", "soft", "middle"))
    if budget is not None and budget <= top:
        y = bottom - _HEIGHT * budget / top
        parts += [line(_LEFT, y, WIDTH - _RIGHT, y, "budget")]
        parts += [words(_LEFT + 6, y - 5, f"budget {size_text(budget)}: what is above does not fit", "warn")]
    for p in reversed(points):
        x, y = _LEFT + wide * min(1.0, p.seconds / right), bottom - _HEIGHT * min(1.0, p.peak / top)
        color, radius = ("c1", 10) if p.number == 0 else ("c0", 9)
        says = f"{shown(p.text, 240)}: {time_text(p.seconds)}, {size_text(p.peak)}, {p.why}"
        parts.append(
            f'<g data-seconds="{p.seconds!r}" data-peak="{p.peak}"><title>{escaped(says, 600)}</title>'
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="dot {color}"/>'
            f"{words(x, y + 4, str(p.number or '✓'), 'soft strong' if p.number else 'on', 'middle')}</g>"
        )
    parts.append(line(_LEFT, bottom, WIDTH - _RIGHT, bottom, "base"))
    beyond = "; what is at the edge is further out" if most > top or max(p.seconds for p in points) > right else ""
    axes = f"seconds of a call; memory per device upwards{beyond}"
    parts.append(words(WIDTH - _RIGHT, bottom + 36, axes, "soft", "end"))
    title = f"layouts of {plan.name} that were weighed"
    label = f"{title}: the chosen one takes {time_text(plan.cost.seconds)} and {size_text(plan.memory.peak)}."
    return Picture(title, WIDTH, bottom + 44, "".join(parts), _as_text(points), label)


def _as_text(points: Sequence[Weighed]) -> str:
    rows = [
        f"{'*' if p.number == 0 else p.number:>3} {time_text(p.seconds):>10} {size_text(p.peak):>10}  {p.why}: "
        f"{shown(p.text, 80)}"
        for p in points
    ]
    return "\n".join(["Layouts weighed (* is chosen): seconds of a call, peak per device, why.", *rows])
