"""The walls of the house, read off the sources: which package may import which, and what stands nowhere."""

from __future__ import annotations

import ast
import builtins
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest

import autoshard
from docs.packages import PICTURE, ROOT, imports, module_of, modules, picture

MAY_IMPORT: Mapping[str, str] = {
    "errors": "",
    "units": "",
    "interrupts": "",
    "strict_files": "",
    "strict_config": "errors strict_files",
    "shared_folder": "errors strict_files",
    "call_errors": "errors jaxpr strict_files",
    "jaxpr": "",
    "schedule": "errors",
    "machine": "errors units strict_config",
    "ir": "jaxpr machine schedule",
    "transforms": "ir",
    "pipelining": "search",
    "cost": "ir",
    "search": "cost",
    "rules": "transforms cost",
    "passes": "transforms cost",
    "plan": "pipelining transforms",
    "backend": "plan",
    "pages": "backend",
    "export": "plan strict_files",
    "runtime": "export pages",
    "checkpoint": "errors jaxpr shared_folder strict_config strict_files runtime.nnx",
    "weights": "checkpoint",
    "api": "runtime rules passes",
    "runs": "errors shared_folder units strict_files",
    "batches": "errors strict_files",
    "train": "api batches call_errors checkpoint runs weights.models.cache",
    "decoding": "train weights",
    "__init__": "decoding interrupts schedule",
    "platforms": "errors train.config",
    "cli": "train __init__ platforms",
    "__main__": "cli",
}
"""What each package, and each file at the top of autoshard/, may import besides itself. What a whole package named here
may import, it may import as well; a single module named here brings nothing else."""


SOURCES = modules()
PACKAGES = sorted({name.split(".")[0] for name in SOURCES})


@functools.cache
def tree_of(text: str) -> ast.Module:
    """A source's tree: every wall is read off the same ones."""
    return ast.parse(text)


@functools.cache
def imports_of(text: str) -> list[tuple[int, str]]:
    """Line and name of everything that a source imports."""
    return list(imports(tree_of(text)))


