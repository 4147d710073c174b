"""Runs a training configuration phase by phase; resumable at any moment, with a report at the end.

All randomness (initialization, order of the batches) depends on the seed and the step only. So a run that was killed
and resumed takes the same steps with the same numbers as one that was not.

Several processes (`jax.distributed`) run this together over one mesh: each makes every batch and copies its own rows to
its devices; the first one prints, and writes the folder, which all must share for the checkpoints.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from etils import epath
from rich.console import Console

from autoshard import checkpoint
from autoshard.backend.audit import audit
from autoshard.batches.padding import WEIGHTS
from autoshard.batches.prefetch import Prefetched
from autoshard.errors import ConfigError
from autoshard.machine.hardware import is_of_other_chip
from autoshard.pages.page import brief, page
from autoshard.runs.host_times import HostTimes
from autoshard.runs.progress import ProgressLine
from autoshard.runs.report import (
    EndEvent,
    Event,
    HeldOutEvent,
    NonFiniteEvent,
    PhaseEvent,
    Report,
    SlowDevicesEvent,
    StepEvent,
    StragglerEvent,
    make_report,
)
from autoshard.runs.run_folder import RunFolder, write_json
from autoshard.runs.run_log import RunLog
from autoshard.runs.wandb_run import WandbRun
from autoshard.train import data
from autoshard.train.config import TrainConfig
from autoshard.train.models.decoder import Tree
from autoshard.train.non_finite import LossWatch, NonFinitePolicy, NonFiniteWatch
from autoshard.train.optimizer import OptimizerConfig, decay_note
from autoshard.train.peak import peak_seconds
from autoshard.train.phase import PlannedPhase, plan_phase
from autoshard.train.processes.agreement import from_first, in_any, is_first, same_entries
from autoshard.train.processes.ending import failure_logged, saves_finished
from autoshard.train.processes.meeting import Meeting
from autoshard.train.processes.positions import gathered, resume
from autoshard.train.stepping import Duties, Numbers, scalars, take_steps, traced
from autoshard.train.stop_signals import StopSignals
from autoshard.train.work import Work, check_state, work_of


def train(
    config: TrainConfig, *, fresh: bool = False, console: Console | None = None, stop: StopSignals | None = None
) -> Report | None:
    """Trains from the last complete checkpoint in ``config.checkpoint.dir``, or from the start, to the last step.

    Args:
      fresh: deletes an earlier run in the folder and starts over.
      console: receives the plan, the progress and the report; standard output if absent.
      stop: asked before the first step and after every one whether to stop; after a step the state is saved then.

    Returns:
      The report; None if the run was stopped.

    Raises:
      ConfigError: the run in the folder was begun with another model, data, optimizer, batch or seed; or several
        processes have other configurations.
      CheckpointError: the folder is in use, or has files that are no run's, or checkpoints of another state.
      MeshError: a phase's mesh needs more devices than are available.

    Example:
      >>> from autoshard.train.config import TrainConfig
      >>> model = {"layers": 1, "d_model": 8, "heads": 1, "seq": 8, "d_ff": 16}
      >>> run = TrainConfig(
      ...     model=model,
      ...     data={"source": os.path.dirname(autoshard.train.__file__)},
      ...     eval={"batches": 1, "final_batches": 1},
      ...     checkpoint={"dir": tempfile.mkdtemp() + "/run"},
      ...     batch=8,
      ...     mesh={"axes": {"data": 8}},
      ...     steps=1,
      ...     strategy="replicated",
      ... )
      >>> autoshard.train.train(run, console=Console(quiet=True)).steps
      1
    """
    console = console or Console(soft_wrap=True, quiet=not is_first())
    same_entries(config.entries(), "configuration")
    folder = RunFolder(epath.Path(config.checkpoint.dir))
    _check_devices(config, 0 if fresh else from_first(lambda: checkpoint.latest(folder.checkpoints)) or 0)
    with contextlib.ExitStack() as stack:
        from_first(lambda: stack.enter_context(_locked(config, folder)))
        if fresh and (deleted := from_first(folder.clear)):
            console.print(f"starting over: deleted {', '.join(deleted)} in {folder.root}", markup=False)
        return _train(config, folder, console, stop or StopSignals())


def _train(config: TrainConfig, folder: RunFolder, console: Console, stop: StopSignals) -> Report | None:
    """Trains in a folder that is locked."""
    given, config = config, config.resuming(from_first(folder.settings) or {})
    settings = config.state_settings()
    from_first(lambda: folder.claim(settings))
    done = from_first(lambda: checkpoint.latest(folder.checkpoints)) or 0
    if done > config.last_step:
        raise ConfigError(
            f"the run in {folder.root} is at step {done}, beyond this configuration's last step {config.last_step}; "
            "choose another checkpoint.dir, or start over with --fresh"
        )
    if done == config.last_step and (report := from_first(lambda: folder.finished(done))):
        console.print(f"the run in {folder.root} is finished; --fresh starts it over", markup=False)
        console.print(str(report), markup=False, highlight=False)
        return report
    if damaged := from_first(lambda: folder.drop_events_after(done)):
        console.print(
            f"{folder.log} has {damaged} damaged lines, which are dropped: the report lacks their events", markup=False
        )
    if done:
        console.print(f"resuming {folder.root} from its checkpoint at step {done} of {config.last_step}", markup=False)
    kept = None if config is given else config.optimizer
    if isinstance(kept, OptimizerConfig) and (note := decay_note(kept, config.last_step)):
        console.print(note, markup=False, highlight=False)
    with failure_logged(folder, stop):
        return _run_remaining(config, folder, console, done, stop)


@contextlib.contextmanager
def _locked(config: TrainConfig, folder: RunFolder) -> Generator[None]:
    """The run's folder, made and kept for this process; an error names the line that names it."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(folder.locked())
        except OSError as error:
            where = f"{config.at('checkpoint.dir')}{folder.root} cannot be the run's folder"
            raise ConfigError(f"{where}: {error.strerror}; name another, which is made if it is not there") from None
        yield


