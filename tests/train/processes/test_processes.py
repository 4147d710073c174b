"""A training run in two processes: equal to that in one, stopped and resumed, refused in both."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from jax.sharding import PartitionSpec as P
from rich.console import Console

from autoshard import checkpoint, cli, jit
from autoshard.errors import AutoshardError
from autoshard.train.config import TrainConfig
from autoshard.train.fit import fit
from autoshard.train.loop import train
from autoshard.train.processes.agreement import from_first, in_any, same_in_all
from autoshard.train.stop_signals import StopSignals
from tests.train.test_stop_signals import StoppedAfter
from tests.two_processes import run

WORDS = b"the mesh has two processes and every axis of the mesh has a name ".split()


def recipe(folder: Path, run: str, **entries: Any) -> dict[str, Any]:
    """A run of six steps that changes its mesh after the second."""
    meshes = ({"data": 2, "model": 2}, {"data": 4})
    return {
        "model": {"layers": 1, "d_model": 16, "heads": 2, "seq": 16},
        "data": {"source": str(folder / "text"), "holdout": 4},
        "optimizer": {"learning_rate": 1e-2},
        "batch": 8,
        "phases": [{"mesh": {"axes": a, "hardware": "cpu"}, "until": n} for n, a in zip((2, 6), meshes, strict=True)],
        "eval": {"batches": 1, "final_batches": 2},
        "checkpoint": {"dir": str(folder / run), "every": 4},
        "log_every": 2,
    } | entries


def trained(config: dict[str, Any], stop: StopSignals | None = None) -> Any:
    """The report as JSON, None if the run was stopped, or the error."""
    try:
        report = train(TrainConfig.model_validate(config), console=Console(quiet=True), stop=stop)
    except AutoshardError as error:
        return f"{type(error).__name__}: {error}"
    return None if report is None else report.model_dump(mode="json")


def raises() -> None:
    raise AutoshardError("from the first")


LATE = 15


def rows(late: bool) -> Iterator[dict[str, np.ndarray]]:
    """Numbered rows, of which one batch may come late."""
    for n in range(20):
        if late and n + 1 == LATE:
            time.sleep(1.0)
        yield {"row": 4 * n + np.arange(4)}


def signalled(here: bool) -> Iterator[dict[str, np.ndarray]]:
    """Rows that are read once a process has a signal."""
    if here:
        os.kill(os.getpid(), signal.SIGTERM)
    yield from rows(late=False)


def count(state: Any, batch: dict[str, Any]) -> Any:
    return state + batch["row"].sum(), {}


def drawn(state: Any, batch: dict[str, Any]) -> Any:
    """Counts rows, beside a key that is saved."""
    return {"key": jax.random.split(state["key"])[0], "rows": state["rows"] + batch["row"].sum()}, {}


def paired(state: Any, batch: dict[str, Any]) -> Any:
    return state + (batch["x"] * batch["at"].sum(0)).sum(), {}


def pair(n: int) -> dict[str, np.ndarray]:
    """Of the shapes of tokens [batch, seq] and positions [3, batch, seq]."""
    return {
        "at": n + np.arange(24, dtype=np.float32).reshape(3, 4, 2),
        "x": np.arange(8, dtype=np.float32).reshape(4, 2),
    }


def own_rows() -> float:
    """`paired` over three batches, of which each process brings its rows."""
    split = {"at": P(None, "data"), "x": P("data")}
    plan = jit(paired, mesh={"data": 4}, in_shardings=(None, split)).plan(jnp.zeros(()), pair(0))
    at, x = plan.local_rows("batch['at']", 1), plan.local_rows("batch['x']")
    batches = [{"at": pair(n)["at"][:, at], "x": pair(n)["x"][x]} for n in range(3)]
    return float(fit(paired, jnp.zeros(()), batches, steps=3, plan=plan))


def program(folder: str) -> dict[str, Any]:
    """Runs in each of two processes."""
    root, me = Path(folder), jax.process_index()
    stop = StoppedAfter(1) if me else StopSignals()  # as if the second process alone had received a signal
    found: dict[str, Any] = {"stopped": trained(recipe(root, "two"), stop)}
    found["saved"] = checkpoint.latest(root / "two/checkpoints")
    cli.app(["train", str(root / "config.yaml")], standalone_mode=False)  # resumes
    found["again"] = trained(recipe(root, "two"))
    found["refused"] = trained(recipe(root, "two", batch=4))
    found["other rate"] = trained(recipe(root, "rate", optimizer={"learning_rate": 1e-2 + 1e-3 * me}))
    found["other text"] = trained(recipe(root, "other", data={"source": str(root / f"text{me or ''}"), "holdout": 4}))

    found["sum"] = float(fit(count, jnp.zeros(()), rows(late=me == 1), steps=20, log=root / "late"))

    for steps in (2, 4):
        start = {"key": jax.random.key(3), "rows": jnp.zeros(())}
        state = fit(drawn, start, rows(late=False), steps=steps, checkpoints=root / "keys")
    found["key"] = np.asarray(jax.random.key_data(state["key"]).addressable_data(0)).tolist()
    found["own rows"] = own_rows()
    try:
        fit(lambda state, batch: (state + (1 + me) * batch["row"].sum(), {}), jnp.zeros(()), rows(late=False), steps=1)
    except AutoshardError as error:
        found["other program"] = str(error)

    try:
        fit(count, jnp.zeros(()), signalled(me == 1), steps=3, checkpoints=root / "signalled")
    except SystemExit as ended:
        found["ended"] = [ended.code, checkpoint.latest(root / "signalled")]

    found["first"] = from_first(lambda: {"process": me})
    found["any"] = [in_any(False), in_any(me == 1)]
    found["same"] = [same_in_all(7), same_in_all(me)]
    try:
        from_first(raises)
    except AutoshardError as error:
        found["raised"] = str(error)
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, and with a configuration."""
    folder = tmp_path_factory.mktemp("run")
    chosen = np.random.default_rng(0)
    for name in ("text", "text1"):
        (folder / name).mkdir()
        for number in range(20):
            (folder / name / f"{number}.txt").write_bytes(b" ".join(chosen.choice(WORDS, 200)))
    (folder / "config.yaml").write_text(yaml.safe_dump(recipe(folder, "two")))
    return folder


