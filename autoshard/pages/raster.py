"""Pictures as PNG, for what shows no SVG: drawn by matplotlib, which the extra ``plots`` brings."""

from __future__ import annotations

import importlib
import io
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from typing import Any

from autoshard.errors import ArgumentError
from autoshard.pages.picture import STYLE, Picture

_DPI = 144
"""Two pixels for a unit of an SVG, of which 72 are an inch."""
_FONT_SCALE = 0.88
"""Of DejaVu Sans, which matplotlib brings, to be as wide as what browsers take."""
_LIGHT = dict(re.findall(r"--(\w+): light-dark\((#\w+)", STYLE))
_CLASSES: Mapping[str, Mapping[str, str]] = {
    name: dict(re.findall(r"([\w-]+): ([^;]+);", re.sub(r"var\(--(\w+)\)", lambda m: _LIGHT[m[1]], body)))
    for name, body in re.findall(r"\.autoshard-picture \.?(\w+) \{([^}]*)\}", STYLE)
}
_ALIGNED = {"start": "left", "middle": "center", "end": "right"}


def png(picture: Picture) -> bytes:
    """``picture`` in light colours, two pixels for each of its units.

    Raises:
      ArgumentError: matplotlib is not installed.
    """
    try:
        figures, canvases = map(importlib.import_module, ("matplotlib.figure", "matplotlib.backends.backend_agg"))
    except ImportError as error:
        raise ArgumentError(
            "a PNG is drawn by matplotlib, which is not here: pip install 'autoshard[plots]', or name a file .svg"
        ) from error
    figure = figures.Figure(figsize=(picture.width / 72, picture.height / 72), dpi=_DPI, facecolor=_LIGHT["paper"])
    canvas = canvases.FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, picture.width), ylim=(picture.height, 0))
    axes.set_axis_off()
    for order, (element, x, y) in enumerate(_placed(ET.fromstring(f"<g>{picture.shapes}</g>"), 0.0, 0.0)):
        _draw(axes, element, x, y, order)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # is drawn as a box
        canvas.print_png(file)
    return file.getvalue()


def _placed(element: ET.Element, x: float, y: float) -> Iterator[tuple[ET.Element, float, float]]:
    """What is drawn, with the origin of the groups that it is in."""
    for child in element:
        if child.tag == "g":
            right, down = re.findall(r"[\d.]+", child.get("transform", "translate(0 0)"))
            yield from _placed(child, x + float(right), y + float(down))
        elif child.tag != "title":
            yield child, x, y


def _draw(axes: Any, element: ET.Element, x: float, y: float, order: int) -> None:
    style = dict[str, str]()
    for name in ("text" if element.tag == "text" else "", *element.get("class", "").split()):
        style |= _CLASSES.get(name, {})
    at = {k: float(v) for k, v in element.items() if re.fullmatch(r"-?[\d.]+", v)}
    width = float(style.get("stroke-width", 1))
    dashes = tuple(float(n) / width for n in style.get("stroke-dasharray", "").split())
    if element.tag == "text":
        axes.text(
            x + at["x"],
            y + at["y"],
            element.text or "",
            color=style["fill"],
            fontsize=float(style.get("font-size", "13px").removesuffix("px")) * _FONT_SCALE,
            fontweight="bold" if "font-weight" in style else "normal",
            ha=_ALIGNED[element.get("text-anchor", "start")],
            va="baseline",
            parse_math=False,
            zorder=order,
        )
    elif element.tag == "line":
        ends = (x + at["x1"], x + at["x2"]), (y + at["y1"], y + at["y2"])
        axes.plot(*ends, color=style["stroke"], lw=width, ls=(0, dashes) if dashes else "-", zorder=order)
    else:
        patches = importlib.import_module("matplotlib.patches")
        edge = {"ec": style["stroke"], "lw": width} if "stroke" in style else {"lw": 0}
        look = {"fc": style["fill"], "alpha": at.get("fill-opacity"), "zorder": order, **edge}
        if element.tag == "rect":
            axes.add_patch(patches.Rectangle((x + at["x"], y + at["y"]), at["width"], at["height"], **look))
        elif element.tag == "circle":
            axes.add_patch(patches.Circle((x + at["cx"], y + at["cy"]), at["r"], **look))
        else:
            paths = importlib.import_module("matplotlib.path")
            corners = [[(x + a, y + b) for a, b in ring] for ring in _rings(element.get("d", ""))]
            parts = [paths.Path([*ring, ring[0]], closed=True) for ring in corners]
            axes.add_patch(patches.PathPatch(paths.Path.make_compound_path(*parts), **look))


def _rings(path: str) -> Iterator[list[tuple[float, float]]]:
    """The corners of each closed part of an SVG path of level and upright lines, such as pictures have."""
    for part in filter(str.strip, re.split("[zZ]", path)):
        ring, x, y = list[tuple[float, float]](), 0.0, 0.0
        for command, numbers in re.findall(r"([MHVhv])([-\d. ]+)", part):
            n = [float(number) for number in numbers.split()]
            match command:
                case "M":
                    x, y = n
                case "H" | "h":
                    x = n[0] + (x if command == "h" else 0)
                case _:
                    y = n[0] + (y if command == "v" else 0)
            ring.append((x, y))
        yield ring
