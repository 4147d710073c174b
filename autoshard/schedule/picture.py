"""A schedule drawn: a row a stage, a column a tick."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.schedule.slots import Operation, Slot, label

_LOOK = {
    Operation.FORWARD: ("c1", "forward"),
    Operation.BACKWARD: ("c4", "backward"),
    Operation.INPUT_GRADIENT: ("c4", "gradient of the input"),
    Operation.WEIGHT_GRADIENT: ("c3", "gradient of the weights"),
}
_HEIGHT, _MARGIN = 26, 68
_STYLE = (
    ".autoshard-schedule text { fill: currentColor; font: 12px system-ui, sans-serif; } "
    ".autoshard-schedule .c1 { fill: #2a78d6; } .autoshard-schedule .c3 { fill: #1baf7a; } "
    ".autoshard-schedule .c4 { fill: #eda100; }"
)


def blocks(table: Sequence[Sequence[Slot | None]], chunks: int) -> tuple[str, int, int]:
    """``table[tick][stage]`` as SVG elements whose classes are colours, and their width and height; later chunks are
    paler."""
    stages = len(table[0]) if table else 0
    step = 8 * max((len(label(slot, chunks)) for row in table for slot in row), default=1) + 8
    parts = [f'<text x="0" y="{_HEIGHT * stage + 17}" class="strong">stage {stage}</text>' for stage in range(stages)]
    for tick, row in enumerate(table):
        for stage, slot in enumerate(row):
            if slot is None:
                continue
            x, y, (color, name) = _MARGIN + step * tick, _HEIGHT * stage, _LOOK[slot.operation]
            says = f"{name} of micro-batch {slot.microbatch}, chunk {slot.chunk}, tick {tick}"
            opacity = 0.6 - 0.35 * slot.chunk / chunks
            parts.append(
                f'<rect x="{x}" y="{y + 2}" width="{step - 1}" height="{_HEIGHT - 4}" class="{color}" '
                f'fill-opacity="{opacity:.2f}" data-stage="{stage}"><title>{says}</title></rect>'
                f'<text x="{x + (step - 1) / 2}" y="{y + 17}" class="slot" text-anchor="middle">'
                f"{label(slot, chunks)}</text>"
            )
    return "".join(parts), _MARGIN + step * len(table), _HEIGHT * stages


def svg(table: Sequence[Sequence[Slot | None]], chunks: int) -> str:
    """The same as an SVG element that fits its page, and has the colour of its text."""
    parts, width, height = blocks(table, chunks)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" class="autoshard-schedule" role="img" aria-label="pipeline schedule" '
        f'viewBox="0 0 {width} {height}" style="max-width:100%;width:{width}px"><style>{_STYLE}</style>{parts}</svg>'
    )
