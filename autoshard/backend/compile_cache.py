"""answers: what compilers said of programs, kept on disk under all that it depends on, so that nothing is asked twice.

A file is one answer in JSON, named by its digest and written whole or not at all. One that is broken, or not what its
name says, is told of in a warning, and its program is compiled anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from importlib import metadata
from pathlib import Path

import jax

from autoshard.backend import compilation, estimate, hlo_collectives, hlo_roofline, hlo_text, hlo_trip_counts
from autoshard.backend.compilation import Compilation, MemoryUsage, Refusal
from autoshard.backend.estimate import Estimate
from autoshard.errors import CacheWarning, ConfigError
from autoshard.machine import collective
from autoshard.plan.record import PlanRecord
from autoshard.strict_config import Config

CACHE_VARIABLE = "AUTOSHARD_CACHE"
"""Of the environment: the folder of answers, where the step names none."""
PARSERS = (collective, compilation, estimate, hlo_collectives, hlo_roofline, hlo_text, hlo_trip_counts)
"""What reads the compiler's output: an answer holds what they made of it."""
COMPILER_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Variables of the environment that compilers read."""


class CachedCompilation(Config):
    """What a compiler said of a program."""

    digest: str
    """The digest that it answers."""
    usage: MemoryUsage | None
    refusal: Refusal | None
    estimate: Estimate | None

    def compilation(self, plan: PlanRecord) -> Compilation:
        """As a compilation that took no time, and whose collectives are not told."""
        return Compilation(plan, 0.0, self.usage, self.refusal, self.estimate)


def cache_folder(given: str | os.PathLike[str] | None = None) -> Path:
    """Where answers are kept: ``given``, or what the environment says, or the user's own folder for what is cached."""
    chosen = given or os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))  # to be ignored unless absolute, says its specification
    return (base if base.is_absolute() else Path.home() / ".cache") / "autoshard"


def digest(lowered: jax.stages.Lowered, plan: PlanRecord) -> str:
    """Of all that an answer depends on: program, chips and links, options, the compiler's versions, and its readers."""
    devices = list(plan.jax_mesh.devices.flat)
    plugins = sorted((e.dist.name, e.dist.version) for e in metadata.entry_points(group="jax_plugins") if e.dist)
    parts = [
        lowered.as_text(),
        repr((plan.mesh.axis_names, plan.mesh.axis_sizes, plan.mesh.axis_links, plan.mesh.hardware, plan.mesh.target)),
        repr(sorted(plan.compiler_options)),
        repr([os.environ.get(name) for name in COMPILER_VARIABLES]),
        repr([(d.platform, d.device_kind, d.id) for d in devices]),
        repr((jax.__version__, metadata.version("jaxlib"), devices[0].client.platform_version, plugins)),
        *(Path(reader.__file__ or "").read_text() for reader in PARSERS),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def load(at: Path, asked: str) -> CachedCompilation | None:
    """The answer to ``asked`` that is kept in the folder ``at``; None where there is none that can be read."""
    path = at / f"{asked}.json"
    try:
        text = path.read_text()
        found = CachedCompilation.model_validate_json(text, strict=True)
        if found.digest != asked or json.loads(found.model_dump_json()) != json.loads(text):
            raise ConfigError("an entry is not what this version writes for it")
    except FileNotFoundError:
        return None
    except (ConfigError, OSError, ValueError) as error:
        why = str(error).splitlines()[0]
        warnings.warn(f"{path}: no answer of a compiler, so the layout is compiled anew: {why}", CacheWarning, 2)
        return None
    return found


def store(at: Path, answer: CachedCompilation) -> None:
    """Keeps ``answer`` in the folder ``at``; another process that does the same meanwhile is no harm."""
    path = at / f"{answer.digest}.json"
    partial = at / f"{answer.digest}.{os.getpid()}.partial"
    try:
        at.mkdir(parents=True, exist_ok=True)
        partial.write_text(answer.model_dump_json(indent=1) + "\n")
        partial.replace(path)
    except OSError as error:
        warnings.warn(f"{path}: the compiler's answer cannot be kept: {error.strerror}", CacheWarning, 2)
