"""Small programs, one or more for each primitive, on which the auditor proves the rules.

Inputs do not flatter: no zeros, both signs, dimensions of different sizes with the divisors 2 and 3, integers
in a narrow range so that comparisons come out both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.xla_metadata import set_xla_metadata
from jax.lax import linalg
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from autoshard.jaxpr import find_primitive


@dataclass(frozen=True)
class Sample:
    """``fn(*args)`` contains an equation of the primitive called ``name``."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]


class Draw:
    """Arrays that do not flatter, the same in every run."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def real(self, *shape: int, dtype: Any = np.float64) -> np.ndarray:
        """Both signs, magnitudes between 0.1 and 2."""
        sign = self.rng.choice([-1.0, 1.0], shape)
        return np.asarray(sign * self.rng.uniform(0.1, 2, shape), dtype)

    def positive(self, *shape: int) -> np.ndarray:
        """Between 1.1 and 3."""
        return np.asarray(self.rng.uniform(1.1, 3, shape))

    def unit(self, *shape: int) -> np.ndarray:
        """Both signs, magnitudes between 0.1 and 0.9."""
        return self.real(*shape) * 0.45

    def imaginary(self, *shape: int) -> np.ndarray:
        """Complex."""
        return self.real(*shape) + 1j * self.real(*shape)

    def integer(self, *shape: int, low: int = -4, high: int = 5, dtype: Any = np.int32) -> np.ndarray:
        """In ``low <= x < high``, without zeros unless the range has nothing else."""
        x = self.rng.integers(low, high, shape)
        return np.asarray(np.where(x == 0, high - 1, x), dtype)

    def index(self, high: int, *shape: int) -> np.ndarray:
        """In ``0 <= x < high``, with repeats."""
        return np.asarray(self.rng.integers(0, high, shape), np.int32)

    def bits(self, *shape: int) -> np.ndarray:
        """Unsigned 32-bit."""
        return np.asarray(self.rng.integers(1, 2**32, shape), np.uint32)

    def flag(self, *shape: int) -> np.ndarray:
        """Boolean."""
        return self.rng.integers(0, 2, shape) == 1

    def definite(self, *batch: int, n: int) -> np.ndarray:
        """Symmetric positive definite matrices."""
        a = self.real(*batch, n, n)
        return a @ np.swapaxes(a, -1, -2) + n * np.eye(n)


def bind(name: str, **params: Any) -> Callable[..., Any]:
    """A function that is this one primitive."""

    def fn(*args: Any) -> Any:
        p = find_primitive(name)
        if p is None:
            raise LookupError(name)
        return p.bind(*args, **params)

    return fn


UNARY = {
    "real": "acos asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 "
    "expm1 floor integer_pow lgamma log log1p log2 logistic neg one_minus_square reduce_precision round rsqrt "
    "sign sin sinh sqrt square tan tanh abs copy name reshard stop_gradient",
    "integer": "population_count clz not",
}
BINARY = {
    "real": "add add_any atan2 div max min mul nextafter pow rem sub",
    "integer": "add add_any and eq eq_to ge gt le le_to lt lt_to max min mul mulhi ne or rem sub xor shift_left "
    "shift_right_arithmetic shift_right_logical div",
    "positive": "igamma igamma_grad_a igammac zeta",
}


def samples() -> tuple[Sample, ...]:
    """All of them."""
    return tuple(
        s
        for family in (_pointwise, _shape, _reduce, _window, _contract, _index, _random, _sort, _linalg)
        for s in family(Draw())
    )


def _pointwise(d: Draw) -> Iterator[Sample]:
    for kind, ops in UNARY.items():
        for op in ops.split():
            yield Sample(op, _public(op), (getattr(d, kind)(4, 6) * (0.45 if op in UNIT else 1),))
    for kind, ops in BINARY.items():
        for op in ops.split():
            second = d.integer(4, 6, low=1, high=4) if op.startswith("shift") else getattr(d, kind)(4, 6)
            yield Sample(op, _public(op), (getattr(d, kind)(4, 6), second))
    yield Sample("polygamma", lax.polygamma, (np.floor(d.positive(4, 6)), d.positive(4, 6)))
    yield Sample("acosh", lax.acosh, (d.positive(4, 6),))
    yield Sample("mul", lax.mul, (d.real(), d.real(4, 6)))
    yield Sample("mul", lax.mul, (d.imaginary(4, 6), d.imaginary(4, 6)))
    yield Sample("integer_pow", partial(lax.integer_pow, y=3), (d.real(4, 6),))
    yield Sample("integer_pow", partial(lax.integer_pow, y=-2), (d.real(4, 6),))
    yield Sample("integer_pow", partial(lax.integer_pow, y=2), (d.integer(4, 6),))
    yield Sample("square", lax.square, (d.integer(4, 6),))
    yield Sample("sign", lax.sign, (d.integer(4, 6),))
    yield Sample("abs", lax.abs, (d.integer(4, 6),))
    yield Sample("neg", lax.neg, (d.integer(4, 6),))
    yield Sample("is_finite", lax.is_finite, (np.where(d.flag(4, 6), d.real(4, 6), np.inf),))
    yield Sample("complex", lax.complex, (d.real(4, 6), d.real(4, 6)))
    for op in (lax.real, lax.imag, lax.conj):
        yield Sample(op.__name__, op, (d.imaginary(4, 6),))
    yield Sample("clamp", lax.clamp, (d.real(4, 6) - 0.5, d.real(4, 6), d.real(4, 6) + 0.5))
    yield Sample("clamp", lax.clamp, (np.float64(-0.5), d.real(4, 6), np.float64(0.7)))
    yield Sample("select_n", lax.select_n, (d.flag(4, 6), d.real(4, 6), d.real(4, 6)))
    yield Sample("select_n", lax.select_n, (np.bool_(True), d.integer(4, 6), d.integer(4, 6)))
    yield Sample("polynomial", bind("polynomial"), (d.real(4, 6), d.real(4, 6), d.real(), d.real(4, 6)))
    yield Sample("regularized_incomplete_beta", lax.betainc, (d.positive(4, 6), d.positive(4, 6), abs(d.unit(4, 6))))
    yield Sample("layout_constraint", lambda x: with_layout_constraint(x, Layout((1, 0))), (d.real(4, 6),))
    yield Sample("xla_metadata_value", partial(set_xla_metadata, label="x"), (d.real(4, 6),))
    yield Sample("tie", bind("tie"), (d.real(4, 3), d.real(6, 2)))
    yield Sample("reshard", bind("reshard", dst_sharding=ELSEWHERE, concrete_mesh=None), (d.real(4, 6),))
    yield Sample("optimization_barrier", lambda *x: lax.optimization_barrier(x), (d.real(4, 6), d.real(2)))
    yield Sample("device_put", _put, (d.real(4, 6), d.real(2)))
    yield Sample("dce_sink", lambda x: (lax.dce_sink(x), x)[1], (d.real(4, 6),))
    for old, new in CONVERSIONS:
        x = (
            d.flag(4, 6)
            if "bool" in (old, new)
            else d.integer(4, 6, low=1 if old[0] == "u" else -4)
            if "int" in old
            else d.imaginary(4, 6)
            if old[0] == "c"
            else d.real(4, 6)
        )
        yield Sample("convert_element_type", partial(lax.convert_element_type, new_dtype=new), (x.astype(old),))


def _put(*xs: Any) -> Any:
    return jax.device_put(xs)


NOWHERE = NamedSharding(AbstractMesh((), ()), PartitionSpec(None, None))
ELSEWHERE = NamedSharding(AbstractMesh((1,), ("one",), axis_types=(AxisType.Explicit,)), PartitionSpec("one", None))
UNIT = ("acos", "asin", "atanh", "erf_inv")
CONVERSIONS = (
    ("float32", "float64"),
    ("float64", "float32"),
    ("float64", "int32"),
    ("int32", "float64"),
    ("int8", "int32"),
    ("int32", "int8"),
    ("int32", "uint32"),
    ("uint8", "int32"),
    ("bool", "int32"),
    ("bool", "float64"),
    ("int32", "bool"),
    ("float64", "complex128"),
    ("complex64", "complex128"),
)


def _public(op: str) -> Callable[..., Any]:
    """The function of `jax.lax` with a primitive's name, or the primitive itself."""
    special: dict[str, Callable[..., Any]] = {
        "abs": lax.abs,
        "integer_pow": partial(lax.integer_pow, y=-1),
        "name": partial(checkpoint_name, name="x"),
        "not": lax.bitwise_not,
        "and": lax.bitwise_and,
        "or": lax.bitwise_or,
        "xor": lax.bitwise_xor,
        "reduce_precision": partial(lax.reduce_precision, exponent_bits=5, mantissa_bits=4),
        "reshard": bind("reshard", dst_sharding=NOWHERE, concrete_mesh=None),
        "round": lax.round,
    }
    bare = (
        "add_any",
        "copy",
        "eq_to",
        "igamma_grad_a",
        "le_to",
        "lt_to",
        "mulhi",
        "stop_gradient",
        "one_minus_square",
        "name",
    )
    if op in special:
        return special[op]
    return bind(op) if op in bare or not hasattr(lax, op) else getattr(lax, op)


