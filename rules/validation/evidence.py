"""evidence: an operation on numbers, whole and in parts, and whether what comes of both is the same.

A comparison counts only if the result varies: a constant agrees with anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autoshard import jaxpr as jx
from autoshard.ir.rule import Dims, Rule, RuleTable
from autoshard.rules import TABLE
from autoshard.rules.validation.known_gaps import NOT_LET, NOT_SPLIT
from autoshard.rules.validation.part import Part, compute
from autoshard.rules.validation.samples import Sample

COMBINE = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
POSITIONAL = ("empty", "iota_2x32_shape", "random_bits", "random_split")
"""What their free factors hold depends on the position in the whole, or on nothing."""
_KEYS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


@dataclass(frozen=True)
class Finding:
    """One disagreement. ``kind``: "wrong", "missing" or "no evidence"."""

    kind: str
    name: str
    rule: str
    text: str
    whole: str = ""
    """Why the rule keeps its operation whole, where it does."""
    passthrough: bool = False
    """Whether it is about partial operands, not about a split."""

    @property
    def reason(self) -> str:
        """Why the rule does not allow what is missing; "" if no reason is stated."""
        known = NOT_LET if self.passthrough else NOT_SPLIT
        return known.get(self.name, self.whole) if self.kind == "missing" else ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}: {self.rule}: {self.text}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True)
class Case:
    """A sample's equation with its rule, operands and results, all as numpy (keys as their words)."""

    eqn: jx.JaxprEqn
    rule: Rule
    sizes: dict[str, int]
    operands: tuple[np.ndarray, ...]
    results: tuple[np.ndarray, ...]

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    def ranks(self) -> list[int]:
        """Of the operands as the rule sees them: a key's words are no dimension."""
        return [len(jx.aval(a).shape) for a in self.eqn.invars]

    def run(self, operands: Sequence[np.ndarray], part: Part | None = None) -> list[np.ndarray]:
        """The operation on these operands, as the whole or as ``part`` of it."""
        xs = [device(x, jx.aval(a).dtype) for x, a in zip(operands, self.eqn.invars, strict=True)]
        params = self.eqn.params
        if part is not None:
            return [host(y) for y in compute(self.eqn.primitive, params, xs, part)]
        out = self.eqn.primitive.bind(*xs, **params)
        return [host(y) for y in (out if self.eqn.primitive.multiple_results else [out])]

    def finding(self, kind: str, text: str, *, passthrough: bool = False) -> Finding:
        return Finding(kind, self.name, str(self.rule), text, self.rule.reason, passthrough)


def load(sample: Sample, table: RuleTable = TABLE) -> Case | None:
    """Traces and runs a sample up to the equation it is for; None where this JAX has no such primitive."""
    if jx.find_primitive(sample.name) is None:
        return None
    jaxpr = jx.normalize(jax.make_jaxpr(sample.fn)(*sample.args))
    values: dict[Any, Any] = dict(zip(jaxpr.invars, sample.args, strict=True))
    values |= dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    found: Case | None = None
    for eqn in jaxpr.eqns:
        ins = [a.val if isinstance(a, jx.Literal) else values[a] for a in eqn.invars]
        out = eqn.primitive.bind(
            *(device(host(x), jx.aval(a).dtype) for x, a in zip(ins, eqn.invars, strict=True)), **eqn.params
        )
        outs = list(out) if eqn.primitive.multiple_results else [out]
        values |= dict(zip(eqn.outvars, outs, strict=True))
        if eqn.primitive.name == sample.name:
            rule = table[eqn.primitive](*(a.aval for a in eqn.invars), **eqn.params)
            sizes = rule.factor_sizes([jx.aval(a).shape for a in (*eqn.invars, *eqn.outvars)])
            found = Case(eqn, rule, sizes, tuple(map(host, ins)), tuple(map(host, outs)))
    if found is None:
        raise ValueError(f"the sample for {sample.name} does not contain it")
    return found


