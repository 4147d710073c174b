"""The reference that is made from the program: every error, key, command and primitive has its entry."""

from __future__ import annotations

import re

import pytest
import typer.main

from autoshard import cli, errors
from autoshard.rules import KEPT_WHOLE, OWN, STRUCTURAL, TABLE
from docs import made_pages


def cells(page: str) -> list[list[str]]:
    """The rows of a page's tables."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in page.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in rows]


def test_every_error_has_its_cause_and_its_remedy():
    page = made_pages.error_page()
    named = re.findall(r"^## `(\w+)`\n\nOf `\w+`\. (.+)\n\n\*\*Remedy:\*\* (.+)$", page, re.MULTILINE)
    raised = {name for name, c in vars(errors).items() if isinstance(c, type) and issubclass(c, Exception)}
    assert {name for name, _, _ in named} == raised
    assert [name for name, cause, remedy in named if min(len(cause), len(remedy)) < 20 or "Remedy" in remedy] == []


@pytest.mark.parametrize("kind", made_pages.CONFIGS)
def test_every_key_says_what_it_is(kind):
    schema = made_pages.CONFIGS[kind].model_json_schema()
    keys = {*schema["properties"]}
    keys |= {key for d in schema.get("$defs", {}).values() for key in d.get("properties", ())}
    rows = cells(made_pages.configurations())
    assert keys <= {row[0].strip("`") for row in rows}
    assert [row for row in rows if not all(row[i] for i in (0, 1, 3))] == []


def test_every_command_has_its_text():
    page = made_pages.command_line()
    found = re.findall(r"^## `autoshard (.+)`\n\n(.+)$", page, re.MULTILINE)
    commands = typer.main.get_command(cli.app).commands
    assert {name.split()[0] for name, _ in found} == {*commands}
    options = {p.opts[0] for c in commands.values() for p in c.params if p.param_type_name == "option"}
    assert {o for o in options if f"`{o}`" not in page} <= {"--help"}


def test_every_primitive_has_its_row():
    rows = cells(made_pages.rules())
    shown = {row[0].strip("`"): row[1] for row in rows}
    ruled = {p.name for p in (*TABLE, *OWN)}
    assert {*shown} == {*ruled, *STRUCTURAL, *KEPT_WHOLE}
    assert shown["dot_general"] == "`abc, acd -> abd {c: sum} \\| sum: 0 1`"
    assert sum(not shown[name].startswith("`") for name in ruled) < 10
