"""Every public name says what it is, with an example that runs; `help` and `dir` show the public names."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import inspect
import itertools
import os
import re
import tempfile
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from rich.console import Console

import autoshard
from autoshard.train.config import named_config

GIVEN = {
    "autoshard": autoshard,
    "Console": Console,
    "jax": jax,
    "jnp": jnp,
    "np": np,
    "os": os,
    "P": PartitionSpec,
    "tempfile": tempfile,
}
"""What examples take for granted, as `docs/reference/api.md` says."""


def public() -> Iterator[tuple[str, object]]:
    """Every public function and class, by the name that a user writes."""
    for module in (autoshard, autoshard.train, autoshard.checkpoint, autoshard.weights):
        for name, found in vars(module).items():
            if not name.startswith("_") and not isinstance(found, types.ModuleType):
                yield f"{module.__name__}.{name}", found


PUBLIC = dict(public())
INNER = {"around", "dynamic", "executable", "halo_factor", "of", "rewrites", "variants"}
"""Methods of public classes that other modules of autoshard ask, and no user."""


@pytest.mark.parametrize("name", PUBLIC)
def test_an_example_runs(name, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    text = inspect.getdoc(PUBLIC[name]) or ""
    example = doctest.DocTestParser().get_doctest(text, dict(GIVEN), name, None, None)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    found = runner.run(example, out=said.append)
    assert found.attempted, "no example"
    assert not found.failed, "".join(said)


def own_members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that a class defines, as functions; of an array, those that are its own."""
    of_arrays = {*dir(type(jnp.ones(1)))} if issubclass(cls, jax.Array) else set[str]()
    for name, found in vars(cls).items():
        function = getattr(found, "__func__", None) or getattr(found, "fget", None) or getattr(found, "func", found)
        if not name.startswith("_") and name not in INNER | of_arrays and inspect.isfunction(function):
            yield name, function


FUNCTIONS = {n: f for n, f in PUBLIC.items() if inspect.isfunction(f)} | {
    f"{n}.{member}": f for n, c in PUBLIC.items() if inspect.isclass(c) for member, f in own_members(c)
}
"""Public functions, methods and properties."""


@pytest.mark.parametrize("name", [n for n, c in PUBLIC.items() if inspect.isclass(c) and any(own_members(c))])
def test_the_example_of_a_class_has_its_methods(name):
    text = inspect.getdoc(PUBLIC[name]) or ""
    example = "\n".join(line for line in text.splitlines() if line.startswith(("  >>>", "  ...")))
    assert [member for member, _ in own_members(PUBLIC[name]) if not re.search(rf"\b{member}\b", example)] == []


