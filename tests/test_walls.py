"""The walls of the house, read off the sources: who may import whom, and what stands nowhere."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
JAXPR = sorted((ROOT / "autoshard/jaxpr").glob("*.py"))
ENGINE = [*sorted((ROOT / "autoshard").glob("*.py")), *JAXPR]
RULES = sorted((ROOT / "rules").rglob("*.py"))
PASSES = sorted((ROOT / "passes").rglob("*.py"))
SOURCES = [*ENGINE, *RULES, *PASSES]
TREES = {path: ast.parse(path.read_text(), str(path)) for path in SOURCES}

every_source = pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything that is imported; relative imports start with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def dotted(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of every chain of attributes, such as ``jax.lax.add_p``."""
    yield from ((node.lineno, ast.unparse(node)) for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def under(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def found(path: Path, hits: list[tuple[int, str]]) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{line}: {text}" for line, text in sorted(hits)]


def test_there_is_something_to_look_at():
    assert {"api.py", "errors.py"} <= {path.name for path in ENGINE}
    assert len(JAXPR) > 1
    assert len(RULES) > 1
    assert len(PASSES) > 1


@every_source
def test_rules_and_passes_have_one_name(path):
    hits = [(line, name) for line, name in imports(TREES[path]) if under(name, "rules", "passes") or name[0] == "."]
    assert not found(path, hits)


@pytest.mark.parametrize("path", [p for p in ENGINE if p.name != "api.py"], ids=lambda p: p.name)
def test_the_engine_knows_no_rule_and_no_pass(path):
    hits = [hit for hit in imports(TREES[path]) if under(hit[1], "autoshard.rules", "autoshard.passes")]
    assert not found(path, hits)


@pytest.mark.parametrize("path", [*RULES, *PASSES], ids=lambda p: str(p.relative_to(ROOT)))
def test_rules_and_passes_do_not_reach_the_user_s_side(path):
    above = ("autoshard.api", "autoshard.cli", "autoshard.train", "autoshard.checkpoint")
    assert not found(path, [hit for hit in imports(TREES[path]) if under(hit[1], *above)])


@pytest.mark.parametrize(
    "path", [p for p in PASSES if p != ROOT / "passes/__init__.py"], ids=lambda p: str(p.relative_to(ROOT))
)
def test_passes_do_not_import_each_other(path):
    """A pass is a file, or a folder whose files may import one another."""
    own = [f"autoshard.passes.{name}" for name in path.relative_to(ROOT / "passes").parts[:-1]]
    hits = [hit for hit in imports(TREES[path]) if under(hit[1], "autoshard.passes") and not under(hit[1], *own)]
    assert not found(path, hits)


@pytest.mark.parametrize("path", RULES, ids=lambda p: p.name)
def test_rules_do_not_import_passes(path):
    assert not found(path, [hit for hit in imports(TREES[path]) if under(hit[1], "autoshard.passes")])


@pytest.mark.parametrize("path", PASSES, ids=lambda p: p.name)
def test_passes_do_not_import_rules(path):
    assert not found(path, [hit for hit in imports(TREES[path]) if under(hit[1], "autoshard.rules")])


@pytest.mark.parametrize("path", [p for p in SOURCES if p not in JAXPR], ids=lambda p: p.name)
def test_one_package_touches_what_jax_keeps_to_itself(path):
    parts = ("ClosedJaxpr", "Jaxpr", "JaxprEqn", "Literal", "Var", "jaxpr_as_fun")
    inside = ("jax._src", "jax.core", "jaxlib", *(f"jax.extend.core.{part}" for part in parts))
    hits = [hit for hit in (*imports(TREES[path]), *dotted(TREES[path])) if under(hit[1], *inside)]
    assert not found(path, hits)


@every_source
def test_no_import_inside_a_function(path):
    functions = (n for n in ast.walk(TREES[path]) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    assert not found(path, [hit for function in functions for hit in imports(function)])


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name != "errors.py"], ids=lambda p: p.name)
def test_errors_are_defined_in_one_file(path):
    ours = {n.name for n in ast.walk(TREES[ROOT / "autoshard/errors.py"]) if isinstance(n, ast.ClassDef)}
    theirs = {
        name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)
    }
    hits = [
        (node.lineno, node.name)
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).split(".")[-1] in ours | theirs for base in node.bases)
    ]
    assert not found(path, hits)


def written() -> list[Path]:
    """Every text that belongs to the project, this file apart: it has to spell what it looks for."""
    folders = ["autoshard", "benchmarks", "configs", "docs", "notebooks", "passes", "rules", "tests", ".ci"]
    files = [p for f in folders if (ROOT / f).is_dir() for p in (ROOT / f).rglob("*") if p.is_file()]
    files += [p for p in ROOT.iterdir() if p.is_file() and p.suffix in {".md", ".toml", ".txt", ".yaml"}]
    files.append(ROOT / "Makefile")
    # Source control's own files and compiled ones are not text; `.pyc` may lie in any folder.
    return sorted(p for p in files if p.suffix != ".pyc" and p != Path(__file__))


def test_nothing_is_left_over():
    leftover = re.compile(
        r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError"  # unfinished work
        r"|pypi\.org|pythonhosted|(?<![\w.])/(root|work|Users)/\w"  # a registry's host, a path of one machine
    )
    hits = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in written()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if leftover.search(line)
    ]
    assert not hits


def test_pins_carry_no_address():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines
    assert not [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._+!-]+", line)]
