"""What an entry of the cache is keyed by."""

from __future__ import annotations

import ast
from pathlib import Path

import autoshard
from autoshard.backend.compile_cache import PARSERS

SOURCES = Path(autoshard.__file__).parent.parent
BY_VALUE = {"autoshard/machine/mesh.py", "autoshard/machine/tpu_slice.py", "autoshard/plan/record.py"}
"""Of these the key has the values that the answer depends on."""


def imported(path: Path) -> set[Path]:
    """The files of the machine and the backend that the module at ``path`` imports."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    files = [SOURCES / f"{name.replace('.', '/')}.py" for name in names]
    return {file for file in files if file.exists() and file.parts[-2] in ("hlo", "machine", "backend")}


def test_the_key_has_all_that_reads_what_the_compiler_made():
    reached, todo = (
        set[Path](),
        [SOURCES / "autoshard/backend/estimate.py", SOURCES / "autoshard/backend/compilation.py"],
    )
    while todo:
        file = todo.pop()
        if file not in reached and str(file.relative_to(SOURCES)) not in BY_VALUE and file.name != "audit.py":
            reached.add(file)
            todo += imported(file)
    names = {str(file.relative_to(SOURCES)) for file in reached}
    assert names >= {"autoshard/backend/hlo/waits.py", "autoshard/machine/torus.py"}
    assert names - {str(file.resolve().relative_to(SOURCES.resolve())) for file in PARSERS} == set()
