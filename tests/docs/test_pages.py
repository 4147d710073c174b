"""Every Python block of the documentation's pages runs, block after block, and what it asserts holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = r"`((?:autoshard|rules|passes|tests|configs|docs|benchmarks)/[\w/.-]+)`"
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
    """In backquotes, as ``autoshard/cost/reshard.py``; below autoshard/ where a page says so in a table of files."""
    missing = [
        f"{page}: {name}"
        for page in PAGES
        for name in re.findall(NAMED, (ROOT / page).read_text())
        if not (ROOT / name).exists()
    ]
    assert missing == []
