"""The helpers that rule tables are written with.

A rule function labels dimensions with any words it likes; `build` turns labels into factors named
a, b, c, ... in the order in which they appear, so that equal rules print alike.
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
from autoshard.jaxpr import find_primitive

Label = str | tuple[str, ...] | None
"""Of one dimension: a factor, the factors it is made of (major first), or None where it must stay whole."""
ANY = "sum: 0, max: 0, min: 0, prod: 0, and: 0, or: 0"
"""What an operation lets through that only moves the elements of its first operand."""


def table[Row](rows: Mapping[str, Row]) -> dict[Primitive, Row]:
    """``rows`` keyed by primitive; names that this version of JAX does not have are left out."""
    found = ((find_primitive(name), row) for name, row in rows.items())
    return {p: row for p, row in found if p is not None}


def build(
    operands: Iterable[Sequence[Label]],
    results: Iterable[Sequence[Label]],
    kinds: Mapping[str, str] | None = None,
    lets: str = "",
    sizes: Mapping[str, int] | None = None,
    reason: str = "",
    local: Local | None = None,
    halos: Sequence[Halo] = (),
) -> Rule:
    """The rule whose dimensions carry these labels. ``sizes`` is needed for factors of compound dimensions, ``local``
    where one is of that kind.

    Factors of size 1 that ``sizes`` names are dropped from compound dimensions.
    """
    sizes = sizes or {}
    sides = [[tuple(_factors(label, sizes) for label in dims) for dims in side] for side in (operands, results)]
    flat = (f for side in sides for dims in side for dim in dims for f in dim)
    labels = list(dict.fromkeys(flat))
    name = dict(zip(labels, factor_names(len(labels)), strict=True))
    done = [tuple(tuple(tuple(name[f] for f in dim) for dim in dims) for dims in side) for side in sides]
    compound = {f for side in sides for dims in side for dim in dims if len(dim) > 1 for f in dim}
    return Rule(
        done[0],
        done[1],
        tuple(sorted((name[f], kind) for f, kind in (kinds or {}).items() if f in name)),
        partials(lets),
        tuple(sorted((name[f], n) for f, n in sizes.items() if f in name and f in compound)),
        reason,
        tuple(halos),
        local,
    )


def _factors(label: Label, sizes: Mapping[str, int]) -> tuple[str, ...]:
    if label is None:
        return ()
    if isinstance(label, str):
        return (label,)
    kept = tuple(f for f in label if sizes[f] != 1)
    return kept or label[:1]


@functools.cache
def partials(lets: str) -> tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]:
    """Reads the part of a rule's text after the bar."""
    return parse(f"-> | {lets}").partial_passthrough


def alone(fun: Callable[..., Any] | None = None) -> Local:
    """Each device runs ``fun``, or the operation itself, on its parts: for what XLA would partition wrongly."""
    return Local((lambda _, *operands: fun(*operands)) if fun else None, lambda *_: ())


def rows(shape: Sequence[int], prefix: str = "") -> list[str]:
    """A label for every dimension, from its position: equal positions are equal factors."""
    return [f"{prefix}{i}" for i in range(len(shape))]


def together(first: int, count: int) -> str:
    """Lets of an operation that takes each element from one of ``count`` operands from ``first`` on.

    A sum or product passes when all are partial; of the idempotent reductions also when some are: a whole
    operand combined with itself is itself.
    """
    operands = range(first, first + count)
    joint = "+".join(map(str, operands))
    sizes = range(1, count + 1) if count <= 3 else (1, count)
    some = " ".join("+".join(map(str, s)) for n in sizes for s in itertools.combinations(operands, n))
    return ", ".join([f"sum: {joint}", f"prod: {joint}", *(f"{k}: {some}" for k in ("max", "min", "and", "or"))])


def elementwise(avals: Sequence[Aval], results: int = 1, lets: str = "") -> Rule:
    """Every dimension passes; scalars and dimensions of size 1 stretch over the others."""
    rank = max((len(a.shape) for a in avals), default=0)
    full = [max((a.shape[d] for a in avals if a.shape), default=1, key=_stretched) for d in range(rank)]
    labels = rows(full)
    operands = [[x if n == m else None for x, n, m in zip(labels, a.shape, full, strict=False)] for a in avals]
    return build(operands, [labels] * results, lets=lets)


def _stretched(n: int) -> float:
    return math.inf if n == 0 else n


def is_float(dtype: Any) -> bool:
    """Real floating point, of any width."""
    return jax.dtypes.issubdtype(dtype, np.floating)


def is_key(dtype: Any) -> bool:
    """Whether values of this type have no zero that a masked part could hold."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def is_complex(dtype: Any) -> bool:
    return jax.dtypes.issubdtype(dtype, np.complexfloating)


def is_integer(dtype: Any) -> bool:
    """Integers of any width, signed or not; not booleans."""
    return jax.dtypes.issubdtype(dtype, np.integer)
