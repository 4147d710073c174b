"""What the command line shows of errors in a person's own functions: the entry, the error, and their own lines."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoshard.call_errors import TRACEBACK_VARIABLE, shown_error
from autoshard.cli import main

CONFIG = """
model: {call: "my_faults:model"}
data: {call: "my_faults:data"}
optimizer: {call: "my_faults:optimizer"}
loss: {call: "my_faults:loss"}
batch: 8
mesh: {axes: {data: 2}, hardware: cpu}
steps: 1
checkpoint: {dir: RUN}
"""
SOURCE = """
import jax
import jax.numpy as jnp
import numpy as np
import optax

def layer(w, x):
    return x @ w

def model():
    return lambda key: jnp.ones((4, 2)), layer

def data():
    return {"inputs": np.ones((16, 4), np.float32), "y": np.ones((16, 2), np.float32)}

def optimizer():
    return optax.sgd(0.1)

def loss(outputs, batch):
    return jnp.mean((outputs - batch["y"]) ** 2)

@jax.custom_vjp
def odd(x):
    return x

odd.defvjp(lambda x: (x, None), lambda _, g: (g.no_such_part,))

def broken_update(gradients, state, params=None):
    return gradients.absent, state
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "train.yaml").write_text(CONFIG.replace("RUN", str(tmp_path / "run")))
    monkeypatch.setattr(sys, "argv", ["autoshard", "train", str(tmp_path / "train.yaml")])
    yield tmp_path
    sys.modules.pop("my_faults", None)


def shown(folder: Path, old: str, new: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says, with one piece of the source replaced."""
    assert old in SOURCE
    (folder / "my_faults.py").write_text(SOURCE.replace(old, new))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "entry", "error", "lines"),
    [
        ("x @ w", "x @ w.T", "2: model: my_faults:model", "TypeError: dot_general .*", ["layer: return x @ w.T"]),
        ("return lambda key", "1 / 0; return lambda key", "2: model: my_faults:model", "ZeroDivisionError: .*",
         ["model: 1 / 0; .*"]),
        ('return {"inputs"', 'open("absent"); return {"inputs"', "3: data: my_faults:data", "FileNotFoundError: .*",
         ["data: open.*"]),
        ("optax.sgd(0.1)", "optax.sgd(0.1)._replace(update=broken_update)", "4: optimizer: my_faults:optimizer",
         "AttributeError: .*", ["broken_update: return gradients.absent, state"]),
        ('batch["y"]', 'batch["z"]', "5: loss: my_faults:loss", "KeyError: 'z'", [r'loss: return jnp.*']),
        ("return x @ w", "return odd(x @ w)", "2: model: my_faults:model", "AttributeError: .*", ["<lambda>: odd.*"]),
    ],
)  # fmt: skip
def test_an_error_in_own_code_is_its_entry_and_own_lines(
    folder: Path, old: str, new: str, entry: str, error: str, lines: list[str], capsys: pytest.CaptureFixture[str]
):
    first, *own, last = shown(folder, old, new, capsys).splitlines()
    assert re.fullmatch(rf"error: {re.escape(str(folder))}/train.yaml:{re.escape(entry)} raised {error}", first)
    assert len(own) == len(lines)
    for line, wanted in zip(own, lines, strict=True):
        assert re.fullmatch(rf"  {re.escape(str(folder))}/my_faults.py:\d+ in {wanted}", line)
    assert last == f"{TRACEBACK_VARIABLE}=1 in the environment shows the whole traceback"


@pytest.mark.parametrize(
    ("old", "new", "gives"),
    [
        ('jnp.mean((outputs - batch["y"]) ** 2)', "outputs[:, 0]", "float32[8]; a loss is one float"),
        ('jnp.mean((outputs - batch["y"]) ** 2)', "jnp.sum(outputs > 0)", "int32[]; a loss is one float"),
        ('jnp.mean((outputs - batch["y"]) ** 2)', "outputs.mean(), {}, 1", "a tuple; a loss is one float"),
        ('jnp.mean((outputs - batch["y"]) ** 2)', "outputs.mean(), outputs.max()", "a loss and float32[];"),
    ],
)
def test_a_loss_that_is_no_scalar_names_its_line_and_shape(
    folder: Path, old: str, new: str, gives: str, capsys: pytest.CaptureFixture[str]
):
    (line,) = shown(folder, old, new, capsys).splitlines()
    assert line.startswith(f"error: {folder}/train.yaml:5: loss: my_faults:loss gives {gives}")


def test_the_whole_traceback_is_shown_where_it_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv(TRACEBACK_VARIABLE, "1")
    text = shown(folder, "x @ w", "x @ w.T", capsys)
    assert text.startswith("Traceback (most recent call last):")
    assert "autoshard/train/models/own_model.py" in text
    assert text.splitlines()[-3].startswith(f"error: {folder}/train.yaml:2: model: ")


def test_an_error_of_a_library_that_a_call_names_shows_where_it_was_raised(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    path = folder / "train.yaml"
    path.write_text(path.read_text().replace('"my_faults:optimizer"', '"json:loads", with: {s: "{"}'))
    first, line, _ = shown(folder, "x @ w", "x @ w", capsys).splitlines()
    assert "train.yaml:4: optimizer: json:loads raised JSONDecodeError: " in first
    assert re.fullmatch(r"  .*/json/decoder\.py:\d+ in \w+: .*", line)


@pytest.mark.parametrize("made", ["lambda key: jnp.ones((4, 2)), layer", "__import__('flax').linen.Dense(2)"])
def test_a_model_that_is_called_with_the_whole_batch_hints_at_its_keys(
    folder: Path, made: str, capsys: pytest.CaptureFixture[str]
):
    source = SOURCE.replace("lambda key: jnp.ones((4, 2)), layer", made)
    (folder / "my_faults.py").write_text(source.replace('"inputs"', '"image"'))
    with pytest.raises(SystemExit):
        main()
    lines = capsys.readouterr().err.splitlines()
    assert re.search(r"train.yaml:2: model: my_faults:model raised \w+: ", lines[0])
    assert lines[-2] == (
        "hint: the model is called with the whole batch, a dictionary of 'image', 'y', as it has no 'inputs'; name "
        "what a model takes 'inputs' in the batch"
    )


def test_other_errors_are_left_to_python():
    assert shown_error(ValueError("of autoshard's own")) is None
