"""A schedule drawn: a row a stage, a column a tick."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.schedule.slots import Operation, Slot, label

_FILL = {
    Operation.FORWARD: "#8ecae6",
    Operation.BACKWARD: "#ffb703",
    Operation.INPUT_GRADIENT: "#ffb703",
    Operation.WEIGHT_GRADIENT: "#95d5b2",
}
_NAME = {
    Operation.FORWARD: "forward",
    Operation.BACKWARD: "backward",
    Operation.INPUT_GRADIENT: "gradient of the input",
    Operation.WEIGHT_GRADIENT: "gradient of the weights",
}
_HEIGHT, _MARGIN = 24, 64


def svg(table: Sequence[Sequence[Slot | None]], chunks: int) -> str:
    """``table[tick][stage]`` as an SVG element that fits its page; later chunks are paler."""
    stages = len(table[0]) if table else 0
    step = 8 * max((len(label(slot, chunks)) for row in table for slot in row), default=1) + 8
    width, height = _MARGIN + step * len(table), _HEIGHT * stages
    parts = [
        f'<text x="0" y="{_HEIGHT * stage + 16}" fill="currentColor">stage {stage}</text>' for stage in range(stages)
    ]
    for tick, row in enumerate(table):
        for stage, slot in enumerate(row):
            if slot is None:
                continue
            x, y, text = _MARGIN + step * tick, _HEIGHT * stage, label(slot, chunks)
            says = f"{_NAME[slot.operation]} of micro-batch {slot.microbatch}, chunk {slot.chunk}, tick {tick}"
            parts.append(
                f'<g><title>{says}</title><rect x="{x}" y="{y}" width="{step - 1}" height="{_HEIGHT - 2}" '
                f'fill="{_FILL[slot.operation]}" fill-opacity="{1 - 0.5 * slot.chunk / chunks:.2f}"/>'
                f'<text x="{x + 4}" y="{y + 16}" fill="#000">{text}</text></g>'
            )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="pipeline schedule" '
        f'viewBox="0 0 {width} {height}" style="max-width:100%;width:{width}px;font:13px monospace">'
        f"{''.join(parts)}</svg>"
    )
