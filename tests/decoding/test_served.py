"""A run's decoder put to use: tokens from its checkpoint, and artifacts that run in a process with JAX alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

import autoshard
from autoshard import checkpoint
from autoshard.cli import main
from autoshard.decoding import served
from autoshard.errors import ArgumentError, CheckpointError
from autoshard.train.config import named_config
from autoshard.train.models.decoder import Decoder, ModelConfig
from autoshard.train.phase import plan_phase
from autoshard.weights.models import decoder
from tests import jax_alone
from tests.weights.published import V, publish

CONFIG = """
model: {layers: 1, d_model: 16, heads: 2, seq: 16, d_ff: 32}
data: {source: text, holdout: 4}
batch: 8
strategy: fsdp
mesh: {axes: {data: 8}}
steps: 2
eval: {batches: 1, final_batches: 1}
checkpoint: {dir: RUN, every: 1, keep: 2}
"""


NAMES = ["train", "eval", "prefill", "decode"]


def run_in(folder: Path) -> Path:
    """A configuration in ``folder``, with text beside it."""
    (folder / "text").mkdir()
    for number in range(8):
        (folder / f"text/{number}.txt").write_text(f"{number} devices, {number * number} shards, no waste. " * 12)
    path = folder / "train.yaml"
    path.write_text(CONFIG.replace("RUN", str(folder / "run")))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a run of two steps."""
    path = run_in(tmp_path_factory.mktemp("trained"))
    autoshard.train.train(named_config(path), console=Console(quiet=True))
    return path


def best(logits: Callable[[Any], Any], prompt: np.ndarray, count: int) -> np.ndarray:
    """``prompt`` and so many best tokens; what follows a token changes nothing, so that one shape does."""
    tokens, run = np.pad(prompt.astype(np.int32), (0, count)), jax.jit(logits)
    for at in range(len(prompt), len(tokens)):
        tokens[at] = np.asarray(run(tokens[None]))[0, at - 1].argmax()
    return tokens


def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[Any, ...]:
    """What the command says: exit status, output, errors."""
    monkeypatch.setattr(sys, "argv", ["autoshard", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, *capsys.readouterr()


@pytest.mark.parametrize("step", [1, 2])
def test_a_run_goes_on_from_a_prompt(trained: Path, step: int, monkeypatch: Any, capsys: Any) -> None:
    config = named_config(trained)
    assert isinstance(config.model, ModelConfig)
    saved = checkpoint.restore(Path(config.checkpoint.dir) / "checkpoints", step)
    model = Decoder(config.model, nnx.Rngs(0))
    state = nnx.state(model)
    params = nnx.to_pure_dict(state)
    names = jax.tree_util.tree_map_with_path(
        lambda path, _: jnp.asarray(saved["/".join(["params", *(str(k.key) for k in path)])]), params
    )
    nnx.replace_by_pure_dict(state, names)
    nnx.update(model, state)
    tokens = best(model, np.frombuffer(b"shards", np.uint8), 5)
    asked = ["--step", step] if step == 1 else []
    code, out, err = say(monkeypatch, capsys, "generate", trained, "--prompt", "shards", "--tokens", 5, *asked)
    assert (code, out) == (0, bytes(np.uint8(tokens[6:])).decode("utf-8", "replace") + "\n"), err


def test_rows_are_drawn_each_by_itself(trained: Path, monkeypatch: Any, capsys: Any) -> None:
    given = ("generate", trained, "--prompt", "a", "--tokens", 4, "--rows", 2, "--temperature", 1, "--top-p", 0.9)
    code, out, _ = say(monkeypatch, capsys, *given)
    first, second = out.split("--- 2\n")
    assert (code, first.startswith("--- 1\n")) == (0, True)
    assert first[6:] != second
    assert say(monkeypatch, capsys, *given)[1] == out


def test_a_published_model_goes_on_from_numbers(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    folder = publish(tmp_path / "llama", "llama")
    found = autoshard.weights.open_pretrained(folder)
    settings, params = decoder.DecoderSettings(**found.settings), found.read()
    tokens = best(lambda tokens: decoder.logits(settings, params, tokens), np.array([3, 1]), 3)
    code, out, err = say(monkeypatch, capsys, "generate", folder, "--ids", "3,1", "--tokens", 3, "--mesh", "cpu-8")
    assert (code, [int(n) for n in out.split()]) == (0, list(tokens[2:])), err
    for given, why in (
        (("--prompt", "text"), "give their numbers with --ids"),
        (("--ids", "3,x"), "--ids '3,x': give numbers with commas between them"),
        (("--ids", str(V)), f"the prompt has a token {V}, and the model has those from 0 to {V - 1}"),
        ((), "give one of --prompt and --ids"),
    ):
        code, _, err = say(monkeypatch, capsys, "generate", folder, *given)
        assert (code, err.startswith("error: "), why in err, err.count("\n")) == (2, True, True, 1)


def test_exported_steps_run_where_jax_is_alone(trained: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """What they give there is what the planned steps give here, a prompt and its tokens among it."""
    code, out, err = say(
        monkeypatch, capsys, "export", trained, "--to", tmp_path, "--rows", 8, "--prompt", 3, "--tokens", 4
    )
    assert (code, [Path(line.split(":")[0]).stem for line in out.splitlines()]) == (0, NAMES), err
    config = named_config(trained)
    planned = plan_phase(config, config.all_phases[-1])
    state = planned.work.steps.init(jax.random.key(0))
    batch = next(planned.work.batches.train())
    run = served.of_run(config)
    prompt = batch["inputs"][:, :3]
    prepared = run.generator().prepare(run.params, prompt, 4)
    cache = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), prepared.prefill_arguments[1])
    key = np.zeros(2, np.uint32)
    first = prepared.prefill(*prepared.prefill_plan.put(state["params"], cache, prompt, key))
    given = {
        "train": (state, batch),
        "eval": (state["params"], batch),
        "prefill": (state["params"], cache, prompt, key),
        "decode": (state["params"], *map(copied, first), key),
    }
    steps = {name: ((tmp_path / f"{name}.jax").read_bytes(), args) for name, args in given.items()}
    found = jax_alone.run(tmp_path, steps)
    assert planned.evaluate is not None
    wanted = {
        "train": planned.step(*planned.plan.put(state, batch)),
        "eval": planned.evaluate(*planned.evaluate.plan(*given["eval"]).put(*given["eval"])),
        "prefill": tuple(map(copied, first)),
        "decode": prepared.decode(*prepared.decode_plan.put(*given["decode"])),
    }
    for name, want in wanted.items():
        for leaf, expected in zip(found[name], jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(leaf, expected)


def copied(tree: Any) -> Any:
    """As numpy arrays, which no step donates."""
    return jax.tree.map(np.array, tree)


def test_what_cannot_be_served(tmp_path: Path) -> None:
    config = named_config(run_in(tmp_path))
    run = served.of_run(config)
    generator, prompt = run.generator(), run.prompt("a", [], 1)
    with pytest.raises(CheckpointError, match="has no checkpoint: train first, with autoshard train"):
        next(run.pieces(generator, prompt, 2, 0))
    with pytest.raises(ArgumentError, match="the prompt is empty"):
        run.prompt("", [], 1)