def _check_devices(config: TrainConfig, done: int) -> None:
    """Raises `MeshError` where a phase that has steps after ``done`` needs more devices than there are."""
    for phase in config.all_phases:
        if phase.until > done and phase.mesh.axes != "auto":
            phase.mesh.mesh().concrete()


@dataclass(frozen=True)
class _RunContext:
    """What all phases of a run share."""

    config: TrainConfig
    folder: RunFolder
    events: RunLog
    console: Console
    work: Work
    progress: ProgressLine
    stop: StopSignals
    wandb: WandbRun

    def log(self, event: Event) -> None:
        """Adds ``event`` to the folder's log."""
        if is_first():
            self.events.append(event)
            self.wandb.append(event)

    def to_stop(self) -> bool:
        """Whether a process was asked to stop."""
        return in_any(self.stop.requested)

    def say(self, text: str) -> None:
        """Prints ``text`` without markup."""
        self.console.print(text, markup=False, highlight=False)


def _run_remaining(
    config: TrainConfig, folder: RunFolder, console: Console, done: int, stop: StopSignals
) -> Report | None:
    """Takes the steps after ``done`` and writes the report; None if it was stopped before."""
    work = work_of(config)
    if done:
        check_state(work.steps, folder, done)
    if (corpus := work.batches.corpus) is not None:  # read before anything is planned, which takes longer
        console.print(f"text: {corpus}", markup=False, highlight=False)
    if work.is_evaluated:
        next(work.batches.final())  # that there is one
    asked = None if config.wandb is None else config.wandb.model_dump(exclude_none=True)
    wandb = WandbRun(folder, asked, config.model_dump(mode="json"))
    from_first(wandb.begin)
    line = ProgressLine(console, config.last_step, *work.batches.amount, config.log_every)
    with contextlib.closing(wandb), line as progress, RunLog(folder) as events:
        run = _RunContext(config, folder, events, console, work, progress, stop, wandb)
        last = None
        for index, phase in enumerate(config.all_phases):
            if phase.until > done:
                last = _run_phase(run, index, done)
                done = phase.until
                if run.to_stop():
                    return None
        last = last or plan_phase(config, config.all_phases[-1], work)
        held_out, batches = None, 0
        if last.evaluate is not None:
            # From the checkpoint even if the run trained just now, so that a resumed run does the same.
            state = checkpoint.restore(folder.checkpoints, done, plan=last.plan)
            metrics, batches = _mean_metrics(last, state, work.batches.final())
            held_out = metrics.get("loss")
        run.log(EndEvent(step=done, how="finished"))
    report = from_first(lambda: _write_report(run, last, done, held_out, batches))
    run.say(str(report))
    if config.nan is None and is_first():
        losses = LossWatch.of(folder.events())
        if hint := losses.hint("`nan: stop`, `nan: skip` or `nan: rewind N` in the configuration"):
            run.say(hint)
    return report


