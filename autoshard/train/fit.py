"""fit: trains a step of one's own from Python, saved and resumed; the loop is that of ``autoshard train``."""

from __future__ import annotations

import contextlib
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from etils import epath
from rich.console import Console

from autoshard import checkpoint
from autoshard.api import jit
from autoshard.batches.padding import Padding
from autoshard.batches.prefetch import Prefetched
from autoshard.errors import PACKAGE, ArgumentError, CheckpointError, PlanError
from autoshard.runs.host_times import HostTimes
from autoshard.runs.progress import ProgressLine
from autoshard.runs.report import EndEvent, HeldOutEvent, NonFiniteEvent, SlowDevicesEvent, StepEvent, StragglerEvent
from autoshard.runs.run_folder import RunFolder
from autoshard.runs.run_log import RunLog
from autoshard.runtime import nnx
from autoshard.runtime.plan import Plan
from autoshard.runtime.step import BoundStep, Step
from autoshard.train.non_finite import LossWatch, NonFinitePolicy, NonFiniteWatch, checked
from autoshard.train.peak import peak_seconds
from autoshard.train.processes.agreement import from_first, in_any, is_first
from autoshard.train.processes.ending import failure_logged, saves_finished
from autoshard.train.processes.meeting import Meeting
from autoshard.train.processes.placing import SizedPlacer, abstract
from autoshard.train.processes.positions import gathered, resume
from autoshard.train.sources import Mapped, Peeked, Tree, arrays_only, source_of
from autoshard.train.stepping import Duties, Numbers, scalars, take_steps, uniform
from autoshard.train.stop_signals import StopSignals, write_error

AGREE_EVERY = 10
"""Steps between two moments at which several processes compare: to compare they wait for one another."""
KEEP = 2
"""Checkpoints that a folder keeps, the newest."""

type Log = Callable[[int, Numbers], None]


