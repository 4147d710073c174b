"""Every Python block of the documentation's pages runs, block after block, and what it asserts holds.

Pages of executed cells run when `make docs` builds them; here one of them does, and of all others names are looked up.
"""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer.main

import autoshard
from autoshard import cli

ROOT = Path(__file__).parents[2]
NAMED = r"`((?:autoshard|rules|passes|tests|configs|docs|benchmarks)/[\w/.-]+)`"
MOVED = re.compile(r"^  \| `([^`]+)` (\| `.+` \|)$", re.MULTILINE)
"""A row of the changelog's table of files: before, and now."""
PAGES = {
    str(path.relative_to(ROOT)): re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)
    for folder in ("docs", "docs/math")
    for path in sorted((ROOT / folder).glob("*.md"))
}
CELLS = {
    str(path.relative_to(ROOT)): re.findall(
        r"^```\{code-cell\}\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE
    )
    for path in sorted((ROOT / "docs").glob("**/*.md"))
    if path.parent.name != "made"
}
COMMANDS = [
    (str(path.relative_to(ROOT)), line.partition("  #")[0])
    for path in (ROOT / "README.md", *map(ROOT.__truediv__, CELLS))
    for block in re.findall(r"^```(?:sh|\{code-cell\})\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
    if re.match(r"!?(autoshard|make|pip|python -m) ", line)
]


def python(cells: list[str]) -> str:
    """Of cells, without what is for the shell."""
    own = [cell for cell in cells if not cell.startswith("%%bash")]
    return "\n".join(line for cell in own for line in cell.splitlines() if not line.startswith((":tags:", "!", "%")))


def test_the_first_page_runs():
    names: dict[str, object] = {"display": print}
    exec(compile(python(CELLS["docs/start.md"]), "docs/start.md", "exec"), names)
    assert isinstance(names["plan"], autoshard.Plan)


@pytest.mark.parametrize("page", [page for page, cells in CELLS.items() if cells])
def test_names_that_a_page_s_cells_use_are_public(page):
    dotted = [ast.unparse(node) for node in ast.walk(ast.parse(python(CELLS[page]))) if isinstance(node, ast.Attribute)]
    for name in dotted:
        found: object = autoshard
        if re.fullmatch(r"autoshard(\.\w+)+", name):
            for part in name.split(".")[1:]:
                assert hasattr(found, part), f"{page}: {name}"
                found = getattr(found, part)


def known(command: list[str]) -> bool:
    """Whether a command line names a command, its options, a target, an extra or a module that there is."""
    match command:
        case ["make", target, *_]:
            return bool(re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE))
        case ["python", "-m", module, *_]:
            return (ROOT / module.replace(".", "/")).with_suffix(".py").exists() or module.startswith("autoshard")
        case ["pip", "install", *packages]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            return all(p.partition("[")[2].strip("]") in {"", *extras} for p in packages if p.startswith("."))
    found = typer.main.get_command(cli.app)
    words = command[1:]
    while words and words[0] in getattr(found, "commands", {}):
        found = found.commands[words.pop(0)]
    words = words[: words.index("--")] if "--" in words else words
    options = {o for p in found.params for o in p.opts} | {"--help"}
    configs = [w for w in words if w.startswith("configs/")]
    return all(w.partition("=")[0] in options for w in words if w.startswith("--")) and all(
        (ROOT / c).exists() for c in configs
    )


def test_commands_that_pages_give_exist():
    assert len(COMMANDS) > 5
    assert [(page, line) for page, line in COMMANDS if not known(shlex.split(line.lstrip("!")))] == []
    assert not known(["autoshard", "plan", "x.yaml", "--htlm"])
    assert not known(["make", "teapot"])


@pytest.mark.parametrize("page", [page for page, blocks in PAGES.items() if blocks])
def test_a_page_s_examples_hold(page):
    names: dict[str, object] = {}
    for block in PAGES[page]:
        exec(compile(block, page, "exec"), names)


def test_every_page_of_mathematics_has_an_example_that_asserts():
    pages = {page: blocks for page, blocks in PAGES.items() if page.startswith("docs/math/") and "README" not in page}
    assert len(pages) == 6
    assert [page for page, blocks in pages.items() if not any("assert " in block for block in blocks)] == []


def test_paths_that_pages_name_exist():
    """In backquotes, as ``autoshard/cost/reshard.py``; of the changelog's table of moved files, the new ones."""
    pages = [*ROOT.glob("*.md"), *map(ROOT.__truediv__, CELLS)]
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in pages
        for name in re.findall(NAMED, MOVED.sub(r"\2", page.read_text()))
        if not (ROOT / name).exists()
    ]
    assert len(pages) > len(PAGES)
    assert missing == []


def test_a_file_that_moved_is_no_longer_where_it_was():
    moved = MOVED.findall((ROOT / "CHANGELOG.md").read_text())
    assert len(moved) > 150
    assert [old for old, new in moved if (ROOT / old).exists() and f"`{old}`" not in new] == []
