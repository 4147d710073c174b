"""The report of a finished training run: losses on each mesh, held-out bits per byte, collectives, checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, TypeAdapter

_MEAN_STEPS = 10
"""Steps over which a loss in the report is averaged, at most: the loss of one batch is noisy."""
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
type Number = Annotated[float, BeforeValidator(lambda x: float(x) if x in _NOT_FINITE else x)]
"""In JSON, which has no other numbers, those that are not finite are these texts."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class PhaseEvent(_Frozen):
    """A phase begins, or is resumed, after step ``step``."""

    event: Literal["phase"] = "phase"
    step: NonNegativeInt
    mesh: str
    collectives: str
    """The audit of the step, as a table of predicted and emitted collectives."""


class _Measured(_Frozen):
    """An event with metrics of any name beside ``loss``."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Number] = Field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]

    step: NonNegativeInt
    loss: Number | None = None

    @classmethod
    def of(cls, step: int, metrics: Mapping[str, float]) -> Self:
        """The event with these metrics; one that is called as an entry of events is, has an underscore after it."""
        return cls.model_validate({"step": step, **{_metric_name(n): value for n, value in metrics.items()}})

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics by name."""
        loss = {} if self.loss is None else {"loss": self.loss}
        return {**loss, **(self.__pydantic_extra__ or {})}


def _metric_name(name: str) -> str:
    return f"{name}_" if name in ("event", "step") else name


class StepEvent(_Measured):
    """Step ``step``, counted from 1, was taken; of the decoder, ``loss`` in nats per token."""

    event: Literal["step"] = "step"


class HeldOutEvent(_Measured):
    """An evaluation after ``step`` steps, on the mesh of the last phase event; of the decoder, the held-out loss in
    nats per token.
    """

    event: Literal["held_out"] = "held_out"


class NonFiniteEvent(_Frozen):
    """Step ``step`` gave numbers that are NaN or infinite."""

    event: Literal["non_finite"] = "non_finite"
    step: NonNegativeInt
    metrics: tuple[str, ...]
    """Which of its metrics."""
    state: tuple[str, ...]
    """Paths of arrays in the next state, the first of them."""
    batch: tuple[str, ...]
    """Paths of arrays in its batch."""
    processes: tuple[NonNegativeInt, ...]
    """Whose rows of the batch these are."""
    did: Literal["stop", "skip", "rewind"]
    restored: NonNegativeInt | None = None
    """The step whose saved state was taken instead."""

    def text(self, processes: int) -> str:
        """One line for a person, of a run in so many processes."""
        names = [*self.metrics, *self.state[:3], *(["..."] if len(self.state) > 3 else [])]
        line = f"step {self.step}: not finite: {', '.join(names)}"
        if self.batch:
            of = f" of process {', '.join(map(str, self.processes))}" if processes > 1 else ""
            return f"{line}; nor is its batch{of}: {', '.join(self.batch)}"
        return f"{line}; its batch is finite"


Cause = Literal["batches", "host"]
"""By what a process is late: its batches come late, or its host works while its devices wait."""


class StragglerEvent(_Frozen):
    """A process kept the others waiting: most before step ``step``."""

    event: Literal["straggler"] = "straggler"
    step: NonNegativeInt
    process: NonNegativeInt
    cause: Cause = "batches"
    seconds: float
    """That it was late before that step."""
    total: float
    """Seconds that it was late since the processes compared before."""
    others: float
    """The same of the others, their median."""
    passed: float
    """Seconds since the processes compared before."""

    @property
    def text(self) -> str:
        """One line for a person."""
        what = "its batches came" if self.cause == "batches" else "its host was"
        return (
            f"process {self.process} keeps the others waiting: {what} {self.total:.2f} s late in {self.passed:.2f} s, "
            f"{self.seconds:.2f} s of that before step {self.step}; theirs {self.others:.2f} s"
        )


class SlowDevicesEvent(_Frozen):
    """The devices of a process are slower than those of the others, measured after step ``step``."""

    event: Literal["slow_devices"] = "slow_devices"
    step: NonNegativeInt
    process: NonNegativeInt
    seconds: float
    """That the slowest of its devices takes for a product."""
    others: float
    """The same of the others, their median."""

    @property
    def text(self) -> str:
        """One line for a person."""
        return (
            f"process {self.process} keeps the others waiting: after step {self.step} a device of it takes "
            f"{self.seconds * 1e3:.2f} ms for what takes theirs {self.others * 1e3:.2f} ms"
        )


class EndEvent(_Frozen):
    """The run ended after step ``step``: it took its last one, or an error ended it. One that is to go on has none."""

    event: Literal["end"] = "end"
    step: NonNegativeInt
    how: Literal["finished", "failed"]
    error: str | None = None
    """Its class and first line."""


Event = PhaseEvent | StepEvent | HeldOutEvent | NonFiniteEvent | StragglerEvent | SlowDevicesEvent | EndEvent
EVENTS: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])
"""Reads an event of any kind."""


class PhaseReport(_Frozen):
    """Steps on one mesh, of a phase of the configuration, or of a part of one that was resumed on another mesh: mean
    loss of the first and last of them, held-out loss at their start and end, in nats per token.

    A loss is None where the log lacks it.
    """

    mesh: str
    first: int
    last: int
    loss_first: Number | None
    loss_last: Number | None
    held_out_first: Number | None
    held_out_last: Number | None
    collectives: str

    @property
    def where(self) -> str:
        """Its steps and its mesh. It has no number: the phases that a run counts are those of its configuration."""
        steps = f"steps {self.first + 1}-{self.last}" if self.last > self.first + 1 else f"step {self.last}"
        return f"{steps} on mesh {self.mesh}"