def fit(
    step: Callable[[Tree, Tree], Any],
    state: Tree,
    batches: Any,
    *,
    steps: int,
    plan: Plan | None = None,
    checkpoints: epath.PathLike | None = None,
    every: int | None = None,
    evaluate: Callable[[Tree], Any] | None = None,
    log: Log | epath.PathLike | None = None,
    nan: str | None = None,
    pad: Padding | None = None,
) -> Tree:
    """Takes ``step`` until step ``steps``, from the newest checkpoint if there is one, and returns the last state.

    The same program resumes after it was stopped or killed: on the same or other devices, with the same batches in the
    same order. SIGTERM and SIGINT save the state after the step that is being taken, of several processes within a
    second or after the next one, and then raise `SystemExit` with 143, and `KeyboardInterrupt`, in all; before the
    first step nothing is saved, and several processes wait for one another there. A second signal ends the process at
    once.

    Args:
      step: ``step(state, batch)`` -> the next state and metrics (a pytree, whose scalars are logged; one number alone
        is the ``loss``), or the next state alone. A function decorated with `autoshard.jit`; any other is decorated,
        for ``plan``, or for all devices and with its state donated. NNX modules in the state are mutated in place, and
        the step returns its metrics alone.
      state: the initial state, any pytree or NNX modules; it is put on the mesh. Modules are updated in place.
      batches: a grain dataset or loader, or any iterator with ``get_state`` and ``set_state``; any other iterable or
        iterator, moved on resume by taking its batches again (a list begins again at its end); `Rows` of arrays; or,
        with ``plan``, numpy arrays or memory maps themselves, whose rows make batches of the planned size in order. A
        batch is whole, the same in every process, or, with ``plan``, the rows that ``plan.local_rows`` names: then each
        process has a position of its own, and the run resumes on as many processes. Strings in it, and lists of them,
        become None.
      steps: number of the last step, counted from 1 over all starts.
      plan: of ``step``, whose arguments 0 and 1 are state and batch; by default that for the first batch.
      checkpoints: a folder that all processes share; None saves nothing and handles no signal.
      every: steps between two checkpoints, the newest two of which are kept, and between two evaluations; by default
        only after the last step.
      evaluate: state -> metrics, called after every ``every`` steps and after the last.
      log: called with the number of a step and its metrics by name, and with those of an evaluation, whose names begin
        with ``eval_``, in the first process; or a folder, which gets ``log.jsonl`` and ``metrics.csv``, and a line of
        progress is printed: loss, rate, time of a step, the share of the chips' peak that it uses (MFU), memory, and
        time left; also, that the run goes on on another mesh.
      nan: what is done after a step of which a scalar metric, or a number in the next state that was finite before, is
        NaN or infinite: ``"stop"`` raises; ``"skip"`` keeps the state of before, as if the step had not been, at most
        ten times in a row; ``"rewind 20"`` goes on from the newest checkpoint that is 20 steps or more before it, with
        the batches that follow. Each is logged, with what was not finite, also of the batch, and of which process that
        was. By default nothing is looked for, and in the end a warning says since when the loss is not finite, if the
        last is not. The step is planned with the check in it; of ``plan`` it has the shardings.
      pad: batches of any sizes are padded to one of a few, for each of which the step is planned; the state stays where
        the first plan has it. Not with ``plan``, which is for one size.

    Returns:
      The state after step ``steps``. A finished run is restored, and no step is taken.

    Raises:
      ArgumentError: ``steps`` or ``every`` below 1; batches of other shapes than planned, or that end too early (the
        state is saved then); a step that does not return what is said above.
      ConfigError: the position in the checkpoint is none of these batches, or another number of processes saved it,
        each of rows of its own; or several processes have other batches.
      CheckpointError: a checkpoint of another state, or one beyond ``steps``.
      PlanError: a step of other arguments than state and batch.
      NonFiniteError: a step that is not finite, and ``nan`` says stop, or nothing else can be done.

    Example:
      >>> def step(w, batch):
      ...     loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w - 1) ** 2))(w)
      ...     return w - 0.1 * gradient, loss
      >>> losses = []
      >>> w = autoshard.train.fit(
      ...     autoshard.jit(step, mesh={"data": 8}, donate_argnums=0), jnp.zeros(4), [np.ones((16, 4), np.float32)],
      ...     steps=3, log=lambda number, metrics: losses.append(metrics["loss"]),
      ... )
      >>> len(losses), losses[2] < losses[0]
      (3, True)
    """
    for name, value in (("steps", steps), ("every", every)):
        if value is not None and (type(value) is not int or value < 1):
            raise ArgumentError(f"{name}={value!r}: must be a whole number, 1 or more")
    policy = None if nan is None else NonFinitePolicy.of(nan)
    if policy is not None and policy.action == "rewind" and (checkpoints is None or every is None):
        raise ArgumentError(f"nan={nan!r} goes back to checkpoints: give `checkpoints`, and `every`, for some")
    if pad is not None and plan is not None:
        raise ArgumentError("pad= makes batches of several sizes, and plan= is for one: give one of them")
    folder = None if checkpoints is None else epath.Path(checkpoints)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(_signals(handled=folder is not None))
        source = source_of(batches, None if plan is None else _batch_size(plan))
        source = Peeked(source if pad is None else Mapped(source, pad))
        if source.first is None:
            raise ArgumentError("batches: there is none")
        own = _planned_step(step, plan, policy, state)
        first = jax.tree.map(abstract, arrays_only(source.first))
        chosen: Plan = own.plan(state, first) if plan is None or policy is not None else plan
        if len(chosen.in_avals) != 2:
            raise PlanError(
                f"fit takes a step(state, batch); {chosen.name} was planned with {len(chosen.in_avals)} arguments"
            )
        mesh = before = str(chosen.mesh)
        done = 0 if folder is None else from_first(lambda: checkpoint.latest(folder)) or 0
        if done > steps:
            raise CheckpointError(f"steps={steps}: {folder} is at step {done} already; give more, or another folder")
        if done and folder is not None:
            restored, report = checkpoint.restore(folder, done, plan=chosen, report=True)
            state = nnx.updated(state, restored)
            resume(source, report.extra.get("batches"))
            before = report.extra.get("mesh", before)
        else:
            state = nnx.updated(state, nnx.split((chosen.put(state),)).states[0])

        like = state if nnx.has_modules(state) else chosen.in_avals[0]
        place = SizedPlacer(chosen, None if pad is None else lambda batch: own.plan(like, batch))
        record = stack.enter_context(_recording(log, stop, done, steps, _batch_size(chosen)))
        if before != mesh:
            record.say(f"the mesh was {before} until step {done}, and is {mesh}: the state is placed anew")
        if record.progress is not None and pad is None:  # else a step's products are as many as its batch is large
            record.progress.measure_against(peak_seconds(own, chosen, like, first))

        def save(number: int, state: Tree, position: Any) -> None:
            record.flush()
            if folder is not None:
                extra = {"batches": gathered(position, parted=place.parted), "mesh": mesh}
                checkpoint.save(folder, number, state, plan=chosen, extra=extra, keep=keep)

        def restore(number: int) -> Tree:
            assert folder is not None
            return nnx.updated(state, checkpoint.restore(folder, number, plan=chosen))

        def stopped() -> bool:
            return folder is not None and in_any(stop.requested)  # without a folder no signal is handled

        def saved() -> Sequence[int]:
            return from_first(lambda: () if folder is None else checkpoint.steps(folder))

        watch = None if policy is None else NonFiniteWatch(policy, saved, restore, record.not_finite)
        keep = KEEP if policy is None else policy.kept(KEEP, every or steps)
        ready = Prefetched(source, place, steps - done)
        host = HostTimes()
        duties = Duties(
            log=record.step,
            save=save,
            saves=lambda number: every is not None and number % every == 0,
            evaluate=lambda number, state: _evaluate(evaluate, number, state, record),
            evaluates=lambda number: evaluate is not None and (number == steps or number % (every or steps) == 0),
            stops=Meeting(stop, ready, host, AGREE_EVERY, steps, record.straggler),
            host=host,
            failed=None if watch is None else watch.answer,
        )
        if done < steps and stopped():
            where = f"step {done} is saved, from which this went on" if done else "nothing is saved yet"
            write_error(f"stopped before step {done + 1}: {where}\n")
        elif done < steps:
            with stop.deferred(), saves_finished(folder), ready:
                state, done = take_steps(uniform(own, state), state, ready, range(done + 1, steps + 1), duties)
        if done < steps or stopped():
            raise KeyboardInterrupt if stop.signal is signal.SIGINT else SystemExit(stop.exit_code)
        record.finished(steps, looked=policy is not None)
    return state


