"""The command line: ``autoshard train``, ``plan``, ``compile``, ``generate``, ``export`` and others."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import jax
import typer
from rich.console import Console

from autoshard import __version__
from autoshard.backend.compilation import compile_plan
from autoshard.backend.compile_report import print_compilation
from autoshard.call_errors import TRACEBACK_VARIABLE, also, shown_error
from autoshard.checkpoint.commands import checkpoint_app
from autoshard.checkpoint.manifest import absolute_path, complete_steps
from autoshard.decoding.served import exported, of_folder, of_run
from autoshard.errors import AutoshardError, ConfigError, nearest
from autoshard.machine.hardware import HardwareConfig, require_compiler
from autoshard.machine.mesh_config import MeshConfig, load_mesh_config
from autoshard.platforms import use_cpu_devices, use_platform
from autoshard.runs.commands import runs_app
from autoshard.strict_config import find_config, read_text
from autoshard.train.config import TrainConfig, named_config
from autoshard.train.loop import train
from autoshard.train.phase import plan_phase
from autoshard.train.processes.connection import check_address, connect, has_peers, lost_peer
from autoshard.train.processes.gpus import gpu_shares, gpus_here
from autoshard.train.processes.launch import launch, supervised
from autoshard.train.processes.peers import LOST_CODE, SUPERVISED, PeerWatch
from autoshard.train.stop_signals import StopSignals, write_error
from autoshard.weights.commands import merge_adapter_command

_TRAINS = re.compile(r"^(batch|checkpoint|model|phases|step)\s*:", re.MULTILINE)
"""In the text of a training configuration, and in none of a mesh."""

app = typer.Typer(
    name="autoshard",
    help="Automatic sharding for JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(checkpoint_app, name="checkpoint")
checkpoint_app.command("merge-adapter")(merge_adapter_command)

app.add_typer(runs_app, name="runs")

SCHEMAS = {"train": TrainConfig, "mesh": MeshConfig, "hardware": HardwareConfig}
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A training configuration in YAML.")]
MeshOption = Annotated[
    str | None,
    typer.Option(
        metavar="MESH", help="In place of the configuration's: a file of a mesh, or the name of a shipped one."
    ),
]


@app.command("train")
def train_command(
    config: ConfigPath,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete an earlier run in the folder and start over.")] = False,
    distributed: Annotated[
        bool, typer.Option("--distributed", help="Connect to the other processes of the cluster that started this one.")
    ] = False,
    coordinator: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Connect to other processes: where process 0 is reached.")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Their number, with --coordinator.")] = None,
    process_id: Annotated[int | None, typer.Option("--id", min=0, help="Which of them this is, from 0.")] = None,
    wait: Annotated[int, typer.Option(min=1, help="Seconds to wait for the other processes.")] = 300,
    heartbeat: Annotated[
        int, typer.Option(min=1, help="Seconds after which a process that is not heard of counts as lost.")
    ] = 60,
) -> None:
    """Train, evaluate and checkpoint; a run that was stopped resumes from its last checkpoint.

    Started by Slurm, Open MPI or Kubernetes Engine on TPUs as one of several, or with --distributed on each TPU VM or
    in Kubernetes, or with --coordinator, --processes and --id, processes train together; the folder is one that all
    share. `autoshard launch` starts several on this machine.

    The first SIGINT (Ctrl-C) or SIGTERM saves the state after the step that is being taken, among several processes
    within a second or after the next one; before the first step nothing is saved, and several processes leave together
    when they are ready for it. The second stops at once.

    Exit status: 0 the run is finished; 2 an error; 75 another process was lost, start again; 130 stopped by SIGINT; 143
    stopped by SIGTERM, in all processes after the same step: what schedulers take for a reason to start it again.
    """
    cluster = (coordinator, processes, process_id)
    named = any(given is not None for given in cluster)
    if several := distributed or named or has_peers():
        if named and not distributed and None in cluster:
            raise ConfigError("--coordinator, --processes and --id belong together: give all three")
        check_address(coordinator)
        if SUPERVISED not in os.environ:
            _supervise(config)
        connect(*cluster, wait, heartbeat)
    finished = saved = False
    watch = None
    with StopSignals(ends_process=True) as stop:
        try:
            with stop.deferred() if several else contextlib.nullcontext():  # several leave together
                recipe = named_config(config)
                if several:
                    watch = PeerWatch(heartbeat, lambda why: write_error(f"error: {why}; {_next_start(recipe)}\n"))
                use_platform(recipe, processes=processes or 1)
                finished = train(recipe, fresh=fresh, stop=stop) is not None
            saved = True
        except KeyboardInterrupt:
            if not stop.requested:
                raise
        except Exception as error:
            if not stop.turned_into(error):
                if watch is None or (lost := lost_peer(error, watch)) is None:
                    raise
                watch.leave(str(lost))
        finally:
            if watch is not None:
                watch.end(finished=saved)
        if not finished:
            typer.echo(f"stopped; {_next_start(TrainConfig.load(config))}", err=True)
            raise typer.Exit(stop.exit_code)


def _supervise(config: Path) -> NoReturn:
    """Runs this command in a process of its own: where JAX aborts one, this one says why in a line."""
    code = supervised(sys.argv[1:])
    if code == 128 + signal.SIGABRT:
        lost = "process 0, which keeps the processes together, is lost"
        write_error(f"error: {lost}; {_next_start(TrainConfig.load(config))}\n")
        code = LOST_CODE
    sys.exit(code)


def _next_start(recipe: TrainConfig) -> str:
    """From where the next start of a run goes on. A save is not waited for: without a process that is lost it may never
    end."""
    saved = max(complete_steps(absolute_path(Path(recipe.checkpoint.dir) / "checkpoints")), default=None)
    if saved is None:
        return "nothing is saved yet, and the same command starts over"
    return f"step {saved} is saved, and the same command resumes from there"


@app.command("launch", context_settings={"ignore_unknown_options": True})
def launch_command(
    arguments: Annotated[
        list[str], typer.Argument(metavar="-- train CONFIG", help="The command that each process runs.")
    ],
    processes: Annotated[int, typer.Option(min=1, help="How many to start.")],
) -> None:
    """Train in several processes on this machine, as `autoshard launch --processes 4 -- train CONFIG`.

    On CPUs their number changes no bit of the results: one process, too, adds between its devices as several do, which
    `autoshard train` by itself does in another order.

    Of the machine's GPUs each gets as many as the others, its own. They start and end together: SIGINT and SIGTERM are
    passed on to all, which save the same step; where one fails, the others are ended, and one line says which and from
    where the next start goes on.

    Exit status: as that of `train`; of a process that was ended by a signal, 128 and its number.
    """
    given: dict[str, Any] = {}
    if arguments[0] == "train":
        command: Any = typer.main.get_command(app)
        train_options = command.commands["train"].make_context("train", [*arguments[1:]], resilient_parsing=True)
        given = train_options.params
    if given.get("config") is None:
        raise ConfigError("launch runs `train CONFIG`: autoshard launch --processes 4 -- train CONFIG")
    recipe = TrainConfig.load(given["config"])
    gpus = 0 if recipe.platform in ("cpu", "tpu") else gpus_here()
    ended = launch(arguments, gpu_shares(gpus, processes), given["heartbeat"])
    if ended.lost:
        typer.echo(f"error: process 0 of {processes} is lost; {_next_start(recipe)}", err=True)
    elif ended.by is not None:
        typer.echo(
            f"process {ended.process} of {processes} was ended by {ended.by.name}, and the others with it; "
            f"{_next_start(recipe)}",
            err=True,
        )
    elif ended.errors:
        typer.echo(f"process {ended.process} of {processes}: {ended.errors.strip()}", err=True)
    raise typer.Exit(ended.code)


@app.command("plan")
def plan_command(
    config: ConfigPath,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page of pictures instead; of several phases one each."),
    ] = None,
    mesh: MeshOption = None,
) -> None:
    """Print the plan of every phase; needs no devices, and a compiler for them only if the configuration has refine.

    With --html each plan is drawn, a page that needs no network: FILE, or, of several phases, FILE-1, FILE-2 and so on.
    """
    recipe = _recipe(config, mesh)
    if recipe.refine:
        use_platform(recipe, runs=False)
    console = Console(soft_wrap=True)
    for number, phase in enumerate(recipe.all_phases, 1):
        plan = plan_phase(recipe, phase).plan
        console.print(f"phase {number}: to step {phase.until} on mesh {plan.mesh}", markup=False, highlight=False)
        if html is None:
            console.print(plan.explain(), markup=False, highlight=False)
        else:
            console.print(f"  {plan.show(_page(html, recipe, number))}", markup=False, highlight=False)


def _recipe(config: Path, mesh: str | None) -> TrainConfig:
    """The configuration that a person named, on the mesh that they named."""
    recipe = named_config(config)
    return recipe if mesh is None else recipe.on_mesh(load_mesh_config(mesh))


def _page(html: Path, recipe: TrainConfig, number: int) -> Path:
    """The file of a phase's page: of several, one each."""
    return html if len(recipe.all_phases) == 1 else html.with_stem(f"{html.stem}-{number}")


