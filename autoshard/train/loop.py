"""Runs a training configuration phase by phase; resumable at any moment, with a report at the end.

All randomness (initialization, order of the batches) depends on the seed and the step only. So a run that was killed
and resumed takes the same steps with the same numbers as one that was not.

Several processes (`jax.distributed`) run this together over one mesh: each makes every batch and copies its own rows to
its devices; the first one prints, and writes the folder, which all must share for the checkpoints.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from rich.console import Console

from autoshard import checkpoint
from autoshard.api import jit
from autoshard.backend.audit import audit
from autoshard.errors import ConfigError
from autoshard.runtime.plan import Plan
from autoshard.runtime.step import Step
from autoshard.train import data
from autoshard.train.config import Phase, TrainConfig
from autoshard.train.decoder import Steps, Tree, make_steps
from autoshard.train.processes import BatchPlacer, from_first, in_any, is_first, same_in_all
from autoshard.train.progress import ProgressLine
from autoshard.train.report import Event, HeldOutEvent, PhaseEvent, Report, StepEvent, make_report
from autoshard.train.run_folder import RunFolder, write_json
from autoshard.train.stepping import Duties, Numbers, take_steps
from autoshard.train.stop_signals import StopSignals


def train(
    config: TrainConfig, *, fresh: bool = False, console: Console | None = None, stop: StopSignals | None = None
) -> Report | None:
    """Trains from the last complete checkpoint in ``config.checkpoint.dir``, or from the start, to the last step.

    Args:
      fresh: deletes an earlier run in the folder and starts over.
      console: receives the plan, the progress and the report; standard output if absent.
      stop: asked after every step whether to stop; if so, the state is saved.

    Returns:
      The report; None if the run was stopped.

    Raises:
      ConfigError: the run in the folder was begun with another model, data, optimizer, batch or seed.
      CheckpointError: the folder is in use, or has files that are no run's, or checkpoints of another state.
      MeshError: a phase's mesh needs more devices than are available.
    """
    console = console or Console(soft_wrap=True, quiet=not is_first())
    folder = RunFolder(epath.Path(config.checkpoint.dir))
    _check_devices(config, 0 if fresh else from_first(lambda: checkpoint.latest(folder.checkpoints)) or 0)
    with contextlib.ExitStack() as stack:
        from_first(lambda: stack.enter_context(folder.locked()))
        if fresh:
            deleted = from_first(folder.clear)
            console.print(f"starting over: deleted {', '.join(deleted) or 'nothing'} in {folder.root}", markup=False)
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
    decay = config.optimizer.decay_steps
    if config is not given and decay != config.last_step:
        console.print(f"the learning rate decays until step {decay}, as it did when the run began", markup=False)
    return _run_remaining(config, folder, console, done, stop)


def _check_devices(config: TrainConfig, done: int) -> None:
    """Raises `MeshError` where a phase that has steps after ``done`` needs more devices than there are."""
    for phase in config.all_phases:
        if phase.until > done and phase.mesh.axes != "auto":
            phase.mesh.mesh().concrete()


@dataclass(frozen=True)
class PlannedPhase:
    """The planned step and eval function of a phase, and the abstract values of their arguments."""

    step: Step
    evaluate: Step
    plan: Plan
    state: Tree
    """`jax.ShapeDtypeStruct`s."""
    batch: Tree
    """`jax.ShapeDtypeStruct`s."""

    @functools.cached_property
    def place(self) -> BatchPlacer:
        """Puts a batch on the mesh."""
        return BatchPlacer(self.plan)


def plan_phase(config: TrainConfig, phase: Phase) -> PlannedPhase:
    """Plans one phase; needs no devices, and creates no array."""
    steps = make_steps(config.model, config.optimizer, config.last_step)
    step = jit(
        steps.train,
        mesh=phase.mesh,
        strategy=config.strategy,
        refine=config.refine,
        passes=config.passes,
        donate_argnums=0,
    )
    state = jax.eval_shape(steps.init, jax.eval_shape(lambda: jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((config.batch, config.model.seq), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    plan = step.plan(state, batch)
    params_and_batch = (plan.in_specs[0]["params"], plan.in_specs[1])
    evaluate = jit(steps.evaluate, mesh=phase.mesh, strategy=config.strategy, in_shardings=params_and_batch)
    return PlannedPhase(step, evaluate, plan, state, batch)


@dataclass(frozen=True)
class _RunContext:
    """What all phases of a run share."""

    config: TrainConfig
    folder: RunFolder
    console: Console
    corpus: data.Corpus
    steps: Steps
    progress: ProgressLine
    stop: StopSignals

    def log(self, event: Event) -> None:
        """Adds ``event`` to the folder's log."""
        if is_first():
            self.folder.append([event])

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
    with ProgressLine(
        console, config.last_step, config.batch * config.model.seq, "tokens", config.log_every
    ) as progress:
        steps = make_steps(config.model, config.optimizer, config.last_step)
        run = _RunContext(config, folder, console, _corpus(config), steps, progress, stop)
        last = None
        for index, phase in enumerate(config.all_phases):
            if phase.until > done:
                last = _run_phase(run, index, done)
                done = phase.until
                if run.to_stop():
                    return None
        last = last or plan_phase(config, config.all_phases[-1])
        # From the checkpoint even if the run trained just now, so that a resumed run does the same.
        params = checkpoint.restore(folder.checkpoints, done, plan=last.plan)["params"]
        held_out, scored = _final_loss(run, last, params)
    report = from_first(lambda: _write_report(run, last, done, held_out, scored))
    run.say(str(report))
    return report


