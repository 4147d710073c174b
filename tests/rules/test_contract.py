"""Rules of matrix products and convolutions."""

from __future__ import annotations

from functools import partial

import pytest
from jax import lax
from jax import numpy as jnp

NHWC = ("NHWC", "HWIO", "NHWC")
conv = partial(lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=NHWC)
ragged = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))

CASES = {
    "matmul": ("dot_general", jnp.matmul, [(8, 4), (4, 6)], "ab, bc -> ac {b: sum}"),
    "batch": ("dot_general", jnp.matmul, [(2, 8, 4), (2, 4, 6)], "abc, acd -> abd {c: sum}"),
    "8-bit floats": (
        "dot_general",
        jnp.matmul,
        [("float8_e4m3fn", 8, 4), ("float8_e4m3fn", 4, 6)],
        "ab, bc -> ac {b: whole}",
    ),
    "8-bit floats summed in 32": (
        "dot_general",
        lambda x, y: jnp.matmul(x, y, preferred_element_type="float32"),
        [("float8_e4m3fn", 8, 4), ("float8_e5m2", 4, 6)],
        "ab, bc -> ac {b: sum}",
    ),
    "truncated": (
        "dot_general",
        lambda x, y: jnp.matmul(x, y, preferred_element_type="int32"),
        [(8, 4), (4, 6)],
        "ab, bc -> ac {b: whole}",
    ),
    "einsum": (
        "dot_general",
        partial(jnp.einsum, "bshk,bthk->bhst"),
        [(2, 8, 3, 4), (2, 6, 3, 4)],
        "abcd, aecd -> acbe {d: sum}",
    ),
    "two contracted": (
        "dot_general",
        partial(jnp.einsum, "bsd,bse->de"),
        [(2, 8, 4), (2, 8, 6)],
        "abc, abd -> cd {a: sum, b: sum}",
    ),
    "outer": (
        "dot_general",
        partial(lax.dot_general, dimension_numbers=(((), ()), ((), ()))),
        [(2,), (3,)],
        "a, b -> ab",
    ),
    "ragged": (
        "ragged_dot_general",
        partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=ragged),
        [(6, 4), (3, 4, 2), ("int32", 3)],
        "ab, cbd, . -> ad {b: sum, c: sum}",
    ),
    "conv": (
        "conv_general_dilated",
        conv,
        [(2, 8, 8, 4), (3, 3, 4, 6)],
        "abcd, ..de -> abce {b: halo, c: halo, d: sum}",
    ),
    "conv 1x1": ("conv_general_dilated", conv, [(2, 8, 8, 4), (1, 1, 4, 6)], "abcd, ..de -> abce {d: sum}"),
    "strided": (
        "conv_general_dilated",
        partial(conv, window_strides=(2, 1)),
        [(2, 8, 8, 4), (3, 3, 4, 6)],
        "a(bc)de, ..ef -> abdf {b: halo, c: whole, d: halo, e: sum}",
    ),
    "patches": (
        "conv_general_dilated",
        partial(conv, window_strides=(4, 4), padding="VALID"),
        [(2, 8, 8, 3), (4, 4, 3, 6)],
        "a(bc)(de)f, ..fg -> abdg {c: whole, e: whole, f: sum}",
    ),
    "valid": (
        "conv_general_dilated",
        partial(conv, padding="VALID"),
        [(2, 8, 8, 4), (3, 1, 4, 6)],
        "a(bc)de, ..ef -> a(bg)df {b: halo, c: whole, e: sum, g: whole}",
    ),
    "transposed": (
        "conv_general_dilated",
        partial(conv, padding=((1, 2), (1, 2)), lhs_dilation=(2, 2)),
        [(2, 8, 8, 4), (3, 3, 4, 6)],
        "abcd, ..de -> a(bf)(cg)e {b: halo, c: halo, d: sum, f: whole, g: whole}",
    ),
    "depthwise": (
        "conv_general_dilated",
        partial(conv, feature_group_count=4),
        [(2, 8, 8, 4), (3, 3, 1, 4)],
        "abcd, ..ed -> abcd {b: halo, c: halo, e: sum}",
    ),
    "groups": (
        "conv_general_dilated",
        partial(conv, feature_group_count=2),
        [(2, 8, 8, 4), (3, 3, 2, 6)],
        "abc(de), ..e(df) -> abc(df) {b: halo, c: halo, e: whole}",
    ),
    "batch groups": (
        "conv_general_dilated",
        partial(conv, batch_group_count=2),
        [(4, 8, 8, 4), (3, 3, 4, 6)],
        "(ab)cde, ..e(af) -> bcd(af) {b: whole, c: whole, d: whole, e: sum}",
    ),
    "a window's gradient": (
        "conv_general_dilated",
        partial(conv, padding=((1, 1), (1, 1)), dimension_numbers=("CHWN", "IHWO", "HWNC")),
        [(2, 8, 8, 4), (2, 8, 8, 6)],
        "abcd, abce -> ..de {a: sum, b: sum, c: sum}",
    ),
    "a window's gradient, strided": (
        "conv_general_dilated",
        partial(conv, padding=((0, 1), (1, 1)), rhs_dilation=(2, 1), dimension_numbers=("CHWN", "IHWO", "HWNC")),
        [(2, 8, 8, 4), (2, 4, 8, 6)],
        "a(bc)de, abdf -> ..ef {a: sum, b: sum, c: whole, d: sum}",
    ),
    "a window's gradient, of parts that begin elsewhere": (
        "conv_general_dilated",
        partial(conv, padding="VALID", dimension_numbers=("CHWN", "IHWO", "HWNC")),
        [(2, 8, 8, 4), (2, 6, 7, 6)],
        "a..b, a..c -> ..bc {a: sum}",
    ),
    "a window over most of a dimension": (
        "conv_general_dilated",
        conv,
        [(2, 8, 8, 4), (7, 3, 4, 6)],
        "a.bc, ..cd -> a.bd {b: halo, c: sum}",
    ),
}


@pytest.mark.parametrize(("name", "fn", "args", "expected"), CASES.values(), ids=CASES)
def test_rule(rule_of, name, fn, args, expected):
    assert rule_of(name, fn, *args) == expected


@pytest.mark.parametrize(
    ("dtype", "preferred", "expected"),
    [
        ("float32", None, "sum: 0 1"),
        ("bfloat16", "float32", "sum: 0 1"),
        ("int8", None, "sum: 0 1"),
        ("int8", "int32", ""),
    ],
)
def test_either_operand_may_be_partial_unless_its_sum_may_wrap(rule_of, dtype, preferred, expected):
    fn = partial(lax.dot, preferred_element_type=preferred)
    assert rule_of("dot_general", fn, (dtype, 4, 6), (dtype, 6, 2), passthrough=True) == expected
