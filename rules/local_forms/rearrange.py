"""Operations that put pieces of their operands at fixed places: pad, slice, concatenate, split, reverse, tile.

Along a split dimension each such operation is a list of stretches, known when the program is traced. Cut at the
borders of the parts, a stretch becomes pieces, each from one part to one part. Pieces that stay need no
communication; the others travel in rounds of one collective-permute, in which a part sends at most one piece and
receives at most one. XLA's own partitioning shifts and selects whole operands, or exchanges them all to all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from autoshard.ir.halo import permute_shards
from autoshard.ir.rule import Local
from autoshard.machine.collective import COLLECTIVE_PERMUTE, CollectiveKind


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements ``to``, ``to + 1``, ... of a result are elements ``at``, ``at + step``, ... of an operand."""

    operand: int
    at: int
    result: int
    to: int
    length: int
    step: int = 1
    """1 or -1."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch within one part of an operand and one part of a result, counted from where these begin."""

    source: int
    target: int
    stretch: Stretch

    @property
    def low(self) -> int:
        """The lowest of its elements in the operand's part."""
        return self.stretch.at - (self.stretch.length - 1 if self.stretch.step < 0 else 0)


Turn = tuple[Piece, ...]
"""Pieces that are moved together: of each part at most one leaves, and to each at most one comes."""


@functools.lru_cache(maxsize=1024)
def schedule(
    stretches: tuple[Stretch, ...], before: tuple[int, ...], after: tuple[int, ...], parts: int
) -> tuple[tuple[Turn, ...], tuple[Turn, ...]]:
    """What stays and what travels, in turns.

    Args:
      stretches: of the whole.
      before, after: sizes of the dimension in each operand and result, whole.
      parts: divides all of them.
    """
    pieces = [p for s in stretches for p in _cut(s, before[s.operand] // parts, after[s.result] // parts)]
    stay, travel = ([p for p in pieces if (p.source == p.target) == same] for same in (True, False))
    return _turns(stay), _turns(travel)


def _cut(s: Stretch, m: int, n: int) -> list[Piece]:
    """``s`` cut at the borders of parts of ``m`` elements of the operand and ``n`` of the result."""
    pieces: list[Piece] = []
    done = 0
    while done < s.length:
        at, to = s.at + s.step * done, s.to + done
        left = m - at % m if s.step > 0 else at % m + 1
        length = min(s.length - done, left, n - to % n)
        pieces.append(Piece(at // m, to // n, Stretch(s.operand, at % m, s.result, to % n, length, s.step)))
        done += length
    return pieces


def _turns(pieces: Sequence[Piece]) -> tuple[Turn, ...]:
    """The longest first, so that pieces of like length share a turn; each in the first turn that has room."""
    turns: list[list[Piece]] = []
    for p in sorted(pieces, key=lambda p: -p.stretch.length):
        room = (t for t in turns if all(p.source != q.source and p.target != q.target for q in t))
        turn = next(room, None)
        if turn is None:
            turns.append(turn := [])
        turn.append(p)
    return tuple(map(tuple, turns))


def rearrange(
    stretches: Sequence[Stretch],
    before: Sequence[int],
    after: Sequence[int],
    axis: int,
    others: Callable[..., Any] | None = None,
) -> Local:
    """The form of an operation whose results are made of ``stretches`` along ``axis``.

    Args:
      stretches: of the whole; they do not overlap in the results.
      before, after: sizes of the dimension in each operand and result, whole. An operand more than ``before`` says
        is a scalar that fills whatever no stretch covers.
      axis: the dimension, in every operand and result.
      others: ``others(axis, *operands)`` does to the first operand what happens to its other dimensions.
    """
    plan: Callable[[int], tuple[tuple[Turn, ...], tuple[Turn, ...]]] = functools.partial(
        schedule, tuple(stretches), tuple(before), tuple(after)
    )

    def fun(axes: tuple[str, ...], *operands: Any) -> Any:
        parts, me = lax.axis_size(axes), lax.axis_index(axes)
        stay, travel = plan(parts)
        xs, fill = list(operands[: len(before)]), operands[len(before) :]
        if others is not None:
            xs = [others(axis, *operands)]
        own = lax.concatenate(xs, axis) if len(xs) > 1 else xs[0]
        starts = np.cumsum([0, *(x.shape[axis] for x in xs)])
        pool, slots, end = [own], [(turn, [starts[p.stretch.operand] for p in turn]) for turn in stay], int(starts[-1])
        for turn in travel:
            longest = max(p.stretch.length for p in turn)
            lows = [min(starts[p.stretch.operand] + p.low, starts[-1] - longest) for p in turn]
            low = _table(parts, {p.source: n for p, n in zip(turn, lows, strict=True)})[me]
            sent = lax.dynamic_slice_in_dim(own, low, longest, axis)
            pool.append(permute_shards(sent, axes, [(p.source, p.target) for p in turn]))
            slots.append((turn, [end + starts[p.stretch.operand] - n for p, n in zip(turn, lows, strict=True)]))
            end += longest
        if fill:
            shape = (*own.shape[:axis], 1, *own.shape[axis + 1 :])
            pool.append(jnp.broadcast_to(fill[0], shape))
        everything = lax.concatenate(pool, axis) if len(pool) > 1 else own
        results: list[Any] = []
        for r, size in enumerate(after):
            index = _index(r, size // parts, parts, slots, int(end))(me)
            results.append(jnp.take(everything, index, axis, mode="clip"))
        return results[0] if len(results) == 1 else tuple(results)

    def moves(parts: int, sizes: Sequence[int]) -> tuple[tuple[CollectiveKind, int], ...]:
        each = sizes[0] * parts // before[0]
        return tuple((COLLECTIVE_PERMUTE, each * max(p.stretch.length for p in turn)) for turn in plan(parts)[1])

    return Local(fun, moves)


def _index(
    result: int, size: int, parts: int, slots: Sequence[tuple[Turn, Sequence[int]]], fill: int
) -> Callable[[Any], Any]:
    """Where in the pool each element of a part's ``result`` lies, by part; ``slots`` say where pieces begin."""
    rows = []
    for turn, bases in slots:
        chosen = [(p.target, p.stretch, b) for p, b in zip(turn, bases, strict=True) if p.stretch.result == result]
        if chosen:
            rows.append(
                tuple(
                    _table(parts, {t: value(s, b) for t, s, b in chosen})
                    for value in (
                        lambda s, b: s.to,
                        lambda s, b: s.to + s.length,
                        lambda s, b: b + s.at,
                        lambda s, b: s.step,
                    )
                )
            )

    def index(me: Any) -> Any:
        places = jnp.arange(size, dtype="int32")
        found = jnp.full(size, fill, "int32")
        for begin, end, at, step in rows:
            inside = (places >= begin[me]) & (places < end[me])
            found = jnp.where(inside, at[me] + step[me] * (places - begin[me]), found)
        return found

    return index


def _table(parts: int, values: dict[int, int]) -> Any:
    """``values`` by part, 0 where there is none."""
    return jnp.asarray([values.get(p, 0) for p in range(parts)], "int32")