def _shape(d: Draw) -> Iterator[Sample]:
    x = d.real(4, 6)
    yield Sample("bitcast_convert_type", partial(lax.bitcast_convert_type, new_dtype=np.int64), (x,))
    yield Sample("bitcast_convert_type", partial(lax.bitcast_convert_type, new_dtype=np.int32), (x,))
    yield Sample("bitcast_convert_type", partial(lax.bitcast_convert_type, new_dtype=np.int64), (d.integer(4, 6, 2),))
    yield Sample(
        "broadcast_in_dim", partial(lax.broadcast_in_dim, shape=(4, 6, 2), broadcast_dimensions=(0, 2)), (d.real(4, 1),)
    )
    yield Sample("concatenate", lambda *xs: lax.concatenate(xs, 1), (x, d.real(4, 2)))
    yield Sample("concatenate", lambda *xs: lax.concatenate(xs, 1), (x, d.real(4, 12), d.real(4, 6)))
    yield Sample("empty", lambda: lax.empty((4, 6), np.float64), ())
    yield Sample("iota", lambda: lax.broadcasted_iota(np.int32, (4, 6), 1), ())
    yield Sample("pad", lambda x, v: lax.pad(x, v, ((0, 0, 0), (2, 1, 1))), (x, d.real()))
    for edges in (((0, 0, 0), (3, 3, 0)), ((1, 1, 0), (-2, 8, 0)), ((-2, 0, 0), (0, 1, 1)), ((0, 0, 0), (-1, 1, 0))):
        yield Sample("pad", partial(lax.pad, padding_config=edges), (x, d.real()))
    for before, after in RESHAPES:
        yield Sample("reshape", partial(lax.reshape, new_sizes=after), (d.real(*before),))
    yield Sample("rev", partial(lax.rev, dimensions=(1,)), (x,))
    yield Sample("rev", partial(lax.rev, dimensions=(0, 2)), (d.real(4, 3, 6),))
    yield Sample("slice", lambda x: lax.slice(x, (0, 1), (4, 5), (1, 2)), (x,))
    for start, limit, step in (((0, 3), (4, 6), (1, 1)), ((1, 0), (3, 4), (1, 1)), ((1, 1), (4, 6), (1, 2))):
        yield Sample("slice", partial(lax.slice, start_indices=start, limit_indices=limit, strides=step), (x,))
    yield Sample("split", lambda x: lax.split(x, (2, 4), 1), (x,))
    yield Sample("split", lambda x: lax.split(x, (6, 3, 3), 1), (d.real(4, 12),))
    yield Sample("squeeze", lambda x: lax.squeeze(x, (1,)), (d.real(4, 1, 6),))
    yield Sample("stack", lambda *xs: lax.stack(xs, 1), (x, d.real(4, 6)))
    yield Sample("tile", lambda x: lax.tile(x, (3, 1, 2)), (d.real(4, 6, 1),))
    yield Sample("tile", lambda x: lax.tile(x, (1, 2)), (d.real(4, 1),))
    yield Sample("transpose", lambda x: lax.transpose(x, (2, 0, 1)), (d.real(4, 6, 3),))
    yield Sample("unstack", lambda x: lax.unstack(x, 1), (x,))