def raised_by(function: Any) -> set[str]:
    """The error classes that a function raises itself."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
    names = {ast.unparse(e.func if isinstance(e, ast.Call) else e).rpartition(".")[2] for e in raised}
    return {name for name in names if hasattr(autoshard.errors, name)}


def test_what_functions_raise_is_in_their_docstrings():
    lacking = {n: raised_by(f) - {*re.findall(r"\w+", inspect.getdoc(f) or "")} for n, f in FUNCTIONS.items()}
    assert {n: missing for n, missing in lacking.items() if missing} == {}
    assert sum(bool(raised_by(f)) for f in FUNCTIONS.values()) > 10


def test_errors_that_docstrings_name_exist():
    named = {
        (n, error)
        for n, f in {**PUBLIC, **FUNCTIONS}.items()
        for error in re.findall(r"\b\w+Error\b", (inspect.getdoc(f) or "").partition("Raises:")[2])
    }
    assert {(n, error) for n, error in named if not hasattr(autoshard.errors, error)} == set()
    assert len(named) > 40


def wrong_calls(folder: str) -> Iterator[tuple[str, Any]]:
    """A call of each public function that raises, with something wrong."""
    step = autoshard.jit(lambda w, x: w * jnp.mean(x), mesh={"data": 8}, strategy="dp")
    llama = autoshard.weights.family.family_of({"model_type": "llama"})
    state, x = jnp.ones(8), jnp.ones((8, 4))
    adapter = autoshard.weights.Adapter({"no": {"leaf": {"a": jnp.ones((1, 2)), "b": jnp.ones((2, 1))}}}, scale=1.0)
    part = {"layers": {"mlp": {"down": jnp.ones((2, 32, 16))}}}
    autoshard.weights.write_pretrained(folder + "/llama", part, llama, {})
    model = autoshard.weights.open_pretrained(folder + "/llama")
    demo = named_config("configs/train/demo.yaml")
    saved = demo.checkpoint.model_copy(update={"dir": folder + "/run"})
    large = (demo.phases[0].model_copy(update={"mesh": autoshard.MeshConfig(axes={"data": 16})}),)
    begun = demo.model_copy(update={"checkpoint": saved, "phases": large})
    yield "autoshard.jit", lambda: autoshard.jit(jnp.sin, mesh={"data": 8}, strategy="fastest")
    yield "autoshard.MeshConfig", lambda: autoshard.MeshConfig(axes={})
    yield "autoshard.register_rule", lambda: autoshard.register_rule("sin", "ij -> (")
    yield "autoshard.unregister_rule", lambda: autoshard.unregister_rule("nothing of this name")
    yield "autoshard.generate", lambda: autoshard.generate(lambda *a: a, lambda *a: a, mesh={"data": 8}, top_p=2.0)
    yield "autoshard.load_exported", lambda: autoshard.load_exported(b"")
    yield "autoshard.annotate", lambda: autoshard.annotate(x, "data")
    yield "autoshard.verify", lambda: autoshard.verify(jnp.sin, x)
    yield "autoshard.train.fit", lambda: autoshard.train.fit(step, state, [x], steps=0)
    yield "autoshard.train.train", lambda: autoshard.train.train(begun, console=Console(quiet=True))
    yield "autoshard.train.even_buckets", lambda: autoshard.train.even_buckets(0, of="rows", rows=8)
    yield "autoshard.train.batch_sizes", lambda: autoshard.train.batch_sizes(10, micro=3, shards=2)
    yield "autoshard.train.Padding", lambda: autoshard.train.Padding([], {"x": ["rows"]})
    yield "autoshard.train.Precision", lambda: autoshard.train.Precision(params="float9")
    yield "autoshard.train.Rows", lambda: autoshard.train.Rows({}, batch=4)
    yield "autoshard.checkpoint.save", lambda: autoshard.checkpoint.save(folder, 1, {"w": object()})
    yield "autoshard.checkpoint.restore", lambda: autoshard.checkpoint.restore(folder)
    yield "autoshard.checkpoint.to_safetensors", lambda: autoshard.checkpoint.to_safetensors(folder, {"w": object()})
    yield "autoshard.checkpoint.from_safetensors", lambda: autoshard.checkpoint.from_safetensors(folder)
    yield "autoshard.weights.open_pretrained", lambda: autoshard.weights.open_pretrained(folder)
    yield "autoshard.weights.write_pretrained", lambda: autoshard.weights.write_pretrained(folder, {"a": x}, llama, {})
    yield "autoshard.weights.read_adapter", lambda: autoshard.weights.read_adapter(folder, None)
    yield "autoshard.weights.write_adapter", lambda: autoshard.weights.write_adapter(folder, adapter, model)
    yield "autoshard.weights.adapted", lambda: autoshard.weights.adapted({}, llama, adapter)


def test_what_goes_wrong_is_what_docstrings_say(tmp_path):
    calls = dict(wrong_calls(str(tmp_path)))
    for name, call in calls.items():
        with pytest.raises(autoshard.errors.AutoshardError) as caught:
            call()
        said = (inspect.getdoc(PUBLIC[name]) or "").partition("Raises:")[2].partition("Example")[0]
        assert type(caught.value).__name__ in said, f"{name} raises {caught.value!r}"
    silent = {n for n, f in PUBLIC.items() if "Raises:" in (inspect.getdoc(f) or "")} - calls.keys()
    assert silent == {"autoshard.checkpoint.finish"}  # which tells of a write that failed earlier


FIGURE = re.compile(r"\bfloat\b")
UNIT = re.compile(
    r"seconds?\b|bytes?\b|FLOPs?\b|cycles|bits\b|share\b|fractions?\b|relative|number|probability|divided|multiplied",
    re.IGNORECASE,
)
"""What a figure is in; of a figure without one, that it is a share or a number."""


def fields_of(cls: type) -> Iterator[tuple[str, str, str]]:
    """Name, type and text of each public field of a dataclass: its own, and the class's first paragraph."""
    hints = {f.name: str(f.type) for f in dataclasses.fields(cls) if not f.name.startswith("_")}
    for base in cls.__mro__:
        if dataclasses.is_dataclass(base) and base.__module__.startswith("autoshard"):
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
            for at, after in itertools.zip_longest(body, body[1:]):
                if isinstance(at, ast.AnnAssign) and at.target.id in hints:
                    own = ast.literal_eval(after.value) if isinstance(after, ast.Expr) else ""
                    arguments = re.findall(rf"^  {at.target.id}: (.*(?:\n    .*)*)", inspect.getdoc(base), re.MULTILINE)
                    first = (inspect.getdoc(base) or "").partition("\n\n")[0]
                    yield f"{cls.__name__}.{at.target.id}", hints[at.target.id], "\n".join([own, *arguments, first])


