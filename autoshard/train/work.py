"""What a configuration trains: its functions and its batches, those that ship or one's own."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from autoshard.checkpoint.restoring import misfit_of
from autoshard.checkpoint.save_restore import open_checkpoint
from autoshard.errors import CheckpointError, ConfigError
from autoshard.runs.run_folder import RunFolder
from autoshard.train import data
from autoshard.train.calls import Call
from autoshard.train.config import TrainConfig
from autoshard.train.config_parts import DataConfig
from autoshard.train.models.decoder import ModelConfig, Steps, make_steps
from autoshard.train.models.own_model import (
    Model,
    cross_entropy,
    decoder_model,
    make_own_steps,
    own_loss,
    own_model,
    own_steps,
)
from autoshard.train.optimizer import OptimizerConfig, make_optimizer
from autoshard.train.processes.agreement import same_in_all
from autoshard.train.processes.placing import abstract
from autoshard.train.sources import Mapped, Rows, Source, Tree, arrays_only, source_of


class RunBatches(Protocol):
    """The batches of a run."""

    @property
    def like(self) -> Tree:
        """A batch as `jax.ShapeDtypeStruct`s."""
        ...

    @property
    def amount(self) -> tuple[int, str]:
        """How much a step takes, and of what: for the rate that a person watches."""
        ...

    @property
    def corpus(self) -> data.Corpus | None:
        """The text, which every process reads whole; None where the batches are of something else.

        Raises:
          ConfigError: processes read different text.
        """
        ...

    def train(self) -> Source:
        """The training batches, from their start."""
        ...

    def held_out(self, count: int) -> Iterator[Tree]:
        """``count`` held-out batches, always the same; none where no data is held out.

        Raises:
          ConfigError: data is held out, and too little for a batch.
        """
        ...

    def final(self) -> Iterator[Tree]:
        """The batches of the evaluation at the end of the run; as `held_out`."""
        ...


@dataclass(frozen=True)
class Work:
    """What a run trains."""

    batches: RunBatches
    steps: Steps
    is_evaluated: bool
    """Whether the state is evaluated during the run and at its end."""
    in_bits: bool
    """Whether its loss is that of the next byte of text, so that it makes bits per byte."""


@dataclass(frozen=True)
class _TextBatches:
    """Windows of the text in a directory."""

    config: TrainConfig
    source: DataConfig
    seq: int

    @property
    def like(self) -> Tree:
        tokens = jax.ShapeDtypeStruct((self.config.batch, self.seq), jnp.int32)
        return {"inputs": tokens, "targets": tokens}

    @property
    def amount(self) -> tuple[int, str]:
        return self.config.batch * self.seq, "tokens"

    @property
    def corpus(self) -> data.Corpus:
        return self._read

    @functools.cached_property
    def _read(self) -> data.Corpus:
        source = self.source
        try:
            found = data.corpus(source.source, include=source.include, exclude=source.exclude, holdout=source.holdout)
        except ConfigError as error:
            raise ConfigError(f"{self.config.at('data')}{error}") from None
        if not same_in_all(zlib.crc32(found.heldout, zlib.crc32(found.train))):
            raise ConfigError(f"the text in {source.source} is not the same in all {jax.process_count()} processes")
        return found

    def train(self) -> Source:
        return self._batches("train", self.corpus.train, self.config.seed)

    def held_out(self, count: int) -> Iterator[Tree]:
        """The first batches of one fixed shuffle."""
        return itertools.islice(self._batches("held-out", self.corpus.heldout, 0), count)

    def final(self) -> Iterator[Tree]:
        """In the order of the files."""
        batches = self._batches("held-out", self.corpus.heldout, None)
        return itertools.islice(batches, self.config.eval.final_batches or batches.per_pass)

    def _batches(self, part: str, text: np.ndarray, seed: int | None) -> data.Batches:
        at, source = self.config.at("data"), self.source
        try:
            return data.batches(
                text, batch=self.config.batch, seq=self.seq, seed=seed, name=f"{at}the text in {source.source}"
            )
        except ConfigError as error:
            more = f", or a smaller holdout than {source.holdout}" if part == "held-out" else ""
            raise ConfigError(f"{at}the {part} part: {error}{more}") from None


@dataclass(frozen=True)
class _Named:
    """A source whose errors name the entry that gives it."""

    source: Source
    call: Call

    def __next__(self) -> Tree:
        return self.call.named(self.source.__next__)()

    def get_state(self) -> Any:
        return self.source.get_state()

    def set_state(self, state: Any) -> None:
        self.call.named(self.source.set_state)(state)


@dataclass(frozen=True)
class _OwnBatches:
    """What functions of the configuration give."""

    config: TrainConfig
    source: Call
    corpus: data.Corpus | None = None

    @functools.cached_property
    def like(self) -> Tree:
        first = next(self.train(), None)
        if first is None:
            raise ConfigError(f"{self.source.at}{self.source.call} gives no batch")
        like = self.source.named(lambda: jax.tree.map(abstract, arrays_only(first)))()
        rows = {x.shape[0] for x in jax.tree.leaves(like) if x.shape}
        if not rows:
            raise ConfigError(f"{self.source.at}nothing in a batch of {self.source.call} is an array of rows")
        if self.config.batch not in rows:
            raise ConfigError(
                f"{self.config.at('batch')}it is {self.config.batch}, and the first dimensions of a batch of "
                f"{self.source.call} are {sorted(rows)}: give the same in both, or arrays, whose rows are "
                "taken `batch` at a time"
            )
        return like

    @property
    def amount(self) -> tuple[int, str]:
        return self.config.batch, "examples"

    def train(self) -> Source:
        return self._named(self._read(self.source, self.config.seed), self.source)

    def held_out(self, count: int) -> Iterator[Tree]:
        return self._held_out(lambda _: count)

    def final(self) -> Iterator[Tree]:
        asked = self.config.eval
        return self._held_out(
            lambda source: asked.final_batches or (source.per_pass if isinstance(source, Rows) else asked.batches)
        )

    def _held_out(self, count: Callable[[Source], int]) -> Iterator[Tree]:
        """As many batches as ``count`` says of what gives them."""
        if (call := self.config.eval.data) is None:
            return
        source = self._read(call, None)
        batches = self._named(source, call)
        for number in range(count(source)):
            if (batch := next(batches, None)) is None:
                if number == 0:
                    raise ConfigError(f"{call.at}{call.call} gives no batch")
                return
            yield batch

    def _read(self, call: Call, seed: int | None) -> Source:
        return call.named(source_of)(call.resolved()(), self.config.batch, seed)

    def _named(self, source: Source, call: Call) -> Source:
        """Padded, where the configuration says so, with errors that name the entry."""
        pad = self.config.pad
        return _Named(source if pad is None else Mapped(source, pad.padding), call)


def batches_of(config: TrainConfig) -> RunBatches:
    """The batches that ``config`` asks for; nothing is read yet."""
    if isinstance(config.data, Call):
        return _OwnBatches(config, config.data)
    seq = config.data.seq or (config.model.seq if isinstance(config.model, ModelConfig) else None)
    assert seq is not None  # the configuration was validated
    return _TextBatches(config, config.data, seq)


def work_of(config: TrainConfig) -> Work:
    """What ``config`` trains.

    Raises:
      ConfigError: a call gives something else than it should, or data is held out and nothing evaluates it.
    """
    batches = batches_of(config)
    steps = steps_of(config, batches.like)
    if config.eval.data is not None and steps.evaluate is None:
        raise ConfigError(
            f"{config.eval.data.at}the `step` gives (init, step) alone; let it give (init, step, evaluate)"
        )
    of_text = isinstance(config.data, DataConfig)
    held_out = config.eval.data is not None or of_text
    in_bits = of_text and config.loss is None and config.step is None
    return Work(batches, steps, held_out and steps.evaluate is not None, in_bits)


def steps_of(config: TrainConfig, batch: Tree) -> Steps:
    """The init, train and eval functions that ``config`` asks for, for batches of the abstract values ``batch``.

    Raises:
      ConfigError: a call gives something else than it should.
    """
    if config.step is not None:
        return own_steps(config.step)
    model, optimizer, loss = config.model, config.optimizer, config.loss
    precision = None if config.precision is None else config.precision.precision
    of_text = isinstance(batch, dict) and batch.keys() <= {"inputs", "targets"}  # no weights, no segments
    if isinstance(model, ModelConfig):
        model = computed_model(config)
    if (
        precision is None
        and of_text
        and isinstance(model, ModelConfig)
        and isinstance(optimizer, OptimizerConfig)
        and loss is None
    ):
        return make_steps(model, optimizer, config.last_step)
    assert model is not None  # the configuration was validated
    applied: Model = decoder_model(model) if isinstance(model, ModelConfig) else own_model(model, batch)
    if isinstance(optimizer, OptimizerConfig):
        update, rate = make_optimizer(optimizer, config.last_step)
    else:
        update, rate = optimizer.resolved()(), None
        if not isinstance(update, optax.GradientTransformation):
            raise ConfigError(
                f"{optimizer.at}{optimizer.call} gives a {type(update).__name__}, and not an "
                "optax.GradientTransformation"
            )
        update = update._replace(init=optimizer.named(update.init), update=optimizer.named(update.update))
    default = functools.partial(cross_entropy, at=config.at("model"))
    return make_own_steps(applied, update, default if loss is None else own_loss(loss), rate, precision)


def check_state(steps: Steps, folder: RunFolder, done: int) -> None:
    """Raises `CheckpointError` where the run's state at step ``done`` has other leaves than ``steps`` make: the code of
    the model or of the optimizer has changed, of which the configuration says nothing.
    """
    state = jax.eval_shape(steps.init, jax.eval_shape(lambda: jax.random.key(0)))
    if misfit := misfit_of(open_checkpoint(folder.checkpoints, done).stored, state):
        raise CheckpointError(
            f"the run in {folder.root} has another state than the model and the optimizer have now: {misfit}. Set "
            "their code back, choose another checkpoint.dir, or start over with --fresh"
        )


def computed_model(config: TrainConfig) -> ModelConfig:
    """The decoder of ``config`` with the dtype that it computes in."""
    assert isinstance(config.model, ModelConfig)
    if config.precision is None:
        return config.model
    precision = config.precision.precision
    return config.model.model_copy(update={"dtype": precision.compute or precision.params})
