"""Operations that move elements without changing them. What only moves elements lets every partial through.

Where pieces of operands come to lie at other places of a dimension, its parts exchange pieces; of several such
dimensions of one operation the largest may be split.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from autoshard.ir.rule import Aval, Rule, RuleFn
from autoshard.rules.builders import ANY, Label, build, is_key, rows, table, together
from autoshard.rules.local_forms.dynamic_slice import pick, put
from autoshard.rules.local_forms.rearrange import Stretch, rearrange

FEW = 4
"""Parts that a few elements are not worth being split into."""


def bitcast_convert_type(x: Aval, *, new_dtype: Any, **_: Any) -> Rule:
    """Between widths, the minor dimension holds the pieces of one element and stays whole."""
    labels: list[Label] = list(rows(x.shape))
    old, new = _bits(x.dtype), _bits(new_dtype)
    if old > new:
        return build([labels], [[*labels, None]])
    if old < new:
        return build([[*labels[:-1], None]], [labels[:-1]])
    return build([labels], [labels])


def _bits(dtype: Any) -> int:
    if dtype == np.bool_:
        return 8
    if jax.dtypes.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    if jax.dtypes.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits
    return jnp.dtype(dtype).itemsize * 8


def broadcast_in_dim(
    x: Aval, *_dynamic: Aval, shape: Sequence[int], broadcast_dimensions: Sequence[int], **_: Any
) -> Rule:
    """Dimensions that the operand lacks, or has with size 1, are free factors of the result."""
    out: list[Label] = list(rows(shape))
    operand = [out[to] if n == shape[to] else None for n, to in zip(x.shape, broadcast_dimensions, strict=True)]
    return build([operand, *([] for _ in _dynamic)], [out], lets=ANY)


def concatenate(*xs: Aval, dimension: int, **_: Any) -> Rule:
    """The operands stand side by side along ``dimension``."""
    sizes = [x.shape[dimension] for x in xs]
    offsets = itertools.accumulate(sizes, initial=0)
    stretches = [Stretch(i, 0, 0, to, n) for i, (n, to) in enumerate(zip(sizes, offsets, strict=False))]
    return _moved(
        [x.shape for x in xs],
        [dimension] * (len(xs) > 1),
        {dimension: stretches},
        [{dimension: sum(sizes)}],
        together(0, len(xs)),
    )


def empty(*, shape: Sequence[int], **_: Any) -> Rule:
    """Memory that holds anything: every dimension is free."""
    return build([], [rows(shape)])


def iota(*_dynamic: Aval, shape: Sequence[int], **_: Any) -> Rule:
    """Every dimension is free: a part starts at its own offset."""
    return build([[] for _ in _dynamic], [rows(shape)])


def pad(x: Aval, value: Aval, *, padding_config: Sequence[tuple[int, int, int]], **_: Any) -> Rule:
    """Elements of the operand among those of the padding value. A sum passes only if that is partial too."""
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
    stretches = {
        d: [Stretch(0, max(0, -low), 0, max(0, low), x.shape[d] + min(0, low) + min(0, high))]
        for d, (low, high, between) in edges.items()
        if not between
    }

    def others(axis: int, x: Any, value: Any) -> Any:
        return lax.pad(x, value, [(0, 0, 0) if d == axis else e for d, e in enumerate(padding_config)])

    few = len(edges) == 1 and not aligned and all(_few(x.shape[d], n, d in stretches) for d, n in spread.items())
    if not few or is_key(x.dtype):
        return _moved([x.shape], edges, stretches, [spread], together(0, 2), others, aligned, scalars=1)
    ((axis, (low, _high, between)),) = edges.items()
    names = rows(x.shape)
    whole = [None if d == axis else f for d, f in enumerate(names)]
    form = put(low, between + 1, spread[axis], axis)
    return build([whole, []], [names], {names[axis]: "local"}, together(0, 2), local=form)


def reshape(
    x: Aval, *_dynamic: Aval, new_sizes: Sequence[int], dimensions: Sequence[int] | None = None, **_: Any
) -> Rule:
    """Merged and split dimensions are compound, refined as far as the sizes have common factors."""
    order = tuple(dimensions) if dimensions is not None else tuple(range(len(x.shape)))
    before, after, sizes, kinds = refine([x.shape[d] for d in order], new_sizes)
    operand: list[Label] = [None] * len(order)
    for d, label in zip(order, before, strict=True):
        operand[d] = label
    return build([operand, *([] for _ in _dynamic)], [after], kinds, ANY, sizes)


def refine(
    before: Sequence[int], after: Sequence[int]
) -> tuple[list[Label], list[Label], dict[str, int], dict[str, str]]:
    """Factors of two shapes of the same number of elements; also their sizes and kinds.

    What two dimensions have in common from the major end becomes a factor. Where they have nothing in common,
    as in ``[2, 3] -> [3, 2]``, what is left of them is whole, up to the next border that both shapes have.
    """
    sizes: dict[str, int] = {}
    kinds: dict[str, str] = {}
    if 0 in before or 0 in after:
        return [None] * len(before), [None] * len(after), sizes, kinds
    left: list[tuple[str, ...]] = [()] * len(before)
    right: list[tuple[str, ...]] = [()] * len(after)

    def factor(size: int, kind: str, *places: tuple[list[tuple[str, ...]], int]) -> None:
        name = f"f{len(sizes)}"
        sizes[name], kinds[name] = size, kind
        for dims, d in places:
            dims[d] += (name,)

    for ins, outs in _between_borders(before, after):
        a, b = list(ins), list(outs)
        m, n = before[a[0]], after[b[0]]
        while a:
            common = math.gcd(m, n)
            if common > 1:
                factor(common, "parallel", (left, a[0]), (right, b[0]))
            m, n = m // common, n // common
            if m > 1 and n > 1:
                for dims, at, first, shape in ((left, a, m, before), (right, b, n, after)):
                    for k, d in enumerate(at):
                        factor(shape[d] if k else first, "whole", (dims, d))
                break
            if m == 1:
                a.pop(0)
                m = before[a[0]] if a else 1
            if n == 1:
                b.pop(0)
                n = after[b[0]] if b else 1
    whole = {f: kind for f, kind in kinds.items() if kind == "whole"}
    return [f or None for f in left], [f or None for f in right], sizes, whole


def _between_borders(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The shortest runs of dimensions, of size above 1, that hold the same number of elements in both shapes."""
    ins, outs = (iter([d for d, n in enumerate(shape) if n > 1]) for shape in (before, after))
    for i in ins:
        a, b = [i], [next(outs)]
        m, n = before[i], after[b[0]]
        while m != n:
            if m < n:
                a.append(next(ins))
                m *= before[a[-1]]
            else:
                b.append(next(outs))
                n *= after[b[-1]]
        yield a, b


