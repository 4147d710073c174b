"""Batches of which each process has a position of its own: none of their rows is lost or seen again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import checkpoint, jit
from autoshard.errors import AutoshardError, ConfigError
from autoshard.jaxpr import all_reach
from autoshard.train.fit import fit
from autoshard.train.processes.positions import gathered, resume
from autoshard.train.sources import source_of
from tests.two_processes import run

ROWS, BATCH = 48, 4
HERE = "tests.train.processes.test_positions"


def count(state: Any, batch: Any) -> Any:
    """Counts the rows that were seen."""
    return state.at[batch["row"]].add(1), {}


class Filtered:
    """A process's rows of a batch: of its half of the numbered ones, process 1 leaves out two of three."""

    def __init__(self, rows: int) -> None:
        self.at, self._rows = 0, rows

    def __next__(self) -> Any:
        me = jax.process_index()
        found: list[int] = []
        while len(found) < self._rows:
            if not me or self.at % 3 == 0:
                found.append((me * ROWS // 2 + self.at) % ROWS)
            self.at += 1
        return {"row": np.asarray(found, np.int32)}

    def get_state(self) -> Any:
        return {"at": self.at}

    def set_state(self, state: Any) -> None:
        self.at = state["at"]


class Even(Filtered):
    """One that leaves out nothing: both processes are at the same position, of rows of their own."""

    def __next__(self) -> Any:
        rows = jax.process_index() * ROWS // 2 + self.at + np.arange(self._rows, dtype=np.int32)
        self.at += self._rows
        return {"row": rows}


class Strict(Filtered):
    """One that takes no position in process 1."""

    def set_state(self, state: Any) -> None:
        if jax.process_index():
            raise ValueError(f"no such shard as of {state}\nand more")
        super().set_state(state)


def sharded(batch: int) -> Any:
    """A loader that gives each process its shard."""
    options = grain.sharding.ShardByJaxProcess(drop_remainder=True)
    sampler = grain.samplers.IndexSampler(ROWS, shuffle=False, num_epochs=1, shard_options=options)
    rows = [{"row": np.int32(n)} for n in range(ROWS)]
    return grain.DataLoader(data_source=rows, sampler=sampler, operations=[grain.transforms.Batch(batch)])


def trained(batches: Any, folder: Path, steps: int, devices: int) -> Any:
    """How often each row was seen, or the error."""
    start = jnp.zeros(ROWS, jnp.int32)
    plan = jit(count, mesh={"data": devices}, strategy="dp", donate_argnums=0).plan(
        start, {"row": jax.ShapeDtypeStruct((BATCH,), jnp.int32)}
    )
    try:
        state = fit(count, start, batches, steps=steps, plan=plan, checkpoints=folder, every=1)
    except AutoshardError as error:
        return f"{type(error).__name__}: {error}"
    return np.asarray(state.addressable_data(0)).tolist()


def program(folder: str) -> dict[str, Any]:
    """Runs in each of two processes."""
    root, found = Path(folder), dict[str, Any]()
    half = BATCH // 2
    for steps in (2, 4):
        found["filtered"] = trained(Filtered(half), root / "filtered", steps, 4)
        found["even"] = trained(Even(half), root / "even", steps, 4)
        found["grain"] = trained(sharded(half), root / "grain", steps, 4)
        found["whole"] = trained([{"row": BATCH * n + np.arange(BATCH)} for n in range(12)], root / "whole", steps, 4)
    found["reached"] = [all_reach("by both", 60), jax.process_index() == 0 or all_reach("by one", 1)]
    found["refused"] = trained(Strict(half), root / "filtered", 5, 4)
    try:
        gathered(object() if jax.process_index() else 1, parted=False)
    except AutoshardError as error:
        found["no JSON"] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def found(root: Path) -> list[dict[str, Any]]:
    """What `program` returned in each process."""
    return run(f"{HERE}:program", str(root))


def test_each_process_goes_on_from_its_own_position(found: list[dict[str, Any]]):
    seen = [*range(8), *range(ROWS // 2, ROWS, 3)]
    wanted = np.isin(np.arange(ROWS), seen).astype(int).tolist()
    assert [one["filtered"] for one in found] == [wanted] * 2


def test_a_loader_that_shards_by_process_goes_on(found: list[dict[str, Any]]):
    wanted = (np.arange(ROWS) % (ROWS // 2) < 8).astype(int).tolist()
    assert [one["grain"] for one in found] == [wanted] * 2


def test_positions_that_differ_are_refused_by_another_number_of_processes(root: Path, found: list[dict[str, Any]]):
    given = {"filtered": Filtered(BATCH), "even": Even(BATCH), "grain": sharded(BATCH)}
    for kind, batches in given.items():
        refused = trained(batches, root / kind, 5, 4)
        assert "ConfigError: the batches were saved by 2 processes, each of which reads rows" in refused
        assert "this run has 1" in refused
        assert "Go on with 2 processes" in refused
        assert checkpoint.latest(root / kind) == 4


def test_a_process_that_waits_alone_is_told(found: list[dict[str, Any]]):
    assert [one["reached"] for one in found] == [[True, True], [True, False]]


def test_equal_positions_are_kept_once_and_go_on_with_any_number(root: Path, found: list[dict[str, Any]]):
    kept = checkpoint.restore(root / "whole", report=True)[1].extra
    assert kept["batches"] == {"of_all": {"taken": 4}}
    state = trained([{"row": BATCH * n + np.arange(BATCH)} for n in range(12)], root / "whole", 6, 2)
    assert state == (np.arange(ROWS) < 6 * BATCH).astype(int).tolist()


def test_what_a_loader_raises_in_one_process_names_it_in_both(found: list[dict[str, Any]]):
    assert (
        "ConfigError: batches: Strict refuses the saved position: ValueError: no such shard as of"
        in (found[1]["refused"])
    )
    assert "and more" not in found[1]["refused"]
    assert "or start over in another folder" in found[1]["refused"]
    assert found[0]["refused"] == (
        "CheckpointError: the saved position of the batches could not be taken by process 1; its error says why"
    )


def test_a_position_that_is_no_json_is_refused_in_both(found: list[dict[str, Any]]):
    assert "ConfigError: batches: their `get_state` gives <object" in found[1]["no JSON"]
    assert "could not be read by process 1" in found[0]["no JSON"]


@pytest.mark.parametrize("saved", [None, {"taken": 1}, {"of_all": 1, "of_each": [1, 2]}, {"of_each": [1]}])
def test_a_value_that_no_run_saved_is_refused(saved: Any):
    with pytest.raises(ConfigError, match="no run of `autoshard.train` saved it"):
        resume(source_of([1, 2]), saved)
