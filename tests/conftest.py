"""Eight virtual CPU devices for every test, and properties that draw the same examples each time.

What is compiled runs once or a few times: LLVM's optimizations, of which sharding knows nothing, are left out, for they
take longer than they save; and a program that is compiled again, as the references on one device are, and what the
tests compiled when they ran before, is read from a cache. Not where there is another compiler than that for CPUs: it
does as it does for users.
"""

import gc
import importlib.util
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["NPROC"] = "64"  # threads, in which collectives of programs from the cache wait: see autoshard.platforms
if not any(map(importlib.util.find_spec, ("libtpu", "jax_cuda13_plugin"))):
    os.environ["XLA_FLAGS"] = " ".join(
        (
            "--xla_backend_optimization_level=0",
            "--xla_llvm_disable_expensive_passes=true",
            *os.environ.get("XLA_FLAGS", "").split(),
        )
    )

import jax
import pytest
from hypothesis import settings
from jax.experimental.compilation_cache import compilation_cache

COMPILED = Path(__file__).parents[1] / ".pytest_cache" / "compiled"
MAX_BYTES = 1 << 30
"""Of what one worker compiled."""

MAX_MAPPED = 30_000
"""Mapped regions of memory above which a worker drops what it has compiled: each executable has some, and at 65,530
Linux gives no more, which XLA does not survive."""

settings.register_profile("autoshard", derandomize=True, deadline=None)
settings.load_profile("autoshard")
gc.set_threshold(50_000, 20, 20)  # tracing makes many objects that live on: looking for cycles took a tenth of the time


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before there are workers: each gets what all have compiled, for none knows which tests it will run.

    A worker that was killed may have left half a file: what it compiled is dropped, as it is where it takes too much.
    """
    if hasattr(session.config, "workerinput"):
        return
    for folder in [*COMPILED.glob("*")]:
        if (folder / "unfinished").exists() or sum(path.stat().st_size for path in folder.iterdir()) > MAX_BYTES:
            shutil.rmtree(folder)
    for folder, other in itertools.permutations(COMPILED.glob("*"), 2):
        for path in folder.iterdir():
            if not (other / path.name).exists():
                os.link(path, other / path.name)


@pytest.fixture(autouse=True, scope="session")
def compiled_once() -> Iterator[None]:
    """What this worker compiles, and what was compiled when the tests ran before.

    A folder for each worker, for JAX writes its cache's files bit by bit, and another process could read half of one.
    """
    if "--xla_backend_optimization_level=0" not in os.environ.get("XLA_FLAGS", ""):
        yield
        return
    folder = COMPILED / os.environ.get("PYTEST_XDIST_WORKER", "alone")
    unfinished = folder / "unfinished"
    folder.mkdir(parents=True, exist_ok=True)
    unfinished.touch()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    unfinished.unlink()


@pytest.fixture(autouse=True, scope="module")
def mapped_memory() -> Iterator[None]:
    """Drops what was compiled, where there is much of it."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAX_MAPPED:
        jax.clear_caches()
        gc.collect()
