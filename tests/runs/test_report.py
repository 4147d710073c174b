"""What the report of a run says of its phases."""

from __future__ import annotations

import pytest

from autoshard.runs.report import PhaseEvent, Report, StepEvent, make_report


def report(*ends: int) -> Report:
    """Of a run whose loss is its step's number, on another mesh after each of ``ends``."""
    starts = [0, *ends[:-1]]
    phases = [PhaseEvent(step=n, mesh=f"(data={2**i})", collectives="clean") for i, n in enumerate(starts)]
    steps = [StepEvent(step=n, loss=n) for n in range(1, ends[-1] + 1)]
    return make_report(
        [*phases, *steps],
        steps=ends[-1],
        parameters=1,
        held_out=None,
        bigram_bits=None,
        scored=0,
        unit="tokens",
        checkpoint="run/1",
    )


@pytest.mark.parametrize(
    ("last", "line"),
    [
        (1, "step 1 on mesh (data=1): loss 1.0000"),
        (2, "steps 1-2 on mesh (data=1): loss 1.0000 -> 2.0000"),
        (5, "steps 1-5 on mesh (data=1): loss 1.5000 -> 4.5000 (mean of 2 steps)"),
        (40, "steps 1-40 on mesh (data=1): loss 5.5000 -> 35.5000 (mean of 10 steps)"),
    ],
)
def test_no_step_is_in_both_means(last: int, line: str):
    assert str(report(last)).splitlines()[1] == f"  {line}"


def test_a_phase_is_named_by_its_steps_and_its_mesh():
    lines = [line.strip() for line in str(report(20, 25)).splitlines()]
    assert lines[1:5] == [
        "steps 1-20 on mesh (data=1): loss 5.5000 -> 15.5000 (mean of 10 steps)",
        "steps 21-25 on mesh (data=2): loss 21.5000 -> 24.5000 (mean of 2 steps)",
        "resumed at step 20: (data=1) -> (data=2)",
        "training loss 15.5000 before, 21.5000 after (mean of 10 and 2 steps)",
    ]
    assert "collectives of one step (steps 21-25 on mesh (data=2)):" in lines
