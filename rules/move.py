"""Rules of operations that put elements at other positions of a dimension: pad, slice, concatenate, reverse, tile.

All kinds of partial values pass through. A dimension along which elements move has a local form, in which devices
exchange spans; of several such dimensions only the largest may be sharded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from jax import lax
from jax.extend.core import Primitive

from autoshard.ir.rule import Aval, Rule, RuleFn
from autoshard.rules.builders import ANY_PARTIAL, Label, build, dim_labels, is_key, selection_passthrough, table
from autoshard.rules.local_forms.dynamic_slice import sharded_pad, sharded_slice
from autoshard.rules.local_forms.rearrange import Span, rearrange
from autoshard.transforms.swapped_halves import swapped_halves_p

FEW_SHARDS = 4
"""Where at most this many shards divide both a dimension and a slice of an eighth of it or less, elements are sent one
by one: an exchange of spans could not use more devices."""


def concatenate(*xs: Aval, dimension: int, **_: Any) -> Rule:
    """The operands are spans of the result along ``dimension``."""
    sizes = [x.shape[dimension] for x in xs]
    offsets = itertools.accumulate(sizes, initial=0)
    spans = [Span(i, 0, 0, to, n) for i, (n, to) in enumerate(zip(sizes, offsets, strict=False))]
    return _movement_rule(
        [x.shape for x in xs],
        [dimension] * (len(xs) > 1),
        {dimension: spans},
        [{dimension: sum(sizes)}],
        selection_passthrough(*range(len(xs))),
    )


def pad(x: Aval, value: Aval, *, padding_config: Sequence[tuple[int, int, int]], **_: Any) -> Rule:
    """The operand among elements of the padding value. A sum passes through only if that is partial too.

    Interior padding that keeps shards aligned needs no communication. A whole operand of few elements is padded into a
    sharded result without communication, too.
    """
    edges = {d: tuple(map(int, e)) for d, e in enumerate(padding_config) if any(e)}
    spread = {
        d: max(0, x.shape[d] + low + high + max(0, x.shape[d] - 1) * between)
        for d, (low, high, between) in edges.items()
    }
    aligned = {
        d: x.shape[d]
        for d, (low, high, between) in edges.items()
        if low >= 0 <= high and low + high == between and x.shape[d]
    }
    spans = {
        d: [Span(0, max(0, -low), 0, max(0, low), x.shape[d] + min(0, low) + min(0, high))]
        for d, (low, high, between) in edges.items()
        if not between
    }

    def others(axis: int, x: Any, value: Any) -> Any:
        return lax.pad(x, value, [(0, 0, 0) if d == axis else e for d, e in enumerate(padding_config)])

    few = len(edges) == 1 and not aligned and all(_is_few(x.shape[d], n, d in spans) for d, n in spread.items())
    if not few or is_key(x.dtype):
        return _movement_rule(
            [x.shape], edges, spans, [spread], selection_passthrough(0, 1), others, aligned, scalars=1
        )
    ((axis, (low, _high, between)),) = edges.items()
    names = dim_labels(x.shape)
    whole = [None if d == axis else f for d, f in enumerate(names)]
    form = sharded_pad(low, between + 1, spread[axis], axis)
    return build([whole, []], [names], {names[axis]: "local"}, selection_passthrough(0, 1), local=form)


def rev(x: Aval, *, dimensions: Sequence[int], **_: Any) -> Rule:
    """The shards of a reversed dimension change places."""
    turned = [d for d in dimensions if x.shape[d] > 1]
    spans = {d: [Span(0, x.shape[d] - 1, 0, 0, x.shape[d], -1)] for d in turned}
    return _movement_rule(
        [x.shape], turned, spans, [{}], ANY_PARTIAL, lambda axis, x: lax.rev(x, [d for d in turned if d != axis])
    )


def slice_(
    x: Aval,
    *,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None = None,
    **_: Any,
) -> Rule:
    """Dimensions taken whole are parallel. A strided slice that keeps shards aligned needs no communication; of a slice
    of few elements, the devices that have them send them to the others.
    """
    picks = {
        d: (int(start), int(limit), int(step))
        for d, (start, limit, step, n) in enumerate(
            zip(start_indices, limit_indices, strides or (1,) * len(x.shape), x.shape, strict=True)
        )
        if (start, limit, step) != (0, n, 1)
    }
    kept = {d: max(0, -(-(limit - start) // step)) for d, (start, limit, step) in picks.items()}
    aligned = {d: kept[d] for d, (start, _, step) in picks.items() if start < step and kept[d] * step == x.shape[d]}
    spans = {d: [Span(0, start, 0, 0, limit - start)] for d, (start, limit, step) in picks.items() if step == 1}

    def others(axis: int, x: Any) -> Any:
        picked = [
            (0, n, 1) if d == axis or d not in picks else (picks[d][0], n, picks[d][2]) if d in aligned else picks[d]
            for d, n in enumerate(x.shape)
        ]
        return lax.slice(x, *zip(*picked, strict=True))

    few = len(picks) == 1 and not aligned and all(_is_few(n, x.shape[d], d in spans) for d, n in kept.items())
    if not few or is_key(x.dtype):
        return _movement_rule([x.shape], picks, spans, [kept], ANY_PARTIAL, others, aligned)
    ((axis, (start, _limit, step)),) = picks.items()
    names = dim_labels(x.shape)
    return build(
        [names],
        [[None if d == axis else f for d, f in enumerate(names)]],
        {names[axis]: "local"},
        ANY_PARTIAL,
        local=sharded_slice(start, step, kept[axis], axis),
    )


def split(x: Aval, *, sizes: Sequence[int], axis: int, **_: Any) -> Rule:
    """The results are spans of the operand along ``axis``."""
    offsets = itertools.accumulate(sizes, initial=0)
    spans = [Span(0, int(at), i, 0, int(n)) for i, (n, at) in enumerate(zip(sizes, offsets, strict=False))]
    return _movement_rule(
        [x.shape], [axis] * (len(sizes) > 1), {axis: spans}, [{axis: int(n)} for n in sizes], ANY_PARTIAL
    )


def tile(x: Aval, *, reps: Sequence[int], **_: Any) -> Rule:
    """The operand is repeated along dimensions; the repeats of a dimension of size 1 are a free factor."""
    spread = {d: n * r for d, (n, r) in enumerate(zip(x.shape, reps, strict=True)) if n > 1 < r}
    spans = {d: [Span(0, 0, 0, to, x.shape[d]) for to in range(0, n, x.shape[d])] for d, n in spread.items()}
    free = {d for d, (n, r) in enumerate(zip(x.shape, reps, strict=True)) if n == 1 < r}

    def others(axis: int, x: Any) -> Any:
        return lax.tile(x, [1 if d == axis else r for d, r in enumerate(reps)])

    return _movement_rule([x.shape], spread, spans, [spread], ANY_PARTIAL, others, free=free)


def _is_few(some: int, all_: int, stretched: bool) -> bool:
    """Whether to send single elements rather than spans.

    That is where ``some`` of ``all_`` elements are few, where no number of devices divides both, or where they are
    strided.
    """
    common = math.gcd(some, all_)
    return some > 0 < all_ and (common == 1 or not stretched or (common <= FEW_SHARDS and 8 * some <= all_))


def _movement_rule(
    operands: Sequence[Sequence[int]],
    dims: Iterable[int],
    spans: Mapping[int, Sequence[Span]],
    results: Sequence[Mapping[int, int]],
    passthrough: str,
    others: Callable[..., Any] | None = None,
    aligned: Mapping[int, int] | None = None,
    scalars: int = 0,
    free: Collection[int] = (),
) -> Rule:
    """The rule of an operation that moves elements along ``dims`` only.

    Args:
      operands: shapes of the operands, equal except for ``dims``.
      dims: the dimensions along which elements move.
      spans: how they move, by dimension; a dimension without, or whose sizes have no common divisor, is whole.
      results: sizes of each result, by dimension, where they differ from the first operand's.
      passthrough: as in a rule's text.
      others: ``others(axis, *operands)`` applies the operation to dimensions beside ``axis`` of the first operand.
      aligned: dimensions whose shards stay on their devices -> the most shards they can have.
      scalars: the number of scalar operands after these.
      free: dimensions of size 1 of the operand that are free factors of the result, unless another has a local form.
    """
    aligned = aligned or {}
    befores = {d: [shape[d] for shape in operands] for d in dims}
    afters = {d: [sizes.get(d, operands[0][d]) for sizes in results] for d in dims}
    common = {
        d: aligned[d]
        if d in aligned
        else math.gcd(*befores[d], *afters[d])
        if d in spans and all((*befores[d], *afters[d]))
        else 1
        for d in dims
    }
    axis = max((d for d in common if d not in aligned and common[d] > 1), key=lambda d: operands[0][d], default=None)
    names, sizes, kinds = dim_labels(operands[0]), dict[str, int](), dict[str, str]()

    def label(d: int, n: int, place: str) -> Label:
        if d not in common:
            return names[d]
        if d not in aligned and d != axis:
            return None
        inner = f"{names[d]} {place}"
        sizes.update({names[d]: common[d], inner: n // common[d]})
        kinds.update({inner: "whole"} | ({names[d]: "local"} if d == axis else {}))
        return (names[d], inner)

    before = [
        [None if d in free else label(d, n, f"in {i}") for d, n in enumerate(shape)] for i, shape in enumerate(operands)
    ]
    after = [
        [
            None if d in free and axis is not None else label(d, changed.get(d, n), f"out {i}")
            for d, n in enumerate(operands[0])
        ]
        for i, changed in enumerate(results)
    ]
    local = rearrange(spans[axis], befores[axis], afters[axis], axis, others) if axis is not None else None
    return build([*before, *([] for _ in range(scalars))], after, kinds, passthrough, sizes, local=local)


def swapped_halves(x: Aval) -> Rule:
    """Rows are whole."""
    labels = [*dim_labels(x.shape)[:-1], None]
    return build([labels], [labels], passthrough=ANY_PARTIAL)


RULES: dict[str, RuleFn] = {
    "concatenate": concatenate,
    "pad": pad,
    "rev": rev,
    "slice": slice_,
    "split": split,
    "tile": tile,
}
TABLE = table(RULES)
OWN: dict[Primitive, RuleFn] = {swapped_halves_p: swapped_halves}