RESHAPES = (
    ((4, 6), (24,)),
    ((24,), (4, 6)),
    ((4, 6), (2, 12)),
    ((4, 6), (8, 3)),
    ((6, 4), (4, 6)),
    ((2, 3, 4), (3, 2, 4)),
    ((4, 1, 6), (4, 6, 1)),
    ((4, 6, 2), (4, 12)),
    ((12, 2), (2, 3, 4)),
)


def _reduce(d: Draw) -> Iterator[Sample]:
    x = d.real(4, 6, 3)
    n = d.integer(4, 6, 3, low=1, high=100)
    for op in ("reduce_sum", "reduce_prod", "reduce_max", "reduce_min"):
        yield Sample(op, partial(getattr(lax, op), axes=(0, 2)), (x,))
    yield Sample("reduce_sum", partial(lax.reduce_sum, axes=(1,)), (n,))
    dense = d.bits(4, 6, 3) | d.bits(4, 6, 3) | d.bits(4, 6, 3)
    often = d.rng.uniform(size=(24, 4)) < 0.8
    for op, words, flags in (("reduce_and", dense, often), ("reduce_or", ~dense, ~often), ("reduce_xor", dense, often)):
        yield Sample(op, partial(getattr(lax, op), axes=(1,)), (words,))
        yield Sample(op, partial(getattr(lax, op), axes=(1,)), (flags,))
    for op in (lax.argmax, lax.argmin):
        for y in (x, -np.abs(x), np.floor(x), n, n.astype(np.uint8) % 7, n > 30):
            yield Sample(op.__name__, partial(op, axis=1, index_dtype=np.int32), (y,))
    for op in (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp):
        yield Sample(op.__name__, partial(op, axis=1), (x,))
        yield Sample(op.__name__, partial(op, axis=1, reverse=True), (x,))
    yield Sample(
        "reduce",
        lambda x, y: lax.reduce((x, y), (np.float64(1), np.float64(2)), _pair, (1,)),
        (d.real(4, 6), d.real(4, 6)),
    )


