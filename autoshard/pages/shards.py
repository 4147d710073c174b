"""How an array is sharded: its dimensions and their splits, and the grid of devices with who holds which part.

A device's cell has a stripe for every mesh axis that splits the array, in that axis's colour, the paler the earlier the
part. Cells that look the same hold the same part. So a picture works for arrays of any rank and meshes of any number of
axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from autoshard.ir.spec import Spec
from autoshard.machine.mesh import LogicalMesh
from autoshard.pages.picture import Picture, axis_color, box, escaped, shown, words
from autoshard.plan.decisions import Place
from autoshard.plan.document import plural
from autoshard.plan.grouping import ArrayGroup, MatchingSubtree, bytes_per_device, report_rows
from autoshard.plan.record import PlanRecord
from autoshard.units import size_text

CARD = 340
"""Units of a card's width."""
MAX_CARDS = 12
_GRID, _MAX_SIDE, _BAR, _MAX_PARTS = 112, 32, 176, 64


def largest_groups(plan: PlanRecord) -> tuple[list[ArrayGroup], list[MatchingSubtree]]:
    """Groups of arguments of one kind, those that take most bytes unsharded first; and subtrees sharded as others."""
    whole, rows = dict.fromkeys(plan.mesh.axis_names, 1), report_rows(plan.inputs)
    groups = [row for row in rows if isinstance(row, ArrayGroup)]
    groups.sort(key=lambda g: -bytes_per_device(g.places, whole))
    return groups, [row for row in rows if isinstance(row, MatchingSubtree)]


def shards(group: ArrayGroup, mesh: LogicalMesh) -> Picture:
    """The card of one group: every array of it is sharded so."""
    p, n = group.first, len(group.places)
    spec, sizes = p.spec, mesh.shape
    parts_of, copies = spec.num_shards(sizes), mesh.size // spec.num_shards(sizes)
    kind = f"{p.dtype}[{', '.join(map(str, p.shape))}]" + (f" x {n}" if n > 1 else "")
    size = f"{size_text(bytes_per_device(group.places, sizes))} per device"
    how = f"{plural(parts_of, 'part')}, {'each on one device' if copies == 1 else f'each on {copies} devices'}"
    if parts_of == 1:
        how = f"whole on each of {plural(mesh.size, 'device')}"
    elements = [words(0, 14, shown(group.path, 46), "strong"), words(0, 32, shown(kind, 50), "soft")]
    elements.append(words(0, 48, f"{size}: {how}", "soft"))
    grid, below = _grid(spec, mesh, 60)
    dims = _dimensions(p, mesh, 60)
    elements += [*grid, *dims]
    height = max(round(below), 60 + 30 * max(1, len(p.shape)))
    title = f"{shown(group.path)}, {kind}, {p.where}: {how}, {size}"
    return Picture(title, CARD, height, "".join(elements), _as_text(title, spec, mesh), title)


def all_shards(plan: PlanRecord) -> Picture:
    """The cards of the largest groups as one picture, two beside each other."""
    cards = [shards(g, plan.mesh) for g in largest_groups(plan)[0][:MAX_CARDS]]
    elements, y = list[str](), 0
    for pair in itertools.batched(cards, 2):
        elements += [f'<g transform="translate({i * (CARD + 20)} {y})">{c.shapes}</g>' for i, c in enumerate(pair)]
        y += max(c.height for c in pair) + 16
    text = "\n\n".join(c.text for c in cards)
    title = f"arrays of {plan.name} on the mesh {plan.mesh}"
    return Picture(title, 2 * CARD + 20, max(1, y), "".join(elements), text)


def part_numbers(spec: Spec, mesh: LogicalMesh, position: Mapping[str, int]) -> tuple[int, ...]:
    """For each dimension, which of its parts the device at this position of the mesh holds."""
    found: list[int] = []
    for axes in spec.dims:
        part = 0
        for a in axes:
            part = part * mesh.shape[a] + position[a]
        found.append(part)
    return tuple(found)


