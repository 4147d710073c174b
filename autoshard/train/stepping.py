"""The one loop of every training run: takes steps, and in between logs, evaluates, saves, sees whether to stop."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from autoshard.errors import ArgumentError
from autoshard.jaxpr import all_reach
from autoshard.runs.host_times import HostTimes
from autoshard.runtime import nnx
from autoshard.strict_files import cut
from autoshard.train.non_finite import Checked
from autoshard.train.sources import Tree

type Numbers = Mapping[str, float]
"""Metrics of a step on the host."""

END_SECONDS = 30
"""For which a process whose batches have ended waits for those of the others to end."""


class Batches(Protocol):
    """Batches on the mesh, in order, with a position that can be saved."""

    def __next__(self) -> Tree: ...

    def get_state(self) -> Any:
        """The position after the batches taken so far, as strict JSON."""
        ...


@dataclass(frozen=True)
class Duties:
    """What is done after which steps, beside taking them. Steps count from 1."""

    log: Callable[[int, Numbers], None]
    """The step, and its metrics."""
    save: Callable[[int, Tree, Any], None]
    """The step, the state after it, and the position of the batches."""
    saves: Callable[[int], bool]
    """Whether the state after a step is saved; that after the last one is in any case."""
    evaluate: Callable[[int, Tree], None]
    """The step, and the state after it."""
    evaluates: Callable[[int], bool]
    """Whether the state after a step is evaluated."""
    stops: Callable[[int], bool]
    """Whether the run is to stop after a step; all processes say the same."""
    failed: Callable[[int, Checked, Tree, Tree], Tree | None] | None = None
    """Of a checked step whose numbers are not all finite: the step, what it found, the newest state, and its batch;
    gives the state to go on with, or None for the newest."""
    host: HostTimes = field(default_factory=HostTimes)
    """Measures how late this process is for each step by what it does itself."""


def take_steps(
    step: Callable[[Tree, Tree], tuple[Tree, Any]],
    state: Tree,
    batches: Batches,
    numbers: range,
    duties: Duties,
) -> tuple[Tree, int]:
    """Takes the steps ``numbers``, or until the run is to stop, and saves the state after the last one taken.

    Args:
      step: state, batch -> the next state and its metrics, a pytree of numbers.
      batches: on the mesh, with their position.

    Returns:
      The state, and the number of the last step taken.

    Raises:
      ArgumentError: the batches ended before the last step; the state after the last batch is saved, unless those of
        other processes go on.
    """
    pending: deque[tuple[int, Any, Tree]] = deque()
    host = duties.host
    for number in numbers:
        try:
            with host.aside():
                batch = next(batches)
        except StopIteration:
            while pending:
                state = _settled(duties, pending, state)
            if not all_reach(f"batches-end-{number}", END_SECONDS):
                raise ArgumentError(
                    f"the batches of process {jax.process_index()} ended after step {number - 1} of {numbers[-1]}, and "
                    "those of others did not, so that its state is not saved; give each process as many batches"
                ) from None
            _finish_early(number - 1, numbers, state, batches, duties)
            raise ArgumentError(
                f"the batches ended after step {number - 1} of {numbers[-1]}, whose state is saved where the run has a "
                "folder; give batches that do not end, such as a data set that repeats, or fewer steps"
            ) from None
        with host.starting([metrics for _, metrics, _ in pending]):
            state, metrics = step(state, batch)
        pending.append((number, metrics, batch if isinstance(metrics, Checked) else None))
        with host.aside():
            stopping = duties.stops(number)
        saves = stopping or number == numbers[-1] or duties.saves(number)
        evaluates = duties.evaluates(number)
        while len(pending) > (0 if saves or evaluates else 1):  # stays one step behind, so as not to wait for results
            state = _settled(duties, pending, state)
        with host.aside():
            if evaluates:
                duties.evaluate(number, state)
            if saves:
                duties.save(number, state, batches.get_state())
        if stopping:
            return state, number
    return state, numbers[-1] if numbers else numbers.start - 1


@contextlib.contextmanager
def traced(
    step: Callable[[Tree, Tree], tuple[Tree, Any]], next_number: int, traced_steps: range, folder: str
) -> Generator[Callable[[Tree, Tree], tuple[Tree, Any]]]:
    """``step``, of which the calls with numbers in ``traced_steps`` are recorded for xprof, where TensorBoard finds
    them too: ``folder/plugins/profile``.

    Args:
      next_number: of the first call. A recording that is not complete when the context is left is written as it is.
    """
    number, is_on = next_number, False

    def call(state: Tree, batch: Tree) -> tuple[Tree, Any]:
        nonlocal number, is_on
        if number in traced_steps and not is_on:
            jax.profiler.start_trace(folder)
            is_on = True
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            result = step(state, batch)
        number += 1
        if is_on and number not in traced_steps:
            jax.block_until_ready(result)
            is_on = False
            jax.profiler.stop_trace()
        return result

    try:
        yield call if traced_steps else step
    finally:
        if is_on:
            jax.profiler.stop_trace()


def _finish_early(done: int, numbers: range, state: Tree, batches: Batches, duties: Duties) -> None:
    """Saves what is not yet after step ``done``, the last that had a batch."""
    if done >= numbers.start and not duties.saves(done):
        duties.save(done, state, batches.get_state())


def _settled(duties: Duties, pending: deque[tuple[int, Any, Tree]], state: Tree) -> Tree:
    """Logs the first of the steps whose results are ``pending``; the state to go on with.

    Where another one takes the place of ``state``, the steps after it came to nothing: they are logged and not judged.
    """
    number, metrics, batch = pending.popleft()
    with duties.host.aside():
        found = scalars(metrics.metrics if isinstance(metrics, Checked) else metrics)
    duties.log(number, found)
    if not isinstance(metrics, Checked):
        return state
    if np.asarray(metrics.finite).all():
        return state
    assert duties.failed is not None  # who checks a step says what to do
    if (instead := duties.failed(number, metrics, state, batch)) is None:
        return state
    for later, each, _ in pending:
        duties.log(later, scalars(each.metrics))
    pending.clear()
    return instead


def scalars(metrics: Any) -> Numbers:
    """The numbers among ``metrics`` by name: a dotted path, and ``loss`` of one number alone; arrays are left out."""
    named = {
        jax.tree_util.keystr(path, simple=True, separator=".") or "loss": leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(metrics)[0]
        if np.ndim(leaf) == 0
    }
    found = {name: np.asarray(x) for name, x in jax.device_get(named).items()}  # all on their way at once
    return {name: float(x) for name, x in found.items() if x.dtype.kind in "biufV"}


def uniform(step: Callable[[Tree, Tree], Any], state: Tree) -> Callable[[Tree, Tree], tuple[Tree, Any]]:
    """``step`` with the next state and the metrics as its result, whichever of them it returns.

    Raises:
      ArgumentError: at a call, where it returns neither.
    """
    if nnx.has_modules(state):

        @functools.wraps(step)
        def mutating(state: Tree, batch: Tree) -> tuple[Tree, Any]:
            result = step(state, batch)
            if nnx.has_modules(result):
                raise ArgumentError(
                    "step: its state has NNX modules, which it mutates in place; let it return its metrics alone"
                )
            return state, result

        return mutating
    tree = jax.tree.structure(state)

    @functools.wraps(step)
    def pure(state: Tree, batch: Tree) -> tuple[Tree, Any]:
        result = step(state, batch)
        if isinstance(result, tuple) and len(result) == 2 and jax.tree.structure(result[0]) == tree:
            return result
        if jax.tree.structure(result) == tree:
            return result, {}
        raise ArgumentError(
            "step: it must return the next state, of the structure of the state it takes, and its metrics; it returns "
            f"{cut(str(jax.tree.structure(result)))}"
        )

    return pure