def _pair(a: Sequence[Any], b: Sequence[Any]) -> tuple[Any, Any]:
    return a[0] * b[0], a[1] + b[1] * b[0]


def _window(d: Draw) -> Iterator[Sample]:
    x = d.real(4, 12, 3)
    geometry = (
        ((1, 2, 1), (1, 2, 1), "VALID"),
        ((1, 3, 1), (1, 1, 1), "SAME"),
        ((1, 3, 1), (1, 2, 1), "SAME"),
        ((1, 3, 1), (1, 1, 1), "VALID"),
        ((2, 2, 1), (2, 2, 1), "VALID"),
        ((1, 12, 1), (1, 1, 1), "VALID"),
    )
    for window, strides, padding in geometry:
        for op, init, reducer in (("sum", 0.0, lax.add), ("max", -np.inf, lax.max), ("min", np.inf, lax.min)):
            yield Sample(
                f"reduce_window_{op}",
                lambda x, r=reducer, i=init, w=window, s=strides, p=padding: lax.reduce_window(
                    x, np.float64(i), r, w, s, p
                ),
                (x,),
            )
    yield Sample(
        "reduce_window", lambda x: lax.reduce_window(x, np.float64(1), lax.mul, (1, 2, 1), (1, 2, 1), "VALID"), (x,)
    )
    for window, strides in (((1, 2, 1), (1, 2, 1)), ((1, 3, 1), (1, 2, 1))):

        def pool(x: Any, w: Any = window, s: Any = strides) -> Any:
            return lax.reduce_window(x, np.float64(-np.inf), lax.max, w, s, "VALID")

        yield Sample("select_and_scatter_add", lambda x, f=pool: jax.grad(lambda y: (f(y) ** 2).sum())(x), (x,))
        yield Sample("select_and_gather_add", lambda x, t, f=pool: jax.jvp(f, (x,), (t,))[1], (x, d.real(4, 12, 3)))
    yield Sample("select_and_scatter", _scatter_windows, (x, d.real(4, 6, 3)))


