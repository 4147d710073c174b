"""Recipes: a few steps on eight devices are those of plain JAX on one, and full-size ones are valid."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath
from flax import nnx

from autoshard import checkpoint
from autoshard.decoding.served import of_run
from autoshard.errors import ConfigError
from autoshard.runs.run_folder import RunFolder
from autoshard.train.config import TrainConfig, named_config
from autoshard.train.models.decoder import Decoder, ModelConfig
from autoshard.train.models.own_model import own_model
from autoshard.train.phase import plan_phase
from autoshard.train.work import work_of

RECIPES = Path(__file__).parents[1] / "configs/recipes"
FULL = sorted(file.stem for file in RECIPES.glob("*-full.yaml"))
SMALL = sorted({file.stem for file in RECIPES.glob("*.yaml")} - set(FULL))
SLICE = ["lora"]
"""The others take a minute or two: `make recipes`."""
WRITERS = ["baichuan", "deepseek", "ernie", "gpt", "llama3", "mixtral", "qwen3", "sft"]
"""Those whose models make tokens."""
STEPS, RTOL = 3, 1e-5
KEY_BIAS = ("['bk']", "['bq']")
"""A key's bias adds the same to all scores of a query: its gradient is zero, and its moments are what rounding leaves
of terms as large as those of the query's bias."""


def batches(config: TrainConfig) -> list[Any]:
    source = work_of(config).batches.train()
    return [jax.tree.map(np.asarray, next(source)) for _ in range(STEPS)]


def run(step: Any, state: Any, given: list[Any]) -> tuple[list[Any], Any]:
    """The metrics, each an array over the steps, and the last state.

    A metric's scale is that of its curve: DPO's margin is zero but for rounding where policy and reference are equal.
    """
    metrics: list[Any] = []
    for batch in given:
        state, found = step(state, batch)
        metrics.append(jax.device_get(found))
    return jax.tree.map(lambda *of_steps: np.stack(of_steps), *metrics), jax.device_get(state)


def by_path(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def check(name: str) -> None:
    """Raises where metrics or states differ."""
    config = named_config(RECIPES / f"{name}.yaml")
    work, given = work_of(config), batches(config)
    planned = plan_phase(config, config.all_phases[0], work)
    assert planned.plan.cost.collectives
    key = jax.random.key(config.seed)
    metrics, state = run(planned.step, planned.plan.init(work.steps.init, key), given)
    expected, alone = run(jax.jit(work.steps.train), jax.jit(work.steps.init)(key), given)
    for ours, theirs in ((metrics, expected), (state, alone)):
        found, wanted = by_path(ours), by_path(theirs)
        for path, want in wanted.items():
            size = np.abs(wanted[path.replace(*KEY_BIAS)]).max()
            np.testing.assert_allclose(found[path], want, rtol=RTOL, atol=RTOL * size, err_msg=path)


@pytest.mark.parametrize("name", SMALL if os.environ.get("AUTOSHARD_RECIPES") == "all" else SLICE)
def test_steps_on_eight_devices_are_those_of_one(name: str):
    check(name)


@pytest.mark.parametrize("name", FULL)
def test_a_full_size_is_a_valid_configuration_and_traces(name: str):
    assert name.removesuffix("-full") in SMALL
    config = named_config(RECIPES / f"{name}.yaml")
    if os.environ.get("AUTOSHARD_RECIPES") == "all" or name == "mixtral-full":
        work = work_of(config)
        state = jax.eval_shape(work.steps.init, jax.eval_shape(lambda: jax.random.key(0)))
        after, metrics = jax.eval_shape(work.steps.train, state, work.batches.like)
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(after)] == [
            (x.shape, x.dtype) for x in jax.tree.leaves(state)
        ]
        assert metrics["loss"].shape == ()


def test_a_batch_is_embedded_in_any_number_of_chunks():
    config = named_config(RECIPES / "embedding.yaml")
    assert config.step is not None
    given, ends = batches(config), list[Any]()
    for chunks in (1, 2, 4):
        step = config.step.model_copy(update={"arguments": config.step.arguments | {"chunks": chunks}})
        steps = work_of(config.model_copy(update={"step": step})).steps
        ends.append(by_path(run(jax.jit(steps.train), jax.jit(steps.init)(jax.random.key(0)), given)))
    for other in ends[1:]:
        for path, want in ends[0].items():
            np.testing.assert_allclose(other[path], want, rtol=RTOL, atol=RTOL * np.abs(want).max(), err_msg=path)


def test_a_step_of_deepseek_chooses_its_busy_experts_less_and_is_evaluated_by_logits_alone():
    config = named_config(RECIPES / "deepseek.yaml")
    steps, given = work_of(config).steps, batches(config)
    _, state = run(jax.jit(steps.train), jax.jit(steps.init)(jax.random.key(0)), given[:1])
    bias = state["rest"]["router"]["bias"]
    assert set(np.unique(np.abs(bias))) <= {np.float32(0), np.float32(0.01)}
    assert ((bias < 0).any(-1) & (bias > 0).any(-1)).all()
    assert steps.evaluate is not None
    assert steps.evaluate(steps.evaluated(state), given[0]).keys() == {"loss"}


def logits_of(config: TrainConfig) -> Callable[[Any, np.ndarray], jax.Array]:
    """Without a cache: the state and tokens, int [row, position] -> [row, position, vocabulary]."""
    if isinstance(config.model, ModelConfig):
        graph, like = nnx.split(nnx.eval_shape(lambda: Decoder(config.model, nnx.Rngs(0))))

        def of_decoder(state: Any, tokens: np.ndarray) -> jax.Array:
            params = jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(state["params"]))
            return nnx.merge(graph, params)(tokens)

        return jax.jit(of_decoder)
    model = own_model(config.model, work_of(config).batches.like)
    return jax.jit(lambda state, tokens: model.apply(state["params"], state["rest"], {"inputs": tokens}, None)[0])


@pytest.mark.parametrize("name", WRITERS if os.environ.get("AUTOSHARD_RECIPES") == "all" else ["llama3", "mixtral"])
def test_a_run_goes_on_from_a_prompt(name: str, tmp_path: Path):
    """With the cache that the model has, or with its tokens for one: the best by all logits, one after the other."""
    config = named_config(RECIPES / f"{name}.yaml")
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"dir": str(tmp_path)})})
    state = jax.jit(work_of(config).steps.init)(jax.random.key(0))
    checkpoint.save(RunFolder(epath.Path(tmp_path)).checkpoints, 5, state, wait=True)
    served = of_run(config)
    prompt = served.prompt(None, [3, 1, 4, 1], 2)
    texts = ["".join(parts) for parts in zip(*served.pieces(served.generator(), prompt, 5, 0), strict=True)]
    tokens, logits = np.pad(prompt, ((0, 0), (0, 5))), logits_of(config)
    for at in range(4, 9):
        tokens[:, at] = logits(state, tokens)[:, at - 1].argmax(-1)
    assert [text.split() for text in texts] == tokens[:, 4:].astype(str).tolist()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("t5", r"the run's inputs are int32\[16, 16\], int32\[16, 8\], and what makes tokens has tokens"),
        ("vit", r"the run's inputs are float32\[16, 8, 8, 3\]"),
        ("lora", "a step of one's own, whose model is not known: give a step with a cache to autoshard.generate"),
    ],
)
def test_what_makes_no_tokens(name: str, why: str):
    with pytest.raises(ConfigError, match=why):
        of_run(named_config(RECIPES / f"{name}.yaml"))
