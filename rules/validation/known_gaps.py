"""Why rules do not allow what the auditor finds to be right on its samples, by primitive."""

from __future__ import annotations

_BY_REASON: dict[str, tuple[str, ...]] = {
    "integers wrap and narrower dtypes round, so that order, sums and products are not preserved in general": (
        "abs",
        "add",
        "add_any",
        "convert_element_type",
        "scatter-add",
        "scatter-sub",
        "shift_left",
        "shift_right_arithmetic",
        "sign",
        "sub",
    ),
    "the partial values may be outside of its domain (NaN) where their reduction is not": (
        "acosh",
        "asin",
        "atanh",
        "erf_inv",
        "log",
        "log1p",
        "log2",
        "sqrt",
    ),
    "increasing on part of its domain only, or in one argument at a time: too rare to state": (
        "bessel_i1e",
        "igamma",
        "igammac",
        "mul",
        "polynomial",
        "regularized_incomplete_beta",
        "sin",
        "symmetric_product",
    ),
    "true up to rounding only: the result differs from the operand in its last bit": ("nextafter",),
    "there is no collective for bitwise reductions of integers": ("reduce_and", "reduce_or"),
    "one operand and result could be partial without the others, which a rule cannot state": (
        "device_put",
        "optimization_barrier",
        "sort",
        "tie",
    ),
    "the bits of an integer are never partial in a real program": ("bitcast_convert_type",),
    "true for the sample's window, condition or indices, not for all": (
        "clamp",
        "gather",
        "scatter",
        "scatter-max",
        "scatter-min",
        "select_and_gather_add",
        "select_and_scatter_add",
        "select_n",
    ),
    "true for the sample's function, not for all": (
        "reduce",
        "reduce_window",
        "select_and_scatter",
    ),
}
MISSING_PASSTHROUGH: dict[str, str] = {name: reason for reason, names in _BY_REASON.items() for name in names}
"""Partial operands that would pass through."""
MISSING_SPLITS: dict[str, str] = {
    "reduce_and": "there is no collective for bitwise reductions of integers",
    "reduce_or": "there is no collective for bitwise reductions of integers",
    "scatter-sub": "XLA gathers the updates of a scatter that subtracts",
}
"""Dimensions that could be sharded."""