def _scatter_windows(x: Any, source: Any) -> Any:
    scalar = jax.ShapeDtypeStruct((), np.float64)
    jaxprs = [jax.make_jaxpr(f)(scalar, scalar) for f in (lax.ge, lax.mul)]
    return bind(
        "select_and_scatter",
        select_jaxpr=jaxprs[0],
        select_consts=(),
        scatter_jaxpr=jaxprs[1],
        scatter_consts=(),
        window_dimensions=(1, 2, 1),
        window_strides=(1, 2, 1),
        padding=((0, 0),) * 3,
    )(x, source, np.float64(1.5))


def _contract(d: Draw) -> Iterator[Sample]:
    numbers = (((2,), (1,)), ((0,), (0,)))
    yield Sample("dot_general", partial(lax.dot_general, dimension_numbers=numbers), (d.real(2, 4, 6), d.real(2, 6, 3)))
    yield Sample(
        "dot_general",
        partial(lax.dot_general, dimension_numbers=(((0, 1), (1, 0)), ((), ()))),
        (d.real(2, 4, 6), d.real(4, 2, 3)),
    )
    whole = partial(lax.dot_general, dimension_numbers=(((1,), (0,)), ((), ())))
    yield Sample("dot_general", whole, (d.integer(4, 6), d.integer(6, 2)))
    yield Sample(
        "dot_general",
        partial(whole, preferred_element_type=np.int32),
        (d.integer(4, 6, low=-99, high=100, dtype=np.int8), d.integer(6, 2, low=-99, high=100, dtype=np.int8)),
    )
    ragged = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
    sizes = np.asarray([1, 3, 2], np.int32)
    yield Sample(
        "ragged_dot_general",
        partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=ragged),
        (d.real(6, 4), d.real(3, 4, 2), sizes),
    )
    ragged = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    yield Sample(
        "ragged_dot_general",
        partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=ragged),
        (d.real(6, 4), d.real(6, 2), sizes),
    )
    double = np.dtype(np.float64)
    yield Sample(
        "scaled_dot",
        bind("scaled_dot", dimension_numbers=numbers, preferred_element_type=double),
        (d.real(2, 4, 8), d.real(2, 8, 3), d.real(2, 4, 4), d.real(2, 3, 4).swapaxes(1, 2)),
    )
    for lhs, rhs, options in CONVOLUTIONS:
        yield Sample("conv_general_dilated", partial(lax.conv_general_dilated, **options), (d.real(*lhs), d.real(*rhs)))


