"""What a compiler said of a program, kept on disk under a digest of all that it was given.

A second run of a benchmark then asks only about what has changed.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import jax

import autoshard
from autoshard.backend.compilation import MemoryUsage, memory_usage, parse_out_of_memory
from autoshard.machine.mesh import LogicalMesh

_COMPILERS = ("libtpu", "jax-cuda13-plugin", "jaxlib")


@dataclass(frozen=True)
class Answer:
    """What the compiler made of a program; of one that it refused for memory, what it said."""

    memory: Mapping[str, int]
    """All that it says of memory, in bytes, by its own names."""
    text: str
    """HLO."""
    seconds: float
    """What compiling took."""
    refusal: str = ""

    def as_text(self) -> str:
        """As `jax.stages.Compiled` has it."""
        return self.text

    def memory_analysis(self) -> SimpleNamespace:
        """As `jax.stages.Compiled` has it."""
        return SimpleNamespace(**self.memory)

    @property
    def peak(self) -> int:
        """Bytes per device at the moment when most are held, as the TPU compiler counts them."""
        return self.memory["peak_memory_in_bytes"]

    def memory_usage(self, mesh: LogicalMesh) -> MemoryUsage | None:
        """By class; None where it was refused."""
        return None if self.refusal else memory_usage(self, mesh)


def asked(argv: Sequence[str], flag: str) -> tuple[Path | None, bool, list[str]]:
    """What a command line says: ``--cache DIR``, whether ``flag``, and the words that are left."""
    cache, words = folder("--cache", argv)
    return cache, flag in words, [word for word in words if word != flag]


def folder(option: str, argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The folder that a command line names after ``option``, and the words that are left."""
    if option not in argv:
        return None, [*argv]
    at = argv.index(option)
    return Path(argv[at + 1]), [*argv[:at], *argv[at + 2 :]]


def compilers() -> str:
    """The compilers that are installed, with their versions."""
    there = {d.metadata["Name"].lower(): d.version for d in metadata.distributions()}
    return ", ".join(f"{name} {there[name]}" for name in _COMPILERS if name in there)


def digest(lowered: jax.stages.Lowered, mesh: LogicalMesh, options: str = "") -> str:
    """Of all that the compiler is given; ``options`` is what it is given beside the program."""
    latencies = _pricing() if mesh.platform == "gpu" else ""
    given = "\n".join((compilers(), str(mesh), options, lowered.as_text(), latencies))
    return hashlib.sha256(given.encode()).hexdigest()[:32]


@functools.cache
def _pricing() -> str:
    """A digest of what predicts the latencies that XLA for GPUs is given (`autoshard.backend.latencies`)."""
    folder = Path(autoshard.__file__).parent / "backend"
    files = [folder / "latencies.py", folder / "estimate.py", *sorted((folder / "hlo").glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def answer(
    lowered: jax.stages.Lowered, mesh: LogicalMesh, cache: Path | None, *, options: str = "", kept: bool = False
) -> Answer | None:
    """The compiler's answer, from ``cache`` if it was asked before; if not, and only what is ``kept`` counts, None.

    Raises:
      JaxRuntimeError: the compiler refuses the program for anything but memory.
    """
    path = cache / f"{digest(lowered, mesh, options)}.json.gz" if cache else None
    if path is not None and path.exists():
        return Answer(**json.loads(gzip.decompress(path.read_bytes())))
    if kept:
        return None
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if parse_out_of_memory(str(error)) is None:
            raise
        made = Answer({}, "", time.perf_counter() - start, str(error)[:2000])
    else:
        seconds, found = time.perf_counter() - start, compiled.memory_analysis()
        sizes = {k: getattr(found, k) for k in dir(found) if k.endswith("bytes")}
        made = Answer(sizes, compiled.as_text() or "", seconds)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(json.dumps(vars(made)).encode()))
    return made
