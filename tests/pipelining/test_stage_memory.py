"""What a device of a pipeline has in memory."""

from __future__ import annotations

import pytest

import autoshard
from autoshard import MeshConfig
from autoshard.cost.memory import Memory
from tests.models import tokens
from tests.pipelined_steps import decoder_loss, decoder_params, train_state, trained

MESH = MeshConfig(axes={"stage": 4, "model": 2}, pipeline="stage")


def memory(schedule: str) -> Memory:
    step = autoshard.jit(trained(decoder_loss), mesh=MESH, strategy="tp", microbatches=8, schedule=schedule)
    return step.plan(train_state(decoder_params(4)), tokens(0)).memory


def test_residuals_have_a_slot_for_each_micro_batch_in_flight_and_one_that_is_read_or_made() -> None:
    one, other = memory("gpipe"), memory("1f1b")
    assert one.residuals / other.residuals == pytest.approx((8 + 1) / (4 + 1))
    assert one.peak - other.peak >= one.residuals - other.residuals