_NHWC = ("NHC", "HIO", "NHC")
CONVOLUTIONS: tuple[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ((4, 12, 6), (3, 6, 2), {"window_strides": (1,), "padding": "SAME", "dimension_numbers": _NHWC}),
    ((4, 12, 6), (3, 6, 2), {"window_strides": (2,), "padding": "SAME", "dimension_numbers": _NHWC}),
    ((4, 12, 6), (2, 6, 2), {"window_strides": (2,), "padding": "VALID", "dimension_numbers": _NHWC}),
    ((4, 12, 6), (1, 6, 2), {"window_strides": (1,), "padding": "VALID", "dimension_numbers": _NHWC}),
    (
        (4, 12, 6),
        (3, 6, 2),
        {"window_strides": (1,), "padding": ((1, 2),), "lhs_dilation": (2,), "dimension_numbers": _NHWC},
    ),
    (
        (4, 12, 6),
        (3, 6, 2),
        {"window_strides": (1,), "padding": ((2, 2),), "rhs_dilation": (2,), "dimension_numbers": _NHWC},
    ),
    (
        (4, 12, 6),
        (3, 1, 12),
        {"window_strides": (1,), "padding": "SAME", "feature_group_count": 6, "dimension_numbers": _NHWC},
    ),
    (
        (4, 12, 6),
        (3, 3, 4),
        {"window_strides": (1,), "padding": "SAME", "feature_group_count": 2, "dimension_numbers": _NHWC},
    ),
    (
        (4, 12, 6),
        (3, 6, 8),
        {"window_strides": (1,), "padding": "SAME", "batch_group_count": 2, "dimension_numbers": _NHWC},
    ),
    ((4, 6, 12), (2, 6, 12), {"window_strides": (1,), "padding": "VALID"}),
    ((4, 12, 6), (12, 6, 2), {"window_strides": (1,), "padding": ((1, 1),), "dimension_numbers": _NHWC}),
    (
        (4, 12, 6),
        (6, 6, 2),
        {"window_strides": (1,), "padding": ((0, 1),), "rhs_dilation": (2,), "dimension_numbers": _NHWC},
    ),
    ((4, 12, 6), (12, 6, 2), {"window_strides": (2,), "padding": ((3, 2),), "dimension_numbers": _NHWC}),
    (
        (4, 6, 6),
        (12, 6, 2),
        {"window_strides": (1,), "padding": ((1, 2),), "lhs_dilation": (2,), "dimension_numbers": _NHWC},
    ),
    (
        (4, 12, 6),
        (12, 6, 4),
        {"window_strides": (1,), "padding": ((2, 2),), "batch_group_count": 2, "dimension_numbers": _NHWC},
    ),
    (
        (4, 12, 6),
        (4, 3, 4),
        {
            "window_strides": (1,),
            "padding": ((-1, 2),),
            "rhs_dilation": (3,),
            "feature_group_count": 2,
            "dimension_numbers": _NHWC,
        },
    ),
    ((2, 3, 12, 6), (4, 3, 12, 6), {"window_strides": (1, 2), "padding": ((2, 1), (2, 2))}),
)


