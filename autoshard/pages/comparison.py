"""What differs between two plans, as text that can also be drawn."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from autoshard.pages.browser import open_page
from autoshard.pages.html import Part, document, figure, paragraph, sections_html, tiles
from autoshard.pages.memory_over_time import memory_over_time
from autoshard.pages.picture import escaped
from autoshard.pages.shards import MAX_CARDS, largest_groups, shards
from autoshard.pages.timeline import timeline
from autoshard.plan.diff import compare_plans
from autoshard.plan.record import PlanRecord
from autoshard.plan.render import as_text
from autoshard.units import size_text, time_text


class Comparison(str):
    """What changes from one plan to another: the text itself; `show` draws both beside each other.

    Raises:
      PlanError: they are of different steps that share no argument.
    """

    before: PlanRecord
    after: PlanRecord

    def __new__(cls, before: PlanRecord, after: PlanRecord) -> Self:
        """The comparison of two plans."""
        made = super().__new__(cls, as_text(compare_plans(before, after)))
        made.before, made.after = before, after
        return made

    def __repr__(self) -> str:
        return f"<Comparison of {self.before!r} with {self.after!r}: print it, or .show() it>"

    def show(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Writes one HTML page that needs nothing else, to ``path`` or a new file; opens it where there is a screen.
        Returns the path."""
        return open_page(comparison_page(self.before, self.after), path, f"{self.before.name}-compared")

    def _repr_html_(self) -> str:
        return sections_html(compare_plans(self.before, self.after))


def comparison_page(before: PlanRecord, after: PlanRecord) -> str:
    """Both plans on one page as HTML."""
    pairs = [
        (f"{time_text(before.cost.seconds)} → {time_text(after.cost.seconds)}", "predicted for one call"),
        (f"{time_text(before.cost.compute)} → {time_text(after.cost.compute)}", "compute"),
        (f"{time_text(before.cost.transfers)} → {time_text(after.cost.transfers)}", "communication"),
        (f"{size_text(before.memory.peak)} → {size_text(after.memory.peak)}", "at the peak per device"),
    ]
    names = [f"{which}: {p.name}, {p.strategy} on {p.mesh}" for which, p in (("before", before), ("after", after))]
    title = f"<h1>{escaped(before.name, 120)} <span class=soft>compared with</span> {escaped(after.name, 120)}</h1>"
    parts = [
        Part("changes", "What changes", sections_html(compare_plans(before, after))),
        Part("arrays", "Arrays that are sharded differently", _arrays(before, after)),
    ]
    both = [(p, p.profile, name) for p, name in zip((before, after), names, strict=True)]
    memory = "".join(figure(memory_over_time(p, f), name) for p, f, name in both if f is not None)
    time = "".join(figure(timeline(p, f), name) for p, f, name in both if f is not None)
    if memory:
        parts += [Part("memory", "Memory over the step", memory), Part("time", "Time and communication", time)]
    return document(f"autoshard: {before.name} compared", title + tiles(pairs), parts)


def _arrays(before: PlanRecord, after: PlanRecord) -> str:
    """The largest groups of arguments whose specs differ, as each shards them."""
    now = {p.path: p for p in after.inputs}
    cards: list[str] = []
    for group in largest_groups(before)[0]:
        same = now.get(group.first.path)
        if same is None or (same.where == group.first.where and before.mesh == after.mesh):
            continue
        moved = type(group)(group.keys, tuple(now[p.path] for p in group.places if p.path in now))
        cards += [f"<div>{shards(g, p.mesh).element}</div>" for g, p in ((group, before), (moved, after))]
        if len(cards) >= MAX_CARDS:
            break
    if not cards:
        return paragraph("None.")
    return paragraph("Each twice: before, then after.") + f'<div class="cards pairs">{"".join(cards)}</div>'
