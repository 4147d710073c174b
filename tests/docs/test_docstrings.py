"""Every public name says what it is, with an example that runs; `help` and `dir` show the public names."""

from __future__ import annotations

import doctest
import inspect
import os
import re
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from rich.console import Console

import autoshard

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


@pytest.mark.parametrize("name", ["autoshard.Plan", "autoshard.Step"])
def test_the_example_of_a_class_has_its_methods(name):
    methods = [n for n, f in vars(PUBLIC[name]).items() if inspect.isfunction(f) and not n.startswith("_")]
    inner = {"around", "dynamic", "executable", "of", "rewrites"}  # what other modules of autoshard ask
    text = inspect.getdoc(PUBLIC[name]) or ""
    assert len(methods) > 5
    assert [n for n in methods if n not in inner and f".{n}(" not in text] == []


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
