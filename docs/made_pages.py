"""The pages of the reference that are made from the program: its command line, configurations, rules and errors.

    python -m docs.made_pages

writes them to `docs/reference/made/`, where `make docs` finds them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import typer.main

from autoshard import cli, errors
from autoshard import jaxpr as jx
from autoshard.machine.hardware import HardwareConfig
from autoshard.machine.mesh_config import MeshConfig
from autoshard.rules import FAMILIES, KEPT_WHOLE, OWN, STRUCTURAL, TABLE
from autoshard.rules.validation.samples import Sample, samples
from autoshard.train.config import TrainConfig

FOLDER = Path(__file__).parent / "reference" / "made"
CONFIGS = {"train": TrainConfig, "mesh": MeshConfig, "hardware": HardwareConfig}


def command_line() -> str:
    """Every command with its arguments, options and exit status."""
    lines = ["# Command line", "", "`autoshard COMMAND --help` prints the same.", ""]
    for path, command in _commands(typer.main.get_command(cli.app), ("autoshard",)):
        lines += [f"## `{' '.join(path)}`", "", _prose(command.help or ""), ""]
        rows = [(_usage(p), _cell(getattr(p, "help", None) or "")) for p in command.params if p.name != "help"]
        lines += _table(("argument or option", "meaning"), rows)
    return "\n".join(lines)


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """``command`` and those below it; a group that does nothing by itself is left out."""
    below: Mapping[str, Any] = getattr(command, "commands", {})
    if not below or command.invoke_without_command:
        yield path, command
    for name in sorted(below):
        yield from _commands(below[name], (*path, name))


def _usage(parameter: Any) -> str:
    shown = parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar or parameter.name.upper()
    default = parameter.default
    tail = "" if default is None or callable(default) or default in (False, ()) else f", {default} by default"
    tail += ", required" if parameter.required else ""
    return f"`{shown}`{tail}"


def configurations() -> str:
    """Every key of every kind of configuration, from the schemas that ``autoshard schema`` prints."""
    lines = [
        "# Configurations",
        "",
        "Files are YAML, read strictly: an unknown key, a repeated one or a wrong value is an error with its line. "
        "`autoshard schema NAME` prints the JSON schema that these tables are made from, for editors to complete by.",
        "",
    ]
    for name, model in CONFIGS.items():
        schema = model.model_json_schema(by_alias=True)
        inner = {n: d for n, d in schema.get("$defs", {}).items() if "properties" in d and n not in _titles(name)}
        lines += [f"## A `{name}` file", "", _prose(schema.get("description", "")), "", *_keys(schema)]
        for title, definition in inner.items():
            lines += [f"### {title}, within `{name}`", "", _prose(definition.get("description", "")), ""]
            lines += _keys(definition)
    return "\n".join(lines)


def _titles(name: str) -> set[str]:
    """Definitions that have a section of their own."""
    return {model.__name__ for other, model in CONFIGS.items() if other != name}


def _keys(schema: Mapping[str, Any]) -> list[str]:
    required = schema.get("required", ())
    rows = []
    for key, entry in schema["properties"].items():
        default = "required" if key in required else _default(entry.get("default"))
        rows.append((f"`{key}`", _type(entry), default, _cell(entry.get("description", ""))))
    return _table(("key", "value", "default", "meaning"), rows)


def _default(value: Any) -> str:
    """As YAML; a mapping of entries has its own table."""
    return "" if value is None else "its own" if isinstance(value, dict) and value else f"`{json.dumps(value)}`"


def _type(entry: Mapping[str, Any]) -> str:
    """What a value may be, in words."""
    if "$ref" in entry:
        return f"`{entry['$ref'].rpartition('/')[2]}`"
    if "const" in entry or "enum" in entry:
        return ", ".join(f"`{value}`" for value in entry.get("enum", [entry.get("const")]))
    for choice in ("anyOf", "oneOf", "allOf"):
        if choice in entry:
            return " or ".join(dict.fromkeys(_type(e) for e in entry[choice] if e.get("type") != "null"))
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = ", ".join(f"{sign} {entry[key]:,}" for key, sign in bounds.items() if key in entry)
    match entry.get("type"):
        case "array":
            inner = entry.get("items")
            return f"list of {_type(inner)}" if isinstance(inner, dict) else "list"
        case "object":
            inner = entry.get("additionalProperties")
            return f"mapping to {_type(inner)}" if isinstance(inner, dict) else "mapping"
        case None:
            return "any"
        case kind:
            return f"{kind} {limits}".strip()


def rules() -> str:
    """Every primitive of JAX: its rule on a sample, or why it has none."""
    of_samples = sample_rules()
    lines = [
        "# Rules",
        "",
        "How each primitive of JAX can be split. [A rule](../../concepts/rule.md) names the factors of an operation as "
        "`einsum` does; those in braces are not parallel; after the bar is what passes partial operands through. "
        "A rule is made for the operation's shapes and parameters: what is shown is that of one sample.",
        "",
    ]
    for family in FAMILIES:
        name = family.__name__.rpartition(".")[2]
        rows = [
            (f"`{p.name}`", f"`{_bar(of_samples[p.name])}`" if p.name in of_samples else "made for its parameters")
            for p in sorted(family.TABLE, key=lambda p: p.name)
        ]
        lines += [f"## {name.capitalize()}", "", _first(family.__doc__), "", *_table(("primitive", "rule"), rows)]
    own = [(f"`{p.name}`", "made for its parameters") for p in sorted(OWN, key=lambda p: p.name)]
    lines += ["## What passes put in a program", "", *_table(("primitive", "rule"), own)]
    known = [(f"`{name}`", why) for name, why in sorted(STRUCTURAL.items())]
    lines += ["## Known by their structure", "", *_table(("primitive", "how"), known)]
    whole = [(f"`{name}`", _cell(why)) for name, why in sorted(KEPT_WHOLE.items())]
    lines += ["## Kept whole", "", "Replicated, and named in the plan's report.", ""]
    return "\n".join([*lines, *_table(("primitive", "why"), whole)])


def sample_rules() -> dict[str, str]:
    """The rule of each primitive on its first sample, as text."""
    found: dict[str, str] = {}
    with jax.enable_x64(True):
        for sample in samples():
            if sample.name not in found and (rule := _rule_of(sample)) is not None:
                found[sample.name] = rule
    return found


def _rule_of(sample: Sample) -> str | None:
    if jx.find_primitive(sample.name) is None:
        return None
    jaxpr = jx.normalize(jax.make_jaxpr(sample.fn)(*sample.args))
    eqn = next((e for e in reversed(jaxpr.eqns) if e.primitive.name == sample.name), None)
    if eqn is None or eqn.primitive not in TABLE:
        return None
    return str(TABLE[eqn.primitive](*(a.aval for a in eqn.invars), **eqn.params))


def error_classes() -> list[type]:
    """Every class of `autoshard.errors`, in order."""
    return [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]


def error_page() -> str:
    """Every error with its cause and its remedy."""
    lines = ["# Errors", "", "In `autoshard.errors`. All are `AutoshardError`s, but for the warnings at the end.", ""]
    for error in sorted(error_classes(), key=lambda c: (issubclass(c, Warning), c is not errors.AutoshardError)):
        cause, _, rest = (inspect.getdoc(error) or "").partition("\n\nRemedy: ")
        remedy, _, attributes = rest.partition("\n\n")
        lines += [f"## `{error.__name__}`", "", f"Of `{error.__mro__[1].__name__}`. {_cell(cause)}", ""]
        lines += [f"**Remedy:** {_cell(remedy)}", ""]
        if attributes.startswith("Attributes:"):
            lines += [f"**Attributes:** {_cell(attributes.removeprefix('Attributes:'))}", ""]
    return "\n".join(lines)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    return [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)] + [""]


def _prose(text: str) -> str:
    """A docstring's text as Markdown, without its example: literals and names in backquotes."""
    return inspect.cleandoc(text).partition("\n\nExample:")[0].replace("``", "`")


def _cell(text: str) -> str:
    return _bar(" ".join(_prose(text).split()))


def _bar(text: str) -> str:
    return text.replace("|", "\\|")


def _first(doc: str | None) -> str:
    return _prose((doc or "").partition("\n\n")[0])


PAGES: Mapping[str, Callable[[], str]] = {
    "command_line": command_line,
    "configurations": configurations,
    "rules": rules,
    "errors": error_page,
}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / f"{name}.md").write_text(page())


if __name__ == "__main__":
    main()
