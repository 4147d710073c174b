"""Notebooks are kept as they ran from top to bottom, and those of pages are as the pages."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from docs.notebooks import PAGES, executed, kept
from docs.notebooks import cells as page_cells

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def test_there_is_a_notebook():
    assert "01_quickstart" in [p.stem for p in NOTEBOOKS]


@every_notebook
def test_speaks_of_no_machine(path):
    text = path.read_text()
    assert not [word for word in (str(ROOT), str(Path.home()), "ipykernel_", "/tmp/") if word in text]


@every_notebook
def test_is_kept_as_it_ran(path):
    """Every cell once, in order, without an error, with a picture or a table."""
    check_run(nbformat.read(path, as_version=4))


@pytest.mark.parametrize("path", NOTEBOOKS if os.environ.get("AUTOSHARD_NOTEBOOKS") == "all" else NOTEBOOKS[:1])
def test_runs(path, monkeypatch):
    """Of all, `make notebook` does. Compiled as for its readers: its steps are many, and long without optimizations."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    check_run(executed(path))


def check_run(notebook: Any) -> None:
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1))
    said = [o for c in code for o in c.outputs]
    assert not [o for o in said if o.output_type == "error" or o.get("name") == "stderr"]
    pages = [o["data"]["text/html"] for o in said if "text/html" in o.get("data", {})]
    drawn = pages + [o["data"]["image/svg+xml"] for o in said if "image/svg+xml" in o.get("data", {})]
    assert drawn
    assert all(str(ROOT) not in p and "ipykernel" not in p for p in drawn)
    assert len(set(pages)) == len(pages), "another mesh makes another plan"


@pytest.mark.parametrize("name", PAGES)
def test_is_the_page_of_the_documentation(name):
    assert kept(name) == page_cells(name), "the page has changed: make notebook"
    links = [
        link.partition("#")[0] for kind, text in page_cells(name) for link in re.findall(r"\]\((\.\./[^)]+)\)", text)
    ]
    assert [link for link in links if not (ROOT / "notebooks" / link).exists()] == []


def test_there_are_ten():
    assert [p.stem[:2] for p in NOTEBOOKS] == [f"{n:02}" for n in range(1, 11)]