@pytest.fixture(scope="module")
def found(root: Path) -> list[dict[str, Any]]:
    """What `program` returned in each process."""
    return run("tests.train.processes.test_processes:program", str(root))


def by_itself(folder: str) -> Any:
    """Runs in one process, whose devices add as those of several do: by gloo."""
    return trained(recipe(Path(folder), "one"))


@pytest.fixture(scope="module")
def alone(root: Path) -> dict[str, Any]:
    """The report of the same run in one process."""
    return run("tests.train.processes.test_processes:by_itself", str(root), processes=1, devices=4)[0]


def losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["event"] == "step"]


def test_two_processes_take_the_steps_of_one_bit_for_bit(
    root: Path, found: list[dict[str, Any]], alone: dict[str, Any]
):
    assert losses(root / "two") == losses(root / "one")
    assert len(losses(root / "two")) == 6
    for report in (one["again"] for one in found):
        assert report["steps"] == alone["steps"] == 6
        assert report["held_out_bits"] == alone["held_out_bits"]
        assert [p["mesh"] for p in report["phases"]] == [p["mesh"] for p in alone["phases"]]
    state, other = (checkpoint.restore(root / name / "checkpoints") for name in ("two", "one"))
    for path, value in state.items():
        np.testing.assert_array_equal(value, other[path])


def test_a_run_that_one_process_is_asked_to_stop_is_stopped_in_both(found: list[dict[str, Any]]):
    assert [one["stopped"] for one in found] == [None, None]
    assert [one["saved"] for one in found] == [1, 1]  # after the step, though the log is written every second one


def test_a_signal_to_one_process_before_the_first_step_ends_both(found: list[dict[str, Any]]):
    assert [one["ended"] for one in found] == [[143, None]] * 2


def test_what_the_first_process_refuses_is_refused_in_both(found: list[dict[str, Any]]):
    for one in found:
        assert "batch is 4, and the run in" in one["refused"]
        assert one["raised"] == "from the first"
        assert one["first"] == {"process": 0}
        assert one["any"] == [False, True]
        assert one["same"] == [True, False]


def test_other_text_in_one_process_is_refused_in_both(found: list[dict[str, Any]]):
    assert all("is not the same in all 2 processes" in one["other text"] for one in found)


def test_keys_are_restored_where_several_processes_hold_them(found: list[dict[str, Any]]):
    key = jax.random.key(3)
    for _ in range(4):
        key = jax.random.split(key)[0]
    assert [one["key"] for one in found] == [jax.random.key_data(key).tolist()] * 2


def test_each_process_brings_its_rows_of_each_array(found: list[dict[str, Any]]):
    wanted = sum(float((batch["x"] * batch["at"].sum(0)).sum()) for batch in map(pair, range(3)))
    assert [one["own rows"] for one in found] == [wanted] * 2


def test_a_number_that_differs_in_the_programs_is_refused_in_both(found: list[dict[str, Any]]):
    assert all("is not the same in processes 0 and 1" in one["other program"] for one in found)


def test_other_entries_in_one_process_are_refused_in_both_and_named(found: list[dict[str, Any]]):
    assert "process 1 has another configuration" in found[0]["other rate"]
    assert "optimizer.learning_rate is 0.011 in process 1, and 0.01 in process 0" in found[1]["other rate"]


def test_a_process_whose_batches_come_late_is_named_with_the_step(root: Path, found: list[dict[str, Any]]):
    assert [one["sum"] for one in found] == [80 * 79 / 2] * 2
    events = [json.loads(line) for line in (root / "late/log.jsonl").read_text().splitlines()]
    named = [(event["process"], event["step"]) for event in events if event["event"] == "straggler"]
    assert (1, LATE) in named
