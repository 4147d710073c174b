"""The state of a run that goes on with other code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from etils import epath

from autoshard import checkpoint
from autoshard.errors import CheckpointError
from autoshard.runs.run_folder import RunFolder
from autoshard.train.models.decoder import Steps
from autoshard.train.work import check_state


def steps(width: int) -> Steps:
    def init(key: jax.Array) -> dict[str, object]:
        kernel = jnp.zeros((width, 4))
        return {"opt_state": {"mu": {"kernel": kernel}}, "params": {"kernel": kernel}, "step": jnp.zeros((), jnp.int32)}

    def unused(*_: object) -> Any:
        raise AssertionError

    return Steps(init, unused, unused, unused)


def test_a_state_of_other_code_is_refused_by_its_parameter(tmp_path: Path):
    folder = RunFolder(epath.Path(tmp_path / "run"))
    checkpoint.save(folder.checkpoints, 3, steps(32).init(jax.random.key(0)), wait=True)
    check_state(steps(32), folder, 3)
    with pytest.raises(CheckpointError) as caught:
        check_state(steps(8), folder, 3)
    assert str(caught.value) == (
        f"the run in {folder.root} has another state than the model and the optimizer have now: params/kernel is "
        "float32[32,4] in the checkpoint and float32[8,4] here. Of 3 leaves here and 3 there, 2 differ in shape or "
        "dtype, 0 are only here, 0 only there. Set their code back, choose another checkpoint.dir, or start over with "
        "--fresh"
    )
