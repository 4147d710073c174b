"""Every exception class of autoshard.

Each message names the argument path or the equation's source line, the sizes involved, and the nearest thing that
works; each class has a remedy.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from typing import Any

PACKAGE = os.path.dirname(__file__) + os.sep
"""Where the package is: warnings name the first line outside of it."""


class AutoshardError(Exception):
    """Base class of every error that autoshard raises on purpose.

    Remedy: catch it to separate what autoshard refuses from a fault of JAX or of the step itself.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Also of those that take more than a message: processes send each other what they raised."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[AutoshardError], args: tuple[Any, ...], attributes: dict[str, Any]) -> AutoshardError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class MeshError(AutoshardError):
    """An impossible mesh: axes, sizes and devices do not agree, or the devices are not available.

    Remedy: make the product of the axis sizes the number of devices, or leave one size open with -1. To plan or compile
    for devices that are not here, name them in a mesh config (``tpu``, ``gpu``, or ``devices`` with ``hardware``); only
    calls need them.
    """


class SpecError(AutoshardError):
    """A sharding that does not fit its value: unknown axis, repeated axis, rank, or division.

    Remedy: write the spec with the mesh's axes, each once, and no more entries than dimensions; leave it out where the
    planner may decide. State that no axis divides can be stored with padding: ``pad_state=True``.
    """


class ArgumentError(AutoshardError):
    """An invalid option of `jit`, or arguments whose structure, shape or dtype does not fit the step or its plan.

    Remedy: correct the option or the argument that the message names by its path. A step makes a plan for each set of
    shapes by itself; a given plan holds for the shapes that it was made for.
    """


class RuleError(AutoshardError):
    """A malformed rule, or, under ``strict=True``, an operation that has none.

    Remedy: give the operation a rule with `register_rule` or ``jit(..., rules=...)``; without ``strict`` it is kept
    whole, and the plan says so. An ``example=`` shows at once whether a rule fits.
    """


class PlanError(AutoshardError):
    """A malformed plan, or one that was made for another program, other shapes or another mesh.

    Remedy: plan again: ``step.plan(...)``. A stored plan holds for one program, its shapes and its mesh.
    """


class ScheduleError(AutoshardError):
    """A pipeline schedule that is unknown, or whose table lacks or repeats an operation, or runs one too early.

    Remedy: take a schedule by its name; of one's own, move the operation that the message names to a later tick.
    """


class PipelineError(AutoshardError):
    """A step that cannot run as the pipeline that is asked for: no chain of layers, or layers, micro-batches and stages
    that do not fit each other.

    Remedy: stack the layers and scan over them with `jax.lax.scan`, inside the loss whose gradient is taken; or plan
    without a pipeline.
    """


class MemoryBudgetError(PlanError):
    """No layout fits the memory budget; the message is about the smallest that was priced, or says what each needs.

    Remedy: more devices, a smaller batch, or ``memory_budget=`` if the chip has more. Leave ``passes`` and
    ``microbatches`` open, so that the planner may recompute and cut the batch; donate the state; drop pins that stand
    in the way, which the message names.

    Attributes:
      least: peak memory of the smallest in bytes per device; where none was priced, what each needs at least.
      fastest: seconds of a step of the fastest layout, or pipeline, that was priced and is too large; 0 if none was.
      of_arguments: whether a pipeline's arguments alone are too large: neither recompute nor micro-batches help then.
      unsearched: whether none was priced, as a bound showed that none can fit.
      none_faster: whether the search ended as a bound showed that none takes less than what was to be beaten;
        ``fastest`` is that bound then.
    """

    def __init__(
        self,
        message: str,
        least: float,
        fastest: float = 0.0,
        *,
        of_arguments: bool = False,
        unsearched: bool = False,
        none_faster: bool = False,
    ) -> None:
        super().__init__(message)
        self.least, self.fastest = least, fastest
        self.of_arguments, self.unsearched, self.none_faster = of_arguments, unsearched, none_faster


class ConfigError(AutoshardError):
    """A configuration file with a missing, unknown or invalid entry.

    Remedy: correct the line that the message names. ``autoshard schema train`` (or ``mesh``, ``hardware``) prints what
    a file may have, for editors too.
    """


class CheckpointError(AutoshardError):
    """A checkpoint that is missing, incomplete, or of another state.

    Remedy: ``autoshard checkpoint inspect`` lists what is in it and ``verify`` reads all of it. A changed state is
    restored with ``rename=``, ``ignore=``, ``cast=`` or ``missing=``.
    """


class PeerError(AutoshardError):
    """Another process of a run was lost, or did not come.

    Remedy: look at the other process's output and start all again: a run resumes from its last checkpoint. Where they
    never meet, check ``--coordinator``, ``--processes`` and ``--id``.
    """