def data_in(hint: Any) -> Iterator[type]:
    """The dataclasses of autoshard in a type."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and hint.__module__.startswith("autoshard"):
        yield hint
    for part in typing.get_args(getattr(hint, "__value__", hint)):
        yield from data_in(part)


def shown_data(found: dict[type, None], cls: type) -> None:
    """Adds to ``found`` the class and the data in its public fields."""
    if cls not in found:
        found[cls] = None
        for name, hint in typing.get_type_hints(cls).items():
            for inner in () if name.startswith("_") else data_in(hint):
                shown_data(found, inner)


def test_figures_have_their_units():
    """Each float of what a plan, a verification or a configuration shows, and each that a function takes or gives."""
    found: dict[type, None] = {}
    for cls in PUBLIC.values():
        if dataclasses.is_dataclass(cls) and cls is not autoshard.Step:
            shown_data(found, cls)
    assert {autoshard.cost.cost.Cost, autoshard.cost.profile.LineCost} <= {*found}
    figures = [
        (n, text)
        for cls in found
        for n, hint, text in fields_of(cls)
        if FIGURE.search(hint) and n != "Plan.compiler_options"
    ]
    for name, function in FUNCTIONS.items():
        text = inspect.getdoc(function) or ""
        for p, hint in inspect.get_annotations(function).items():
            if FIGURE.search(str(hint)):
                own = re.findall(rf"^  (?:\w+, )*{p}(?:, \w+)*: (.*(?:\n    .*)*)", text, re.MULTILINE)
                figures.append((f"{name}({p})", "\n".join(own) or text))
    assert len(figures) > 30
    assert [n for n, text in figures if not UNIT.search(f"{n.rpartition('.')[2]}\n{text}")] == []


def test_sizes_in_bytes_say_so():
    """Each integer that is a size of memory."""
    of_memory = re.compile(r"bytes|memory|budget|peak$|residuals|temporaries|on_chip|^host$")
    found: dict[type, None] = {}
    shown_data(found, autoshard.Plan)
    sizes = [
        (n, text)
        for cls in found
        for n, hint, text in fields_of(cls)
        if re.search(r"\bint\b", hint) and of_memory.search(n.rpartition(".")[2]) and n != "StepProfile.peak"  # a place
    ]
    assert len(sizes) > 10
    assert [n for n, text in sizes if "byte" not in f"{n} {text}".lower()] == []


def test_arrays_have_their_shapes():
    """What a public function takes or gives as an array has its dimensions in brackets, or is of any shape."""
    arrays = [
        (name, inspect.getdoc(f) or "")
        for name, f in FUNCTIONS.items()
        for hint in inspect.get_annotations(f).values()
        if re.search(r"\b(Array|ndarray)\b", str(hint))
    ]
    assert arrays
    assert [n for n, text in arrays if not re.search(r"\[[\w, .*]*\]|\bany\b|\barray\b", text)] == []


def test_every_argument_has_its_meaning():
    """Of functions with arguments beyond one: each has its line, or its name is in the text."""
    for name, found in PUBLIC.items():
        if inspect.isfunction(found):
            text = inspect.getdoc(found) or ""
            lacking = [p for p in inspect.signature(found).parameters if p not in text]
            assert lacking == [], name


def test_every_public_name_is_in_the_reference():
    page = (Path(__file__).parents[2] / "docs/reference/api.md").read_text()
    named: list[str] = []
    for module, text in re.findall(r"currentmodule:: (\S+)\n(.*?)(?=\.\. currentmodule|\Z)", page, re.DOTALL):
        named += [f"{module}.{name}" for name in re.findall(r"auto(?:function|class):: (\S+)", text)]
    assert {*PUBLIC} <= {*named}
    assert len({*named}) == len(named)


def test_functions_say_what_they_raise():
    silent = [n for n, f in PUBLIC.items() if inspect.isfunction(f) and "Raises:" not in (inspect.getdoc(f) or "")]
    assert silent == ["autoshard.audit", "autoshard.checkpoint.latest", "autoshard.checkpoint.steps"]


def test_dir_has_the_public_names():
    assert dir(autoshard) == sorted([*autoshard.__all__, "__version__"])
    text = inspect.getdoc(autoshard) or ""
    assert [n for n in autoshard.__all__ if f"`{n}`" not in text] == []
