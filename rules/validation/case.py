"""What the auditor compares: an operation on numbers, its operands sharded and its results combined with NumPy.

A comparison is evidence only if the result varies: a constant agrees with anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autoshard import jaxpr as jx
from autoshard.ir.rule import Dims, Rule, RuleTable
from autoshard.ir.traits import UNKNOWN, Traits
from autoshard.rules import TABLE
from autoshard.rules.traits import TRAITS
from autoshard.rules.validation.known_gaps import MISSING_PASSTHROUGH, MISSING_SPLITS
from autoshard.rules.validation.samples import Sample
from autoshard.rules.validation.shard import Shard, run_shard

COMBINE = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
_KEYS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


@dataclass(frozen=True)
class Finding:
    """One disagreement between a rule and its operation."""

    kind: str
    """"wrong", "missing" or "no evidence"."""
    name: str
    """The primitive."""
    rule: str
    text: str
    rule_reason: str = ""
    """Why the rule keeps the operation whole, where it does."""
    passthrough: bool = False
    """Whether it is about partial operands, not about sharding."""

    @property
    def reason(self) -> str:
        """Why the rule does not allow what is missing; "" where no reason is stated."""
        known = MISSING_PASSTHROUGH if self.passthrough else MISSING_SPLITS
        return known.get(self.name, self.rule_reason) if self.kind == "missing" else ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}: {self.rule}: {self.text}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True)
class Case:
    """A sample's equation with its rule, and operands and results as NumPy arrays (PRNG keys as their words)."""

    eqn: jx.JaxprEqn
    rule: Rule
    sizes: dict[str, int]
    """Of each factor."""
    operands: tuple[np.ndarray, ...]
    results: tuple[np.ndarray, ...]

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def traits(self) -> Traits:
        return TRAITS.get(self.eqn.primitive, UNKNOWN)

    def ranks(self) -> list[int]:
        """Of the operands as the rule sees them, in which the words of a key are no dimension."""
        return [len(jx.aval(a).shape) for a in self.eqn.invars]

    def run(self, operands: Sequence[np.ndarray], shard: Shard | None = None) -> list[np.ndarray]:
        """The results of the operation on these operands: whole ones, or those of one shard."""
        xs = [to_jax(x, jx.aval(a).dtype) for x, a in zip(operands, self.eqn.invars, strict=True)]
        params = self.eqn.params
        if shard is not None:
            return [to_numpy(y) for y in run_shard(self.eqn.primitive, params, xs, shard)]
        out = self.eqn.primitive.bind(*xs, **params)
        return [to_numpy(y) for y in (out if self.eqn.primitive.multiple_results else [out])]

    def finding(self, kind: str, text: str, *, passthrough: bool = False) -> Finding:
        return Finding(kind, self.name, str(self.rule), text, self.rule.reason, passthrough)


def load(sample: Sample, table: RuleTable = TABLE) -> Case | None:
    """Traces a sample and evaluates it up to the equation that it is for; None where this JAX has no such primitive.

    Raises:
      ValueError: the sample contains no such equation.
    """
    if jx.find_primitive(sample.name) is None:
        return None
    jaxpr = jx.normalize(jax.make_jaxpr(sample.fn)(*sample.args))
    values: dict[Any, Any] = dict(zip(jaxpr.invars, sample.args, strict=True))
    values |= dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    found: Case | None = None
    for eqn in jaxpr.eqns:
        ins = [a.val if isinstance(a, jx.Literal) else values[a] for a in eqn.invars]
        out = eqn.primitive.bind(
            *(to_jax(to_numpy(x), jx.aval(a).dtype) for x, a in zip(ins, eqn.invars, strict=True)), **eqn.params
        )
        outs = list(out) if eqn.primitive.multiple_results else [out]
        values |= dict(zip(eqn.outvars, outs, strict=True))
        if eqn.primitive.name == sample.name:
            rule = table[eqn.primitive](*(a.aval for a in eqn.invars), **eqn.params)
            sizes = rule.factor_sizes([jx.aval(a).shape for a in (*eqn.invars, *eqn.outvars)])
            found = Case(eqn, rule, sizes, tuple(map(to_numpy, ins)), tuple(map(to_numpy, outs)))
    if found is None:
        raise ValueError(f"the sample of {sample.name} has no equation of that primitive")
    return found


