"""The command line: ``autoshard train``, ``plan``, ``compile``, ``mesh`` and ``version``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import jax
import typer
from rich.console import Console

from autoshard import __version__
from autoshard.backend.compilation import compile_plan
from autoshard.backend.compile_report import print_compilation
from autoshard.errors import AutoshardError
from autoshard.machine.mesh_config import load_mesh_config
from autoshard.train.config import TrainConfig
from autoshard.train.loop import plan_phase, train

app = typer.Typer(
    name="autoshard",
    help="Automatic sharding for JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A training configuration in YAML.")]


@app.command("train")
def train_command(
    config: ConfigPath,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete what this run left earlier and start over.")] = False,
) -> None:
    """Train, evaluate and checkpoint; a run that was stopped goes on from its last checkpoint."""
    recipe = TrainConfig.load(config)
    use_platform(recipe)
    try:
        train(recipe, fresh=fresh)
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from the last checkpoint", err=True)
        raise typer.Exit(130) from None


@app.command("plan")
def plan_command(config: ConfigPath) -> None:
    """Print the plan of every phase; needs none of the devices it is for, or their compiler where it is refined."""
    recipe = TrainConfig.load(config)
    if recipe.refine:
        use_platform(recipe, runs=False)
    console = Console(soft_wrap=True)
    for number, phase in enumerate(recipe.all_phases, 1):
        plan = plan_phase(recipe, phase).plan
        console.print(f"phase {number}: to step {phase.until} on mesh {plan.mesh}", markup=False, highlight=False)
        console.print(plan.explain(), markup=False, highlight=False)


@app.command("compile")
def compile_command(
    config: ConfigPath,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object instead: `phases`, each as `Compilation.as_json` says."),
    ] = False,
) -> None:
    """Compile every phase with the real compiler of its mesh's target, which need not be here, and say what it made.

    Whether it fits and what to change, bytes by class, every collective with its source line, the estimated step time,
    and the audit: planned and emitted side by side. Nothing is run.

    Exit status: 0 all is well; 1 a phase does not fit in memory; 2 an error; 3 a phase's audit is not clean.
    """
    recipe = TrainConfig.load(config)
    use_platform(recipe, runs=False)
    console, found = Console(soft_wrap=True), []
    for number, phase in enumerate(recipe.all_phases, 1):
        planned = plan_phase(recipe, phase)
        made = compile_plan(planned.plan, planned.step.lower(planned.state, planned.batch))
        found.append(made)
        if not as_json:
            console.print(f"phase {number}: to step {phase.until}", markup=False, highlight=False)
            print_compilation(made, console)
    if as_json:
        typer.echo(json.dumps({"phases": [made.as_json() for made in found]}, indent=1))
    if not all(made.fits for made in found):
        raise typer.Exit(1)
    if not all(made.audit is None or made.audit.clean for made in found):
        raise typer.Exit(3)


@app.command("mesh")
def mesh_command(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A mesh configuration, or the name of a shipped one.")
    ],
) -> None:
    """Print the mesh that a configuration describes, or those that planning chooses among."""
    for mesh in load_mesh_config(config).meshes():
        typer.echo(str(mesh))


@app.command("version")
def version_command() -> None:
    """Print the versions of autoshard and of JAX."""
    typer.echo(f"autoshard {__version__}, jax {jax.__version__}, Python {sys.version.split()[0]}")


def use_platform(config: TrainConfig, *, runs: bool = True) -> None:
    """Chooses the platform, and makes the virtual CPU devices that the run's meshes ask for.

    Has to come before JAX starts its backends. A number of CPU devices that the environment sets is kept. What is only
    compiled, for targets, leaves the accelerators alone that may be here.
    """
    if not runs and all(phase.mesh.target for phase in config.all_phases):
        jax.config.update("jax_platforms", "cpu")
    elif config.platform is not None:
        jax.config.update("jax_platforms", config.platform)
    if jax.config.jax_num_cpu_devices < 1:  # harmless where the run is on another platform
        jax.config.update("jax_num_cpu_devices", config.min_devices)


def main() -> None:
    """Runs the command line; a foreseen error is one line on standard error and exit code 2."""
    try:
        app()
    except (AutoshardError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
