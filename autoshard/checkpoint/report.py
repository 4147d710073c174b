"""What a restore did, leaf by leaf."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autoshard.checkpoint.matching import Origin
from autoshard.checkpoint.names import LeftOut


@dataclass(frozen=True)
class LeafReport:
    """Where one leaf of the restored state comes from.

    Example:
      >>> print(autoshard.checkpoint.LeafReport("w", "bfloat16[8]", "same", ("w",), cast_from="float32"))
      w bfloat16[8], cast from float32
    """

    name: str
    """The keys of its path, joined by ``/``."""
    leaf: str
    """Dtype and shape: ``float32[8,8]``."""
    origin: Origin
    saved: tuple[str, ...] = ()
    """The saved leaves that it is made of, by the names that they were saved with."""
    cast_from: str | None = None
    """The dtype that it was saved with, where it has another now."""
    rows: tuple[int, int, int] | None = None
    """Of a grown leaf the dimension that is longer, its size as saved, and its size now."""
    filled: str = ""
    """What is beyond the saved rows of a grown leaf: ``fallback`` or ``zeros``."""

    def __str__(self) -> str:
        told = f"{self.name} {self.leaf}"
        if self.origin == "new":
            return f"{told}: of the fallback"
        first, more = self.saved[0], len(self.saved) - 1
        if self.origin == "stacked":
            told += f": {more + 1} layers, {first} and on"
        elif self.origin == "unstacked":
            told += f": a layer of {first}"
        elif (first, more) != (self.name, 0):
            told += f": saved as {first}"
        if self.rows:
            dim, before, now = self.rows
            told += f", dimension {dim} from {before} to {now} with {self.filled}"
        return told + (f", cast from {self.cast_from}" if self.cast_from else "")


@dataclass(frozen=True)
class RestoreReport:
    """What a restore did.

    ``extra`` and ``fingerprint`` are what `save` was given: its ``extra``, and the fingerprint of its plan.

    Example:
      >>> folder = tempfile.mkdtemp()
      >>> saving = autoshard.checkpoint.save(folder, 3, {"w": np.ones(8)}, extra={"epoch": 1}, wait=True)
      >>> state, report = autoshard.checkpoint.restore(folder, report=True)
      >>> report.step, report.extra
      (3, {'epoch': 1})
    """

    step: int | None
    """None for files that have no steps."""
    leaves: tuple[LeafReport, ...]
    """In the order of the restored state's leaves."""
    left_out: tuple[LeftOut, ...] = ()
    """Saved leaves that were not restored, in the order in which they were saved."""
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    fingerprint: str | None = None

    def __str__(self) -> str:
        """A line for each leaf that is not what was saved under its name, and one for each that was left out."""
        plain = [
            leaf for leaf in self.leaves if leaf.origin == "saved" and leaf.saved == (leaf.name,) and not leaf.cast_from
        ]
        lines = [f"{len(plain)} of {len(self.leaves)} leaves as they were saved"]
        lines += [str(leaf) for leaf in self.leaves if leaf not in plain]
        return "\n".join([*lines, *(f"{left.name}: left out, {left.why}" for left in self.left_out)])
