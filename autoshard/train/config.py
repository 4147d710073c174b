"""The configuration of a training run in YAML: model, data, optimizer, and the meshes that it runs on in turn."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    PrivateAttr,
    StrictInt,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from autoshard.batches.sizes import batch_sizes
from autoshard.errors import ArgumentError, ConfigError
from autoshard.machine.mesh_config import MeshConfig
from autoshard.strict_config import PLACE, Config, load_yaml
from autoshard.train.calls import ENTRIES_OR_CALL, IMPORTS, Call, LossCall, ModelCall
from autoshard.train.config_parts import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    MeshEntry,
    ModelEntry,
    PadConfig,
    Phase,
    ProfileConfig,
    WandbConfig,
)
from autoshard.train.data import VOCAB
from autoshard.train.models.decoder import MAX_SIZE, ModelConfig
from autoshard.train.non_finite import PATTERN
from autoshard.train.optimizer import MAX_STEPS, OptimizerConfig, resumed
from autoshard.train.precision import PrecisionConfig
from autoshard.transforms.held_values.names import LayerCounts

Strategy = Literal[
    "auto",
    "dp",
    "dp+offload:optimizer",
    "dp+offload:state",
    "fsdp",
    "fsdp+offload:optimizer",
    "fsdp+offload:state",
    "fsdp_tp",
    "fsdp_tp+offload:optimizer",
    "fsdp_tp+offload:state",
    "offload:optimizer",
    "offload:state",
    "replicated",
    "replicated+offload:optimizer",
    "replicated+offload:state",
    "tp",
    "tp+offload:optimizer",
    "tp+offload:state",
    "zero1",
    "zero1+offload:optimizer",
    "zero1+offload:state",
    "zero2",
    "zero2+offload:optimizer",
    "zero2+offload:state",
    "zero3",
    "zero3+offload:optimizer",
    "zero3+offload:state",
]


_PLACED = (
    *("model", "data", "optimizer", "loss", "step", "batch", "micro_batch", "platform"),
    *("eval.data", "checkpoint.dir"),
)
"""Entries that something may be said of after the configuration was read."""


class TrainConfig(Config):
    """A training run. Either ``mesh`` and ``steps``, or ``phases`` if the mesh changes during the run.

    Model, data, optimizer and loss may be one's own, as ``{call: "package.module:name", with: {width: 512}}``:

    - ``model``: a Flax NNX or Linen module, or the functions ``(init, apply)``; see `autoshard.train.models.own_model`.
    - ``data``: batches, as `autoshard.train.fit` takes them, or arrays, whose rows are shuffled by ``seed``.
    - ``optimizer``: an `optax.GradientTransformation`.
    - ``loss``: called with the model's outputs and the batch, gives a scalar, or a scalar and metrics by name.
    - ``step``, in place of model, optimizer and loss: ``(init, step)`` or ``(init, step, evaluate)``.
    """

    model: Annotated[ModelEntry | Annotated[ModelCall, Tag("a call")], ENTRIES_OR_CALL] | None = None
    """A decoder's entries, the path of their file, or a call."""
    data: Annotated[Annotated[DataConfig, Tag("entries")] | Annotated[Call, Tag("a call")], ENTRIES_OR_CALL] = (
        DataConfig()
    )
    """Text, or a call."""
    optimizer: Annotated[
        Annotated[OptimizerConfig, Tag("entries")] | Annotated[Call, Tag("a call")], ENTRIES_OR_CALL
    ] = OptimizerConfig()
    """Entries of AdamW, or a call."""
    pad: PadConfig | None = None
    """Sizes to which batches of one's own are padded."""
    loss: LossCall | None = None
    """A call; left out, cross-entropy of integer ``targets``."""
    step: Call | None = None
    """A call, in place of model, optimizer and loss."""
    precision: PrecisionConfig | None = None
    """The dtypes of parameters, of what is computed, and of a master copy; the loss's scale."""
    batch: StrictInt = Field(ge=1, le=MAX_SIZE)
    """Sequences per step, over all devices."""
    mesh: MeshEntry | None = None
    """A mesh's entries, the path of its file, or the name of a shipped one."""
    steps: StrictInt | None = Field(default=None, ge=1, le=MAX_STEPS)
    """Number of the last step."""
    phases: Annotated[tuple[Phase, ...], Field(validate_default=True)] = ()
    """In place of mesh and steps: meshes that the run is on in turn."""
    strategy: Strategy = "auto"
    """How layouts are chosen: solved for, or a preset; see `autoshard.jit`."""
    refine: StrictInt = Field(default=0, ge=0)
    """Number of layouts of the step to compile and choose from; see `autoshard.jit`."""
    microbatches: StrictInt | None = Field(default=None, ge=1)
    """Parts in which a step computes its batch; see `autoshard.jit`."""
    micro_batch: StrictInt | None = Field(default=None, ge=1, le=MAX_SIZE)
    """Sequences that a device computes at a time: ``batch`` is this, times ``microbatches``, times the sizes of
    ``data_axes``. With it ``microbatches`` is derived for each mesh, or has to agree."""
    data_axes: tuple[str, ...] = ("data",)
    """Mesh axes that ``micro_batch`` counts as splitting the batch."""
    recompute: dict[str, StrictInt | str] | None = None
    """What the backward part makes again, or what is in the host's memory meanwhile, by name or pattern, and in how
    many layers: ``{"*.mlp.up": 12, attention: all, "*.mlp.gate": host}``; left out, the planner decides. See
    `autoshard.jit`."""
    passes: tuple[str, ...] | None = None
    """Rewrites of the step before it is planned; left out, those of `autoshard.jit`."""
    eval: EvalConfig = EvalConfig()
    """When the held-out loss is taken, and of how many batches."""
    checkpoint: CheckpointConfig
    """Where the run is kept, and how often."""
    nan: str | None = Field(default=None, pattern=rf"^({PATTERN})$")
    """After a step that is NaN or infinite: ``stop``, ``skip``, or ``rewind 20``; see `autoshard.train.fit`."""
    seed: StrictInt = Field(default=0, ge=0)
    """Of the parameters and of the order of the data."""
    log_every: StrictInt = Field(default=10, ge=1)
    """Steps between two progress lines if the output is not a terminal."""
    profile: ProfileConfig | None = None
    """``{steps: [100, 105]}`` records those for xprof; left out, none."""
    wandb: WandbConfig | None = None
    """``{project: NAME}`` sends metrics to Weights & Biases too; left out, none."""
    platform: Literal["cpu", "gpu", "tpu"] | None = None
    """The JAX platform to run on; None is JAX's default."""

    _at: dict[str, str] = PrivateAttr(default={})

    def model_post_init(self, context: Any, /) -> None:
        place = (context or {}).get(PLACE)
        for key in _PLACED:
            self._at[key] = f"{place(tuple(key.split('.')))}: {key}: " if place else f"{key}: "
        calls = {key: getattr(self, key) for key in _PLACED if "." not in key} | {"eval.data": self.eval.data}
        for key, call in calls.items():
            if isinstance(call, Call):
                call.stands(self.at(key))

    def at(self, key: str) -> str:
        """Where the entry ``key`` stands, before what is said of it: ``FILE:LINE: KEY: ``."""
        return self._at[key]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        given = [key for key in ("model", "optimizer", "loss") if key in self.model_fields_set]
        if self.step is not None and given:
            raise ValueError(f"a whole `step` has its own {', '.join(given)}: leave out one or the other")
        if self.step is None and self.model is None:
            raise ValueError("give a `model`, or a whole `step` in its place")
        if self.step is not None and self.precision is not None:
            raise ValueError("a whole `step` has its own precision: wrap it with autoshard.train.Precision")
        if (
            isinstance(self.model, ModelConfig)
            and self.precision is not None
            and "dtype" in self.model.model_fields_set
        ):
            raise ValueError(
                "the model has a `dtype`, and `precision` says what is computed with: leave out one of them"
            )
        text, decoder = isinstance(self.data, DataConfig), isinstance(self.model, ModelConfig)
        if text and isinstance(self.model, ModelConfig) and self.model.vocab < VOCAB:
            raise ValueError(f"model: vocab is {self.model.vocab}; a token is a byte, so it must be {VOCAB} or more")
        if isinstance(self.data, DataConfig) and (self.data.seq is None) != decoder:
            wrong = "is that of the model, and cannot be set for the data" if decoder else "is needed under `data`"
            raise ValueError(f"`seq`, the length of a sequence of text, {wrong}")
        if text and self.pad is not None:
            raise ValueError("`pad` is for data of one's own: text is cut into windows of one length")
        if text and self.eval.data is not None:
            raise ValueError("`eval.data` is for data of one's own: text has held-out files")
        return self

    @field_validator("nan", mode="before")
    @classmethod
    def _policy(cls, nan: object) -> object:
        if nan is not None and not re.fullmatch(PATTERN, str(nan)):
            raise ValueError("write 'stop', 'skip', or 'rewind 20' for 20 steps")
        return nan

    @field_validator("recompute", mode="before")
    @classmethod
    def _layer_counts(cls, asked: object) -> object:
        for name, count in asked.items() if isinstance(asked, Mapping) else ():
            is_count = type(count) is int and count >= 0
            if not is_count and (not isinstance(count, str) or LayerCounts.parse(count) is None):
                raise ValueError(
                    f"{name}: {count!r} is no number of layers; write one, or 'all', 'host', 'host:4' for four layers "
                    "on the host, or '12+host' for those after twelve"
                )
        return asked

    @model_validator(mode="after")
    def _one_recompute(self) -> Self:
        if self.recompute is not None and self.passes is not None:
            raise ValueError("give `recompute`, or `recompute:...` among `passes`, and not both")
        return self

    @field_validator("phases")
    @classmethod
    def _one_schedule(cls, phases: tuple[Phase, ...], info: ValidationInfo) -> tuple[Phase, ...]:
        single = [info.data[key] is not None for key in ("mesh", "steps") if key in info.data]
        if any(single) if phases else not all(single):
            raise ValueError(
                "give either `mesh` and `steps`, or `phases`, a list with a `mesh` and an `until` in each entry"
            )
        ends = [phase.until for phase in phases]
        if ends != sorted(set(ends)):
            raise ValueError(f"the phases end at steps {ends}; each must end after the one before")
        return phases

    @property
    def all_phases(self) -> tuple[Phase, ...]:
        """The phases; one if the run has one mesh."""
        if self.mesh is not None and self.steps is not None:
            return (Phase(mesh=self.mesh, until=self.steps),)
        return self.phases

    @property
    def last_step(self) -> int:
        """The step with which the run ends."""
        return self.all_phases[-1].until

    @property
    def min_devices(self) -> int:
        """The most devices that a phase's mesh needs at least; 1 if no mesh fixes an axis size."""
        return max(phase.mesh.min_devices for phase in self.all_phases)

    def on_mesh(self, mesh: MeshConfig) -> TrainConfig:
        """This configuration with ``mesh`` in the place of each phase's."""
        phases = tuple(phase.model_copy(update={"mesh": mesh}) for phase in self.phases)
        return self.model_copy(update={"phases": phases} if phases else {"mesh": mesh})

    def entries(self) -> dict[str, Any]:
        """All entries by dotted key, but for where this process finds the text."""
        found = _dotted("", self.model_dump(mode="json", by_alias=True))
        return {key.removeprefix("."): value for key, value in found.items() if key != ".data.source"}

    def microbatches_on(self, mesh: MeshConfig) -> int | None:
        """The parts in which a step computes its batch on a mesh; None leaves them to the planner.

        Raises:
          ConfigError: batch, micro-batch and mesh contradict each other, or the mesh leaves its axes open.
        """
        if self.micro_batch is None:
            return self.microbatches
        if mesh.axes == "auto":
            raise ConfigError(
                f"{self.at('micro_batch')}it needs a mesh with axes, to know how many devices split the batch"
            )
        axes = mesh.mesh().shape
        shards = math.prod(axes[name] for name in self.data_axes if name in axes)
        try:
            sizes = batch_sizes(self.batch, micro=self.micro_batch, accumulation=self.microbatches, shards=shards)
        except ArgumentError as error:
            raise ConfigError(f"{self.at('micro_batch')}on {mesh.mesh()}: {error}") from None
        return sizes.accumulation

    def resuming(self, settings: Mapping[str, Any]) -> TrainConfig:
        """This configuration for a run that was begun with ``settings``, as `state_settings` gives them.

        Where no end of the learning rate's decay is given, it is that of the run; see `autoshard.train.optimizer`.

        Raises:
          ConfigError: another one is given.
        """
        optimizer = self.optimizer
        if not isinstance(optimizer, OptimizerConfig) or self.step is not None:
            return self
        try:
            kept = resumed(optimizer, settings.get("optimizer.decay_steps"))
        except ConfigError as error:
            raise ConfigError(f"{self.at('optimizer')}{error}") from None
        return self if kept is optimizer else self.model_copy(update={"optimizer": kept})

    def state_settings(self) -> dict[str, Any]:
        """The entries that a saved state depends on, by dotted key; they must be equal in a resumed run."""
        optimizer = self.optimizer
        if isinstance(optimizer, OptimizerConfig):
            optimizer = optimizer.model_copy(update={"decay_steps": optimizer.decay_steps or self.last_step})
        own = {"loss": self.loss, "step": self.step} if self.step is not None or self.loss is not None else {}
        parts = {"step": self.step} if self.step is not None else {"model": self.model, "optimizer": optimizer, **own}
        padded: dict[str, Config] = {} if self.pad is None else {"pad": self.pad}
        padded |= {} if self.precision is None else {"precision": self.precision}
        given = {"data": self.data, **padded, **{key: part for key, part in parts.items() if part is not None}}
        entries = {key: part.model_dump(mode="json", by_alias=True) for key, part in given.items()}
        return {
            **{name: value for key, part in entries.items() for name, value in _dotted(key, part).items()},
            "batch": self.batch,
            "seed": self.seed,
        }


def _dotted(prefix: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {key: leaf for name, inner in value.items() for key, leaf in _dotted(f"{prefix}.{name}", inner).items()}


def named_config(path: str | os.PathLike[str]) -> TrainConfig:
    """The configuration in the file at ``path``, which a person named: what it calls is imported.

    Raises:
      ConfigError: as `TrainConfig.load`; or something that it calls is not there, or takes other arguments.
    """
    return load_yaml(path, TrainConfig, {IMPORTS: True})
