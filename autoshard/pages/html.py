"""The parts that pages are put together from; whatever text they are given is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from autoshard.pages.picture import STYLE, Picture, escaped
from autoshard.plan.document import Section

FIGURES_STYLE = STYLE + (files("autoshard.pages") / "figures.css").read_text(encoding="utf-8")
"""The style sheet of pictures under a heading and figures, as notebooks show them."""
_PAGE_STYLE = (files("autoshard.pages") / "page.css").read_text(encoding="utf-8")
_SCRIPT = (files("autoshard.pages") / "page.js").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Part:
    """A part of a page, which folds."""

    anchor: str
    title: str
    body: str
    """HTML."""
    open: bool = True


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of ``text``."""
    return f"<p{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}>{escaped(text)}</p>"


def figure(picture: Picture, caption: str = "") -> str:
    """A picture with its caption."""
    return f"<figure>{picture.element}<figcaption>{escaped(caption)}</figcaption></figure>"


def rows_of(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    kinds: Mapping[int, str],
    *,
    anchor: str = "",
    best: int | None = None,
    raw: frozenset[int] = frozenset(),
) -> str:
    """A table that scrolls by itself where it is wider than the page.

    Args:
      head: the names of the columns.
      rows: the cells, as text.
      kinds: classes of columns: ``n`` of numbers, ``path`` of names and code, ``wide`` of sentences.
      anchor: its id, if it has one.
      best: the row to bring out.
      raw: columns whose cells are HTML already.
    """

    def cell(tag: str, c: int, text: str) -> str:
        kind = f' class="{kinds[c]}"' if c in kinds else ""
        scope = ' scope="col"' if tag == "th" else ""
        return f"<{tag}{scope}{kind}>{text if c in raw and tag == 'td' else escaped(text)}</{tag}>"

    top = "".join(cell("th", c, text) for c, text in enumerate(head))
    body = "".join(
        f"<tr{' class=best' if i == best else ''}>{''.join(cell('td', c, t) for c, t in enumerate(row))}</tr>"
        for i, row in enumerate(rows)
    )
    at = f' id="{anchor}"' if anchor else ""
    return (
        f'<div class="scroll" tabindex="0"><table{at}><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def folded(title: str, body: str) -> str:
    """HTML that is shown where its title is clicked."""
    return f'<details class="more"><summary>{escaped(title)}</summary>{body}</details>'


def bar(share: float, kind: str = "") -> str:
    """A bar as long as ``share``, of 0 to 1."""
    return f'<span class="bar {kind}" style="width:{max(0.0, min(1.0, share)) * 90:.0f}px"></span>'


def tiles(pairs: Iterable[tuple[str, str]]) -> str:
    """Figures, each over what it is."""
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><b>{escaped(n)}</b><span>{escaped(what)}</span></div>' for n, what in pairs)
        + "</div>"
    )


def sections_html(sections: Iterable[Section]) -> str:
    """A report as HTML, with the same content as its text; the first section is the heading."""
    parts: list[str] = []
    for n, section in enumerate(sections):
        size = "h4" if n else "h3"
        parts.append(f"<{size}>{escaped(section.title)}</{size}>")
        parts += [paragraph(sentence) for sentence in section.sentences]
        if section.table:
            kinds = dict.fromkeys(section.table.numbers, "n")
            parts.append(rows_of(section.table.head, section.table.rows, kinds))
        if section.remarks:
            parts.append(f"<ul>{''.join(f'<li>{escaped(r)}</li>' for r in section.remarks)}</ul>")
    return "".join(parts)


def document(title: str, head: str, parts: Sequence[Part]) -> str:
    """A whole page: it loads nothing, and its script only searches its tables."""
    links = "".join(f'<a href="#{p.anchor}">{escaped(p.title)}</a>' for p in parts)
    body = "".join(
        f'<details class="part" id="{p.anchor}"{" open" if p.open else ""}>'
        f"<summary><h2>{escaped(p.title)}</h2></summary>{p.body}</details>"
        for p in parts
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'; img-src data:\">"
        f'<link rel="icon" href="data:,"><title>{escaped(title, 120)}</title>'
        f"<style>{FIGURES_STYLE}{_PAGE_STYLE}</style></head>"
        f'<body class="autoshard"><a class="skip" href="#{parts[0].anchor if parts else "top"}">to the content</a>'
        f'<main id="top">{head}<nav aria-label="Parts of this page">{links}</nav>{body}</main>'
        f"<script>{_SCRIPT}</script></body></html>\n"
    )
