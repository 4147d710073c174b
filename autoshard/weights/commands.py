"""The command ``autoshard checkpoint merge-adapter``: the weights of a run that trained adapters, for use.

The state of such a run has what is trained, a dict of ``a`` and ``b`` for each adapted leaf, as ``params``, and the
frozen weights as ``base``, as that of ``configs/recipes/lora.yaml`` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from autoshard.checkpoint.commands import Source, Step, Target
from autoshard.checkpoint.folders import Contents, open_contents
from autoshard.checkpoint.names import nested
from autoshard.errors import CheckpointError, ConfigError
from autoshard.weights.adapters import Adapter, adapted
from autoshard.weights.family import family_of, read_config
from autoshard.weights.pretrained import write_pretrained


def merge_adapter_command(
    path: Source,
    target: Target,
    step: Step = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The model's config.json, where the run's `step` has no config.")
    ] = None,
    scale: Annotated[
        float | None, typer.Option(help="Of the adapters, where the run's `step` does not say it.")
    ] = None,
    max_bytes: Annotated[str, typer.Option("--max-bytes", help="Of tensors in a file, at most.")] = "5GB",
) -> None:
    """Write the weights of a LoRA run, its adapters merged into them, as a published model's folder.

    `autoshard generate` reads it, `autoshard.weights.open_pretrained`, and `transformers`.
    """
    found = open_contents(path, step)
    given = _step_arguments(found)
    made = given.get("config") if config is None else read_config(config)
    if not isinstance(made, Mapping):
        raise ConfigError(f"{found.where}: its `step` has no config of a model: give its config.json with --config")
    scale = given.get("scale") if scale is None else scale
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise ConfigError(f"{found.where}: its `step` does not say the scale of its adapters: give it with --scale")
    family, pairs, base = family_of(made), _part(found, "params"), _part(found, "base")
    merged = adapted(base, family, Adapter(pairs, float(scale)))
    write_pretrained(target, merged, family, family.model_settings(made), config=made, max_bytes=max_bytes)
    typer.echo(f"{target}: a {family.model_type} model, adapters merged with scale {scale:g}")


def _step_arguments(found: Contents) -> Mapping[str, Any]:
    """What the run's configuration, which is saved beside its state, calls its `step` with; nothing where it is not."""
    match found.extra:
        case {"config": {"step": {"arguments": dict(arguments)}}}:
            return arguments
        case _:
            return {}


def _part(found: Contents, name: str) -> Any:
    """The part ``name`` of a state, in numpy."""
    prefix = f"{name}/"
    leaves = {each.name.removeprefix(prefix): each.read() for each in found.leaves if each.name.startswith(prefix)}
    if not leaves:
        raise CheckpointError(
            f"{found.where} has no `{name}`: the state of a run with adapters has them as `params`, and the frozen "
            "weights as `base`"
        )
    return nested(leaves)
