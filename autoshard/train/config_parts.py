"""The parts of a training configuration that have entries of their own."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from etils import epath
from pydantic import AfterValidator, BeforeValidator, Field, StrictInt, Tag, ValidationInfo, model_validator

from autoshard.batches.padding import Padding
from autoshard.errors import ArgumentError
from autoshard.machine.mesh_config import MeshConfig, mesh_config
from autoshard.strict_config import Config
from autoshard.train.calls import Call
from autoshard.train.data import STDLIB
from autoshard.train.models.decoder import MAX_SIZE, ModelConfig
from autoshard.train.optimizer import MAX_STEPS


def _relative_path(value: str, info: ValidationInfo) -> epath.Path:
    """The path ``value``, relative to the configuration file that has it."""
    return epath.Path((info.context or {}).get("file", "")).parent / value


def _read_model(value: object, info: ValidationInfo) -> object:
    return ModelConfig.load(_relative_path(value, info)) if isinstance(value, str) else value


def _read_mesh(value: Any, info: ValidationInfo) -> object:
    if not isinstance(value, str):
        return value
    is_shipped = "/" not in value and not value.endswith(".yaml")  # "cpu-8" ships with autoshard
    return mesh_config(value if is_shipped else _relative_path(value, info))


def _read_source(value: str, info: ValidationInfo) -> str:
    return value if value == STDLIB else str(_relative_path(value, info).expanduser().resolve())


ModelEntry = Annotated[
    ModelConfig, BeforeValidator(_read_model, json_schema_input_type=ModelConfig | str), Tag("entries")
]
"""A model's entries, or the path of its file relative to the configuration file."""
MeshEntry = Annotated[MeshConfig, BeforeValidator(_read_mesh, json_schema_input_type=MeshConfig | str)]
"""A mesh's entries, the path of its file relative to the configuration file, or the name of a shipped one."""


class Phase(Config):
    """The part of the run on one mesh: from the end of the phase before it to step ``until``."""

    mesh: MeshEntry
    """A mesh's entries, the path of its file, or the name of a shipped one."""
    until: StrictInt = Field(ge=1, le=MAX_STEPS)
    """Number of the phase's last step, counted from the start of the run."""


class DataConfig(Config):
    """The text, whose files are split into training and held-out ones; see `autoshard.train.data.corpus`."""

    source: Annotated[str, AfterValidator(_read_source)] = STDLIB
    """``stdlib``, the sources of the Python standard library, or a directory or a file, relative to the configuration
    file."""
    include: tuple[str, ...] | None = None
    """Globs on a file's name relative to ``source``; left out, all, and of ``stdlib`` its ``*.py``."""
    exclude: tuple[str, ...] | None = None
    """Globs on the name of a file, or of a directory on its path; left out, of ``stdlib`` its tests."""
    holdout: StrictInt = Field(default=10, ge=2)
    """One file in this many is held out; of a single file, one byte in this many, the last."""
    seq: StrictInt | None = Field(default=None, ge=2, le=MAX_SIZE)
    """Bytes in a sequence, for a model of one's own; the decoder has its own ``seq``."""


class EvalConfig(Config):
    """Held-out loss: every ``every`` steps and at the end of a phase over ``batches`` batches; at the end of the run
    over ``final_batches``, of text in the order of the files.
    """

    every: StrictInt | None = Field(default=None, ge=1)
    """Steps between two evaluations; left out, only at the end of a phase."""
    batches: StrictInt = Field(default=8, ge=1)
    """Held-out batches of an evaluation."""
    final_batches: StrictInt | None = Field(default=None, ge=1)
    """The same at the end of the run; left out, all whole batches of text or of arrays, and ``batches`` of what else
    gives them."""
    data: Call | None = None
    """What gives the held-out batches of data of one's own: as ``data``, and always the same. Without it the run has no
    held-out loss."""


class PadConfig(Config):
    """The sizes to which batches of one's own are padded; see `autoshard.train.Padding`."""

    buckets: tuple[dict[str, StrictInt], ...] = Field(max_length=64)
    """Sizes by the names of dimensions: a batch goes into the first that holds it."""
    dims: dict[str, tuple[str | None, ...]]
    """The names of the dimensions of each array; null where one is never padded."""
    fill: dict[str, float] = Field(default={})
    """The padding of an array, where it is not 0."""

    @property
    def padding(self) -> Padding:
        """What pads a batch."""
        return Padding(self.buckets, self.dims, self.fill)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        try:
            _ = self.padding
        except ArgumentError as error:
            raise ValueError(str(error)) from None
        return self


class CheckpointConfig(Config):
    """The run's folder, relative to the working directory, and how often its state is saved."""

    dir: str = Field(min_length=1)
    """The run's folder, relative to the working directory: log, metrics, plans, report and checkpoints."""
    every: StrictInt = Field(default=100, ge=1)
    """Steps between two checkpoints."""
    keep: StrictInt | None = Field(default=2, ge=1)
    """Number of checkpoints to keep, the newest; None keeps all."""


class ProfileConfig(Config):
    """Steps that are recorded for xprof, in the run's folder, by the first process."""

    steps: tuple[StrictInt, StrictInt]
    """The first and the last."""

    @property
    def range(self) -> range:
        """The numbers of the steps."""
        return range(self.steps[0], self.steps[1] + 1)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not 1 <= self.steps[0] <= self.steps[1]:
            raise ValueError(f"steps are {list(self.steps)}: give the first and the last, counted from 1")
        return self


class WandbConfig(Config):
    """A run at Weights & Biases, whose package is to be installed; the run's first process sends its metrics."""

    project: str = Field(min_length=1)
    """Of Weights & Biases."""
    name: str | None = None
    """Of the run there; left out, it is given one."""
    entity: str | None = None
    """Whose project it is; left out, that of who is logged in."""
    mode: Literal["online", "offline"] | None = None
    """``offline`` writes to the run's folder alone; left out, the package decides."""