def _write_report(run: _RunContext, last: PlannedPhase, done: int, held_out: float, scored: int) -> Report:
    report = make_report(
        run.folder.events(),
        steps=done,
        parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(last.state["params"])),
        held_out=held_out,
        bigram_bits=data.bigram_bits_per_byte(run.corpus.train, run.corpus.heldout[: scored + 1]),
        scored=scored,
        checkpoint=str(run.folder.checkpoints / str(done)),
    )
    write_json(run.folder.report, report.model_dump(mode="json"))
    return report


def _run_phase(run: _RunContext, index: int, done: int) -> PlannedPhase:
    """Takes the steps of phase ``index`` after step ``done``, until it ends or is to stop; returns when the last state
    is complete on disk.
    """
    config, folder, phase = run.config, run.folder, run.config.all_phases[index]
    planned = plan_phase(config, phase)
    run.say(f"phase {index + 1} of {len(config.all_phases)}: to step {phase.until} on mesh {planned.plan.mesh}")
    run.say(planned.plan.explain())
    if is_first():
        planned.plan.save(os.fspath(folder.plan(index)))
        _log_phase(run, planned, done)

    batches = data.batches(run.corpus.train, batch=config.batch, seq=config.model.seq, seed=config.seed)
    if done:
        state, report = checkpoint.restore(folder.checkpoints, done, plan=planned.plan, report=True)
        batches.set_state(report.extra.get("batches"))
    else:
        state = planned.plan.init(run.steps.init, jax.random.key(config.seed))
    if index and done == config.all_phases[index - 1].until:
        _log_held_out(run, planned, state, done)

    run.progress.restart()
    with run.stop.deferred():
        duties, numbers = _duties(run, planned, phase.until), range(done + 1, phase.until + 1)
        take_steps(planned.step, state, batches, planned.place, numbers, duties)
    checkpoint.finish(folder.checkpoints)
    return planned


def _duties(run: _RunContext, planned: PlannedPhase, last: int) -> Duties:
    """What is done beside the steps of a phase that ends with step ``last``."""
    config = run.config

    def save(number: int, state: Tree, position: Any) -> None:
        extra, keep = {"batches": position}, config.checkpoint.keep
        checkpoint.save(run.folder.checkpoints, number, state, plan=planned.plan, extra=extra, keep=keep)

    return Duties(
        log=lambda number, metrics: _log_step(run, number, metrics),
        save=save,
        saves=lambda number: number % config.checkpoint.every == 0,
        evaluate=lambda number, state: _log_held_out(run, planned, state, number),
        evaluates=lambda number: number == last or (config.eval.every is not None and number % config.eval.every == 0),
        # Processes compare at every so many steps: to compare they wait for one another.
        stops=lambda number: (jax.process_count() == 1 or number % config.log_every == 0) and run.to_stop(),
    )


def _log_phase(run: _RunContext, planned: PlannedPhase, done: int) -> None:
    """Logs the phase's mesh and collectives, unless the log's last phase is the same and is being resumed."""
    compiled = planned.step.lower(planned.state, planned.batch).compile()
    event = PhaseEvent(step=done, mesh=str(planned.plan.mesh), collectives=str(audit(compiled, planned.plan)))
    earlier = [e for e in run.folder.events() if isinstance(e, PhaseEvent)]
    if not earlier or earlier[-1].model_copy(update={"step": done}) != event:
        run.log(event)


def _log_step(run: _RunContext, number: int, metrics: Numbers) -> None:
    run.log(StepEvent.of(number, metrics))
    run.progress.step(number, metrics.get("loss"))


def _log_held_out(run: _RunContext, planned: PlannedPhase, state: Tree, number: int) -> None:
    """Logs the loss over the first batches of one fixed shuffle of the held-out files."""
    config = run.config
    batches = data.batches(run.corpus.heldout, batch=config.batch, seq=config.model.seq, seed=0)
    loss = _mean_loss(planned, state["params"], itertools.islice(batches, config.eval.batches))
    run.log(HeldOutEvent(step=number, loss=loss))
    run.say(f"step {number}: held-out loss {loss:.4f}, {loss / math.log(2):.3f} bits per byte")
    run.progress.restart()


def _final_loss(run: _RunContext, planned: PlannedPhase, params: Tree) -> tuple[float, int]:
    """The loss over the held-out files in order, nats per byte, and the number of bytes scored."""
    config = run.config
    batches = data.batches(run.corpus.heldout, batch=config.batch, seq=config.model.seq, seed=None)
    count = min(batches.per_pass, config.eval.final_batches or batches.per_pass)
    loss = _mean_loss(planned, params, itertools.islice(batches, count))
    return loss, count * config.batch * config.model.seq


def _mean_loss(planned: PlannedPhase, params: Tree, batches: Iterable[Tree]) -> float:
    return float(np.mean([float(planned.evaluate(params, planned.place(batch))["loss"]) for batch in batches]))


def _corpus(config: TrainConfig) -> data.Corpus:
    """The text, which every process reads whole.

    Raises:
      ConfigError: processes read different text.
    """
    source = config.data
    found = data.corpus(source.source, include=source.include, exclude=source.exclude, holdout=source.holdout)
    if not same_in_all(zlib.crc32(found.heldout, zlib.crc32(found.train))):
        raise ConfigError(f"the text in {source.source} is not the same in all {jax.process_count()} processes")
    return found
