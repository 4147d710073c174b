"""The packages of autoshard and their imports, read off the sources, as a picture.

    python -m docs.packages

writes `docs/packages.svg`: a row for each floor, the lowest at the bottom, and an arrow from a package to each that it
imports, where no chain of other arrows says so already. `tests/test_walls.py` holds the walls and sees that the picture
is current.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("autoshard", "passes", "rules")
PICTURE = ROOT / "docs/packages.svg"
HIDDEN = frozenset({"__init__", "__main__"})
"""The front door and the command's entry: they only pass on."""
WIDTH, BOX, HEIGHT, STEP = 1100, 210, 52, 92
"""Pixels: of the picture, of a box, its height, and from floor to floor."""
COLUMNS: Mapping[str, int] = {
    "api": 220, "batches": 770, "call_errors": 880, "checkpoint": 880, "decoding": 220, "errors": 410, "export": 220,
    "jaxpr": 130, "pages": 830, "passes": 330, "pipelining": 880, "rules": 110, "runs": 220, "schedule": 970,
    "shared_folder": 220, "strict_files": 690, "transforms": 220, "units": 970, "weights": 830,
}  # fmt: skip
"""Where a box stands that is not in the middle, in pixels from the left."""


def modules() -> dict[str, str]:
    """The text of every source in the three folders by its name after ``autoshard.``: ``rules.local_forms.sort``.

    Links are not followed: `autoshard/rules` shows what stands in `rules/`.
    """
    found: dict[str, str] = {}
    for top in FOLDERS:
        for folder, _, files in os.walk(ROOT / top, followlinks=False):
            for file in (Path(folder, f) for f in files if f.endswith(".py")):
                parts = file.relative_to(ROOT).with_suffix("").parts
                parts = parts[1:] if top == "autoshard" else parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
                found[name] = file.read_text()
    return found


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything that is imported; relative imports start with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def module_of(imported: str, sources: Mapping[str, str]) -> str | None:
    """The module of autoshard that an import names, or None where it names none."""
    if imported == "autoshard":
        return "__init__"
    if not imported.startswith("autoshard."):
        return None
    name = imported.removeprefix("autoshard.")
    while name not in sources and "." in name:
        name = name.rpartition(".")[0]
    return name if name in sources else "__init__"


def package_imports(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """The other packages, or files at the top, that each imports."""
    found: dict[str, set[str]] = {}
    for name, text in sources.items():
        row = found.setdefault(name.split(".")[0], set())
        for _, imported in imports(ast.parse(text)):
            if (module := module_of(imported, sources)) is not None:
                row.add(module.split(".")[0])
    return {name: others - {name} - HIDDEN for name, others in found.items() if name not in HIDDEN}


def floors(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Packages by the longest chain of imports below them, the lowest floor first."""
    height: dict[str, int] = {}

    def of(name: str) -> int:
        if name not in height:
            height[name] = 1 + max(map(of, edges[name]), default=-1)
        return height[name]

    rows: list[list[str]] = [[] for _ in range(max(map(of, edges)) + 1)]
    for name in sorted(edges):
        rows[height[name]].append(name)
    return rows


def reduced(edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """``edges`` without those that a chain of others implies."""

    def below(name: str) -> set[str]:
        return edges[name].union(*map(below, edges[name]))

    return {name: {o for o in others if not any(o in below(x) for x in others)} for name, others in edges.items()}


def purpose(name: str, sources: Mapping[str, str]) -> str:
    """What a package says it is, in the first sentence of its charter."""
    first = (ast.get_docstring(ast.parse(sources[name])) or "").split("\n\n")[0].replace("\n", " ")
    return (first.partition(": ")[2] or first).partition(". ")[0].rstrip(".").replace("`", "")


def picture(sources: Mapping[str, str]) -> str:
    """The packages and their imports as SVG."""
    edges = package_imports(sources)
    rows = floors(edges)
    at = {
        name: (COLUMNS.get(name, WIDTH // 2), (len(rows) - 1 - level) * STEP + HEIGHT)
        for level, row in enumerate(rows)
        for name in row
    }
    height = len(rows) * STEP + HEIGHT // 2
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        "<title>The packages of autoshard and what each imports</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#667"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    for name, others in sorted(reduced(edges).items()):
        for other in sorted(others):
            (x, y), (u, v) = at[name], at[other]
            lines.append(
                f'<path d="M{x:.0f} {y + HEIGHT / 2:.0f} C{x:.0f} {y + STEP / 2:.0f} {u:.0f} {v - STEP / 2:.0f} '
                f'{u:.0f} {v - HEIGHT / 2:.0f}" fill="none" stroke="#99a" marker-end="url(#tip)"/>'
            )
    for name, (x, y) in at.items():
        words = _wrapped(purpose(name, sources), 36)
        words = [words[0], f"{words[1]} ..."] if len(words) > 2 else words
        lines += [
            f'<rect x="{x - BOX / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{BOX}" height="{HEIGHT}" rx="6" '
            'fill="#f4f6fb" stroke="#556"/>',
            f'<text x="{x:.0f}" y="{y - 8:.0f}" text-anchor="middle" font-size="14" font-weight="bold">{name}</text>',
            *(
                f'<text x="{x:.0f}" y="{y + 6 + 12 * n:.0f}" text-anchor="middle" font-size="10" fill="#445">'
                f"{escape(line)}</text>"
                for n, line in enumerate(words)
            ),
        ]
    assert len(set(at.values())) == len(at), "two packages of one floor stand in one place: give one a column"
    return "\n".join([*lines, "</svg>", ""])


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


if __name__ == "__main__":
    PICTURE.write_text(picture(modules()))
