"""Masks of scores: bands of positions, and segments of packed sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx

Letters = tuple[str | None, ...]
"""A letter for each dimension; None where the value is broadcast along it."""
Position = dict[str, int]
"""An integer linear in positions: the coefficient of each letter's position, and the constant under ``""``."""


@dataclass(frozen=True)
class Band:
    """A mask, True where the position along ``col`` minus that along ``row`` is in [low, high]; None is no limit."""

    row: str
    col: str
    low: int | None
    high: int | None

    def transposed(self) -> Band:
        """The same mask, with ``row`` and ``col`` interchanged."""
        return Band(
            self.col, self.row, None if self.high is None else -self.high, None if self.low is None else -self.low
        )

    def intersection(self, other: Band) -> Band | None:
        """The conjunction of two masks; None where they are of other dimensions."""
        if (self.row, self.col) != (other.row, other.col):
            return None
        lows = [x.low for x in (self, other) if x.low is not None]
        highs = [x.high for x in (self, other) if x.high is not None]
        return Band(self.row, self.col, max(lows, default=None), min(highs, default=None))


@dataclass(frozen=True)
class Segments:
    """A mask, True where an array of integers has the same number at a position along ``row`` and at one along
    ``col``: so it is at each position and itself."""

    ids: jx.Var
    """Integers of at most 32 bits, or booleans."""
    row: str
    col: str
    letters: Letters
    """Of ``ids``: ``row`` is among them, ``col`` is not; None for a dimension of size 1."""

    def transposed(self) -> Segments:
        """The same mask, with ``row`` and ``col`` interchanged."""
        letters = tuple(self.col if c == self.row else c for c in self.letters)
        return Segments(self.ids, self.col, self.row, letters)

    @property
    def operand(self) -> tuple[jx.Var, str]:
        """The ids and their letters, ``.`` for a dimension of size 1, as of those along ``col``."""
        return self.ids, "".join(c or "." for c in self.transposed().letters)


Mask = tuple[Band | Segments, ...]
"""A mask that is True where all of these are."""


def conjunction(x: Mask | None, y: Mask | None) -> Mask | None:
    """The mask that is True where both are; None where one is, or where their bands are of other dimensions."""
    if x is None or y is None:
        return None
    found = list(x)
    for mask in y:
        band = next((m for m in found if isinstance(m, Band)), None)
        if isinstance(mask, Band) and band is not None:
            both = band.intersection(mask if mask.row == band.row else mask.transposed())
            if both is None:
                return None
            found[found.index(band)] = both
        elif mask not in found:
            found.append(mask)
    return tuple(found)


def complement(band: Band) -> Band | None:
    """The negation of a mask; None where that is no band, as of a band with two limits."""
    if band.low is None and band.high is not None:
        return replace(band, low=band.high + 1, high=None)
    return replace(band, low=None, high=band.low - 1) if band.high is None and band.low is not None else None


COMPARISONS = frozenset({_prims.eq_p, _prims.ge_p, _prims.gt_p, _prims.le_p, _prims.lt_p, _prims.ne_p})


def comparison_band(op: jx.Primitive, x: Position, y: Position) -> Band | None:
    """Where ``x`` compares to ``y`` as ``op`` says; None where they are not positions along one dimension each."""
    left = {c: x.get(c, 0) - y.get(c, 0) for c in {**x, **y}}
    offset = left.pop("", 0)
    found = {c: n for c, n in left.items() if n}
    if sorted(found.values()) != [-1, 1] or op in (_prims.eq_p, _prims.ne_p):
        return None
    (row,), (col,) = ([c for c, n in found.items() if n == sign] for sign in (-1, 1))
    low = {_prims.ge_p: -offset, _prims.gt_p: 1 - offset}.get(op)
    high = {_prims.le_p: -offset, _prims.lt_p: -1 - offset}.get(op)
    return Band(row, col, low, high)