@app.command("compile")
def compile_command(
    config: ConfigPath,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object: `phases`, each as documented at `Compilation.as_json`."),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Also write a page with planned beside compiled; a phase, a page."),
    ] = None,
    mesh: MeshOption = None,
) -> None:
    """Compile every phase with the compiler of its mesh's target and report on the result; needs no devices.

    Reports whether it fits in memory and what to change, bytes by class, the estimated step time, every collective with
    its source line, and the audit: predicted against emitted collectives. Nothing is run.

    Exit status: 0 all phases fit and their audits are clean; 1 a phase does not fit in memory; 2 an error; 3 a phase's
    audit is not clean.
    """
    recipe = _recipe(config, mesh)
    use_platform(recipe, runs=False)
    console, compilations = Console(soft_wrap=True), []
    for number, phase in enumerate(recipe.all_phases, 1):
        planned = plan_phase(recipe, phase)
        require_compiler(planned.plan.mesh)
        compilation = compile_plan(planned.plan, planned.step.lower(planned.state, planned.batch))
        compilations.append(compilation)
        page = None if html is None else planned.plan.show(_page(html, recipe, number), compilation.compiled)
        if not as_json:
            console.print(f"phase {number}: to step {phase.until}", markup=False, highlight=False)
            print_compilation(compilation, console)
            if page is not None:
                console.print(f"  {page}", markup=False, highlight=False)
    if as_json:
        typer.echo(json.dumps({"phases": [c.as_json() for c in compilations]}, indent=1))
    if not all(c.fits for c in compilations):
        raise typer.Exit(1)
    if not all(c.audit is None or c.audit.clean for c in compilations):
        raise typer.Exit(3)