def _side(mesh: LogicalMesh) -> tuple[int, int]:
    """Columns and rows of the grid: the first axis downwards, or, of a mesh of one axis, in lines."""
    sizes = [n for n in mesh.axis_sizes if n > 1]
    if len(sizes) < 2:
        columns = min(mesh.size, 16)
        return columns, -(-mesh.size // columns)
    return mesh.size // sizes[0], sizes[0]


def _grid(spec: Spec, mesh: LogicalMesh, top: float) -> tuple[list[str], float]:
    """The grid of devices beneath ``top``, and where it ends."""
    columns, rows = _side(mesh)
    wide, high = min(columns, _MAX_SIDE), min(rows, _MAX_SIDE)
    across, down = (max(3.5, min(22.0, side / n)) for side, n in ((_GRID, wide), (_GRID, high)))
    split = [a for a in mesh.axis_names if a in spec.axes and mesh.shape[a] > 1]
    beside = across > down  # stripes beside one another, or beneath
    stripe = ((across if beside else down) - 1) / max(1, len(split))
    paths: dict[tuple[str, int], list[str]] = {}
    for r, c in itertools.product(range(high), range(wide)):
        number = r * columns + c
        if number >= mesh.size:
            break
        position = _position(mesh, number)
        for i, a in enumerate(split or [""]):
            x, y = across * c + (stripe * i if beside else 0), top + down * r + (0 if beside else stripe * i)
            w, h = (stripe, down - 1) if beside else (across - 1, stripe)
            mark = f"M{x:.2f} {y:.2f}h{w:.2f}v{h:.2f}h{-w:.2f}z"
            paths.setdefault((a, position[a] if a else 0), []).append(mark)
    elements: list[str] = []
    for (a, at), marks in paths.items():
        color, tone = (axis_color(a, mesh.axis_names), _tone(at, mesh.shape[a])) if a else ("c0", 0.55)
        part = f' data-axis="{escaped(a)}" data-part="{at}"' if a else ""
        elements.append(f'<path d="{"".join(marks)}" class="{color}" fill-opacity="{tone:.2f}"{part}/>')
    below = top + down * high
    if (wide, high) != (columns, rows):
        elements.append(words(0, below + 12, f"{wide} x {high} of {columns} x {rows}", "soft"))
        below += 16
    return elements, below + 6


def _position(mesh: LogicalMesh, number: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for a, n in reversed(mesh.shape.items()):
        number, found[a] = divmod(number, n)
    return found


def _tone(part: int, of: int) -> float:
    return 0.25 + 0.75 * part / max(1, of - 1)


def _dimensions(place: Place, mesh: LogicalMesh, top: float) -> list[str]:
    """A bar for each dimension, cut into its parts, in the colours of the axes that split it."""
    elements, left = list[str](), CARD - _BAR - 12
    most = max((math.log2(n + 1) for n in place.stored_shape), default=1.0) or 1.0
    for d, (n, axes) in enumerate(zip(place.stored_shape, place.spec.dims, strict=True)):
        wide, y = max(24.0, _BAR * math.log2(n + 1) / most), top + 30 * d
        parts = mesh.axes_size(axes)
        over = f" / {parts}: {'+'.join(axes)}" if parts > 1 else ""
        elements.append(words(left, y + 9, shown(f"{n}{over}", 30), "soft"))
        before = 1
        for i, a in enumerate(axes):  # a stripe for each axis: the minor ones cut the parts of the major ones
            size = mesh.shape[a]
            before *= size
            drawn, high = min(before, _MAX_PARTS), 9 / len(axes)
            for k in range(drawn):
                tone = f' fill-opacity="{_tone(k % size, size):.2f}"'
                gap = 1 if wide / drawn > 3 else 0
                color = axis_color(a, mesh.axis_names)
                elements.append(
                    box(left + wide * k / drawn, y + 13 + high * i, wide / drawn - gap, high, color, more=tone)
                )
        if not axes:
            elements.append(box(left, y + 13, wide, 9, "c0", more=' fill-opacity="0.55"'))
    return elements


def _as_text(title: str, spec: Spec, mesh: LogicalMesh) -> str:
    """The grid with the number of the part that each device holds."""
    columns, rows = _side(mesh)
    parts: Sequence[int] = [mesh.axes_size(axes) for axes in spec.dims]
    lines: list[str] = []
    for r in range(min(rows, 8)):
        cells: list[str] = []
        for c in range(min(columns, 16)):
            if r * columns + c < mesh.size:
                at = 0
                for k, n in zip(part_numbers(spec, mesh, _position(mesh, r * columns + c)), parts, strict=True):
                    at = at * n + k
                cells.append(f"{at:>3}")
        lines.append("  " + " ".join(cells) + (" ..." if columns > 16 else ""))
    return "\n".join([title, *lines, *(["  ..."] if rows > 8 else [])])