def _planned_step(
    step: Callable[[Tree, Tree], Any], plan: Plan | None, policy: NonFinitePolicy | None, state: Tree
) -> Any:
    """``step`` decorated, and checked where there is a policy."""

    def check(fun: Callable[[Tree, Tree], Any]) -> Callable[[Tree, Tree], Any]:
        return checked(uniform(fun, state), keeps=policy is not None and policy.action == "skip")

    donates = plan is None or any(place.donated for place in plan.inputs)
    donated = 0 if donates else None
    if isinstance(step, Step | BoundStep):
        if policy is not None and plan is not None:
            raise ArgumentError("nan= adds a check to the step, which its plan has not: give the plan and the function")
        return step if policy is None else step.around(check)
    if policy is not None and plan is not None:
        return jit(check(step), mesh=plan.jax_mesh, in_shardings=plan.in_shardings, donate_argnums=donated)
    return jit(step if policy is None else check(step), strategy=plan or "auto", donate_argnums=donated)


def _batch_size(plan: Plan) -> int | None:
    """The rows of a batch that ``plan`` is for; None where its arrays differ in that."""
    sizes = {leaf.shape[0] if leaf.shape else None for leaf in jax.tree.leaves(plan.in_avals[1:])}
    return sizes.pop() if len(sizes) == 1 else None


def _evaluate(evaluate: Callable[[Tree], Any] | None, number: int, state: Tree, record: _Record) -> None:
    if evaluate is not None:
        record.held_out(number, scalars(evaluate(state)))


