"""Steps whose metrics or next state are no longer finite: seen within the step, named, and answered.

`checked` makes a step say which of its numbers are NaN or infinite, and, where it is to be skipped, keep the state of
before: the selection is part of the compiled step, since the state is donated to it.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx as flax_nnx

from autoshard.errors import ArgumentError, NonFiniteError
from autoshard.runs.report import Event, NonFiniteEvent, StepEvent
from autoshard.runtime import nnx
from autoshard.shared_folder import of_all
from autoshard.strict_files import cut
from autoshard.train.sources import Tree

PATTERN = r"stop|skip|rewind [1-9][0-9]{0,8}"
"""What may be asked for."""
MAX_IN_A_ROW = {"stop": 0, "skip": 10, "rewind": 3}
"""Answers to steps that follow one another, of rewinds by as many steps as each goes back; one more ends the run."""


@dataclass(frozen=True)
class NonFinitePolicy:
    """What is done after a step with a NaN or an infinity."""

    action: Literal["stop", "skip", "rewind"]
    steps: int = 0
    """Of ``rewind``: how many steps before the failed one the checkpoint is, or more."""

    @classmethod
    def of(cls, text: str) -> NonFinitePolicy:
        """The policy that ``stop``, ``skip`` or ``rewind 20`` says.

        Raises:
          ArgumentError: none of these.
        """
        if not re.fullmatch(PATTERN, str(text)):
            raise ArgumentError(f"nan={cut(repr(text))}: write 'stop', 'skip', or 'rewind 20' for 20 steps")
        action, _, steps = text.partition(" ")
        return cls(action, int(steps or 0))  # pyright: ignore[reportArgumentType]

    def kept(self, keep: int | None, every: int) -> int | None:
        """Checkpoints that a folder must keep for this, of which one is written each ``every`` steps."""
        return keep if keep is None else max(keep, -(-self.steps // every) + 1)


@dataclass
class LossWatch:
    """Since when the loss is no longer finite, in a run that does not look for that."""

    since: int | None = None
    """The step; None where the last loss was finite."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        """What the steps in a log say."""
        watch = cls()
        for event in events:
            if isinstance(event, StepEvent):
                watch.see(event.step, event.loss)
        return watch

    def see(self, number: int, loss: float | None) -> None:
        """Step ``number`` had this loss."""
        if loss is None or math.isfinite(loss):
            self.since = None
        elif self.since is None:
            self.since = number

    def hint(self, key: str) -> str | None:
        """One line for a person where the last loss was not finite; ``key`` is what is to be given."""
        if self.since is None:
            return None
        return (
            f"the loss is NaN or infinite since step {self.since}, and the run went on: with {key} it would have "
            "stopped there, left out such steps, or gone back to a checkpoint"
        )


class Checked(NamedTuple):
    """The metrics of a `checked` step, and which numbers are finite."""

    metrics: Any
    finite: Any
    """bool [n]: of each scalar metric of floats, then of each array of floats in the state, as `_names` lists them."""


def checked(step: Callable[[Tree, Tree], tuple[Tree, Any]], keeps: bool) -> Callable[[Tree, Tree], tuple[Tree, Any]]:
    """``step`` with `Checked` metrics.

    A number of the state that was infinite or NaN before the step counts as finite after it.

    Args:
      step: state, batch -> the next state and metrics; NNX modules in the state are mutated, and it returns them.
      keeps: whether the state after a step that is not finite is that of before, all of it.
    """

    @functools.wraps(step)
    def run(state: Tree, batch: Tree) -> Any:
        mutates = nnx.has_modules(state)
        before = _arrays(state)
        after, metrics = step(state, batch)
        new = _arrays(after)
        values = [jnp.isfinite(x) for x in _scalars(metrics).values()]
        pairs = zip(_floats(before).values(), _floats(new).values(), strict=True)
        values += [jnp.all(jnp.isfinite(x) | ~jnp.isfinite(old)) for old, x in pairs]
        finite = jnp.stack(values) if values else jnp.ones(0, bool)
        if keeps:
            good = jnp.all(finite)
            new = jax.tree.map(lambda x, old: jnp.where(good, x, old), new, before)
        found = Checked(metrics, finite)
        if not mutates:
            return new, found
        flax_nnx.update(state, jax.tree.unflatten(jax.tree.structure(flax_nnx.state(state)), jax.tree.leaves(new)))
        return found

    return run


def _arrays(state: Tree) -> Tree:
    return flax_nnx.to_pure_dict(flax_nnx.state(state)) if nnx.has_modules(state) else state


def _scalars(metrics: Any) -> dict[str, Any]:
    return {name: x for name, x in _floats(metrics, simple=True).items() if np.ndim(x) == 0}


def _floats(tree: Tree, simple: bool = False) -> dict[str, Any]:
    """The leaves of floats by path, ``['a'][0]``, or simply ``a.0``."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = [(jax.tree_util.keystr(path, simple=simple, separator="." if simple else ""), x) for path, x in leaves]
    return {name: x for name, x in named if jnp.issubdtype(jnp.result_type(x), jnp.inexact)}


