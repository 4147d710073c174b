"""Steps that are not finite: seen in any leaf, named, and answered as asked; two processes say whose rows they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import autoshard
from autoshard import checkpoint
from autoshard.errors import ArgumentError, NonFiniteError
from autoshard.train import fit
from autoshard.train.non_finite import NonFinitePolicy
from tests.two_processes import run


def step(state: Any, batch: Any) -> Any:
    """Adds up what it sees. The loss does not know of ``y``, and ``state["top"]`` is infinite from the start."""
    after = {"x": state["x"] + batch["x"].sum(0), "y": state["y"] * batch["y"].mean(), "steps": state["steps"] + 1}
    return {**after, "top": state["top"]}, {"loss": after["x"].sum(), "steps": after["steps"]}


def start() -> Any:
    return {"x": jnp.zeros(8), "y": jnp.ones(3), "steps": jnp.zeros((), jnp.int32), "top": jnp.full(8, jnp.inf)}


def batches(bad: dict[int, str], count: int = 12) -> list[Any]:
    """Batches of which those at ``bad``, counted from 1, have a NaN in this array."""
    found = [{"x": np.full((4, 8), n, np.float32), "y": np.ones(4, np.float32)} for n in range(1, count + 1)]
    for n, name in bad.items():
        found[n - 1][name][0] = np.nan
    return found


def summed(*numbers: int) -> float:
    return 4.0 * sum(numbers)


def decorated() -> Any:
    return autoshard.jit(step, mesh={"data": 2}, strategy="dp", donate_argnums=0)


def test_stop_names_the_step_and_what_was_not_finite_and_saves_nothing_of_it(tmp_path: Path):
    with pytest.raises(NonFiniteError, match=r"step 4: not finite: state\['y'\]; nor is its batch: .*\['y'\]; .* 2$"):
        fit(decorated(), start(), batches({4: "y"}), steps=6, checkpoints=tmp_path, every=2, nan="stop")
    assert checkpoint.steps(tmp_path) == (2,)


@pytest.mark.parametrize("kind", ["step", "function", "with a plan"])
def test_skip_leaves_the_state_as_it_was(kind: str, tmp_path: Path):
    plan = decorated().plan(start(), batches({})[0]) if kind == "with a plan" else None
    given = decorated() if kind == "step" else step
    with pytest.warns(UserWarning, match="step [35]: not finite: ") as warned:
        state = fit(given, start(), batches({3: "x", 5: "y"}), steps=6, plan=plan, log=tmp_path, nan="skip")
    assert len(warned) == 2
    assert int(state["steps"]) == 4
    np.testing.assert_array_equal(state["x"], np.full(8, summed(1, 2, 4, 6)))
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    seen = [e for e in events if e["event"] == "non_finite"]
    assert [(e["step"], e["metrics"], e["state"], e["did"]) for e in seen] == [
        (3, ["loss"], ["state['x']"], "skip"),
        (5, [], ["state['y']"], "skip"),
    ]
    assert [e["step"] for e in events if e["event"] == "step"] == [1, 2, 3, 4, 5, 6]


def test_modules_that_a_skipped_step_would_change_are_as_before():
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.x = nnx.Param(jnp.zeros(8))
            self.seen = nnx.Variable({"steps": jnp.zeros(())})  # a tree in one variable

    def mutate(net: Net, batch: Any) -> Any:
        net.x[...] = net.x[...] + batch["x"].sum(0)
        net.seen.set_value({"steps": net.seen.get_value()["steps"] + 1})
        return net.x[...].sum()

    net = Net()
    with pytest.warns(UserWarning, match="step 2: not finite: loss, state"):
        fit(mutate, net, batches({2: "x"}), steps=3, nan="skip")
    np.testing.assert_array_equal(net.x[...], np.full(8, summed(1, 3)))
    assert net.seen.get_value()["steps"] == 2


def test_more_than_ten_in_a_row_are_not_skipped():
    bad = dict.fromkeys(range(2, 13), "x")
    with (
        pytest.warns(UserWarning, match="not finite") as warned,
        pytest.raises(NonFiniteError, match="step 12: .* skip was the answer 10 times in a row"),
    ):
        fit(decorated(), start(), batches(bad, 14), steps=14, nan="skip")
    assert len(warned) == 10


def test_rewind_goes_back_so_many_steps_and_on_with_the_batches_that_follow(tmp_path: Path):
    given: Any = {"steps": 12, "checkpoints": tmp_path, "every": 2, "nan": "rewind 3"}
    with pytest.warns(UserWarning, match="step 7: not finite"):
        state = fit(decorated(), start(), batches({7: "x"}), **given)
    # Step 4 is 3 steps before step 7; step 8, which is saved, is seen to have come from it: what it computed is lost.
    assert int(state["steps"]) == 4 + 4
    np.testing.assert_array_equal(state["x"], np.full(8, summed(1, 2, 3, 4, 9, 10, 11, 12)))
    assert checkpoint.steps(tmp_path)[-1] == 12


def test_a_rewind_that_has_nowhere_to_go_ends_the_run(tmp_path: Path):
    given: Any = {"checkpoints": tmp_path, "every": 2, "nan": "rewind 3"}
    with pytest.raises(NonFiniteError, match="no checkpoint is 3 steps or more before it .* step is 2"):
        fit(decorated(), start(), batches({3: "x"}), steps=6, **given)
    bad = dict.fromkeys(range(5, 13), "x")
    with (
        pytest.warns(UserWarning, match="not finite") as warned,
        pytest.raises(NonFiniteError, match="step 8: .* rewind was the answer 3 times in a row"),
    ):
        fit(decorated(), start(), batches(bad), steps=12, **given | {"every": 1, "nan": "rewind 1"})
    assert len(warned) == 3
    with pytest.raises(ArgumentError, match="give `checkpoints`, and `every`"):
        fit(decorated(), start(), batches({}), steps=6, nan="rewind 3")


@pytest.mark.parametrize("text", ["", "rewind", "rewind 0", "rewind -1", "stop 3", "Stop", 3])
def test_what_is_no_policy_is_refused(text: Any):
    with pytest.raises(ArgumentError, match="write 'stop', 'skip', or 'rewind 20'"):
        NonFinitePolicy.of(text)


def program() -> Any:
    """Runs in each of two processes; the rows of the second are not finite at step 3."""
    mine = jax.process_index()
    given = batches({})
    given[2]["x"][2] = np.nan  # rows 2 and 3 lie on the devices of process 1
    try:
        by_row = autoshard.jit(step, mesh={"data": 2}, in_shardings=(None, PartitionSpec("data")), donate_argnums=0)
        fit(by_row, start(), given, steps=4, nan="stop")
    except NonFiniteError as error:
        return [mine, str(error)]
    return [mine, ""]


def test_the_process_whose_rows_are_not_finite_is_named_in_both():
    found = run("tests.train.test_non_finite:program", devices=1)
    assert [each[0] for each in found] == [0, 1]
    for _, text in found:
        assert "nor is its batch of process 1: batch['x']" in text
