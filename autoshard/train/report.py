"""What a finished training run has to show: losses on each mesh, held-out bits, collectives, where it lies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

_MEAN_STEPS = 10
"""Steps that a loss in the report is the mean of: one batch's loss says little."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class PhaseEvent(_Frozen):
    """After ``step`` steps the run goes on here: the mesh, and what the step sends over it."""

    event: Literal["phase"] = "phase"
    step: int
    mesh: str
    collectives: str
    """The audit of the step: a table of predicted and emitted collectives."""


class StepEvent(_Frozen):
    """Step ``step`` (counted from 1) was taken; ``loss`` in nats a token."""

    event: Literal["step"] = "step"
    step: int
    loss: float
    grad_norm: float
    learning_rate: float


class HeldOutEvent(_Frozen):
    """The held-out loss after ``step`` steps, in nats a token, on the mesh of the last phase before it."""

    event: Literal["held_out"] = "held_out"
    step: int
    loss: float


class PhaseReport(_Frozen):
    """One phase: the mean loss of its first and last steps, and the held-out loss at both its ends, in nats a token."""

    mesh: str
    first: int
    last: int
    loss_first: float
    loss_last: float
    held_out_first: float | None
    held_out_last: float | None
    collectives: str


class Report(_Frozen):
    """A finished run."""

    steps: int
    parameters: int
    phases: tuple[PhaseReport, ...]
    held_out_bits: float
    """Bits per byte of the model on the first ``scored`` bytes of the held-out files."""
    bigram_bits: float
    """Bits per byte of a byte-bigram model, fitted on the training bytes, on the same held-out bytes."""
    scored: int
    checkpoint: str

    def __str__(self) -> str:
        lines = [f"{self.steps} steps of {self.parameters:,} parameters"]
        for number, phase in enumerate(self.phases, 1):
            lines.append(
                f"  phase {number}: mesh {phase.mesh}, steps {phase.first + 1}-{phase.last}, "
                f"loss {phase.loss_first:.4f} -> {phase.loss_last:.4f}"
            )
        for before, after in zip(self.phases, self.phases[1:], strict=False):
            lines.append(f"  resumed at step {before.last}: {before.mesh} -> {after.mesh}")
            lines.append(f"    training loss {before.loss_last:.4f} before, {after.loss_first:.4f} after{_WINDOW_NOTE}")
            if before.held_out_last is not None and after.held_out_first is not None:
                both = f"{before.held_out_last:.6f} before, {after.held_out_first:.6f} after"
                lines.append(f"    held-out loss of that same state {both}")
        better = "below" if self.held_out_bits < self.bigram_bits else "NOT below"
        lines.append(
            f"  held-out files ({self.scored:,} bytes): {self.held_out_bits:.3f} bits per byte, {better} the "
            f"{self.bigram_bits:.3f} of a byte-bigram model fitted on the same training bytes"
        )
        for number, phase in enumerate(self.phases, 1):
            lines.append(f"  collectives of one step in phase {number}, mesh {phase.mesh}:")
            lines.extend(f"    {line}" for line in phase.collectives.splitlines())
        lines.append(f"  checkpoint: {self.checkpoint}")
        return "\n".join(lines)


_WINDOW_NOTE = f" (mean of {_MEAN_STEPS} steps)"


def make_report(
    records: Iterable[Mapping[str, Any]],
    *,
    parameters: int,
    held_out: float,
    bigram_bits: float,
    scored: int,
    checkpoint: str,
) -> Report:
    """The report of the run with this log; ``held_out`` is its final loss over ``scored`` bytes, in nats a byte."""
    starts: list[PhaseEvent] = []
    losses: dict[int, float] = {}
    held: dict[tuple[int, int], float] = {}
    for record in records:
        match record["event"]:
            case "phase":
                starts.append(PhaseEvent.model_validate(record))
            case "step":
                losses[record["step"]] = record["loss"]
            case _:
                held[len(starts) - 1, record["step"]] = record["loss"]
    ends = [start.step for start in starts[1:]] + [max(losses)]
    phases = [
        PhaseReport(
            mesh=start.mesh,
            first=start.step,
            last=end,
            loss_first=_mean_loss(losses, start.step + 1, min(start.step + _MEAN_STEPS, end)),
            loss_last=_mean_loss(losses, max(start.step, end - _MEAN_STEPS) + 1, end),
            held_out_first=held.get((index, start.step)),
            held_out_last=held.get((index, end)),
            collectives=start.collectives,
        )
        for index, (start, end) in enumerate(zip(starts, ends, strict=True))
        if start.step < end  # a mesh that was changed before its first step leaves nothing to report
    ]
    return Report(
        steps=max(losses),
        parameters=parameters,
        phases=tuple(phases),
        held_out_bits=held_out / math.log(2),
        bigram_bits=bigram_bits,
        scored=scored,
        checkpoint=checkpoint,
    )


def _mean_loss(losses: Mapping[int, float], first: int, last: int) -> float:
    return float(np.mean([losses[step] for step in range(first, last + 1)]))
