"""The command that writes the weights of a run with adapters: they compute what the run's evaluation does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import autoshard
from autoshard import checkpoint
from autoshard.cli import main
from autoshard.train.config import TrainConfig, named_config
from autoshard.train.work import work_of
from autoshard.weights.models import decoder

RECIPE = Path(__file__).parents[2] / "configs/recipes/lora.yaml"


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The exit code, output and errors of a command."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*words: object) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["autoshard", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return run


def saved(folder: Path) -> tuple[TrainConfig, Any]:
    """A run's folder after some steps of the recipe: its configuration, and its state, with adapters that matter."""
    config = named_config(RECIPE)
    state = jax.jit(work_of(config).steps.init)(jax.random.key(0))
    state["params"] = jax.tree.map(lambda x: x + 0.05, state["params"])
    extra = {"config": config.model_dump(mode="json")}
    checkpoint.save(folder / "checkpoints", 3, state, extra=extra, wait=True)
    (folder / "run.json").write_text("{}")
    return config, state


def test_merged_weights_give_the_logits_of_the_run(tmp_path: Path, say: Any):
    config, state = saved(tmp_path / "run")
    assert say("checkpoint", "merge-adapter", tmp_path / "run", tmp_path / "model")[:2] == (
        0,
        f"{tmp_path / 'model'}: a llama model, adapters merged with scale 2\n",
    )
    found = autoshard.weights.open_pretrained(tmp_path / "model")
    batch = jax.tree.map(np.asarray, next(work_of(config).batches.train()), is_leaf=lambda x: hasattr(x, "shape"))
    logits = decoder.logits(decoder.DecoderSettings(**found.settings), found.read(), batch["inputs"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
    evaluate = work_of(config).steps.evaluate
    assert evaluate is not None
    np.testing.assert_allclose(loss, evaluate(state, batch)["loss"], rtol=1e-6)
    unadapted = evaluate({**state, "params": jax.tree.map(np.zeros_like, state["params"])}, batch)["loss"]
    assert abs(unadapted - loss) > 1e-3
    code, out, err = say("generate", tmp_path / "model", "--ids", "3,1", "--tokens", 3, "--mesh", "cpu-8")
    assert (code, len(out.split())) == (0, 3), err


def test_what_the_run_does_not_say_is_asked_for(tmp_path: Path, say: Any):
    tree = {"params": {"x": np.ones(2)}}
    checkpoint.save(tmp_path / "own", 1, tree, wait=True)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    given = ("checkpoint", "merge-adapter", tmp_path / "own", tmp_path / "model")
    for options, why in (
        ((), "give its config.json with --config"),
        (("--config", tmp_path / "config.json"), "give it with --scale"),
        (("--config", tmp_path / "config.json", "--scale", 1), "has no `base`"),
    ):
        code, _, err = say(*given, *options)
        assert (code, why in err, err.count("\n")) == (2, True, 1), err