def _index(d: Draw) -> Iterator[Sample]:
    table = d.real(6, 4)
    take = lax.GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,))
    for mode in ("clip", "fill"):
        yield Sample(
            "gather",
            partial(lax.gather, dimension_numbers=take, slice_sizes=(1, 4), mode=mode),
            (table, d.index(8, 2, 3, 1) - 1),
        )
    yield Sample(
        "gather",
        partial(lax.gather, dimension_numbers=take, slice_sizes=(1, 4), mode="fill"),
        (d.integer(6, 4), d.index(8, 2, 3, 1) - 1),
    )
    yield Sample(
        "gather",
        partial(lax.gather, dimension_numbers=take, slice_sizes=(1, 4), mode="clip"),
        (d.flag(6, 4), d.index(6, 2, 3, 1)),
    )
    both = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0, 1), start_index_map=(1, 0))
    yield Sample(
        "gather",
        partial(lax.gather, dimension_numbers=both, slice_sizes=(1, 1), mode="clip"),
        (table, d.index(4, 3, 2)),
    )
    part = lax.GatherDimensionNumbers(offset_dims=(0, 2), collapsed_slice_dims=(), start_index_map=(0,))
    yield Sample(
        "gather",
        partial(lax.gather, dimension_numbers=part, slice_sizes=(2, 4), mode="clip"),
        (table, d.index(6, 3, 1)),
    )
    along = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(1,),
        start_index_map=(1,),
        operand_batching_dims=(0,),
        start_indices_batching_dims=(0,),
    )
    yield Sample(
        "gather",
        partial(lax.gather, dimension_numbers=along, slice_sizes=(1, 1), mode="clip"),
        (table, d.index(4, 6, 2, 1)),
    )
    rows = lax.ScatterDimensionNumbers(
        update_window_dims=(2,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    cells = lax.ScatterDimensionNumbers(
        update_window_dims=(), inserted_window_dims=(0, 1), scatter_dims_to_operand_dims=(0, 1)
    )
    piece = lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,)
    )
    lined = lax.ScatterDimensionNumbers(
        update_window_dims=(),
        inserted_window_dims=(1,),
        scatter_dims_to_operand_dims=(1,),
        operand_batching_dims=(0,),
        scatter_indices_batching_dims=(0,),
    )
    cases = (
        (rows, d.index(8, 2, 3, 1) - 1, d.real(2, 3, 4)),
        (cells, d.index(4, 8, 2), d.real(8)),
        (piece, d.index(4, 6, 1), d.real(6, 2, 4)),
        (lined, d.index(4, 6, 2, 1), d.real(6, 2)),
    )
    ops = (lax.scatter_add, lax.scatter_sub, lax.scatter_mul, lax.scatter_min, lax.scatter_max, lax.scatter)
    for fn in ops:
        name = fn.__name__.replace("_", "-")
        for numbers, indices, updates in cases:
            yield Sample(name, partial(fn, dimension_numbers=numbers), (table, indices, updates))
    lines = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    yield Sample(
        "scatter",
        lambda x, i: lax.scatter_apply(x, i, jnp.sin, lines, update_shape=(3, 4)),
        (table, np.asarray([[1], [4], [5]], np.int32)),
    )
    yield Sample("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, np.int32(0)), (3, 4)), (table, np.int32(2)))
    yield Sample(
        "dynamic_update_slice",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, np.int32(0))),
        (table, d.real(1, 4), np.int32(4)),
    )
    yield Sample(
        "dynamic_update_slice",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, np.int32(0))),
        (table, d.real(3, 4), np.int32(2)),
    )


def _random(d: Draw) -> Iterator[Sample]:
    keys = jax.random.split(jax.random.key(3), (4, 6))
    yield Sample("random_bits", bind("random_bits", bit_width=32, shape=(2, 3)), (keys,))
    yield Sample("random_bits", lambda k: jax.random.bits(k, (2, 3)), (jax.random.key(1, impl="rbg"),))
    yield Sample("random_split", bind("random_split", shape=(2,)), (keys,))
    yield Sample("random_clone", jax.random.clone, (keys,))
    yield Sample("random_fold_in", bind("random_fold_in"), (keys, d.bits(4, 6)))
    yield Sample("random_gamma", bind("random_gamma", log_space=True), (keys[:2, 0], d.positive(2, 3)))
    yield Sample("random_seed", jax.vmap(jax.vmap(jax.random.key)), (d.integer(4, 6),))
    yield Sample("random_unwrap", bind("random_unwrap"), (keys,))
    yield Sample("random_wrap", jax.random.wrap_key_data, (d.bits(4, 6, 2),))
    yield Sample("threefry2x32", bind("threefry2x32"), tuple(d.bits(4, 6) for _ in range(4)))
    yield Sample("threefry4x32", bind("threefry4x32"), tuple(d.bits(4, 6) for _ in range(8)))
    yield Sample("philox2x32", bind("philox2x32"), tuple(d.bits(4, 6) for _ in range(3)))
    yield Sample("philox4x32", bind("philox4x32"), tuple(d.bits(4, 6) for _ in range(6)))
    yield Sample("iota_2x32_shape", bind("iota_2x32_shape", shape=(4, 6)), ())
    yield Sample("rng_bit_generator", lambda k: lax.rng_bit_generator(k, (4, 6)), (d.bits(2).astype(np.uint64),))
    yield Sample("rng_uniform", lambda a, b: lax.rng_uniform(a, b, (4, 6)), (np.float64(0), np.float64(1)))