def _write_report(run: _RunContext, last: PlannedPhase, done: int, held_out: float | None, batches: int) -> Report:
    """Writes the report; ``held_out`` is the final loss over so many ``batches``."""
    corpus = last.work.batches.corpus if last.work.in_bits else None
    amount, unit = last.work.batches.amount
    scored = batches * amount
    trained = last.state["params"] if isinstance(last.state, dict) and "params" in last.state else last.state
    report = make_report(
        run.folder.events(),
        steps=done,
        parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(trained)),
        held_out=held_out,
        bigram_bits=None if corpus is None else data.bigram_bits_per_byte(corpus.train, corpus.heldout[: scored + 1]),
        scored=scored,
        unit=unit,
        checkpoint=str(run.folder.checkpoints / str(done)),
    )
    write_json(run.folder.report, report.as_json())
    return report


def _run_phase(run: _RunContext, index: int, done: int) -> PlannedPhase:
    """Takes the steps of phase ``index`` after step ``done``, until it ends or is to stop, if not before the first;
    returns when the last state is complete on disk.
    """
    config, folder, phase = run.config, run.folder, run.config.all_phases[index]
    planned = plan_phase(config, phase, run.work)
    run.say(f"phase {index + 1} of {len(config.all_phases)}: to step {phase.until} on mesh {planned.plan.mesh}")
    run.say(brief(planned.plan))
    chip, kind = planned.plan.mesh.hardware, jax.devices()[0].device_kind
    if is_of_other_chip(chip, kind):
        run.say(f"  predicted for {chip.name}, and run on {kind}: steps here take other times than are predicted")
    if is_first():
        planned.plan.save(os.fspath(folder.plan(index)))
        folder.page(index).write_text(page(planned.plan))
        run.say(f"the plan drawn: {folder.page(index)}; as text: autoshard plan")
        _log_phase(run, planned, done)

    batches = run.work.batches.train()
    if done:
        state, report = checkpoint.restore(folder.checkpoints, done, plan=planned.plan, report=True)
        resume(batches, report.extra.get("batches"))
    else:
        state = planned.plan.init(run.work.steps.init, jax.random.key(config.seed))
    if planned.evaluate is not None and index and done == config.all_phases[index - 1].until:
        _log_held_out(run, planned, state, done)

    run.progress.restart()
    one_size = not planned.padded
    run.progress.measure_against(
        peak_seconds(planned.step, planned.plan, planned.state, planned.batch) if one_size else None
    )
    ready = Prefetched(batches, planned.placer(), phase.until - done)
    recorded = config.profile.range if config.profile is not None and is_first() else range(0)
    tracing = traced(planned.step, done + 1, recorded, os.fspath(folder.root))
    with run.stop.deferred(), saves_finished(folder.checkpoints), ready, tracing as step:
        duties = _duties(run, planned, phase.until, ready)
        if not run.to_stop():  # before the first step
            take_steps(step, state, ready, range(done + 1, phase.until + 1), duties)
    return planned