def not_finite(found: Checked, state: Tree) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the metrics, and paths of the arrays in the state, that are not finite."""
    metrics = [name or "loss" for name in _scalars(found.metrics)]
    names = [*metrics, *(f"state{path}" for path in _floats(_arrays(state)))]
    bad = [name for name, finite in zip(names, np.asarray(found.finite), strict=True) if not finite]
    return tuple(n for n in bad if n in metrics), tuple(n for n in bad if n not in metrics)


def batch_not_finite(batch: Tree) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Paths of the arrays in a placed batch that are not finite, and the processes whose devices hold such rows; every
    process must ask.
    """
    arrays = {path: x for path, x in _floats(batch).items() if not x.is_deleted()}
    mine = [all(_is_finite(shard.data) for shard in x.addressable_shards) for x in arrays.values()]
    if not arrays:
        return (), ()
    table = of_all(np.asarray(mine))
    paths = tuple(f"batch{path}" for path, good in zip(arrays, table.all(0), strict=True) if not good)
    return paths, tuple(int(n) for n in np.flatnonzero(~table.all(1)))


def _is_finite(x: Any) -> bool:
    return bool(np.isfinite(np.asarray(x).astype(np.complex128 if jnp.iscomplexobj(x) else np.float64)).all())


@dataclass
class NonFiniteWatch:
    """Answers the steps of one run that are not finite."""

    policy: NonFinitePolicy
    saved: Callable[[], Sequence[int]]
    """The steps whose checkpoints are whole, oldest first; the same in every process."""
    restore: Callable[[int], Tree]
    """The state of such a step."""
    report: Callable[[NonFiniteEvent], None]
    """Logs what was seen."""
    last: int = -1
    """The last step that was not finite."""
    in_a_row: int = 0

    def answer(self, number: int, found: Checked, state: Tree, batch: Tree) -> Tree | None:
        """What the state is to be in place of that after step ``number``, whose numbers are not all finite; None: as it
        is, since the step kept it.

        Raises:
          NonFiniteError: the run is to end; what was saved before is finite.
        """
        metrics, arrays = not_finite(found, state)
        rows, processes = batch_not_finite(batch)
        policy, event = (
            self.policy,
            NonFiniteEvent(
                step=number, metrics=metrics, state=arrays[:20], batch=rows, processes=processes, did=self.policy.action
            ),
        )
        follows = self.last >= 0 and number - self.last <= policy.steps + 1
        self.last, self.in_a_row = number, self.in_a_row + 1 if follows else 1
        saved = () if policy.action == "skip" else self.saved()
        kept = f"the newest saved step is {max(saved)}" if saved else "nothing is saved"
        if policy.action == "stop":
            why = f"the run ends, and {kept}"
        elif self.in_a_row > MAX_IN_A_ROW[policy.action]:
            why = f"{policy.action} was the answer {MAX_IN_A_ROW[policy.action]} times in a row already"
        elif policy.action == "skip":
            self.report(event)
            return None
        elif goals := [n for n in saved if n <= number - policy.steps]:
            self.report(event.model_copy(update={"restored": max(goals)}))
            return self.restore(max(goals))
        else:
            why = f"no checkpoint is {policy.steps} steps or more before it to go back to: {kept}"
        self.report(event.model_copy(update={"did": "stop"}))
        raise NonFiniteError(f"{event.text(jax.process_count())}; {why}")
