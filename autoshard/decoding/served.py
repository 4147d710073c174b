"""What is left of a training run, or was published, put to use: tokens, and artifacts that run elsewhere."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from autoshard import checkpoint
from autoshard.decoding.generator import Generator, generate
from autoshard.decoding.models import CachedModel, of_config, of_own, of_pretrained, vocabulary
from autoshard.errors import ArgumentError, CheckpointError, ConfigError
from autoshard.plan.record import PlanRecord
from autoshard.runs.run_folder import RunFolder
from autoshard.train.calls import Call
from autoshard.train.config import TrainConfig
from autoshard.train.config_parts import DataConfig
from autoshard.train.models.decoder import ModelConfig, Tree
from autoshard.train.models.own_model import inputs_of, own_model
from autoshard.train.phase import plan_phase
from autoshard.train.precision import Precision
from autoshard.train.work import computed_model, work_of
from autoshard.weights.pretrained import open_pretrained


@dataclass(frozen=True)
class Served:
    """A model that makes tokens."""

    model: CachedModel
    params: Tree
    """Its parameters. `jax.ShapeDtypeStruct`s."""
    read: Callable[[Tree], Tree]
    """Reads them to the shardings of such a tree."""
    mesh: Any
    """As `autoshard.jit` takes it."""
    of_text: bool
    """Whether tokens are bytes of text."""

    def prompt(self, text: str | None, ids: Sequence[int], rows: int) -> np.ndarray:
        """The prompt, the same in so many rows. int32 [rows, P].

        Raises:
          ArgumentError: it is empty, or text, and tokens are no bytes; or a number that is no token.
        """
        if (text is None) == (not ids):
            raise ArgumentError("a prompt is either text or the numbers of its tokens: give one of --prompt and --ids")
        if text is not None and not self.of_text:
            raise ArgumentError(
                "this model's tokens are those of a tokenizer, which is not read: give their numbers with --ids"
            )
        tokens = np.array(list(text.encode()) if text is not None else ids, np.int64)
        vocab = vocabulary(self.model, self.params)
        if not tokens.size:
            raise ArgumentError("the prompt is empty: give it one token at least")
        if tokens.min() < 0 or tokens.max() >= vocab:
            raise ArgumentError(f"the prompt has a token {tokens.max()}, and the model has those from 0 to {vocab - 1}")
        return np.broadcast_to(tokens.astype(np.int32), (rows, tokens.size))

    def generator(self, *, temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None) -> Generator:
        """What makes its tokens."""
        return generate(*self.model, mesh=self.mesh, temperature=temperature, top_k=top_k, top_p=top_p)

    def pieces(self, generator: Generator, prompt: np.ndarray, count: int, seed: int) -> Iterator[list[str]]:
        """What is made, token after token, a text for each row: of bytes, what of them is text by then."""
        placed = self.read(generator.prepare(self.params, prompt, count).params)
        decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in prompt]
        for at, token in enumerate(generator.stream(placed, prompt, count, seed=seed), 1):
            numbers = np.asarray(token)[:, 0].tolist()
            if self.of_text:
                parts = [bytes([n]) if n < 256 else b"\xff" for n in numbers]  # no text has the byte 255
                yield [d.decode(part, at == count) for d, part in zip(decoders, parts, strict=True)]
            else:
                yield [f"{n} " for n in numbers]


def of_run(config: TrainConfig, step: int | None = None) -> Served:
    """The model of a training run, with the parameters of a checkpoint, the newest one if no step is named.

    Raises:
      ConfigError: the run has a step of one's own, or a model that is not one of tokens.
      CheckpointError: there is no such checkpoint; when parameters are read.
    """
    if config.model is None:
        raise ConfigError(
            "the run has a step of one's own, whose model is not known: give a step with a cache to autoshard.generate"
        )
    folder = RunFolder(epath.Path(config.checkpoint.dir)).checkpoints
    work = work_of(config)
    state = jax.eval_shape(work.steps.init, jax.eval_shape(lambda: jax.random.key(0)))
    if own := isinstance(config.model, Call):
        model = _own(config, config.model, work.batches.like)
    else:
        model = of_config(computed_model(config))
    params = {name: state[name] for name in ("params", "rest")} if own else state["params"]

    def read(like: Tree) -> Tree:
        saved = checkpoint.latest(folder) if step is None else step
        if saved is None:
            raise CheckpointError(f"{folder} has no checkpoint: train first, with autoshard train")
        found = checkpoint.restore(folder, saved, like=like if own else {"params": like}, extra="ignore")
        return found if own else found["params"]

    mesh = config.all_phases[-1].mesh
    return Served(model, params, read, mesh, isinstance(config.data, DataConfig))


def _own(config: TrainConfig, call: Call, batch: Tree) -> CachedModel:
    inputs = jax.tree.leaves(inputs_of(batch))
    if len(inputs) != 1 or len(inputs[0].shape) != 2 or not jnp.issubdtype(inputs[0].dtype, jnp.integer):
        found = ", ".join(f"{x.dtype}{list(x.shape)}" for x in inputs)
        raise ConfigError(f"the run's inputs are {found}, and what makes tokens has tokens [rows, positions]")
    precision = Precision(params=None) if config.precision is None else config.precision.precision
    return of_own(own_model(call, batch), precision)


def of_folder(folder: Path, mesh: Any = None) -> Served:
    """The model that was published in a folder.

    Raises:
      CheckpointError, ConfigError: as `autoshard.weights.open_pretrained`, or it does not decode with a cache.
    """
    found = open_pretrained(folder)
    return Served(of_pretrained(found), found.abstract, lambda like: found.read(like=like), mesh, of_text=False)


@dataclass(frozen=True)
class NamedArtifact:
    """An exported step."""

    name: str
    """``train``, ``eval``, ``prefill`` or ``decode``."""
    content: bytes
    """As `Step.export` gives it."""
    plan: PlanRecord


def exported(config: TrainConfig, rows: int, prompt: int, count: int) -> Iterator[NamedArtifact]:
    """The steps of a training configuration on its last mesh: training, evaluation where it has one, and of a decoder
    those that read ``prompt`` tokens in each of ``rows`` rows and make ``count`` further ones, the best.

    Evaluation takes parameters as training has them.

    Raises:
      ExportError: as `Step.export`.
    """
    planned = plan_phase(config, config.all_phases[-1])
    yield NamedArtifact("train", planned.step.export(planned.state, planned.batch), planned.plan)
    if planned.evaluate is not None:
        given = planned.work.steps.evaluated(planned.state), planned.batch
        yield NamedArtifact("eval", planned.evaluate.export(*given), planned.evaluate.plan(*given))
    if isinstance(config.model, ModelConfig):
        served = of_run(config)
        tokens = jax.ShapeDtypeStruct((rows, prompt), np.int32)
        prepared = served.generator().prepare(served.params, tokens, count)
        yield NamedArtifact("prefill", prepared.prefill.export(*prepared.prefill_arguments), prepared.prefill_plan)
        yield NamedArtifact("decode", prepared.decode.export(*prepared.decode_arguments), prepared.decode_plan)
