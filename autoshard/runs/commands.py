"""The command ``autoshard runs``: the list of runs, and the curves of one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from etils import epath
from rich.console import Console

from autoshard.errors import ConfigError, nearest
from autoshard.runs.curves import curves_of, drawn, failure_of, find_run, run_table, runs_in

runs_app = typer.Typer(invoke_without_command=True)


@runs_app.callback()
def runs_command(
    context: typer.Context,
    folder: Annotated[Path, typer.Option("--in", help="The folder in which runs are looked for.")] = Path("runs"),
) -> None:
    """List the runs of a folder, the last changed first; `autoshard runs show RUN` draws one."""
    context.obj = epath.Path(folder)
    if context.invoked_subcommand is None:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a directory; name that of your runs with --in")
        Console().print(run_table(runs_in(epath.Path(folder))))


@runs_app.command("show")
def show_command(
    context: typer.Context,
    run: Annotated[str, typer.Argument(help="The run's folder, or its name in the list.")],
    only: Annotated[list[str] | None, typer.Option("--only", help="A metric; may be repeated.")] = None,
) -> None:
    """Draw the curves of a run's metrics, and say by what error it failed."""
    found = find_run(run, context.obj)
    curves, failure = curves_of(found), failure_of(found)
    for name in only or curves:
        if name not in curves:
            raise ConfigError(f"{run} has no metric {name!r}{nearest(name, curves)}")
        typer.echo(drawn(name, curves[name]))
    if failure or not curves:
        typer.echo(f"{run} {failure or 'has no metrics yet'}")
