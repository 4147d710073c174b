"""Samples of matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from jax import lax

from autoshard.rules.validation.samples.sample import RandomArrays, Sample, bind

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


def samples(d: RandomArrays) -> Iterator[Sample]:
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