def factored(x: np.ndarray, dims: Dims, sizes: dict[str, int]) -> list[int]:
    """The shape of ``x`` with every compound dimension taken apart."""
    shape: list[int] = []
    for dim, n in zip(dims, x.shape, strict=False):
        shape += [sizes[f] for f in dim] if dim else [n]
    return shape + list(x.shape[len(dims) :])


def axis_of(dims: Dims, factor: str) -> int | None:
    flat = [f for dim in dims for f in (dim or (None,))]
    return flat.index(factor) if factor in flat else None


def local_shape(dims: Dims, shape: Sequence[int], factor: str, parts: int) -> tuple[int, ...]:
    return tuple(n // parts if factor in dim else n for dim, n in zip(dims, shape, strict=True))


def block(x: np.ndarray, dims: Dims, sizes: dict[str, int], factor: str, parts: int, k: int) -> np.ndarray:
    """Part ``k`` of ``x`` along a factor."""
    axis = axis_of(dims, factor)
    if axis is None:
        return x
    split = np.split(x.reshape(factored(x, dims, sizes)), parts, axis)[k]
    return split.reshape(*local_shape(dims, x.shape[: len(dims)], factor, parts), *x.shape[len(dims) :])


def join(blocks: Sequence[np.ndarray], dims: Dims, sizes: dict[str, int], factor: str, parts: int) -> np.ndarray:
    """The array of which these are the parts along a factor."""
    axis = axis_of(dims, factor)
    assert axis is not None
    local = {**sizes, factor: sizes[factor] // parts}
    joined = np.concatenate([b.reshape(factored(b, dims, local)) for b in blocks], axis)
    first = blocks[0].shape
    shape = [n * parts if factor in dim else n for dim, n in zip(dims, first, strict=False)]
    return joined.reshape(*shape, *first[len(dims) :])


def combine(kind: str, terms: Iterable[np.ndarray]) -> np.ndarray:
    first, *rest = terms
    for term in rest:
        first = np.asarray(COMBINE[kind](first, term), first.dtype)
    return first


def reducible(kind: str, dtype: Any) -> bool:
    """Whether values of this type are ever partial in this way."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return False
    if dtype == np.bool_:
        return kind in ("and", "or")
    if np.issubdtype(dtype, np.integer):
        return True
    return kind in ("sum", "prod") or (kind in ("max", "min") and np.issubdtype(dtype, np.floating))


def tolerance_of(case: Case) -> float:
    types = [x.dtype for x in (*case.operands, *case.results) if np.issubdtype(x.dtype, np.inexact)]
    return max((float(np.finfo(t).eps) for t in types), default=0.0) * 1e4


def same(got: Sequence[np.ndarray], expected: Sequence[np.ndarray], tolerance: float) -> bool:
    """Whether all are equal, up to rounding that grows with the largest element."""
    for a, b in zip(got, expected, strict=True):
        if a.shape != b.shape:
            return False
        if np.issubdtype(b.dtype, np.inexact):
            finite = np.abs(b[np.isfinite(b)])
            scale = float(finite.max()) if finite.size else 1.0
            if not np.allclose(a, b, rtol=tolerance, atol=tolerance * max(scale, 1e-30), equal_nan=True):
                return False
        elif not np.array_equal(a, b):
            return False
    return True


def varies(x: np.ndarray) -> bool:
    """Whether a result says anything: two different finite numbers, or a single one."""
    if x.dtype.kind in "fc":
        x = x[np.isfinite(x)]
    return x.size == 1 or (x.size > 1 and bool((x != x.flat[0]).any()))


def host(x: Any) -> np.ndarray:
    if hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return np.asarray(jax.random.key_data(x))
    return np.asarray(x)


def device(x: np.ndarray, dtype: Any) -> Any:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return jax.random.wrap_key_data(jax.numpy.asarray(x), impl=_KEYS[str(dtype)])
    return jax.numpy.asarray(x, dtype)