@app.command("generate")
def generate_command(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="A training configuration in YAML, or a published model's folder.")
    ],
    prompt: Annotated[str | None, typer.Option(help="Text to go on from; its bytes are tokens.")] = None,
    ids: Annotated[str | None, typer.Option(metavar="N,N,...", help="The tokens to go on from, as numbers.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="How many are made.")] = 64,
    rows: Annotated[int, typer.Option(min=1, help="How often, each drawn by itself.")] = 1,
    temperature: Annotated[float, typer.Option(help="What logits are divided by; 0 takes the best token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Of how many of the best tokens one is drawn.")] = None,
    top_p: Annotated[float | None, typer.Option(help="The same, by the probability that they have together.")] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    step: Annotated[int | None, typer.Option(help="Of the run's checkpoint; the newest if absent.")] = None,
    mesh: MeshOption = None,
) -> None:
    """Make tokens with the model of a training run, from its newest checkpoint, or with a published model.

    The prompt is read in one step, then a token is made a step, on the mesh of the run's last phase. Of a run on text
    tokens are bytes; of others, and of published models, they are numbers, with --ids.
    """
    numbers = [int(n) for n in ids.split(",") if n.strip().isdecimal()] if ids is not None else []
    if ids is not None and len(numbers) != len(ids.split(",")):
        raise ConfigError(f"--ids {ids!r}: give numbers with commas between them, as 17,4,256")
    if (config / "run.json").is_file():
        raise ConfigError(f"{config} is a run's folder; give the configuration of the run, the file that train took")
    if config.is_dir():
        chosen = None if mesh is None else load_mesh_config(mesh)
        use_cpu_devices(1 if chosen is None else chosen.min_devices)
        served = of_folder(config, chosen)
    else:
        recipe = _recipe(config, mesh)
        use_platform(recipe)
        served = of_run(recipe, step)
    given = served.prompt(prompt, numbers, rows)
    texts, generator = [""] * rows, served.generator(temperature=temperature, top_k=top_k, top_p=top_p)
    for pieces in served.pieces(generator, given, tokens, seed):
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
        if rows == 1:
            typer.echo(pieces[0], nl=False)
    typer.echo("" if rows == 1 else "\n".join(f"--- {n}\n{text}" for n, text in enumerate(texts, 1)))


@app.command("export")
def export_command(
    config: ConfigPath,
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the artifacts are written.")],
    rows: Annotated[int, typer.Option(min=1, help="Rows of a prompt.")] = 8,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that are made after it, at most.")] = 64,
    mesh: MeshOption = None,
) -> None:
    """Write the planned steps of a training configuration as files that run where JAX alone is installed.

    FOLDER gets train.jax and, where the run is evaluated, eval.jax; of a decoder also prefill.jax, which reads a prompt
    into a cache, and decode.jax, which makes a token. They run on as many devices as the last phase's mesh has, and
    hold no parameters. `autoshard.load_exported` reads them, and `jax.export.deserialize`.
    """
    recipe = _recipe(config, mesh)
    use_platform(recipe)
    to.mkdir(parents=True, exist_ok=True)
    for artifact in exported(recipe, rows, prompt, tokens):
        path = to / f"{artifact.name}.jax"
        path.write_bytes(artifact.content)
        typer.echo(f"{path}: {len(artifact.content):,} bytes, on mesh {artifact.plan.mesh}")


@app.command("mesh")
def mesh_command(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A mesh or a training configuration, or the name of a shipped mesh.")
    ],
) -> None:
    """Print the mesh of a configuration, or the candidate meshes if it leaves the axes open; of a training
    configuration those of each phase."""
    path = find_config("mesh", config)
    trains = _TRAINS.search(read_text(path)) is not None
    found = [phase.mesh for phase in TrainConfig.load(path).all_phases] if trains else [load_mesh_config(config)]
    for mesh in found:
        for each in mesh.meshes():
            typer.echo(str(each))


