"""trials: what there is to say of the layouts that were compiled to choose from."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.decisions import Trial
from autoshard.sections import Section, Table, count
from autoshard.units import size_text, time_text


def trials(found: Sequence[Trial]) -> Section:
    """What was predicted of each, what its compiler said, and why it won or lost."""
    best = next(t for t in found if t.chosen)
    words = (
        f"{count(len(found), 'layout')} compiled, the one that predictions choose first. What fits by the compiler's "
        "account goes before what does not; then the fewest seconds win, with nothing hidden; of as fast ones, the "
        "fewest with all hidden that can be."
    )
    rows: list[tuple[str, ...]] = []
    for t in found:
        more = "" if t.exact else " or more"
        said = ["" if x is None else time_text(x) + more for x in (t.seconds, t.bound)]
        rows.append((t.text, time_text(t.predicted), *said, size_text(t.needs) if t.needs else "", verdict(t, best)))
    head = ("layout", "predicted", "compiled", "all hidden", "needs", "")
    return Section("Compiled to choose from", (words,), Table(head, tuple(rows), frozenset({1, 2, 3, 4})))


def verdict(t: Trial, best: Trial) -> str:
    """Why a layout won or lost."""
    if t.reason:
        return f"refused: {t.reason}"
    over = "" if t.fits else f"over by {size_text(t.needs - t.has, 2)}"
    if t.chosen:
        return f"chosen: {over}, the least" if over else "chosen: the fastest that fits"
    if over or t.seconds is None or best.seconds is None or t.bound is None or best.bound is None:
        return over or "its compiler estimates no time"
    if t.seconds > best.seconds:
        return f"slower by {t.seconds / best.seconds - 1:.1%}"
    return f"as fast, with all hidden slower by {t.bound / best.bound - 1:.1%}" if t.bound > best.bound else "as fast"