def _sort(d: Draw) -> Iterator[Sample]:
    x = d.real(4, 6, 2)
    yield Sample("sort", lambda a, b: lax.sort((a, b), dimension=1), (x, d.real(4, 6, 2)))
    yield Sample("sort", lambda x: lax.sort(x, dimension=0), (d.integer(90, 2, high=30),))
    yield Sample("sort", lambda a, b: lax.sort((lax.floor(a), b), dimension=1), (d.real(2, 216), d.real(2, 216)))
    yield Sample("top_k", lambda x: lax.top_k(x, 2), (d.real(4, 2, 6),))
    yield Sample("top_k", lambda x: lax.top_k(x, 2, axis=1), (x,))
    yield Sample("top_k", lambda x: lax.top_k(lax.floor(x), 5), (d.real(4, 2, 6),))
    yield Sample("approx_top_k", lambda x: lax.approx_max_k(x, 2, reduction_dimension=1), (x,))


def _linalg(d: Draw) -> Iterator[Sample]:
    square, tall = d.real(6, 4, 4), d.real(6, 4, 2)
    definite = d.definite(6, n=4)
    yield Sample("cholesky", bind("cholesky"), (definite,))
    yield Sample("cholesky_update", linalg.cholesky_update, (np.linalg.cholesky(definite[0]).T, d.real(4)))
    yield Sample("eig", linalg.eig, (square,))
    yield Sample("eigh", linalg.eigh, (definite,))
    for kind, n in (("FFT", 4), ("IFFT", 4), ("RFFT", 4), ("IRFFT", 6)):
        x = d.real(6, 2, 4) if kind == "RFFT" else d.imaginary(6, 2, 4)
        yield Sample("fft", lambda x, k=kind, n=n: lax.fft(x, k, (n,)), (x,))
    yield Sample("geqrf", bind("geqrf"), (tall,))
    yield Sample("geqp3", bind("geqp3", use_magma=None), (tall, np.zeros((6, 2), np.int32)))
    yield Sample("hessenberg", linalg.hessenberg, (square,))
    yield Sample("householder_product", linalg.householder_product, (tall, d.real(6, 2)))
    yield Sample("lu", linalg.lu, (square,))
    yield Sample(
        "lu_pivots_to_permutation",
        partial(linalg.lu_pivots_to_permutation, permutation_size=4),
        (np.asarray([[1, 2, 2, 3], [0, 3, 2, 3]] * 3, np.int32),),
    )
    yield Sample("ormqr", linalg.ormqr, (tall, d.real(6, 2), d.real(6, 4, 3)))
    yield Sample("qr", linalg.qr, (tall,))
    yield Sample("schur", linalg.schur, (square,))
    yield Sample("svd", linalg.svd, (tall,))
    yield Sample("symmetric_product", partial(linalg.symmetric_product, beta=0.5), (tall, definite))
    yield Sample("symmetric_product", linalg.symmetric_product, (tall, definite))
    lower = np.tril(square) + 3 * np.eye(4)
    for left in (True, False):
        yield Sample(
            "triangular_solve",
            partial(linalg.triangular_solve, left_side=left, lower=True),
            (lower, d.real(6, 4, 2) if left else d.real(6, 2, 4)),
        )
    yield Sample("tridiagonal", linalg.tridiagonal, (definite,))
    yield Sample(
        "tridiagonal_solve",
        linalg.tridiagonal_solve,
        (d.real(6, 4), 5 * d.positive(6, 4), d.real(6, 4), d.real(6, 4, 2)),
    )
