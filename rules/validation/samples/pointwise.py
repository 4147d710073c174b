"""Samples of elementwise operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from autoshard.rules.validation.samples.sample import RandomArrays, Sample, bind

UNARY = {
    "real": "acos asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 "
    "expm1 floor integer_pow lgamma log log1p log2 logistic neg one_minus_square reduce_precision round rsqrt "
    "sign sin sinh sqrt square tan tanh abs copy name reshard stop_gradient",
    "integer": "population_count clz not",
}
"""Operations on one array, by the method of `RandomArrays` that draws it."""
BINARY = {
    "real": "add add_any atan2 div max min mul nextafter pow rem sub",
    "integer": "add add_any and eq eq_to ge gt le le_to lt lt_to max min mul mulhi ne or rem sub xor shift_left "
    "shift_right_arithmetic shift_right_logical div",
    "positive": "igamma igamma_grad_a igammac zeta",
}
"""Operations on two arrays."""
UNIT = ("acos", "asin", "atanh", "erf_inv")
"""Those defined between -1 and 1 only."""
EMPTY_MESH = NamedSharding(AbstractMesh((), ()), PartitionSpec(None, None))
OTHER_MESH = NamedSharding(AbstractMesh((1,), ("one",), axis_types=(AxisType.Explicit,)), PartitionSpec("one", None))
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


def samples(d: RandomArrays) -> Iterator[Sample]:
    for kind, ops in UNARY.items():
        for op in ops.split():
            yield Sample(op, _function(op), (getattr(d, kind)(4, 6) * (0.45 if op in UNIT else 1),))
    for kind, ops in BINARY.items():
        for op in ops.split():
            second = d.integer(4, 6, low=1, high=4) if op.startswith("shift") else getattr(d, kind)(4, 6)
            yield Sample(op, _function(op), (getattr(d, kind)(4, 6), second))
    yield Sample("polygamma", lax.polygamma, (np.floor(d.positive(4, 6)), d.positive(4, 6)))
    yield Sample("acosh", lax.acosh, (d.positive(4, 6),))
    yield Sample("mul", lax.mul, (d.real(), d.real(4, 6)))
    yield Sample("mul", lax.mul, (d.complex_numbers(4, 6), d.complex_numbers(4, 6)))
    yield Sample("integer_pow", partial(lax.integer_pow, y=3), (d.real(4, 6),))
    yield Sample("integer_pow", partial(lax.integer_pow, y=-2), (d.real(4, 6),))
    yield Sample("integer_pow", partial(lax.integer_pow, y=2), (d.integer(4, 6),))
    yield Sample("square", lax.square, (d.integer(4, 6),))
    yield Sample("sign", lax.sign, (d.integer(4, 6),))
    yield Sample("abs", lax.abs, (d.integer(4, 6),))
    yield Sample("neg", lax.neg, (d.integer(4, 6),))
    yield Sample("is_finite", lax.is_finite, (np.where(d.booleans(4, 6), d.real(4, 6), np.inf),))
    yield Sample("complex", lax.complex, (d.real(4, 6), d.real(4, 6)))
    for op in (lax.real, lax.imag, lax.conj):
        yield Sample(op.__name__, op, (d.complex_numbers(4, 6),))
    yield Sample("clamp", lax.clamp, (d.real(4, 6) - 0.5, d.real(4, 6), d.real(4, 6) + 0.5))
    yield Sample("clamp", lax.clamp, (np.float64(-0.5), d.real(4, 6), np.float64(0.7)))
    yield Sample("select_n", lax.select_n, (d.booleans(4, 6), d.real(4, 6), d.real(4, 6)))
    yield Sample("select_n", lax.select_n, (np.bool_(True), d.integer(4, 6), d.integer(4, 6)))
    yield Sample("polynomial", bind("polynomial"), (d.real(4, 6), d.real(4, 6), d.real(), d.real(4, 6)))
    yield Sample("regularized_incomplete_beta", lax.betainc, (d.positive(4, 6), d.positive(4, 6), abs(d.unit(4, 6))))
    yield Sample("layout_constraint", lambda x: with_layout_constraint(x, Layout((1, 0))), (d.real(4, 6),))
    yield Sample("xla_metadata_value", partial(set_xla_metadata, label="x"), (d.real(4, 6),))
    yield Sample("tie", bind("tie"), (d.real(4, 3), d.real(6, 2)))
    yield Sample("reshard", bind("reshard", dst_sharding=OTHER_MESH, concrete_mesh=None), (d.real(4, 6),))
    yield Sample("optimization_barrier", lambda *x: lax.optimization_barrier(x), (d.real(4, 6), d.real(2)))
    yield Sample("device_put", _put, (d.real(4, 6), d.real(2)))
    yield Sample("dce_sink", lambda x: (lax.dce_sink(x), x)[1], (d.real(4, 6),))
    for old, new in CONVERSIONS:
        x = (
            d.booleans(4, 6)
            if "bool" in (old, new)
            else d.integer(4, 6, low=1 if old[0] == "u" else -4)
            if "int" in old
            else d.complex_numbers(4, 6)
            if old[0] == "c"
            else d.real(4, 6)
        )
        yield Sample("convert_element_type", partial(lax.convert_element_type, new_dtype=new), (x.astype(old),))


def _put(*xs: Any) -> Any:
    return jax.device_put(xs)


def _function(op: str) -> Callable[..., Any]:
    """The function of `jax.lax` with the name of a primitive, or that primitive."""
    special: dict[str, Callable[..., Any]] = {
        "abs": lax.abs,
        "integer_pow": partial(lax.integer_pow, y=-1),
        "name": partial(checkpoint_name, name="x"),
        "not": lax.bitwise_not,
        "and": lax.bitwise_and,
        "or": lax.bitwise_or,
        "xor": lax.bitwise_xor,
        "reduce_precision": partial(lax.reduce_precision, exponent_bits=5, mantissa_bits=4),
        "reshard": bind("reshard", dst_sharding=EMPTY_MESH, concrete_mesh=None),
        "round": lax.round,
    }
    only_primitive = (
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
    return bind(op) if op in only_primitive or not hasattr(lax, op) else getattr(lax, op)
