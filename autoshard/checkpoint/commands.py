"""The command ``autoshard checkpoint``: ``inspect``, ``diff``, ``convert``, ``merge`` and ``verify``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from autoshard.checkpoint.at_rest import conditions, repair
from autoshard.checkpoint.folders import (
    Contents,
    Format,
    applicable,
    differences,
    leaf_bytes,
    merged,
    open_contents,
    selection_of,
    write_contents,
)

checkpoint_app = typer.Typer(
    help="Look at checkpoints and change them: those of autoshard, those of plain Orbax, and safetensors files.",
    no_args_is_help=True,
)


def _of_run(path: Path) -> Path:
    """Of a training run's folder its checkpoints; any other path as it is."""
    return path / "checkpoints" if (path / "run.json").is_file() else path


Source = Annotated[
    Path,
    typer.Argument(
        metavar="PATH", help="A checkpoint's directory, a run's folder, or a safetensors file.", callback=_of_run
    ),
]
Target = Annotated[Path, typer.Argument(metavar="TARGET", help="A folder to write to.")]
Step = Annotated[int | None, typer.Option("--step", help="Which step; the newest complete one if not given.")]
Ignore = Annotated[list[str] | None, typer.Option("--ignore", metavar="GLOB", help="Leaves to leave out. Repeatable.")]
Rename = Annotated[
    list[str] | None,
    typer.Option("--rename", metavar="OLD=NEW", help="A new name; `*` stands for any text. Repeatable."),
]
Cast = Annotated[
    list[str] | None,
    typer.Option(
        "--cast", metavar="[GLOB=]DTYPE", help="Another dtype for floats, of some leaves or of all. Repeatable."
    ),
]
To = Annotated[
    Format | None, typer.Option("--to", help="The format of the target; safetensors, and from safetensors autoshard.")
]
MaxBytes = Annotated[str, typer.Option("--max-bytes", help="Of tensors in a safetensors file, at most.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@checkpoint_app.command("inspect")
def inspect_command(
    path: Source,
    step: Step = None,
    as_json: AsJson = False,
    ignore: Ignore = None,
    rename: Rename = None,
    cast: Cast = None,
) -> None:
    """Print every leaf of a checkpoint with its dtype and shape, as `convert` would write it; reads no array."""
    found = open_contents(path, step, selection_of(ignore or (), rename or (), cast or ()))
    leaves = [
        {"name": c.name, "dtype": c.leaf.dtype, "shape": c.leaf.shape, "bytes": leaf_bytes(c.leaf)}
        for c in found.leaves
    ]
    shown: dict[str, Any] = {
        "where": found.where,
        "format": found.format,
        "step": found.step,
        "fingerprint": found.fingerprint,
        "bytes": found.nbytes,
        "leaves": leaves,
        "extra": found.extra,
    }
    if as_json:
        typer.echo(json.dumps(shown, indent=1))
        return
    for chosen in found.leaves:
        typer.echo(f"{chosen.name}  {chosen.leaf}")
    typer.echo(f"{found.where}: {found.format}, {len(leaves)} leaves, {found.nbytes:,} bytes")
    if found.extra:
        typer.echo(f"beside them: {', '.join(sorted(found.extra))}")


@checkpoint_app.command("diff")
def diff_command(
    first: Source,
    second: Source,
    step: Annotated[int | None, typer.Option("--step", help="Of the first.")] = None,
    second_step: Annotated[int | None, typer.Option("--second-step", help="Of the second.")] = None,
    ignore: Ignore = None,
    rename: Rename = None,
    cast: Cast = None,
) -> None:
    """Print every leaf that differs, bit for bit, between two checkpoints. --rename and --cast are of the first.

    Exit status: 0 they are equal; 1 they are not; 2 an error.
    """
    chosen = open_contents(first, step, selection_of(ignore or (), rename or (), cast or ()))
    other = open_contents(second, second_step, selection_of(ignore or (), (), ()))
    found = list(differences(chosen, other))
    for difference in found:
        typer.echo(str(difference))
    typer.echo(f"{len(found)} leaves differ of {len(chosen.leaves)} and {len(other.leaves)}")
    if found:
        raise typer.Exit(1)


@checkpoint_app.command("convert")
def convert_command(
    path: Source,
    target: Target,
    to: To = None,
    step: Step = None,
    ignore: Ignore = None,
    rename: Rename = None,
    cast: Cast = None,
    max_bytes: MaxBytes = "5GB",
) -> None:
    """Write a checkpoint in another format, with other names, dtypes or without some leaves."""
    _write(open_contents(path, step, selection_of(ignore or (), rename or (), cast or ())), target, to, max_bytes)


@checkpoint_app.command("merge")
def merge_command(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Checkpoints, and last the folder to write to.")
    ],
    to: To = None,
    ignore: Ignore = None,
    rename: Rename = None,
    cast: Cast = None,
    max_bytes: MaxBytes = "5GB",
) -> None:
    """Write the leaves of several checkpoints together; a leaf that two of them have must be the same in both.

    Leaves are renamed in the checkpoints that have them.
    """
    *sources, target = paths
    if len(sources) < 2:
        raise typer.BadParameter("two checkpoints or more, and the folder to write to")
    chosen = selection_of(ignore or (), rename or (), cast or ())
    sources = [_of_run(path) for path in sources]
    opened = [open_contents(path) for path in sources]
    each = [applicable(chosen, [leaf.name for leaf in contents.leaves]) for contents in opened]
    found = [open_contents(path, None, own) for path, own in zip(sources, each, strict=True)]
    _write(merged(found), target, to, max_bytes)


@checkpoint_app.command("verify")
def verify_command(
    path: Source,
    step: Step = None,
    repair_too: Annotated[
        bool,
        typer.Option("--repair", help="First put right what digests prove; nothing is guessed, all else is named."),
    ] = False,
) -> None:
    """Read every byte of a checkpoint, or of every step of a directory, and say what is damaged.

    Exit status: 0 nothing is; 1 something is damaged; 2 an error.
    """
    if repair_too:
        if step is not None:
            raise typer.BadParameter("--repair is for all steps; leave --step out")
        for done in repair(path):
            typer.echo(str(done))
    found = conditions(path, step)
    for condition in found:
        typer.echo(str(condition))
    if any(condition.problem for condition in found):
        raise typer.Exit(1)


def _write(contents: Contents, target: Path, to: Format | None, max_bytes: str) -> None:
    written = write_contents(contents, target, to, max_bytes=max_bytes)
    typer.echo(f"{target}: {written}, {len(contents.leaves)} leaves, {contents.nbytes:,} bytes")
    for left in contents.left_out:
        typer.echo(f"left out: {left.name}")
    if contents.extra and written != "autoshard":
        typer.echo(f"left out, beside the leaves: {', '.join(sorted(contents.extra))}")