class Report(_Frozen):
    """The report of a finished run."""

    steps: int
    parameters: int
    phases: tuple[PhaseReport, ...]
    held_out: Number | None
    """The final held-out loss, of text in nats per byte; None where no data is held out."""
    held_out_bits: Number | None
    """Of text, without a loss of one's own: bits per byte of the model on the first ``scored`` bytes that are held
    out."""
    bigram_bits: Number | None
    """Of the same runs: bits per byte on the same bytes of a byte-bigram model fitted on the training bytes."""
    scored: int
    """How much ``held_out`` is the loss of, in ``unit``."""
    unit: str
    checkpoint: str

    def as_json(self) -> Any:
        """The report as strict JSON."""
        return json.loads(self.model_dump_json())

    def __str__(self) -> str:
        lines = [f"{self.steps} steps of {self.parameters:,} parameters"]
        for phase in self.phases:
            losses = [_loss_text(phase.loss_first), _loss_text(phase.loss_last)][: phase.last - phase.first]
            lines.append(f"  {phase.where}: loss {' -> '.join(losses)}{_mean_note(phase)}")
        for before, after in zip(self.phases, self.phases[1:], strict=False):
            lines.append(f"  resumed at step {before.last}: {before.mesh} -> {after.mesh}")
            losses = f"{_loss_text(before.loss_last)} before, {_loss_text(after.loss_first)} after"
            lines.append(f"    training loss {losses}{_mean_note(before, after)}")
            if before.held_out_last is not None and after.held_out_first is not None:
                both = f"{before.held_out_last:.6f} before, {after.held_out_first:.6f} after"
                lines.append(f"    held-out loss of the same state {both}")
        if self.held_out_bits is not None and self.bigram_bits is not None:
            better = "below" if self.held_out_bits < self.bigram_bits else "NOT below"
            lines.append(
                f"  first {self.scored:,} bytes held out: {self.held_out_bits:.3f} bits per byte, {better} the "
                f"{self.bigram_bits:.3f} of a byte-bigram model fitted on the training bytes"
            )
        elif self.held_out is not None:
            lines.append(f"  held-out loss {self.held_out:.4f}, over {self.scored:,} {self.unit}")
        for phase in self.phases:
            lines.append(f"  collectives of one step ({phase.where}):")
            lines.extend(f"    {line}" for line in phase.collectives.splitlines())
        lines.append(f"  checkpoint: {self.checkpoint}")
        return "\n".join(lines)


def _mean_steps(first: int, last: int) -> int:
    """Of how many steps the losses of a phase are means: no step is in both."""
    return max(1, min(_MEAN_STEPS, (last - first) // 2))


def _mean_note(*phases: PhaseReport) -> str:
    counts = dict.fromkeys(_mean_steps(phase.first, phase.last) for phase in phases)
    return "" if set(counts) == {1} else f" (mean of {' and '.join(map(str, counts))} steps)"


def _loss_text(loss: float | None) -> str:
    return "unknown" if loss is None else f"{loss:.4f}"


def make_report(
    events: Iterable[Event],
    *,
    steps: int,
    parameters: int,
    held_out: float | None,
    bigram_bits: float | None,
    scored: int,
    unit: str,
    checkpoint: str,
) -> Report:
    """The report of the run of ``steps`` steps with these events; ``held_out`` is its final loss, over ``scored`` of
    ``unit``, of text in nats per byte.
    """
    starts: list[PhaseEvent] = []
    losses: dict[int, float] = {}
    held: dict[tuple[int, int], float] = {}
    answered = False
    for event in events:
        match event:
            case PhaseEvent():
                starts.append(event)
            case StepEvent():
                losses[event.step] = math.nan if event.loss is None else event.loss
            case NonFiniteEvent():
                answered = True
                losses.pop(event.step, None)  # the step came to nothing
            case HeldOutEvent():
                held[len(starts) - 1, event.step] = math.nan if event.loss is None else event.loss
            case StragglerEvent() | SlowDevicesEvent() | EndEvent():
                pass
    if answered:  # so did steps that were begun before the answer
        losses = {step: loss for step, loss in losses.items() if math.isfinite(loss)}
    phases = [
        PhaseReport(
            mesh=start.mesh,
            first=start.step,
            last=end,
            loss_first=_mean_loss(losses, start.step + 1, start.step + _mean_steps(start.step, end)),
            loss_last=_mean_loss(losses, end - _mean_steps(start.step, end) + 1, end),
            held_out_first=held.get((index, start.step)),
            held_out_last=held.get((index, end)),
            collectives=start.collectives,
        )
        for index, (start, end) in enumerate(zip(starts, [*(s.step for s in starts[1:]), steps], strict=False))
        if start.step < end  # a phase without a step, because the mesh was changed before its first one
    ]
    return Report(
        steps=steps,
        parameters=parameters,
        phases=tuple(phases),
        held_out=held_out,
        held_out_bits=None if held_out is None or bigram_bits is None else held_out / math.log(2),
        bigram_bits=bigram_bits,
        scored=scored,
        unit=unit,
        checkpoint=checkpoint,
    )


def _mean_loss(losses: Mapping[int, float], first: int, last: int) -> float | None:
    found = [losses[step] for step in range(first, last + 1) if step in losses]
    return float(np.mean(found)) if found else None
