"""How models of one's own learn whether they train, and the warning where they are not."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from autoshard.cli import main
from autoshard.errors import ModeWarning
from autoshard.train.config import named_config
from autoshard.train.models.modes import unswitched
from autoshard.train.models.own_model import Model, own_model

ME = "tests.train.models.test_modes"
BATCH = {"inputs": np.ones((4, 64), np.float32)}


class Switched(linen.Module):
    """The name of the parameter is what is tested, and chosen in `made`."""

    @linen.compact
    def drops(self, x: Any, deterministic: bool) -> Any:
        return linen.Dropout(0.5)(x, deterministic=deterministic)


class IsTraining(Switched):
    def __call__(self, x: Any, is_training: bool = False) -> Any:
        return self.drops(x, not is_training)


class Training(Switched):
    def __call__(self, x: Any, training: bool = False) -> Any:
        return self.drops(x, not training)


class Train(Switched):
    def __call__(self, x: Any, *, train: bool = False) -> Any:
        return self.drops(x, not train)


class Deterministic(Switched):
    def __call__(self, x: Any, deterministic: bool = True) -> Any:
        return self.drops(x, deterministic)


class NnxIsTraining(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any, is_training: bool = False) -> Any:
        return self.drop(x, deterministic=not is_training)


class OtherName(Switched):
    def __call__(self, x: Any, is_test: bool = True) -> Any:
        return self.drops(x, is_test)


class NnxOtherName(NnxIsTraining):
    def __call__(self, x: Any, is_test: bool = True) -> Any:
        return self.drop(x, deterministic=is_test)


class AsAttribute(Switched):
    is_off: bool = True

    def __call__(self, x: Any) -> Any:
        return self.drops(x, self.is_off)


class InAttention(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.MultiHeadDotProductAttention(2, dropout_rate=0.5, deterministic=True)(x[:, None])


class NoDropout(linen.Module):
    @linen.compact
    def __call__(self, x: Any, return_all: bool = False) -> Any:
        return linen.Dropout(0.0)(x, deterministic=True)


def plain() -> Any:
    return lambda key: jnp.ones(()), lambda params, x, train=False: params * x


def rows() -> Any:
    return BATCH


def config(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = folder / "train.yaml"
    path.write_text(
        f'model: {{call: "{ME}:{name}"}}\ndata: {{call: "{ME}:rows"}}\nbatch: 4\nsteps: 1\n'
        "mesh: {axes: {data: 1}, hardware: cpu}\ncheckpoint: {dir: run}\n"
    )
    return path


def made(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    return own_model(named_config(config(name, folder, monkeypatch)).model, BATCH)


@pytest.mark.parametrize("name", ["Train", "Training", "IsTraining", "Deterministic", "NnxIsTraining"])
def test_a_parameter_of_these_names_is_switched(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = made(name, tmp_path, monkeypatch)
    params, rest = model.init(jax.random.key(0))
    trained, _ = model.apply(params, rest, BATCH, jax.random.key(1))
    evaluated, _ = model.apply(params, rest, BATCH, None)
    np.testing.assert_array_equal(evaluated, BATCH["inputs"])
    assert 0 < np.count_nonzero(trained) < trained.size


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("OtherName", "keeps is_test=True while it trains"),
        ("NnxOtherName", "keeps is_test=True while it trains"),
        ("AsAttribute", "drops nothing in Dropout_0 while it trains"),
        ("InAttention", "drops nothing in MultiHeadDotProductAttention_0 while it trains"),
        ("plain", "keeps train=False while it trains"),
    ],
)
def test_a_model_that_is_not_told_is_warned_of(name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.warns(ModeWarning, match=rf"train.yaml:1: model: {ME}:{name} {said}\. .*'is_training'"):
        made(name, tmp_path, monkeypatch)


def test_the_command_shows_it_as_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = config("OtherName", tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "argv", ["autoshard", "plan", str(path)])
    with warnings.catch_warnings(action="always"), pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.startswith(f"warning: {path}:1: model: {ME}:OtherName keeps is_test=True while it ")


def test_a_model_without_dropout_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made("NoDropout", tmp_path, monkeypatch)


def test_which_parameters_look_like_modes():
    def call(self: Any, x: Any, constrain: bool = False, mask: Any = None, is_eval: bool = True) -> None:
        pass

    assert unswitched(call, ()) == ["is_eval=True"]
    assert unswitched(call, ["is_eval"]) == []
