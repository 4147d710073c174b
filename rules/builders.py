"""The helpers that rule tables are written with.

A rule function labels dimensions with any words it likes; `build` turns labels into factors named
a, b, c, ... in the order in which they appear, so that equal rules print the same.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import xla_metadata as xla_metadata  # defines a primitive
from jax.extend.core import Primitive

from autoshard.ir.halo import Halo
from autoshard.ir.rule import Aval, Local, Rule, factor_names, parse
from autoshard.jaxpr import find_primitive, is_narrow_float

Label = str | tuple[str, ...] | None
"""Of one dimension: a factor, the factors that it is composed of (major first), or None where it has none."""
ANY_PARTIAL = "sum: 0, max: 0, min: 0, prod: 0, and: 0, or: 0"
"""The passthrough of an operation whose results are elements of its first operand, unchanged: all kinds of partial
values."""


def table[Row](rows: Mapping[str, Row]) -> dict[Primitive, Row]:
    """``rows`` keyed by primitive instead of by name, without those that this version of JAX does not have."""
    found = ((find_primitive(name), row) for name, row in rows.items())
    return {p: row for p, row in found if p is not None}


def build(
    operands: Iterable[Sequence[Label]],
    results: Iterable[Sequence[Label]],
    kinds: Mapping[str, str] | None = None,
    passthrough: str = "",
    sizes: Mapping[str, int] | None = None,
    reason: str = "",
    local: Local | None = None,
    halos: Sequence[Halo] = (),
) -> Rule:
    """The rule whose dimensions have these labels.

    Args:
      operands, results: the label of each dimension of each of them.
      kinds: kinds of factors that are not plainly parallel.
      passthrough: partial operands that give partial results, as in a rule's text after the bar.
      sizes: of the factors in compound dimensions, from which factors of size 1 are dropped.
      reason: why the operation is kept whole, where it is.
      local: the local form; needed with a factor of the kind ``local``.
      halos: what shards read of their neighbours, along factors of the kind ``halo``.
    """
    sizes = sizes or {}
    sides = [[tuple(_factors_of(label, sizes) for label in dims) for dims in side] for side in (operands, results)]
    flat = (f for side in sides for dims in side for dim in dims for f in dim)
    labels = list(dict.fromkeys(flat))
    name = dict(zip(labels, factor_names(len(labels)), strict=True))
    done = [tuple(tuple(tuple(name[f] for f in dim) for dim in dims) for dims in side) for side in sides]
    compound = {f for side in sides for dims in side for dim in dims if len(dim) > 1 for f in dim}
    return Rule(
        done[0],
        done[1],
        tuple(sorted((name[f], kind) for f, kind in (kinds or {}).items() if f in name)),
        parse_passthrough(passthrough),
        tuple(sorted((name[f], n) for f, n in sizes.items() if f in name and f in compound)),
        reason,
        tuple(halos),
        local,
    )


def _factors_of(label: Label, sizes: Mapping[str, int]) -> tuple[str, ...]:
    if label is None:
        return ()
    if isinstance(label, str):
        return (label,)
    kept = tuple(f for f in label if sizes[f] != 1)
    return kept or label[:1]


@functools.cache
def parse_passthrough(passthrough: str) -> tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]:
    """`Rule.partial_passthrough`, from a rule's text after the bar."""
    return parse(f"-> | {passthrough}").partial_passthrough


def per_shard(fun: Callable[..., Any] | None = None) -> Local:
    """The local form without collectives: each device runs ``fun``, or the operation itself, on its shards.

    It is for operations that XLA partitions wrongly or not at all.
    """
    return Local((lambda _, *operands: fun(*operands)) if fun else None, lambda *_: ())


def dim_labels(shape: Sequence[int], prefix: str = "") -> list[str]:
    """A label for each dimension, from its index: the same index is the same factor."""
    return [f"{prefix}{i}" for i in range(len(shape))]


def selection_passthrough(*operands: int) -> str:
    """The passthrough of an operation each of whose elements is one of these operands, by position.

    Sums and products pass through where all operands are partial; idempotent reductions also where only some are, since
    a value that is not partial, combined with itself, is itself.
    """
    joint = "+".join(map(str, operands))
    count = len(operands)
    sizes = range(1, count + 1) if count <= 3 else (1, count)
    some = " ".join("+".join(map(str, s)) for n in sizes for s in itertools.combinations(operands, n))
    return ", ".join([f"sum: {joint}", f"prod: {joint}", *(f"{k}: {some}" for k in ("max", "min", "and", "or"))])


def elementwise(avals: Sequence[Aval], results: int = 1, passthrough: str = "") -> Rule:
    """The rule of an elementwise operation, in which scalars and dimensions of size 1 are broadcast."""
    rank = max((len(a.shape) for a in avals), default=0)
    full = [max((a.shape[d] for a in avals if a.shape), default=1, key=_zero_is_largest) for d in range(rank)]
    labels = dim_labels(full)
    operands = [[x if n == m else None for x, n, m in zip(labels, a.shape, full, strict=False)] for a in avals]
    return build(operands, [labels] * results, passthrough=passthrough)


def _zero_is_largest(n: int) -> float:
    """Compares sizes as broadcasting does, where 1 becomes 0."""
    return math.inf if n == 0 else n


def is_float(dtype: Any) -> bool:
    """Real floating point, of any width."""
    return jax.dtypes.issubdtype(dtype, np.floating)


def is_key(dtype: Any) -> bool:
    """Whether values are of an extended dtype, such as PRNG keys: they have no zero for a shard to mask with."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def is_complex(dtype: Any) -> bool:
    return jax.dtypes.issubdtype(dtype, np.complexfloating)


def has_infinity(dtype: Any) -> bool:
    """Whether a floating-point dtype has infinities; a cast of too large a number to one without them is NaN, or its
    largest number."""
    return bool(np.isinf(np.asarray(np.inf).astype(dtype).astype(np.float64)))


def rounded_kinds(kinds: Mapping[str, str], dtype: Any) -> dict[str, str]:
    """``kinds`` of factors, of an operation whose results are rounded to ``dtype``: sums and products are whole, not
    partial, where it has few digits (`is_narrow_float`)."""
    rounds = is_narrow_float(dtype)
    return {f: "whole" if rounds and kind in ("sum", "prod") else kind for f, kind in kinds.items()}


def is_integer(dtype: Any) -> bool:
    """Integers of any width, signed or not; not booleans."""
    return jax.dtypes.issubdtype(dtype, np.integer)
