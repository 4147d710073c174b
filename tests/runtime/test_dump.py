"""The dump of a step's stages, and their times in the log."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
STAGES = ["1-traced.txt", "2-passes.txt", "3-graph.txt", "4-plan.txt", "5-constrained.txt"]


def step(w: Any, x: Any) -> Any:
    return w - 0.1 * (x.T @ jnp.tanh(x @ w))


def test_each_planned_step_is_dumped_stage_by_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSHARD_DUMP_TO", str(tmp_path / "dumps"))
    jitted = autoshard.jit(step, mesh={"data": 8}, strategy="fsdp", donate_argnums=0)
    plan = jitted.plan(X, X)
    jitted.plan(X, X)  # planned already
    jitted.plan(X, jax.ShapeDtypeStruct((128, 64), jnp.float32))
    folders = sorted((tmp_path / "dumps").iterdir())
    assert [folder.name for folder in folders] == ["0001-step", "0002-step"]
    assert sorted(file.name for file in folders[0].iterdir()) == STAGES
    traced, rewritten, graph, report, constrained = ((folders[0] / name).read_text() for name in STAGES)
    assert traced.startswith("program step over mesh (data=8)")
    assert "dot_general" in traced
    assert rewritten.startswith("pass dead_code")
    assert "dot_general" in graph
    assert report == plan.explain().rstrip("\n") + "\n"
    assert "sharding_constraint" in constrained or "shard_map" in constrained


def test_a_step_for_a_mesh_that_is_only_described_is_dumped_unlowered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOSHARD_DUMP_TO", str(tmp_path))
    mesh = autoshard.MeshConfig(axes={"data": 16}, hardware="cpu")
    autoshard.jit(lambda w, x: x @ w, mesh=mesh).plan(X, X)
    assert (tmp_path / "0001-_lambda_" / "5-constrained.txt").read_text().startswith("not lowered: ")


def test_the_log_has_the_time_of_each_stage(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="autoshard"):
        autoshard.jit(step, mesh={"data": 8}, strategy="fsdp").lower(X, X).compile()
    stages = [record.getMessage().split()[1] for record in caplog.records if record.name == "autoshard"]
    assert stages == ["trace", "passes", "graph", "search", "plan", "lower"]
    assert all(record.getMessage().startswith("step: ") for record in caplog.records if record.name == "autoshard")


def test_nothing_is_written_where_no_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOSHARD_DUMP_TO", raising=False)
    monkeypatch.chdir(tmp_path)
    autoshard.jit(step, mesh={"data": 8}).plan(X, X)
    assert not list(tmp_path.iterdir())
