"""Every Python block of the documentation's pages runs, block after block, and what it asserts holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = r"`((?:autoshard|rules|passes|tests|configs|docs|benchmarks)/[\w/.-]+)`"
MOVED = re.compile(r"^  \| `([^`]+)` (\| `.+` \|)$", re.MULTILINE)
"""A row of the changelog's table of files: before, and now."""
PAGES = {
    str(path.relative_to(ROOT)): re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)
    for folder in ("docs", "docs/math")
    for path in sorted((ROOT / folder).glob("*.md"))
}


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
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
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
