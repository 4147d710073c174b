"""The strict YAML reader of every configuration.

An unknown key, a repeated key or an invalid value is a `ConfigError` that names the file, the line, the key and the
nearest thing that works: a misspelt key must not pass silently. What is read is YAML of text, numbers, true, false and
null, without tags and of bounded size, so that a file of any content is read or refused at once.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NoReturn, Self, get_args

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

from autoshard import strict_files
from autoshard.errors import ConfigError, closest, meant, nearest
from autoshard.strict_files import cut, shortened

MAX_BYTES = 2**18
"""Of a configuration file."""
MAX_ENTRIES = 5_000
"""Keys, values and items in a file, those that an alias repeats counted again."""
MAX_DEPTH = 32
"""Of mappings and lists in each other."""
MAX_MISTAKES = 20
"""Invalid entries that one error names."""

PLACE = "place"
"""Of a validation's context: gives the file and line, ``FILE:LINE``, of the entry at some keys."""

type Keys = tuple[int | str, ...]

_SCALARS = {"bool", "float", "int", "null"}
"""What a plain scalar may be beside text: no date, and no merge of mappings."""
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def parse_bytes(value: object) -> int:
    """The number of bytes that an int or text such as ``"14GiB"``, ``"80 GB"`` or ``"1.5e9"`` says.

    Raises:
      ValueError: not a size, less than one byte, or 8 EiB and more.
    """
    text = str(value)
    match = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([A-Za-z]*)", text.strip()) if len(text) < 100 else None
    if isinstance(value, bool) or match is None or match[2] not in _UNITS:
        units = ", ".join(filter(None, _UNITS))
        raise ValueError(f"{shortened(value)} is not a size in bytes; write a number and one of {units}")
    try:
        size = float(match[1]) * _UNITS[match[2]]
    except ValueError:
        raise ValueError(f"{value!r} is not a size in bytes: {match[1]!r} is not a number") from None
    if not 1 <= size < 2**63:
        raise ValueError(f"{value!r} is {'less than one byte' if size < 1 else '8 EiB or more'}")
    return int(size)


Bytes = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | float | str)]
"""A pydantic field in bytes: an int or text such as ``"14GiB"``."""


class Config(BaseModel):
    """Base of every configuration: frozen, refuses unknown keys, and raises `ConfigError`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)
    """The text below a field is its description in the schema."""

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


def load_yaml[Model: BaseModel](
    path: str | os.PathLike[str], model: type[Model], context: Mapping[str, Any] | None = None
) -> Model:
    """The ``model`` that the YAML file at ``path`` describes.

    Args:
      context: for the validators of ``model``, beside the file's name.

    Raises:
      ConfigError: no such file, YAML that does not parse, or an entry that is unknown, repeated, missing or invalid;
        names every such entry with its line.
    """
    return parse_yaml(read_text(path), str(epath.Path(path)), model, context)


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of the configuration file at ``path``.

    Raises:
      ConfigError: no such file, or one that is too large or not UTF-8.
    """
    file = epath.Path(path)
    try:
        return strict_files.read_text(file, MAX_BYTES)
    except ValueError as error:
        raise ConfigError(f"cannot read {cut(str(file))}: {error}") from None
    except OSError as error:
        beside = {f.stem: f.name for f in file.parent.glob("*.yaml")} if file.parent.is_dir() else {}
        near = meant([beside[stem] for stem in closest(file.stem, beside)])
        raise ConfigError(f"cannot read {cut(str(file))}: {error.strerror}{near}") from None


