"""Every error autoshard raises on purpose.

Each message names the argument path or the equation's source line, the sizes involved, and the
nearest thing that works. Nothing else in the package defines an exception class.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AutoshardError(Exception):
    """Root of every error that autoshard raises on purpose."""


class MeshError(AutoshardError):
    """A mesh that cannot exist: axes, sizes or devices do not agree."""


class SpecError(AutoshardError):
    """A sharding that does not fit its value: unknown axis, repeated axis, rank, or division."""


class ArgumentError(AutoshardError):
    """The call's arguments do not fit the step or its plan: structure, shape or dtype."""


class RuleError(AutoshardError):
    """A rule that is malformed, or, under ``strict=True``, a primitive that has none."""


class PlanError(AutoshardError):
    """A plan that is malformed or belongs to another program, shapes or mesh."""


class MemoryBudgetError(PlanError):
    """No layout fits the memory budget; the message names the smallest.

    Attributes:
      least: that, in bytes per device.
    """

    def __init__(self, message: str, least: float) -> None:
        super().__init__(message)
        self.least = least


class ConfigError(AutoshardError):
    """A configuration file with a missing, unknown or impossible entry."""


class CheckpointError(AutoshardError):
    """A checkpoint that is missing, half-written, or of another state."""


class VerificationError(AutoshardError):
    """Sharded and unsharded execution disagree; the message names the first diverging equation."""


class PassError(AutoshardError):
    """A pass that is unknown, wrongly configured, or produced an invalid program."""


class CompileError(AutoshardError):
    """The compiler refuses every layout that was compiled; the message has its reasons."""


class CacheWarning(UserWarning):
    """A cache entry that cannot be read or written; its result is computed again."""


class PlacementWarning(UserWarning):
    """An argument arrived on other devices than planned and had to be moved."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ``"; did you mean 'x'?"`` for the known name closest to ``name``, or all names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(repr(n) for n in names)}" if names else ""
