"""Operations that copy spans of a sharded dimension to fixed positions: pad, slice, concatenate, split, reverse, tile.

Along one dimension such an operation is a list of spans to copy, known when it is traced. Cut at the boundaries of
shards, each span becomes spans from one shard to one shard. Those that stay on their device need no communication; the
others are sent in rounds of one collective-permute, in which a device sends at most one span and receives at most one.
XLA's own partitioning permutes whole shards and selects, or exchanges them all to all.
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
from autoshard.ir.rule import CollectiveBytes, Local
from autoshard.machine.collective import COLLECTIVE_PERMUTE


@dataclass(frozen=True, slots=True)
class Span:
    """Elements ``result_start``, ``result_start + 1``, ... of a result are ``start``, ``start + step``, ... of an
    operand. ``operand`` and ``result`` are their indices."""

    operand: int
    start: int
    result: int
    result_start: int
    length: int
    step: int = 1
    """1, or -1 where the order is reversed."""


@dataclass(frozen=True, slots=True)
class ShardSpan:
    """A span from shard ``source`` of an operand to shard ``target`` of a result; starts count from the shard's."""

    source: int
    target: int
    span: Span

    @property
    def low(self) -> int:
        """The lowest index in the operand's shard."""
        return self.span.start - (self.span.length - 1 if self.span.step < 0 else 0)


Round = tuple[ShardSpan, ...]
"""Spans that are copied together: each device sends at most one of them and receives at most one."""


@functools.lru_cache(maxsize=1024)
def schedule(
    spans: tuple[Span, ...], before: tuple[int, ...], after: tuple[int, ...], parts: int
) -> tuple[tuple[Round, ...], tuple[Round, ...]]:
    """The spans that stay on their device and those that are sent, in rounds.

    Args:
      spans: of whole operands and results.
      before, after: sizes of the dimension in each whole operand and result.
      parts: the number of shards, which divides all of them.
    """
    shard_spans = [p for s in spans for p in _cut(s, before[s.operand] // parts, after[s.result] // parts)]
    stay, sent = ([p for p in shard_spans if (p.source == p.target) == same] for same in (True, False))
    return _rounds(stay), _rounds(sent)


def _cut(s: Span, m: int, n: int) -> list[ShardSpan]:
    """``s`` cut at the boundaries of shards of ``m`` elements of the operand and ``n`` of the result."""
    found: list[ShardSpan] = []
    done = 0
    while done < s.length:
        at, to = s.start + s.step * done, s.result_start + done
        left = m - at % m if s.step > 0 else at % m + 1
        length = min(s.length - done, left, n - to % n)
        found.append(ShardSpan(at // m, to // n, Span(s.operand, at % m, s.result, to % n, length, s.step)))
        done += length
    return found


def _rounds(spans: Sequence[ShardSpan]) -> tuple[Round, ...]:
    """Greedily, longest first, so that spans of similar length share a round."""
    rounds: list[list[ShardSpan]] = []
    for p in sorted(spans, key=lambda p: -p.span.length):
        free = (r for r in rounds if all(p.source != q.source and p.target != q.target for q in r))
        chosen = next(free, None)
        if chosen is None:
            rounds.append(chosen := [])
        chosen.append(p)
    return tuple(map(tuple, rounds))


def rearrange(
    spans: Sequence[Span],
    before: Sequence[int],
    after: Sequence[int],
    axis: int,
    others: Callable[..., Any] | None = None,
) -> Local:
    """The local form of an operation whose results consist of ``spans`` of its operands along ``axis``.

    Args:
      spans: of whole operands and results; they do not overlap in the results.
      before, after: sizes of the dimension in each whole operand and result. One operand more than ``before`` has is a
        scalar that fills whatever no span covers.
      axis: the dimension, in every operand and result.
      others: ``others(axis, *operands)`` applies the operation to dimensions beside ``axis`` of the first operand.
    """
    plan: Callable[[int], tuple[tuple[Round, ...], tuple[Round, ...]]] = functools.partial(
        schedule, tuple(spans), tuple(before), tuple(after)
    )

    def fun(axes: tuple[str, ...], *operands: Any) -> Any:
        parts, me = lax.axis_size(axes), lax.axis_index(axes)
        stay, sent = plan(parts)
        xs, fill = list(operands[: len(before)]), operands[len(before) :]
        if others is not None:
            xs = [others(axis, *operands)]
        own = lax.concatenate(xs, axis) if len(xs) > 1 else xs[0]
        starts = np.cumsum([0, *(x.shape[axis] for x in xs)])
        # Results are gathered from a pool: this device's operands, what it receives in each round, and the scalar.
        pool, end = [own], int(starts[-1])
        offsets = [(together, [starts[p.span.operand] for p in together]) for together in stay]
        for together in sent:
            longest = max(p.span.length for p in together)
            lows = [min(starts[p.span.operand] + p.low, starts[-1] - longest) for p in together]
            low = _by_device(parts, {p.source: n for p, n in zip(together, lows, strict=True)})[me]
            block = lax.dynamic_slice_in_dim(own, low, longest, axis)
            pool.append(permute_shards(block, axes, [(p.source, p.target) for p in together]))
            offsets.append((together, [end + starts[p.span.operand] - n for p, n in zip(together, lows, strict=True)]))
            end += longest
        if fill:
            shape = (*own.shape[:axis], 1, *own.shape[axis + 1 :])
            pool.append(jnp.broadcast_to(fill[0], shape))
        everything = lax.concatenate(pool, axis) if len(pool) > 1 else own
        results: list[Any] = []
        for r, size in enumerate(after):
            index = _pool_index(r, size // parts, parts, offsets, int(end))(me)
            results.append(jnp.take(everything, index, axis, mode="clip"))
        return results[0] if len(results) == 1 else tuple(results)

    def collectives(parts: int, sizes: Sequence[int]) -> CollectiveBytes:
        each = sizes[0] * parts // before[0]
        return tuple((COLLECTIVE_PERMUTE, each * max(p.span.length for p in together)) for together in plan(parts)[1])

    return Local(fun, collectives)


def _pool_index(
    result: int, size: int, parts: int, offsets: Sequence[tuple[Round, Sequence[int]]], fill: int
) -> Callable[[Any], Any]:
    """The function of a device that gives the index in its pool of each element of its shard of a result.

    Args:
      result, size: which result, and the size of its shards.
      offsets: rounds, and of each span where its shard of the operand starts in the pool.
      fill: the index of the scalar that fills the rest.
    """
    rows = []
    for spans, starts in offsets:
        chosen = [(p.target, p.span, n) for p, n in zip(spans, starts, strict=True) if p.span.result == result]
        if chosen:
            rows.append(
                tuple(
                    _by_device(parts, {target: value(s, n) for target, s, n in chosen})
                    for value in (
                        lambda s, n: s.result_start,
                        lambda s, n: s.result_start + s.length,
                        lambda s, n: n + s.start,
                        lambda s, n: s.step,
                    )
                )
            )

    def index(me: Any) -> Any:
        element = jnp.arange(size, dtype="int32")
        found = jnp.full(size, fill, "int32")
        for begin, end, at, step in rows:
            inside = (element >= begin[me]) & (element < end[me])
            found = jnp.where(inside, at[me] + step[me] * (element - begin[me]), found)
        return found

    return index


def _by_device(parts: int, values: dict[int, int]) -> Any:
    """``values`` as a vector over devices, 0 where there is none."""
    return jnp.asarray([values.get(p, 0) for p in range(parts)], "int32")