def reverse(x: Aval, *, dimensions: Sequence[int], **_: Any) -> Rule:
    """The parts of a reversed dimension change places."""
    turned = [d for d in dimensions if x.shape[d] > 1]
    stretches = {d: [Stretch(0, x.shape[d] - 1, 0, 0, x.shape[d], -1)] for d in turned}
    return _moved([x.shape], turned, stretches, [{}], ANY, lambda axis, x: lax.rev(x, [d for d in turned if d != axis]))


def slice_(
    x: Aval,
    *,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None = None,
    **_: Any,
) -> Rule:
    """Dimensions taken whole pass; of a few elements, those that have them tell the others."""
    picks = {
        d: (int(start), int(limit), int(step))
        for d, (start, limit, step, n) in enumerate(
            zip(start_indices, limit_indices, strides or (1,) * len(x.shape), x.shape, strict=True)
        )
        if (start, limit, step) != (0, n, 1)
    }
    kept = {d: max(0, -(-(limit - start) // step)) for d, (start, limit, step) in picks.items()}
    aligned = {d: kept[d] for d, (start, _, step) in picks.items() if start < step and kept[d] * step == x.shape[d]}
    stretches = {d: [Stretch(0, start, 0, 0, limit - start)] for d, (start, limit, step) in picks.items() if step == 1}

    def others(axis: int, x: Any) -> Any:
        picked = [
            (0, n, 1) if d == axis or d not in picks else (picks[d][0], n, picks[d][2]) if d in aligned else picks[d]
            for d, n in enumerate(x.shape)
        ]
        return lax.slice(x, *zip(*picked, strict=True))

    few = len(picks) == 1 and not aligned and all(_few(n, x.shape[d], d in stretches) for d, n in kept.items())
    if not few or is_key(x.dtype):
        return _moved([x.shape], picks, stretches, [kept], ANY, others, aligned)
    ((axis, (start, _limit, step)),) = picks.items()
    names = rows(x.shape)
    return build(
        [names],
        [[None if d == axis else f for d, f in enumerate(names)]],
        {names[axis]: "local"},
        ANY,
        local=pick(start, step, kept[axis], axis),
    )


def _few(some: int, all_: int, stretched: bool) -> bool:
    """Whether ``some`` of ``all_`` elements, or the parts they have in common, are few, or they lie in no stretch."""
    common = math.gcd(some, all_)
    return some > 0 < all_ and (common == 1 or not stretched or (common <= FEW and 8 * some <= all_))


def split(x: Aval, *, sizes: Sequence[int], axis: int, **_: Any) -> Rule:
    """The results stood side by side along ``axis``."""
    offsets = itertools.accumulate(sizes, initial=0)
    stretches = [Stretch(0, int(at), i, 0, int(n)) for i, (n, at) in enumerate(zip(sizes, offsets, strict=False))]
    return _moved([x.shape], [axis] * (len(sizes) > 1), {axis: stretches}, [{axis: int(n)} for n in sizes], ANY)


def _moved(
    operands: Sequence[Sequence[int]],
    dims: Iterable[int],
    stretches: Mapping[int, Sequence[Stretch]],
    results: Sequence[Mapping[int, int]],
    lets: str,
    others: Callable[..., Any] | None = None,
    aligned: Mapping[int, int] | None = None,
    scalars: int = 0,
    free: Collection[int] = (),
) -> Rule:
    """The rule of an operation that moves elements along ``dims`` only.

    Args:
      operands: their shapes, alike but for ``dims``.
      dims: where elements move.
      stretches: how, by dimension; one that lacks them, or whose sizes have nothing in common, is whole.
      results: sizes by dimension, of each result, where they differ from the first operand's.
      lets: what passes.
      others: ``others(axis, *operands)`` does to the first operand what happens to its dimensions beside ``axis``.
      aligned: dimensions whose parts stay what they are; by dimension, the number of elements that stay together.
      scalars: how many operands follow that have no dimension.
      free: dimensions of size 1 in the operand that are split at will in the result, unless another moves.
    """
    aligned = aligned or {}
    befores = {d: [shape[d] for shape in operands] for d in dims}
    afters = {d: [sizes.get(d, operands[0][d]) for sizes in results] for d in dims}
    common = {
        d: aligned[d]
        if d in aligned
        else math.gcd(*befores[d], *afters[d])
        if d in stretches and all((*befores[d], *afters[d]))
        else 1
        for d in dims
    }
    axis = max((d for d in common if d not in aligned and common[d] > 1), key=lambda d: operands[0][d], default=None)
    names, sizes, kinds = rows(operands[0]), dict[str, int](), dict[str, str]()

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
    local = rearrange(stretches[axis], befores[axis], afters[axis], axis, others) if axis is not None else None
    return build([*before, *([] for _ in range(scalars))], after, kinds, lets, sizes, local=local)


def squeeze(x: Aval, *, dimensions: Sequence[int], **_: Any) -> Rule:
    """Drops dimensions of size 1."""
    gone = {d % len(x.shape) for d in dimensions}
    labels: list[Label] = [None if d in gone else f for d, f in enumerate(rows(x.shape))]
    return build([labels], [[f for d, f in enumerate(labels) if d not in gone]], lets=ANY)


def stack(*xs: Aval, axis: int, **_: Any) -> Rule:
    """The new dimension is whole: each of its elements is another operand."""
    labels: list[Label] = list(rows(xs[0].shape))
    return build([labels] * len(xs), [[*labels[:axis], None, *labels[axis:]]], lets=together(0, len(xs)))


def tile(x: Aval, *, reps: Sequence[int], **_: Any) -> Rule:
    """The operand stands side by side with itself; of a dimension of size 1 the repeats are a free factor."""
    spread = {d: n * r for d, (n, r) in enumerate(zip(x.shape, reps, strict=True)) if n > 1 < r}
    stretches = {d: [Stretch(0, 0, 0, to, x.shape[d]) for to in range(0, n, x.shape[d])] for d, n in spread.items()}
    free = {d for d, (n, r) in enumerate(zip(x.shape, reps, strict=True)) if n == 1 < r}

    def others(axis: int, x: Any) -> Any:
        return lax.tile(x, [1 if d == axis else r for d, r in enumerate(reps)])

    return _moved([x.shape], spread, stretches, [spread], ANY, others, free=free)


def transpose(x: Aval, *, permutation: Sequence[int], **_: Any) -> Rule:
    """Dimensions change places."""
    labels = rows(x.shape)
    return build([labels], [[labels[d] for d in permutation]], lets=ANY)


def unstack(x: Aval, *, axis: int, **_: Any) -> Rule:
    """The dimension taken apart is whole."""
    labels: list[Label] = [None if d == axis else f for d, f in enumerate(rows(x.shape))]
    return build([labels], [[f for d, f in enumerate(labels) if d != axis]] * x.shape[axis], lets=ANY)


RULES: dict[str, RuleFn] = {
    "bitcast_convert_type": bitcast_convert_type,
    "broadcast_in_dim": broadcast_in_dim,
    "concatenate": concatenate,
    "empty": empty,
    "iota": iota,
    "pad": pad,
    "reshape": reshape,
    "rev": reverse,
    "slice": slice_,
    "split": split,
    "squeeze": squeeze,
    "stack": stack,
    "tile": tile,
    "transpose": transpose,
    "unstack": unstack,
}
TABLE = table(RULES)
