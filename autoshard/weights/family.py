"""A family of published models as data: names and layouts of its weights, and what its ``config.json`` means.

The files are ``configs/weights/*.yaml``. A leaf of our tree has a tensor's name and a `TensorLayout`:

    layers/attention/wq: [model.layers.{l}.self_attn.q_proj.weight, (h e) d -> l d h e]

``{l}`` counts tensors; ``{l+KEY}`` counts from the number on that ``config.json`` has as KEY.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from autoshard.checkpoint.manifest import first_line
from autoshard.errors import ConfigError, nearest
from autoshard.strict_config import Config, shipped_configs
from autoshard.strict_files import parse_json, read_text, shortened
from autoshard.weights.layout import TensorLayout

MAX_BYTES = 2**22
"""Of a ``config.json``."""
_COUNT = re.compile(r"\{([a-z])(?:\+(\w+))?\}")

type Settings = Mapping[str, Any]
"""What a ``config.json`` has."""


@dataclass(frozen=True)
class TensorRow:
    """How one leaf is in the files."""

    leaf: str
    template: str
    layout: TensorLayout

    @property
    def letters(self) -> tuple[str, ...]:
        """What counts tensors, in the order of the name."""
        return tuple(match[1] for match in _COUNT.finditer(self.template))

    def name(self, numbers: Mapping[str, int], config: Settings) -> str:
        """The name of the tensor with these numbers, each counted from 0."""
        return _COUNT.sub(lambda m: str(numbers[m[1]] + _start(m[2], config)), self.template)

    def numbered(self, names: Sequence[str], config: Settings) -> dict[tuple[int, ...], str]:
        """The names that are of this row, by their numbers in the order of `TensorLayout.counted`.

        A name that is there begins a number's row, so that a gap is seen by whoever asks for all numbers.
        """
        texts = _COUNT.split(self.template)
        pattern = re.compile(r"(0|[1-9]\d{0,6})".join(map(re.escape, texts[::3])))
        starts = [_start(key, config) for key in texts[2::3]]
        order = [self.letters.index(letter) for letter in self.layout.counted]
        found: dict[tuple[int, ...], str] = {}
        for name in names:
            if match := pattern.fullmatch(name):
                numbers = [int(text) - start for text, start in zip(match.groups(), starts, strict=True)]
                if min(numbers, default=0) >= 0:
                    found[tuple(numbers[at] for at in order)] = name
        return found


class Family(Config):
    """A family of models; see ``configs/weights/``."""

    model_type: str
    """As ``config.json`` says it."""
    architecture: str
    """The class of `transformers` whose weights these are."""
    model: str
    """The module of `autoshard.weights.models` that computes with them."""
    prefix: tuple[str, ...] = ("",)
    """Texts before the names of tensors, of which some publishers write one and some another; the first is written."""
    sizes: dict[str, int | str | tuple[str, ...]] = Field(default_factory=dict)
    """The size of a dimension by its letter: a number, or the key of ``config.json`` that has it, of several the
    first that is there."""
    settings: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Settings of the model, and the keys of ``config.json`` that may have them, with dots between nested ones."""
    defaults: dict[str, Any] = Field(default_factory=dict)
    """Settings of the model where ``config.json`` does not say them, or cannot."""
    requires: dict[str, Any] = Field(default_factory=dict)
    """Keys of ``config.json`` that, where they are there, must have this value."""
    inputs_first: bool = False
    """Whether the matrices of products are of inputs by outputs, and not of outputs by inputs."""
    drops: tuple[str, ...] = ()
    """Regular expressions of tensors' names that carry no weights."""
    leaves: dict[str, tuple[str, str]]
    """The name of the tensor and its layout, by leaf."""

    @field_validator("leaves")
    @classmethod
    def _readable(cls, leaves: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
        for leaf, (template, text) in leaves.items():
            row = TensorRow(leaf, template, TensorLayout.parse(text))
            if sorted(row.letters) != sorted(row.layout.counted):
                raise ValueError(f"{leaf}: {template} counts {row.letters}, and its layout {row.layout.counted}")
        return leaves

    @model_validator(mode="after")
    def _patterns(self) -> Self:
        for text in self.drops:
            try:
                re.compile(text)
            except re.error as error:
                raise ValueError(f"drops: {text!r} is no regular expression: {error}") from None
        return self

    @property
    def rows(self) -> Iterator[TensorRow]:
        """The leaves' rows, in the order of the file."""
        for leaf, (template, text) in self.leaves.items():
            yield TensorRow(leaf, template, TensorLayout.parse(text))

    def known_sizes(self, config: Settings) -> dict[str, int]:
        """The sizes that ``config`` says."""
        found: dict[str, int] = {}
        for letter, given in self.sizes.items():
            size = given if isinstance(given, int) else _first(config, _keys(given))
            if size is not None and (type(size) is not int or size < 0):
                raise ConfigError(f"{' or '.join(_keys(given))} is {shortened(size)}, and must be a size")
            if size is not None:
                found[letter] = size
        return found

    def model_settings(self, config: Settings) -> dict[str, Any]:
        """What the model in `autoshard.weights.models` takes as its settings.

        Raises:
          ConfigError: the config asks for what the model does not do.
        """
        for key, wanted in self.requires.items():
            value = _at(config, key, wanted)
            if value != wanted:
                raise ConfigError(
                    f"{key} is {shortened(value)}, and models of type {self.model_type} are read with {wanted!r} alone"
                )
        found = {field: _first(config, keys) for field, keys in self.settings.items()}
        return self.defaults | {field: value for field, value in found.items() if value is not None}

    def config_of(self, settings: Settings, sizes: Mapping[str, int]) -> dict[str, Any]:
        """The ``config.json`` of a model with such settings and sizes of dimensions."""
        made: dict[str, Any] = {"model_type": self.model_type, "architectures": [self.architecture]}
        for key, value in self.requires.items():
            _put(made, key, value)
        for letter, given in self.sizes.items():
            for key in _keys(given) if letter in sizes else ():
                _put(made, key, sizes[letter])
        for field, keys in self.settings.items():
            if field in settings:
                for key in keys:
                    _put(made, key, settings[field])
        return made

    def without_prefix(self, names: Sequence[str], config: Settings) -> dict[str, str]:
        """The names of tensors that carry weights, by what follows the prefix; see `prefix`."""
        templates = list(self.rows)

        def fitting(prefix: str) -> int:
            rest = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
            return sum(bool(row.numbered(rest, config)) for row in templates)

        prefix = max(self.prefix, key=fitting)
        kept = [name for name in names if not any(re.fullmatch(text, name) for text in self.drops)]
        return {name.removeprefix(prefix): name for name in kept}


def families() -> dict[str, Family]:
    """The families that are known, by `Family.model_type`."""
    found = [Family.load(path) for path in shipped_configs("weights")]
    return {family.model_type: family for family in found}


def family_of(config: Settings) -> Family:
    """The family of a model with such a ``config.json``.

    Raises:
      ConfigError: it is of none that is known.
    """
    known, name = families(), config.get("model_type")
    if name not in known:
        raise ConfigError(
            f"model_type {shortened(name)} is none of {', '.join(sorted(known))}{nearest(str(name), known)}"
        )
    return known[name]


def read_config(path: Any) -> dict[str, Any]:
    """The ``config.json`` at ``path``.

    Raises:
      ConfigError: it is not there, or no JSON object.
    """
    try:
        found = parse_json(read_text(path, MAX_BYTES))
        if not isinstance(found, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {first_line(error)}") from error
    return found


def _keys(given: int | str | tuple[str, ...]) -> tuple[str, ...]:
    """The keys of ``config.json`` that have a size."""
    return () if isinstance(given, int) else (given,) if isinstance(given, str) else given


def _start(key: str | None, config: Settings) -> int:
    """The number that a count begins at."""
    value = _at(config, key) if key else 0
    if type(value) is not int or value < 0:
        raise ConfigError(f"{key} is {shortened(value)}, and must be the number of a layer")
    return value


def _at(config: Settings, key: str, default: Any = None) -> Any:
    """The value of a key, with dots between nested ones."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def _first(config: Settings, keys: tuple[str, ...]) -> Any:
    """The value of the first of several keys that is there, or None."""
    return next((value for key in keys if (value := _at(config, key)) is not None), None)


def _put(config: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for part in parents:
        config = config.setdefault(part, {})
    config[last] = value
