"""Why a rule does not allow what the auditor finds to be right on its samples."""

from __future__ import annotations

_BY_REASON: dict[str, tuple[str, ...]] = {
    "integers wrap around and narrower types round, so no order, sum or product of theirs is kept in general": (
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
    "the reduction of values in its domain may be fine where that of its terms is not: NaN": (
        "acosh",
        "asin",
        "atanh",
        "erf_inv",
        "log",
        "log1p",
        "log2",
        "sqrt",
    ),
    "increasing on a part of its domain only, or in one argument at a time; too rare to state": (
        "bessel_i1e",
        "igamma",
        "igammac",
        "mul",
        "polynomial",
        "regularized_incomplete_beta",
        "sin",
        "symmetric_product",
    ),
    "the sample's rounding hides it: the result is the operand but for its last bit": ("nextafter",),
    "there is no collective for integers' bits": ("reduce_and", "reduce_or"),
    "one result or operand is partial without the others, which a rule cannot say": (
        "device_put",
        "optimization_barrier",
        "sort",
        "tie",
    ),
    "bits of an integer, which are never partial in a real program": ("bitcast_convert_type",),
    "true for the sample's window, condition or indices, not for every one": (
        "clamp",
        "gather",
        "scatter",
        "scatter-max",
        "scatter-min",
        "select_and_gather_add",
        "select_and_scatter_add",
        "select_n",
    ),
    "true of the sample's function; of a general one nothing is known": (
        "reduce",
        "reduce_window",
        "select_and_scatter",
    ),
}
NOT_LET: dict[str, str] = {name: reason for reason, names in _BY_REASON.items() for name in names}
"""Partials that would pass."""
NOT_SPLIT: dict[str, str] = {
    "reduce_and": "there is no collective for integers' bits",
    "reduce_or": "there is no collective for integers' bits",
    "scatter-sub": "XLA gathers the positions of a scatter that subtracts",
}
"""Dimensions that could be split."""
