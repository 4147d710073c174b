"""Rules of operations that change an array's shape, or create an array. All kinds of partial values pass through."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from autoshard.ir.rule import Aval, Rule, RuleFn
from autoshard.jaxpr import dtype_bits
from autoshard.rules.builders import ANY_PARTIAL, Label, build, dim_labels, selection_passthrough, table


def bitcast_convert_type(x: Aval, *, new_dtype: Any, **_: Any) -> Rule:
    """Between dtypes of different widths the pieces of one element are the minor dimension, which is kept whole."""
    labels: list[Label] = list(dim_labels(x.shape))
    old, new = dtype_bits(x.dtype), dtype_bits(np.dtype(new_dtype))
    if old > new:
        return build([labels], [[*labels, None]])
    if old < new:
        return build([[*labels[:-1], None]], [labels[:-1]])
    return build([labels], [labels])


def broadcast_in_dim(
    x: Aval, *_dynamic: Aval, shape: Sequence[int], broadcast_dimensions: Sequence[int], **_: Any
) -> Rule:
    """Dimensions that the operand lacks, or has with size 1, are free factors of the result."""
    out: list[Label] = list(dim_labels(shape))
    operand = [out[to] if n == shape[to] else None for n, to in zip(x.shape, broadcast_dimensions, strict=True)]
    return build([operand, *([] for _ in _dynamic)], [out], passthrough=ANY_PARTIAL)


def empty(*, shape: Sequence[int], **_: Any) -> Rule:
    """Uninitialized memory: every dimension is a free factor."""
    return build([], [dim_labels(shape)])


def iota(*_dynamic: Aval, shape: Sequence[int], **_: Any) -> Rule:
    """Every dimension is a free factor: each shard counts from its own offset."""
    return build([[] for _ in _dynamic], [dim_labels(shape)])


def reshape(
    x: Aval, *_dynamic: Aval, new_sizes: Sequence[int], dimensions: Sequence[int] | None = None, **_: Any
) -> Rule:
    """Merged and split dimensions are compound, of factors as fine as the sizes have common divisors."""
    order = tuple(dimensions) if dimensions is not None else tuple(range(len(x.shape)))
    before, after, sizes, kinds = common_factors([x.shape[d] for d in order], new_sizes)
    operand: list[Label] = [None] * len(order)
    for d, label in zip(order, before, strict=True):
        operand[d] = label
    return build([operand, *([] for _ in _dynamic)], [after], kinds, ANY_PARTIAL, sizes)


def common_factors(
    before: Sequence[int], after: Sequence[int]
) -> tuple[list[Label], list[Label], dict[str, int], dict[str, str]]:
    """Labels of two shapes with equally many elements, and the sizes and kinds of their factors.

    From the major end, the greatest common divisor of two dimensions becomes a factor. Where it is 1, as in ``[2, 3] ->
    [3, 2]``, what is left is whole, up to the next point at which both shapes have the same number of elements.
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

    for ins, outs in _aligned_runs(before, after):
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


def _aligned_runs(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The shortest runs of dimensions, without those of size 1, with equally many elements in both shapes."""
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


def squeeze(x: Aval, *, dimensions: Sequence[int], **_: Any) -> Rule:
    """Dimensions of size 1 are removed."""
    gone = {d % len(x.shape) for d in dimensions}
    labels: list[Label] = [None if d in gone else f for d, f in enumerate(dim_labels(x.shape))]
    return build([labels], [[f for d, f in enumerate(labels) if d not in gone]], passthrough=ANY_PARTIAL)


def stack(*xs: Aval, axis: int, **_: Any) -> Rule:
    """The new dimension is whole: each of its elements is an operand."""
    labels: list[Label] = list(dim_labels(xs[0].shape))
    return build(
        [labels] * len(xs), [[*labels[:axis], None, *labels[axis:]]], passthrough=selection_passthrough(*range(len(xs)))
    )


def transpose(x: Aval, *, permutation: Sequence[int], **_: Any) -> Rule:
    """Dimensions are permuted."""
    labels = dim_labels(x.shape)
    return build([labels], [[labels[d] for d in permutation]], passthrough=ANY_PARTIAL)


def unstack(x: Aval, *, axis: int, **_: Any) -> Rule:
    """The dimension ``axis`` is whole: each of its elements is a result."""
    labels: list[Label] = [None if d == axis else f for d, f in enumerate(dim_labels(x.shape))]
    return build([labels], [[f for d, f in enumerate(labels) if d != axis]] * x.shape[axis], passthrough=ANY_PARTIAL)


RULES: dict[str, RuleFn] = {
    "bitcast_convert_type": bitcast_convert_type,
    "broadcast_in_dim": broadcast_in_dim,
    "empty": empty,
    "iota": iota,
    "reshape": reshape,
    "squeeze": squeeze,
    "stack": stack,
    "transpose": transpose,
    "unstack": unstack,
}
TABLE = table(RULES)