def factored_shape(x: np.ndarray, dims: Dims, sizes: dict[str, int]) -> list[int]:
    """The shape of ``x`` with one dimension for each factor."""
    shape: list[int] = []
    for dim, n in zip(dims, x.shape, strict=False):
        shape += [sizes[f] for f in dim] if dim else [n]
    return shape + list(x.shape[len(dims) :])


def axis_of(dims: Dims, factor: str) -> int | None:
    """The dimension of a factor in a `factored_shape`."""
    flat = [f for dim in dims for f in (dim or (None,))]
    return flat.index(factor) if factor in flat else None


def shard_shape(dims: Dims, shape: Sequence[int], factor: str, parts: int) -> tuple[int, ...]:
    """The shape of one of ``parts`` shards along a factor."""
    return tuple(n // parts if factor in dim else n for dim, n in zip(dims, shape, strict=True))


def shard_of(x: np.ndarray, dims: Dims, sizes: dict[str, int], factor: str, parts: int, k: int) -> np.ndarray:
    """Shard ``k`` of ``x`` along a factor."""
    axis = axis_of(dims, factor)
    if axis is None:
        return x
    split = np.split(x.reshape(factored_shape(x, dims, sizes)), parts, axis)[k]
    return split.reshape(*shard_shape(dims, x.shape[: len(dims)], factor, parts), *x.shape[len(dims) :])


def unshard(blocks: Sequence[np.ndarray], dims: Dims, sizes: dict[str, int], factor: str, parts: int) -> np.ndarray:
    """The array of which these are the shards along a factor."""
    axis = axis_of(dims, factor)
    assert axis is not None
    local = {**sizes, factor: sizes[factor] // parts}
    joined = np.concatenate([b.reshape(factored_shape(b, dims, local)) for b in blocks], axis)
    first = blocks[0].shape
    shape = [n * parts if factor in dim else n for dim, n in zip(dims, first, strict=False)]
    return joined.reshape(*shape, *first[len(dims) :])


def combine(kind: str, values: Iterable[np.ndarray]) -> np.ndarray:
    """What an all-reduce of this kind gives."""
    first, *rest = values
    for x in rest:
        first = np.asarray(COMBINE[kind](first, x), first.dtype)
    return first


def reducible(kind: str, dtype: Any) -> bool:
    """Whether values of this dtype can be partial of this kind."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return False
    if dtype == np.bool_:
        return kind in ("and", "or")
    if np.issubdtype(dtype, np.integer):
        return True
    return kind in ("sum", "prod") or (kind in ("max", "min") and np.issubdtype(dtype, np.floating))


def tolerance(case: Case) -> float:
    """The relative error that is rounding, for the dtypes of a case."""
    types = [x.dtype for x in (*case.operands, *case.results) if np.issubdtype(x.dtype, np.inexact)]
    return max((float(np.finfo(t).eps) for t in types), default=0.0) * 1e4


def all_close(got: Sequence[np.ndarray], expected: Sequence[np.ndarray], tolerance: float) -> bool:
    """Whether all arrays are equal, up to rounding relative to the largest element of each."""
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
    """Whether a result is evidence: it has two different finite numbers, or is a single one."""
    if x.dtype.kind in "fc":
        x = x[np.isfinite(x)]
    return x.size == 1 or (x.size > 1 and bool((x != x.flat[0]).any()))


def to_numpy(x: Any) -> np.ndarray:
    """An array, or the words of PRNG keys."""
    if hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return np.asarray(jax.random.key_data(x))
    return np.asarray(x)


def to_jax(x: np.ndarray, dtype: Any) -> Any:
    """The inverse of `to_numpy`."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return jax.random.wrap_key_data(jax.numpy.asarray(x), impl=_KEYS[str(dtype)])
    return jax.numpy.asarray(x, dtype)
