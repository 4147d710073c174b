"""The one loop of every training run: takes steps, and in between logs, evaluates, saves, sees whether to stop."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autoshard.errors import ArgumentError
from autoshard.runtime import nnx
from autoshard.strict_files import cut
from autoshard.train.sources import Source, Tree

type Numbers = Mapping[str, float]
"""Metrics of a step on the host."""


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


def take_steps(
    step: Callable[[Tree, Tree], tuple[Tree, Any]],
    state: Tree,
    batches: Source,
    place: Callable[[Tree], Tree],
    numbers: range,
    duties: Duties,
) -> tuple[Tree, int]:
    """Takes the steps ``numbers``, or until the run is to stop, and saves the state after the last one taken.

    Args:
      step: state, batch -> the next state and its metrics, a pytree of numbers.
      place: puts a batch of ``batches`` on the mesh.

    Returns:
      The state, and the number of the last step taken.

    Raises:
      ArgumentError: the batches ended before the last step; the state after the last batch is saved.
    """
    pending: deque[tuple[int, Any]] = deque()
    for number in numbers:
        try:
            batch = next(batches)
        except StopIteration:
            _finish_early(number - 1, numbers, state, batches, pending, duties)
            raise ArgumentError(
                f"the batches ended after step {number - 1} of {numbers[-1]}, whose state is saved where the run has a "
                "folder; give batches that do not end, such as a data set that repeats, or fewer steps"
            ) from None
        state, metrics = step(state, place(batch))
        pending.append((number, metrics))
        stopping = duties.stops(number)
        saves = stopping or number == numbers[-1] or duties.saves(number)
        evaluates = duties.evaluates(number)
        while len(pending) > (0 if saves or evaluates else 1):  # stays one step behind, so as not to wait for results
            _log(duties, *pending.popleft())
        if evaluates:
            duties.evaluate(number, state)
        if saves:
            duties.save(number, state, batches.get_state())
        if stopping:
            return state, number
    return state, numbers[-1] if numbers else numbers.start - 1


def _finish_early(
    done: int, numbers: range, state: Tree, batches: Source, pending: deque[tuple[int, Any]], duties: Duties
) -> None:
    """Logs and saves what is not yet after step ``done``, the last that had a batch."""
    for each in pending:
        _log(duties, *each)
    if done >= numbers.start and not duties.saves(done):
        duties.save(done, state, batches.get_state())


def _log(duties: Duties, number: int, metrics: Any) -> None:
    duties.log(number, scalars(metrics))


def scalars(metrics: Any) -> Numbers:
    """The numbers among ``metrics`` by name: a dotted path, and ``loss`` of one number alone; arrays are left out."""
    found: dict[str, float] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(metrics)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "loss"
        if np.ndim(leaf) == 0 and np.asarray(leaf).dtype.kind in "biufV":
            found[name] = float(leaf)
    return found


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