def dotted(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of every chain of attributes, such as ``jax.lax.add_p``."""
    yield from ((node.lineno, ast.unparse(node)) for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def under(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def allowed(row: str) -> set[str]:
    """Prefixes of the modules that those of ``row`` may import."""
    found, todo = {row}, MAY_IMPORT[row].split()
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += MAY_IMPORT.get(name, "").split()
    return found


def pass_of(name: str) -> str:
    """The pass that a module under `passes/` is of: a file, or a folder whose files may import one another."""
    return ".".join(name.split(".")[:2])


def wrong_imports(sources: Mapping[str, str]) -> list[str]:
    """Every import that a wall forbids."""
    found: list[str] = []
    for name, text in sources.items():
        row = name.split(".")[0]
        may = allowed(row)
        for line, imported in imports_of(text):
            target = module_of(imported, SOURCES)
            inside_rules = under(name, "rules.local_forms") and target is not None and under(target, "rules")
            if (
                under(imported, "rules", "passes")
                or imported.startswith(".")
                or (target is not None and not under(target, *may))
                or (inside_rules and not under(target or "", "rules.local_forms"))
                or (
                    row == "passes"
                    and name != "passes"
                    and under(target or "", "passes")
                    and pass_of(target or "") != pass_of(name)
                )
            ):
                found.append(f"{name}:{line}: {imported}")
    return found


def circles(sources: Mapping[str, str]) -> list[str]:
    """Every module that imports itself by way of others."""
    edges = {
        name: {t for _, imported in imports_of(text) if (t := module_of(imported, SOURCES)) and t != name}
        for name, text in sources.items()
    }
    done: set[str] = set()
    found: list[str] = []

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            found.append(" -> ".join((*trail[trail.index(name) :], name)))
        elif name not in done:
            for other in sorted(edges.get(name, ())):
                visit(other, (*trail, name))
            done.add(name)

    for name in sorted(edges):
        visit(name, ())
    return found


def everywhere(finds: Iterator[tuple[str, int, str]]) -> list[str]:
    return [f"{name}:{line}: {text}" for name, line, text in sorted(finds)]


def test_every_package_has_its_row_and_its_charter():
    assert set(PACKAGES) == set(MAY_IMPORT)
    packages = {name for name in SOURCES if any(other.startswith(name + ".") for other in SOURCES)}
    assert {"cost", "jaxpr", "passes", "rules", "rules.local_forms", "search"} <= packages
    charters = {name: ast.get_docstring(tree_of(SOURCES[name])) or "" for name in packages}
    parts = {n for n in packages if n.startswith("passes.") or n.count(".") > 1}  # of a pass, of the auditor's samples
    assert [n for n, text in charters.items() if not text] == []
    assert [n for n, text in charters.items() if n not in parts and "May import: " not in text] == []
    assert [n for n, x in charters.items() if n not in parts and not x.startswith(f"{n.rpartition('.')[2]}: ")] == []
    crowded = {p: sum(n.rpartition(".")[0] == p for n in SOURCES if n not in packages) for p in packages}
    assert {p: n for p, n in crowded.items() if n > 16} == {}


def test_imports_go_one_way():
    assert wrong_imports(SOURCES) == []


def test_no_circle():
    assert circles(SOURCES) == []


def test_the_picture_of_the_packages_is_current():
    assert PICTURE.read_text() == picture(SOURCES), "run: python -m docs.packages"


@pytest.mark.parametrize("row", sorted(set(MAY_IMPORT) - {"cli", "__main__"}))
def test_a_wrong_import_is_found(row):
    """One planted in every package: of what stands above it."""
    name = next(n for n in sorted(SOURCES, reverse=True) if n.split(".")[0] == row)
    for line in ("from autoshard.cli import main", "import autoshard.cli"):
        planted = {name: f"{SOURCES[name]}\n\ndef f():\n    {line}\n"}
        assert len(wrong_imports(planted)) == len(wrong_imports({name: SOURCES[name]})) + 1


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("rules.sort", "from autoshard.passes.dead_code import DeadCode"),
        ("rules.sort", "from rules.shape import TABLE"),
        ("rules.local_forms.sort", "from autoshard.rules.sort import TABLE"),
        ("passes.dead_code", "from autoshard.rules import TABLE"),
        ("passes.dead_code", "from autoshard.passes.one_hot import OneHot"),
        ("passes.dead_code", "from .one_hot import OneHot"),
        ("search.solve", "from autoshard.rules import TABLE"),
        ("cost.cost", "from autoshard.transforms.pipeline import Pass"),
        ("checkpoint.leaves", "from autoshard.runtime.step import Step"),
    ],
)
def test_walls_within_the_house(name, line):
    assert name in SOURCES
    assert len(wrong_imports({name: f"{SOURCES[name]}\n{line}\n"})) == 1


def test_a_circle_is_found():
    planted = {**SOURCES, "ir.spec": f"{SOURCES['ir.spec']}\nfrom autoshard.ir.rule import Rule\n"}
    assert any("ir.rule" in found and "ir.spec" in found for found in circles(planted))


def test_one_package_touches_what_jax_keeps_to_itself():
    parts = ("ClosedJaxpr", "Jaxpr", "JaxprEqn", "Literal", "Var", "jaxpr_as_fun")
    inside = ("jax._src", "jax.core", "jaxlib", *(f"jax.extend.core.{part}" for part in parts))
    assert not everywhere(
        (name, line, text)
        for name, source in SOURCES.items()
        if not under(name, "jaxpr")
        for line, text in (*imports_of(source), *dotted(tree_of(source)))
        if under(text, *inside)
    )


def test_nothing_that_is_read_is_executed() -> None:
    """No format that executes is read; what processes of one program send one another is no file."""
    formats = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve", "torch"}
    trees = {name: tree_of(text) for name, text in SOURCES.items()}
    used = {
        (name, what) for name, text in SOURCES.items() for _, what in imports_of(text) if what.split(".")[0] in formats
    }
    assert used == {("train.processes.agreement", "pickle")}
    calls = [(name, node) for name, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not [name for name, c in calls if isinstance(c.func, ast.Name) and c.func.id in ("eval", "exec")]
    assert not [name for name, c in calls if any(word.arg == "allow_pickle" for word in c.keywords)]


def test_no_import_inside_a_function_and_none_for_the_type_checker_alone():
    assert not everywhere(
        (name, line, text)
        for name, source in SOURCES.items()
        for node in ast.walk(tree_of(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for line, text in imports(node)
    )
    assert not [name for name, source in SOURCES.items() if "TYPE_CHECKING" in source]


def test_errors_are_defined_in_one_file():
    ours = {n.name for n in ast.walk(tree_of(SOURCES["errors"])) if isinstance(n, ast.ClassDef)}
    theirs = {
        name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)
    }
    assert not everywhere(
        (name, node.lineno, node.name)
        for name, source in SOURCES.items()
        if name != "errors"
        for node in ast.walk(tree_of(source))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).split(".")[-1] in ours | theirs for base in node.bases)
    )


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


def test_the_front_door_names_what_it_gives():
    given = [n for n, v in vars(autoshard).items() if not n.startswith("_") and not isinstance(v, ModuleType)]
    assert autoshard.__all__ == sorted([*given, "checkpoint", "errors", "train", "weights"])
