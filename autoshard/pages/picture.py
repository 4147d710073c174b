"""Picture: one drawing as SVG and as text for a terminal, and the few shapes that all are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

MAX_NAME = 96
"""Most characters of a name that a picture shows; the middle of a longer one is left out."""
MAX_TEXT = 2000
"""Most characters of any other text, likewise."""
WIDTH = 720
"""Units of an SVG's width; it scales to its page."""
STYLE = (files("autoshard.pages") / "picture.css").read_text(encoding="utf-8")
"""The style sheet of pictures: colours for light and dark."""
COLORS = 8
"""Colours there are; what has more parts repeats them."""


@dataclass(frozen=True, repr=False)
class Picture:
    """One drawing of a plan; printed it is text, in a notebook it is the SVG."""

    title: str
    width: int
    height: int
    shapes: str
    """SVG elements."""
    text: str
    """The same for a terminal."""
    label: str = ""
    """What it shows, in a sentence, for those who do not see it."""

    @property
    def element(self) -> str:
        """An SVG element for a page that has `STYLE`."""
        return (
            f'<svg class="autoshard-picture" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{escaped(self.label or self.title, 600)}">{self.shapes}</svg>'
        )

    @property
    def svg(self) -> str:
        """An SVG file."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="autoshard-picture" viewBox="0 0 {self.width} '
            f'{self.height}" width="{self.width}" height="{self.height}" style="color-scheme: light dark" role="img">'
            f"<title>{escaped(self.title, 600)}</title><style>{escape(STYLE, quote=False)}</style>{self.shapes}</svg>\n"
        )

    def _repr_svg_(self) -> str:
        return self.svg

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Picture of {self.title}: .svg, or print it>"


def shown(name: str, limit: int = MAX_NAME) -> str:
    """``name`` as a person can read it: what is not printable as its escape, the middle of a long one left out."""
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
    if len(plain) <= limit:
        return plain
    end = limit // 2
    return f"{plain[: limit - end - 1]}…{plain[-end:]}"


def escaped(text: str, limit: int = MAX_TEXT) -> str:
    """`shown`, for SVG and HTML."""
    return escape(shown(text, limit))


def words(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    """A text element; ``kind`` is its class."""
    more = f' class="{kind}"' if kind else ""
    more += "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escaped(text, MAX_NAME)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A line element."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def box(x: float, y: float, width: float, height: float, kind: str, title: str = "", more: str = "") -> str:
    """A rectangle, with a title that shows where it is pointed at, and further attributes."""
    says = f"<title>{escaped(title, 600)}</title>" if title else ""
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" class="{kind}"{more}>{says}</rect>'


def tick_values(most: float, binary: bool = False) -> list[float]:
    """From 0 to at most ``most``, three to six round numbers: of powers of two, or of ten."""
    if most <= 0:
        return [0.0]
    if binary:
        step = 2.0 ** math.ceil(math.log2(most / 5))
    else:
        power = 10.0 ** math.floor(math.log10(most / 5))
        step = next(n * power for n in (1, 2, 5, 10) if n * power * 5.5 >= most)
    return [i * step for i in range(int(most / step + 1e-9) + 1)]


def axis_color(axis: str, axes: Sequence[str]) -> str:
    """The class that fills with the colour of this mesh axis."""
    return f"c{axes.index(axis) % COLORS + 1}" if axis in axes else "c0"
