"""Calls in a configuration: what is imported and when, and what an error says."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autoshard.errors import ConfigError
from autoshard.train.calls import Call, takes
from autoshard.train.config import TrainConfig, named_config

CONFIG = """
model:
  call: own_pieces.models:make
  with: {width: 4}
data: {call: "own_pieces.models:data"}
batch: 8
mesh: {axes: {data: 4}, hardware: cpu}
steps: 10
checkpoint: {dir: run}
"""
MODELS = """
import marks_own_pieces
from autoshard.errors import ArgumentError

def make(width, depth=2, *, rngs):
    return width

def data():
    return []

def fails(kind):
    raise {"type": TypeError, "file": FileNotFoundError, "argument": ArgumentError}[kind]("no width")

def mean(outputs, batch, scale=1.0):
    return scale

LIMIT = 3
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A configuration beside the package that it calls; importing that leaves a mark."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_pieces").mkdir()
    (tmp_path / "own_pieces/models.py").write_text(MODELS)
    (tmp_path / "own_pieces/broken.py").write_text("\n\nx = 1 / 0\n")
    (tmp_path / "own_pieces/needs.py").write_text("import no_such_thing_at_all\n")
    (tmp_path / "marks_own_pieces.py").write_text("")
    (tmp_path / "train.yaml").write_text(CONFIG)
    yield tmp_path / "train.yaml"
    for name in [n for n in sys.modules if "own_pieces" in n]:
        del sys.modules[name]


def test_a_call_is_imported_only_from_the_configuration_that_was_named(config: Path):
    read = TrainConfig.load(config)
    assert "marks_own_pieces" not in sys.modules
    assert str(config.parent) not in sys.path
    with pytest.raises(ConfigError, match="own_pieces.models:make is not imported"):
        read.model.resolved()
    assert "marks_own_pieces" not in sys.modules
    named = named_config(config)
    assert "marks_own_pieces" in sys.modules
    assert named.model.resolved()(rngs=None, key=None) == 4
    assert named.state_settings() == read.state_settings()
    assert read.state_settings()["model.with.width"] == 4


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("own_pieces.models:make", "own_piece.models:make", "yaml:3: model.call: .* 'own_piece' .*mean 'own_pieces'"),
        ("own_pieces.models:make", "own_pieces.model:make", "yaml:3: .* 'model' in own_pieces; did you mean 'models'"),
        ("own_pieces.models:make", "own_pieces.models:mak", "yaml:3: .*models has no 'mak'; did you mean 'make'"),
        ("own_pieces.models:make", "own_pieces.models:LIMIT", "LIMIT is a int, which cannot be called"),
        ("own_pieces.models:make", "own_pieces.broken:make", r"fails: ZeroDivisionError: .*broken\.py:3"),
        ("own_pieces.models:make", "own_pieces.needs:make", "fails: ModuleNotFoundError: No module named 'no_such"),
        ("own_pieces.models:make", "own_pieces", "yaml:3: model.call: 'own_pieces' is not a name such as"),
        ("own_pieces.models:make", "own_pieces/models.py:make", "yaml:3: model.call: .* is not a name such as"),
        ("own_pieces.models:make", "own_pieces.models.make", "no colon .*; did you mean 'own_pieces.models:make'"),
        ("with: {width: 4}", "with: {widht: 4}", "yaml:4: model.with: .*make takes no 'widht'; did you mean 'width'"),
        ("  with: {width: 4}", "", "yaml:2: .*own_pieces.models:make needs 'width'"),
        ("with: {width: 4}", "wiht: {width: 4}", "yaml:4: model.wiht: unknown key; did you mean 'with'"),
        ("steps: 10", 'steps: 10\nloss: {call: "own_pieces.models:mean", with: {scal: 2.0}}', "takes no 'scal'"),
        ("steps: 10", 'steps: 10\nloss: {call: "own_pieces.models:mean", with: {batch: 2.0}}', "takes no 'batch'"),
        ("steps: 10", 'steps: 10\nstep: {call: "own_pieces.models:data"}', "a whole `step` has its own model"),
        ('data: {call: "own_pieces.models:data"}', "", "`seq`, the length of a sequence of text, is needed"),
        ("steps: 10", 'steps: 10\neval: {data: {call: "own_pieces.models:dat"}}', "yaml:9: eval.data.call: .*'data'"),
    ],
)  # fmt: skip
def test_an_error_names_the_line_and_what_is_nearest(config: Path, old: str, new: str, message: str):
    assert old in CONFIG
    config.write_text(CONFIG.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        named_config(config)


def test_what_a_call_raises_names_its_entry(config: Path):
    def calls(kind: str) -> Callable[[], object]:
        new = f'"own_pieces.models:fails", with: {{kind: {kind}}}'
        config.write_text(CONFIG.replace('"own_pieces.models:data"', new))
        call = named_config(config).data
        assert isinstance(call, Call)
        return call.named(call.resolved())  # as where what it gives calls it again

    name = f"{config}:5: data: own_pieces.models:fails"
    for kind, raised in (("type", TypeError), ("file", FileNotFoundError)):
        with pytest.raises(raised, match="^no width") as caught:
            calls(kind)()
        assert caught.value.__notes__ == [f"{name} raised this, or what it gave"]
    with pytest.raises(ConfigError, match=f"^{re.escape(name)}: no width$") as caught:
        calls("argument")()
    assert str(caught.value.__cause__) == "no width"


def test_what_is_said_of_an_entry_later_names_its_line(config: Path):
    config.write_text(CONFIG.replace("steps: 10", "steps: 10\nmicro_batch: 3"))
    read = named_config(config)
    with pytest.raises(ConfigError, match=f"^{re.escape(str(config))}:9: micro_batch: on .*: a batch of 8 is not"):
        read.microbatches_on(read.all_phases[0].mesh)
    assert read.on_mesh(read.all_phases[0].mesh).at("batch") == f"{config}:6: batch: "


def test_what_a_function_takes():
    assert takes(lambda rngs: 0, "rngs")
    assert not takes(lambda **given: 0, "rngs")
    assert not takes(print, "rngs")