def parse_yaml[Model: BaseModel](
    text: str, file: str, model: type[Model], context: Mapping[str, Any] | None = None
) -> Model:
    """The ``model`` that ``text``, the content of ``file``, describes; as `load_yaml`."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        values: Any = {} if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        remedy = ": indent with spaces" if "'\\t'" in str(error.problem) else ""
        raise ConfigError(f"{file}:{line}: {cut(str(error.problem))}{remedy}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{file}:{line}: the character {error.character:#x} is not allowed in YAML") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}:1: expected keys and values, found {type(values).__name__}")

    def place(keys: Keys) -> str:
        return f"{file}:{_line_of(node, keys)}"

    try:
        return model.model_validate(values, context={**(context or {}), "file": file, PLACE: place})
    except ValidationError as error:
        raise ConfigError("\n".join(_error_lines(model, error, values, place))) from None


class _Loader(yaml.SafeLoader):
    """A safe YAML loader that refuses repeated keys, tags and what is too large, and reads ``1e-5`` as a number."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._entries = 0
        self._extents: dict[str, int] = {}
        """Entries of each anchored node that is complete, by its anchor."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()
        anchor, alias, before = event.anchor, isinstance(event, yaml.AliasEvent), self._entries
        if not alias and event.tag not in (None, "!"):
            _refuse(f"the tag {cut(event.tag)} is not read: write a plain value", event)
        if alias and anchor in self.anchors and anchor not in self._extents:
            _refuse(f"*{cut(anchor)} repeats what it stands in", event)
        self._entries += self._extents.get(anchor, 1) if alias else 1
        if self._entries > MAX_ENTRIES:
            _refuse(f"a configuration has {MAX_ENTRIES:,} entries at most, with those that are repeated", event)
        if self._depth == MAX_DEPTH:
            _refuse(f"nested more than {MAX_DEPTH} levels deep", event)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if anchor is not None and not alias:
            self._extents[anchor] = self._entries - before
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                _refuse("a key is one word or number", key_node)
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                _refuse(f"{cut(str(key))}: repeated key, first on line {seen[key]}", key_node)
            seen[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        try:
            value = super().construct_yaml_int(node)
        except ValueError:
            value = None
        if value is None or value.bit_length() > 63:
            _refuse(f"{cut(node.value)} is not an integer of 64 bits", node)
        return value

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        try:
            return super().construct_yaml_float(node)
        except (ValueError, OverflowError):
            _refuse(f"{cut(node.value)} is not a number", node)

    def construct_yaml_str(self, node: yaml.ScalarNode) -> str:
        if "\0" in node.value or any("\ud800" <= letter <= "\udfff" for letter in node.value):
            _refuse("text with a character that no path or name has", node)
        return node.value


def _refuse(problem: str, at: Any) -> NoReturn:
    """Refuses a node or an event."""
    raise yaml.constructor.ConstructorError(None, None, problem, at.start_mark)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] in _SCALARS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name in ("int", "float", "str"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_name}", getattr(_Loader, f"construct_yaml_{_name}"))
# YAML 1.1, which PyYAML implements, requires a dot and a signed exponent; people write 1e-5.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _error_lines(
    model: type[BaseModel], error: ValidationError, values: object, where: Callable[[Keys], str]
) -> Iterator[str]:
    """One line for each entry that ``error`` is about, unknown keys first: its place, its key path, what is wrong.

    Where a key is unknown, a rule about entries that are not given beside it is not what was broken: one of them may be
    the one that is misspelt.
    """
    by_keys: dict[Keys, list[ErrorDetails]] = {}
    details = sorted(error.errors(include_url=False), key=lambda item: item["type"] != "extra_forbidden")
    unknown = {item["loc"][:-1] for item in details if item["type"] == "extra_forbidden"}
    for item in details:
        keys = _key_path(item["loc"], values, missing=item["type"] == "missing")
        is_given = item["type"] != "value_error" or keys[-1:] == item["loc"][-1:]
        if is_given or item["loc"][:-1] not in unknown:
            by_keys.setdefault(keys, []).append(item)
    for keys, items in itertools.islice(by_keys.items(), MAX_MISTAKES):
        path = "".join(f"[{k}]" if isinstance(k, int) else f".{cut(k)}" for k in keys).lstrip(".")
        texts = dict.fromkeys(cut(_error_text(model, item, keys), 400) for item in items[:MAX_MISTAKES])
        yield ": ".join(filter(None, (where(keys), path, ", or ".join(texts))))
    if len(by_keys) > MAX_MISTAKES:
        yield f"and {len(by_keys) - MAX_MISTAKES:,} more entries"


def _error_text(model: type[BaseModel], item: ErrorDetails, keys: Keys) -> str:
    match item["type"]:
        case "extra_forbidden":
            return f"unknown key{nearest(str(keys[-1]), _known_keys(model, keys))}"
        case "missing":
            return "this key is required"
        case "value_error":
            return str(item.get("ctx", {}).get("error", item["msg"]))
        case _:
            return f"{item['msg'].replace('Input should', 'should')}; it is {shortened(item['input'])}"


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
    return {field.alias or name for m in models for name, field in m.model_fields.items()}


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
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
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
