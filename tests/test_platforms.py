"""Devices and threads that a command has on a machine without accelerators."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked import Forked

CONFIG = """
model: {layers: 1, d_model: 16, heads: 2, seq: 16}
data: {source: text}
batch: 8
mesh: {axes: {data: 4}, hardware: cpu}
steps: 1
checkpoint: {dir: run}
platform: cpu
"""
ASKS = """
from autoshard.platforms import *
from autoshard.train.config import named_config
os.environ.pop("NPROC", None) if threads is None else os.environ.update(NPROC=threads)
use_platform(named_config(path))
print(jax.device_count(), os.environ["NPROC"])
"""


@pytest.mark.parametrize(
    ("axis", "flags", "threads", "has"),
    [(4, "", None, "4 32"), (4, "", "3", "4 3"), (-1, "--xla_force_host_platform_device_count=2", "5", "2 5")],
)
def test_devices_are_as_many_as_the_mesh_has_or_the_environment_asks_for_and_threads_too(
    axis: int, flags: str, threads: str | None, has: str, tmp_path: Path
) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(CONFIG.replace("data: 4", f"data: {axis}"))
    environment = {"XLA_FLAGS": flags} if flags else {}
    asked = Forked(exec, (ASKS, {"path": path, "threads": threads}), environment)
    assert asked.communicate() == (f"{has}\n", "")