@contextlib.contextmanager
def _signals(handled: bool) -> Generator[StopSignals]:
    """Signals that ask to stop; where they are not handled, or cannot be outside of the main thread, none does.

    Before its first step one process is interrupted at once; of several all look together whether one is to stop.
    """
    stop = StopSignals()
    if not handled or threading.current_thread() is not threading.main_thread():
        yield stop
        return
    try:
        with stop, stop.deferred() if jax.process_count() > 1 else contextlib.nullcontext():
            yield stop
    except (KeyboardInterrupt, Exception) as error:
        interrupted = isinstance(error, KeyboardInterrupt) or stop.turned_into(error)
        if interrupted and stop.signal is signal.SIGTERM:
            raise SystemExit(stop.exit_code) from None
        if interrupted and not isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise


@dataclass(frozen=True)
class _Record:
    """What the user's function is given, or written to a folder with a line of progress."""

    log: Log | None = None
    folder: RunLog | None = None
    progress: ProgressLine | None = None
    console: Console | None = None
    losses: LossWatch = field(default_factory=LossWatch)

    def say(self, text: str) -> None:
        """Prints ``text`` where there is a line of progress."""
        if self.console is not None:
            self.console.print(text, markup=False, highlight=False)

    def finished(self, steps: int, looked: bool) -> None:
        """The last step was taken, and whether it was ``looked`` for what is not finite."""
        if self.folder is not None:
            self.folder.append(EndEvent(step=steps, how="finished"))
        hint = self.losses.hint('nan="stop", "skip" or "rewind N"')
        if hint is not None and not looked and is_first():
            warnings.warn(hint, skip_file_prefixes=(PACKAGE,))

    def flush(self) -> None:
        """Writes what is not yet in the folder."""
        if self.folder is not None:
            self.folder.flush()

    def step(self, number: int, metrics: Numbers) -> None:
        """Step ``number`` was taken."""
        self.losses.see(number, metrics.get("loss"))
        if self.log is not None:
            self.log(number, metrics)
        if self.folder is not None:
            self.folder.append(StepEvent.of(number, metrics))
        if self.progress is not None:
            self.progress.step(number, metrics.get("loss"))

    def held_out(self, number: int, metrics: Numbers) -> None:
        """The state after step ``number`` was evaluated."""
        if self.log is not None:
            self.log(number, {f"eval_{name}": value for name, value in metrics.items()})
        if self.folder is not None:
            self.folder.append(HeldOutEvent.of(number, metrics))
        if self.progress is not None:
            self.progress.restart()

    def straggler(self, event: StragglerEvent | SlowDevicesEvent) -> None:
        """A process kept the others waiting."""
        if self.folder is not None:
            self.folder.append(event)
        if is_first():
            warnings.warn(event.text, skip_file_prefixes=(PACKAGE,))

    def not_finite(self, event: NonFiniteEvent) -> None:
        """A step was not finite."""
        if self.folder is not None:
            self.folder.append(event)
        if is_first() and event.did != "stop":  # else an error says the same
            warnings.warn(event.text(jax.process_count()), skip_file_prefixes=(PACKAGE,))


@contextlib.contextmanager
def _recording(
    log: Log | epath.PathLike | None, stop: StopSignals, done: int, steps: int, examples: int | None
) -> Generator[_Record]:
    """Where metrics go, in the first process; nowhere in the others."""
    with contextlib.ExitStack() as stack:
        if log is None or callable(log):
            yield _Record(log if is_first() else None)
            return
        folder = RunFolder(epath.Path(log))
        from_first(lambda: stack.enter_context(folder.locked()))
        from_first(lambda: folder.drop_events_after(done))
        if not is_first():
            yield _Record()
            return
        stack.enter_context(failure_logged(folder, stop))
        console = Console(soft_wrap=True)
        progress = stack.enter_context(ProgressLine(console, steps, examples, "examples", 10))
        yield _Record(None, stack.enter_context(RunLog(folder)), progress, console)
