"""Every exception class of autoshard.

Each message names the argument path or the equation's source line, the sizes involved, and the nearest thing that
works.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AutoshardError(Exception):
    """Base class of every error that autoshard raises on purpose."""


class MeshError(AutoshardError):
    """An impossible mesh: axes, sizes and devices do not agree, or the devices are not available."""


class SpecError(AutoshardError):
    """A sharding that does not fit its value: unknown axis, repeated axis, rank, or division."""


class ArgumentError(AutoshardError):
    """An invalid option of `jit`, or arguments whose structure, shape or dtype does not fit the step or its plan."""


class RuleError(AutoshardError):
    """A malformed rule, or, under ``strict=True``, an operation that has none."""


class PlanError(AutoshardError):
    """A malformed plan, or one that was made for another program, other shapes or another mesh."""


class ScheduleError(AutoshardError):
    """A pipeline schedule that is unknown, or whose table lacks or repeats an operation, or runs one too early."""


class PipelineError(AutoshardError):
    """A step that cannot run as the pipeline that is asked for: no chain of layers, or layers, micro-batches and stages
    that do not fit each other."""


class MemoryBudgetError(PlanError):
    """No layout fits the memory budget; the message is about the smallest.

    Attributes:
      least: its peak memory in bytes per device.
    """

    def __init__(self, message: str, least: float) -> None:
        super().__init__(message)
        self.least = least


class ConfigError(AutoshardError):
    """A configuration file with a missing, unknown or invalid entry."""


class CheckpointError(AutoshardError):
    """A checkpoint that is missing, incomplete, or of another state."""


class PeerError(AutoshardError):
    """Another process of a run was lost, or did not come."""


class NonFiniteError(AutoshardError):
    """A step of a run whose metrics or next state are NaN or infinite, where that is to end it."""


class ExportError(AutoshardError):
    """A step that cannot be exported, or bytes that are no exported step, a damaged one, or one of another JAX."""


class VerificationError(AutoshardError):
    """Sharded and unsharded results differ; the message names the first equation that differs."""


class PassError(AutoshardError):
    """A pass that is unknown, has an invalid option, or produced an invalid program."""


class ChunkError(PassError):
    """What cannot be computed in chunks: a loss in chunks of its tokens, which the pass ``losses`` then leaves as it
    is, and reports this; or a batch in parts.

    Attributes:
      source: source line of the operation that stands against it; "" if unknown.
    """

    def __init__(self, message: str, source: str) -> None:
        super().__init__(message)
        self.source = source


class MicrobatchError(PassError):
    """A step that cannot be computed in micro-batches: its batch does not divide, it has none, or an operation takes
    all of it together.

    Attributes:
      source: source line of that operation; "" if there is none.
    """

    def __init__(self, message: str, source: str = "") -> None:
        super().__init__(message)
        self.source = source


class CompileError(AutoshardError):
    """The compiler refuses every layout that was compiled; the message has its reasons."""


class CacheWarning(UserWarning):
    """A cache entry that cannot be read or written; its result is computed again."""


class PlacementWarning(UserWarning):
    """An argument was committed to another sharding than planned and had to be resharded."""


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the known name closest to ``name``; else the list of all known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(repr(n) for n in names)}" if names else ""