@app.command("schema")
def schema_command(
    of: Annotated[str, typer.Argument(metavar="NAME", help=f"What a file configures: {', '.join(SCHEMAS)}.")],
) -> None:
    """Print the JSON schema of a kind of configuration, with which editors complete and check YAML files."""
    if of not in SCHEMAS:
        raise ConfigError(f"there is no schema {of!r}{nearest(of, SCHEMAS)}")
    typer.echo(json.dumps(SCHEMAS[of].model_json_schema(), indent=1))


@app.command("version")
def version_command() -> None:
    """Print the versions of autoshard and of JAX."""
    typer.echo(f"autoshard {__version__}, jax {jax.__version__}, Python {sys.version.split()[0]}")


def _show_warning(
    other: Callable[..., None], message: Warning | str, category: type[Warning], *where: Any, **more: Any
) -> None:
    """A warning of autoshard's is a line without the place in its sources; those of others are shown as ever."""
    if category.__module__ == AutoshardError.__module__:
        typer.echo(f"warning: {message}", err=True)
    else:
        other(message, category, *where, **more)


def main() -> None:
    """Runs the command line. An error that autoshard raises on purpose is one line on standard error, one of a function
    that a configuration calls is that with the person's own lines below it, and the exit code is 2.
    """
    warnings.showwarning = functools.partial(_show_warning, warnings.showwarning)
    try:
        app()
    except Exception as error:
        shown = shown_error(error)
        if shown is None and not isinstance(error, AutoshardError | OSError):
            raise
        if os.environ.get(TRACEBACK_VARIABLE):
            traceback.print_exception(error)
        typer.echo(f"error: {shown or '\n'.join([str(error), *also(error)])}", err=True)
        sys.exit(2)