def _duties(run: _RunContext, planned: PlannedPhase, last: int, ready: Prefetched) -> Duties:
    """What is done beside the steps of a phase that ends with step ``last``."""
    config, every = run.config, run.config.eval.every

    policy = None if config.nan is None else NonFinitePolicy.of(config.nan)
    keep = config.checkpoint.keep if policy is None else policy.kept(config.checkpoint.keep, config.checkpoint.every)

    def save(number: int, state: Tree, position: Any) -> None:
        run.events.flush()
        extra = {"batches": gathered(position, parted=ready.parted), "config": config.model_dump(mode="json")}
        checkpoint.save(run.folder.checkpoints, number, state, plan=planned.plan, extra=extra, keep=keep)

    def restore(number: int) -> Tree:
        return checkpoint.restore(run.folder.checkpoints, number, plan=planned.plan)

    def report(event: NonFiniteEvent) -> None:
        run.log(event)
        done = f"going back to step {event.restored}" if event.restored is not None else "the step is skipped"
        if event.did != "stop":  # else an error says the same
            run.say(f"{event.text(jax.process_count())}; {done}")

    def late(event: StragglerEvent | SlowDevicesEvent) -> None:
        run.log(event)
        run.say(event.text)

    def saved() -> Sequence[int]:
        return from_first(lambda: checkpoint.steps(run.folder.checkpoints))

    host = HostTimes()
    return Duties(
        log=lambda number, metrics: _log_step(run, number, metrics),
        save=save,
        saves=lambda number: number % config.checkpoint.every == 0,
        evaluate=lambda number, state: _log_held_out(run, planned, state, number),
        evaluates=lambda number: planned.evaluate is not None and (number == last or number % (every or last) == 0),
        stops=Meeting(run.stop, ready, host, config.log_every, last, late),
        host=host,
        failed=None if policy is None else NonFiniteWatch(policy, saved, restore, report).answer,
    )


def _log_phase(run: _RunContext, planned: PlannedPhase, done: int) -> None:
    """Logs the phase's mesh and collectives, unless the log's last phase is the same and is being resumed."""
    compiled = planned.step.lower(planned.state, planned.batch).compile()
    event = PhaseEvent(step=done, mesh=str(planned.plan.mesh), collectives=str(audit(compiled, planned.plan)))
    earlier = [e for e in run.folder.events() if isinstance(e, PhaseEvent)]
    if earlier and earlier[-1].mesh != event.mesh:
        (amount, unit), parts = run.work.batches.amount, run.config.microbatches_on(planned.phase.mesh)
        run.say(
            f"the mesh was {earlier[-1].mesh} until step {done}: the state is placed anew, and a step takes the same "
            f"{amount:,} {unit} in the same order{f', in {parts} micro-batches' if parts else ''}"
        )
    if not earlier or earlier[-1].model_copy(update={"step": done}) != event:
        run.log(event)


def _log_step(run: _RunContext, number: int, metrics: Numbers) -> None:
    run.log(StepEvent.of(number, metrics))
    run.progress.step(number, metrics.get("loss"))


def _log_held_out(run: _RunContext, planned: PlannedPhase, state: Tree, number: int) -> None:
    """Logs the metrics over the held-out batches, always the same."""
    metrics, batches = _mean_metrics(planned, state, run.work.batches.held_out(run.config.eval.batches))
    run.log(HeldOutEvent.of(number, metrics))
    text = [f"{name} {value:.4f}" for name, value in metrics.items()]
    if run.work.in_bits and "loss" in metrics:
        text.append(f"{metrics['loss'] / math.log(2):.3f} bits per byte")
    amount, unit = run.work.batches.amount
    run.say(f"step {number}: held-out {', '.join(text)}, over {amount * batches:,} {unit}")
    run.progress.restart()


def _mean_metrics(planned: PlannedPhase, state: Tree, batches: Iterable[Tree]) -> tuple[dict[str, float], int]:
    """The means of the metrics over ``batches``, by their ``weights`` where they have some, and the number of these."""
    assert planned.evaluate is not None
    part = planned.work.steps.evaluated(state)
    found: list[Numbers] = []
    amounts: list[float] = []
    for batch in batches:
        found.append(scalars(planned.evaluate(part, planned.place_held_out(batch))))
        weights = batch.get(WEIGHTS) if isinstance(batch, Mapping) else None
        amounts.append(1.0 if weights is None else float(np.sum(np.asarray(weights))))
    means = {name: float(np.average([each[name] for each in found], weights=amounts)) for name in found[0]}
    return means, len(found)
