"""The strict YAML reader of every configuration.

An unknown key, a repeated key or an invalid value is a `ConfigError` that names the file, the line, the key and the
nearest thing that works: a misspelt key must not pass silently.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Self, get_args

import yaml
from etils import epath
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails

from autoshard.errors import ConfigError, nearest

type Keys = tuple[int | str, ...]

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def parse_bytes(value: object) -> int:
    """The number of bytes that an int or text such as ``"14GiB"``, ``"80 GB"`` or ``"1.5e9"`` says.

    Raises:
      ValueError: not a size, or less than one byte.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
    if isinstance(value, bool) or match is None or match[2] not in _UNITS:
        units = ", ".join(filter(None, _UNITS))
        raise ValueError(f"{value!r} is not a size in bytes; write a number and one of {units}")
    try:
        size = int(float(match[1]) * _UNITS[match[2]])
    except ValueError:
        raise ValueError(f"{value!r} is not a size in bytes: {match[1]!r} is not a number") from None
    if size < 1:
        raise ValueError(f"{value!r} is less than one byte")
    return size


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
"""A pydantic field in bytes: an int or text such as ``"14GiB"``."""


class Config(BaseModel):
    """Base of every configuration: frozen, refuses unknown keys, and raises `ConfigError`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="wrap")
    @classmethod
    def _explained(cls, values: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        if info.context is not None:  # parse_yaml adds the file and its lines to the error
            return handler(values)
        try:
            return handler(values)
        except ValidationError as error:
            raise ConfigError("\n".join(_error_lines(cls, error, values, lambda _: cls.__name__))) from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The configuration in the YAML file at ``path``.

        Raises:
          ConfigError: no such file, or an entry that is unknown, repeated, missing or invalid.
        """
        return load_yaml(path, cls)


def load_yaml[Model: BaseModel](path: str | os.PathLike[str], model: type[Model]) -> Model:
    """The ``model`` that the YAML file at ``path`` describes.

    Raises:
      ConfigError: no such file, YAML that does not parse, or an entry that is unknown, repeated, missing or invalid;
        names every such entry with its line.
    """
    return parse_yaml(read_text(path), str(epath.Path(path)), model)


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of the file at ``path``.

    Raises:
      ConfigError: no such file.
    """
    file = epath.Path(path)
    try:
        return file.read_text()
    except OSError as error:
        beside = [f.name for f in file.parent.glob("*.yaml")] if file.parent.is_dir() else []
        raise ConfigError(f"cannot read {file}: {error.strerror}{nearest(file.name, beside)}") from None


def parse_yaml[Model: BaseModel](text: str, file: str, model: type[Model]) -> Model:
    """The ``model`` that ``text``, the content of ``file``, describes; as `load_yaml`."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        values: Any = {} if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{file}:{line}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}:1: expected keys and values, found {type(values).__name__}")
    try:
        return model.model_validate(values, context={"file": file})
    except ValidationError as error:
        raise ConfigError(
            "\n".join(_error_lines(model, error, values, lambda keys: f"{file}:{_line_of(node, keys)}"))
        ) from None


class _Loader(yaml.SafeLoader):
    """A safe YAML loader that refuses repeated keys and reads ``1e-5`` as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key}: repeated key, first on line {seen[key]}", key_node.start_mark
                )
            seen[key] = line
        return super().construct_mapping(node, deep)


# YAML 1.1, which PyYAML implements, requires a dot and a signed exponent; people write 1e-5.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _error_lines(
    model: type[BaseModel], error: ValidationError, values: object, where: Callable[[Keys], str]
) -> Iterator[str]:
    """One line for each entry that ``error`` is about: its place, its key path, what is wrong."""
    by_keys: dict[Keys, list[str]] = {}
    for item in error.errors(include_url=False):
        keys = _key_path(item["loc"], values, missing=item["type"] == "missing")
        by_keys.setdefault(keys, []).append(_error_text(model, item, keys))
    for keys, texts in by_keys.items():
        path = "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in keys).lstrip(".")
        yield ": ".join(filter(None, (where(keys), path, ", or ".join(dict.fromkeys(texts)))))


def _error_text(model: type[BaseModel], item: ErrorDetails, keys: Keys) -> str:
    match item["type"]:
        case "extra_forbidden":
            return f"unknown key{nearest(str(keys[-1]), _known_keys(model, keys))}"
        case "missing":
            return "this key is required"
        case "value_error":
            return str(item.get("ctx", {}).get("error", item["msg"]))
        case _:
            return f"{item['msg'].replace('Input should', 'should')}; it is {item['input']!r}"


def _key_path(loc: tuple[int | str, ...], values: Any, missing: bool) -> Keys:
    """The keys of ``loc``, without the parts by which pydantic names the member of a union that it tried."""
    keys: list[int | str] = []
    for part in loc:
        match values:
            case dict() if part in values:
                values = values[part]
            case list() | tuple() if isinstance(part, int) and part < len(values):
                values = values[part]
            case _:
                continue
        keys.append(part)
    return (*keys, loc[-1]) if missing else tuple(keys)


def _known_keys(model: type[BaseModel], keys: Keys) -> set[str]:
    """The valid keys in place of the last of ``keys``."""
    models = [model]
    for key in keys[:-1]:  # an index or the key of a dict field names no model field: the models stay the same
        fields = [m.model_fields[key] for m in models if isinstance(key, str) and key in m.model_fields]
        models = [inner for field in fields for inner in _nested_models(field.annotation)] if fields else models
    return {name for m in models for name in m.model_fields}


def _nested_models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Every model class inside a type such as ``dict[str, A | B]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _nested_models(argument)


def _line_of(node: yaml.Node | None, keys: Keys) -> int:
    """Line of the entry at ``keys``, or of its innermost parent that is in the file."""
    line = 1
    for key in keys:
        if isinstance(node, yaml.MappingNode):
            entry = next(((k, v) for k, v in node.value if k.value == str(key)), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int):
            entry = (node.value[key], node.value[key])
        else:
            entry = None
        if entry is None:
            break
        line, node = entry[0].start_mark.line + 1, entry[1]
    return line


def shipped_configs(folder: str) -> list[epath.Path]:
    """The configs of ``configs/FOLDER`` that ship with autoshard."""
    return sorted((epath.resource_path("autoshard") / "configs" / folder).glob("*.yaml"))


def find_config(folder: str, name: str | os.PathLike[str]) -> epath.Path:
    """The file that ``name`` is the path of; a bare name is that of a file that ships with autoshard.

    Raises:
      ConfigError: no such file ships.
    """
    path = epath.Path(name)
    if path.suffix or len(path.parts) > 1:
        return path
    known = {file.stem: file for file in shipped_configs(folder)}
    if str(path) not in known:
        raise ConfigError(f"no {folder} config is named {str(path)!r}{nearest(str(path), known)}")
    return known[str(path)]
