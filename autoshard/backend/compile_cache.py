"""On-disk cache of compilation results, keyed by everything that the result depends on.

An entry is a JSON file named by its key and written atomically. An entry that cannot be read or does not match its key
is reported as a `CacheWarning`, and the program is compiled again.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from importlib import metadata
from pathlib import Path

import jax

from autoshard.backend import compilation, estimate, hlo
from autoshard.backend.compilation import Compilation, MemoryUsage, OutOfMemory
from autoshard.backend.estimate import Estimate
from autoshard.errors import CacheWarning, ConfigError
from autoshard.machine import collective, host_link, torus
from autoshard.plan.record import PlanRecord
from autoshard.strict_config import Config

CACHE_VARIABLE = "AUTOSHARD_CACHE"
"""Environment variable: the cache folder, where `jit` is given none."""
PARSERS = (
    *(Path(module.__file__ or "") for module in (collective, compilation, estimate, host_link, torus)),
    *sorted(Path(hlo.__path__[0]).glob("*.py")),
)
"""Files that compute an entry from the compiler's output; they are part of the key."""
COMPILER_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Environment variables that change what a compiler emits."""


class CachedCompilation(Config):
    """One entry: memory and estimated time of a compiled program."""

    key: str
    """As `cache_key` computes it."""
    usage: MemoryUsage | None
    out_of_memory: OutOfMemory | None
    estimate: Estimate | None

    def compilation(self, plan: PlanRecord) -> Compilation:
        """The entry as a compilation that took no time and has no audit."""
        return Compilation(plan, 0.0, self.usage, self.out_of_memory, self.estimate)


def cache_folder(given: str | os.PathLike[str] | None = None) -> Path:
    """The cache folder: ``given``, else ``$AUTOSHARD_CACHE``, else ``autoshard`` in the user's cache folder."""
    chosen = given or os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))  # the XDG specification: ignored unless absolute
    return (base if base.is_absolute() else Path.home() / ".cache") / "autoshard"


def cache_key(lowered: jax.stages.Lowered, plan: PlanRecord) -> str:
    """Digest of all that an entry depends on: program, chips and links, compiler options, versions, and `PARSERS`."""
    mesh, devices = plan.mesh, list(plan.jax_mesh.devices.flat)
    plugins = sorted((e.dist.name, e.dist.version) for e in metadata.entry_points(group="jax_plugins") if e.dist)
    parts = [
        lowered.as_text(),
        repr((mesh.axis_names, mesh.axis_sizes, mesh.axis_links, mesh.torus, mesh.hardware, mesh.target)),
        repr(sorted(plan.compiler_options)),
        repr([os.environ.get(name) for name in COMPILER_VARIABLES]),
        repr([(d.platform, d.device_kind, d.id) for d in devices]),
        repr((jax.__version__, metadata.version("jaxlib"), devices[0].client.platform_version, plugins)),
        *(parser.read_text() for parser in PARSERS),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def load(folder: Path, key: str) -> CachedCompilation | None:
    """The entry ``key`` in ``folder``; None where there is none, or none that can be read."""
    path = folder / f"{key}.json"
    try:
        text = path.read_text()
        found = CachedCompilation.model_validate_json(text, strict=True)
        if found.key != key or json.loads(found.model_dump_json()) != json.loads(text):
            raise ConfigError("its content is not what this version writes for this key")
    except FileNotFoundError:
        return None
    except (ConfigError, OSError, ValueError) as error:
        why = str(error).splitlines()[0]
        warnings.warn(f"{path}: not a valid cache entry, so the layout is compiled again: {why}", CacheWarning, 2)
        return None
    return found


def store(folder: Path, entry: CachedCompilation) -> None:
    """Writes ``entry`` into ``folder``; other processes may write the same entry at the same time."""
    path = folder / f"{entry.key}.json"
    partial = folder / f"{entry.key}.{os.getpid()}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(entry.model_dump_json(indent=1) + "\n")
        partial.replace(path)
    except OSError as error:
        warnings.warn(f"{path}: the cache entry cannot be written: {error.strerror}", CacheWarning, 2)