class NonFiniteError(AutoshardError):
    """A step of a run whose metrics or next state are NaN or infinite, where that is to end it.

    Remedy: the checkpoint before is good: look at the batch that the message names, lower the learning rate, or let the
    run go on by itself with ``nan="skip"`` or ``nan="rewind 20"``.
    """


class ExportError(AutoshardError):
    """A step that cannot be exported, or bytes that are no exported step, a damaged one, or one of another JAX.

    Remedy: export again with the JAX that loads it, or take out of the step what the message names.
    """


class VerificationError(AutoshardError):
    """Sharded and unsharded results differ; the message names the first equation that differs.

    Remedy: where the equation has a rule or a kernel of one's own, correct that. Where the difference is rounding, give
    a larger ``rtol``. Else it is a fault of autoshard, and the message is what a report needs.
    """


class PassError(AutoshardError):
    """A pass that is unknown, has an invalid option, or produced an invalid program.

    Remedy: take the name that the message proposes; a pass of one's own must keep arguments, results and effects.
    """


class ChunkError(PassError):
    """What cannot be computed in chunks: a loss in chunks of its tokens, which the pass ``losses`` then leaves as it
    is, and reports this; or a batch in parts.

    Remedy: look at the operation that the message names: it takes all tokens, or all rows, at once.

    Attributes:
      source: source line of the operation that stands against it; "" if unknown.
      remedy: what could be done, of a batch in parts; may be empty.
      own_loop: whether that is a loop over the batch, such as over micro-batches.
    """

    def __init__(
        self, message: str, source: str, remedy: str = "compute it for each example", *, own_loop: bool = False
    ) -> None:
        super().__init__(message)
        self.source, self.remedy, self.own_loop = source, remedy, own_loop


class MicrobatchError(PassError):
    """A step that cannot be computed in micro-batches: its batch does not divide, it has none, or an operation takes
    all of it together.

    Remedy: a number that divides the batch, or ``microbatches=1``; of batch norm or a contrastive loss the parts would
    give other results.

    Attributes:
      source: source line of that operation; "" if there is none.
      own_loop: whether it is a loop over the batch, such as over micro-batches.
    """

    def __init__(self, message: str, source: str = "", own_loop: bool = False) -> None:
        super().__init__(message)
        self.source, self.own_loop = source, own_loop


class CompileError(AutoshardError):
    """The compiler refuses every layout that was compiled; the message has its reasons.

    Remedy: read the reasons. Out of memory: a lower ``memory_budget`` makes the planner choose smaller layouts.
    """


class CacheWarning(UserWarning):
    """A cache entry that cannot be read or written; its result is computed again.

    Remedy: none is needed; ``cache=`` or ``$AUTOSHARD_CACHE`` names a folder that can be written.
    """


class ModeWarning(UserWarning):
    """A model of one's own that does not seem to know when it trains: its dropout is off, or a parameter that says so
    keeps its default.

    Remedy: name the parameter of its ``__call__`` ``train``, ``training``, ``is_training`` or ``deterministic``: a run
    switches these. Where it is meant so, none is needed.
    """


class PipelineWarning(UserWarning):
    """All stages of a pipeline compute what any of them does, since XLA put a collective of all devices into it: the
    results are the same, later.

    Remedy: none is needed for them; look at the source line that the message names, or split other dimensions there.
    """


class PlacementWarning(UserWarning):
    """An argument was committed to another sharding than planned and had to be resharded.

    Remedy: place it once with ``plan.put`` or make it with ``plan.init``; a step under ``like=`` takes it where another
    step leaves it.
    """


_SHORTEST = 4
"""Letters of a name that is looked for in another one."""
_MOST = 3
"""Names of which one may have been meant."""


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the known name closest to ``name``; else the list of all known names."""
    names = sorted(known)
    listed = f"; known: {', '.join(repr(n) for n in names)}" if names else ""
    return meant(closest(name, names)) or listed


def closest(name: str, known: Iterable[str]) -> list[str]:
    """The known name that is spelt most like ``name``; else the few that have it in them or that it has in it, but for
    a plural's s, the longest first: ``steps`` and ``step`` for ``step_count``.
    """
    names = sorted(known)
    if alike := difflib.get_close_matches(name, names, n=1):
        return alike
    stems = {known: known.removesuffix("s") for known in names}
    within = [n for n, stem in stems.items() if min(len(stem), len(name)) >= _SHORTEST and (stem in name or name in n)]
    return sorted(within, key=len, reverse=True) if len(within) <= _MOST else []


def meant(names: Sequence[str]) -> str:
    """``"; did you mean 'x'?"``, or the empty string where there are no names."""
    return f"; did you mean {' or '.join(map(repr, names))}?" if names else ""
