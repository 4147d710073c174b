"""The rule of sums of products, checked against the sums themselves."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from autoshard.rules.sum_of_products import TABLE, sum_of_products
from autoshard.rules.validation.audit import audit_factors
from autoshard.rules.validation.case import load
from autoshard.rules.validation.samples import RandomArrays, Sample
from autoshard.transforms.sum_of_products import ProductDims, flops, sum_of_products_p


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float64")


def sample(products: tuple[ProductDims, ...], out: str, *shapes: tuple[int, ...]) -> Sample:
    operands = [RandomArrays().real(*s) for s in shapes]
    counted = flops(operands, products, out)

    def fn(*xs: Any) -> Any:
        return sum_of_products_p.bind(*xs, products=products, out=out, dtype="float64", precision=None, flops=counted)

    return Sample("sum_of_products", fn, tuple(operands))


@pytest.mark.parametrize(
    ("products", "shapes"),
    [
        ((("ac", "bc"), ("ac", "cb")), ((4, 6), (8, 6), (4, 6), (6, 8))),
        ((("ac", "bc"), ("ac", "cb")), ((4, 6), (8, 6), (4, 9), (9, 8))),
        ((("acd", "bcd"), ("acd", "cdb")), ((4, 6, 2), (8, 6, 2), (4, 3, 2), (3, 2, 8))),
        ((("ac", "bc"), ("a", "b")), ((4, 6), (8, 6), (4,), (8,))),
    ],
)
def test_every_sharding_that_the_rule_allows_gives_the_same_numbers(
    products: tuple[ProductDims, ...], shapes: tuple[tuple[int, ...], ...]
) -> None:
    with jax.enable_x64(True):
        case = load(sample(products, "ab", *shapes), TABLE)
        assert case is not None
        assert list(audit_factors(case)) == []


def test_contracted_dimensions_are_sharded_together_as_far_as_their_sizes_divide() -> None:
    queries, keys = ("abcd", "ecd"), ("abcd", "ecd")  # 8 heads of queries, 2 of keys
    rule = sum_of_products(
        array(2, 4, 8, 16),
        array(32, 8, 16),
        array(2, 4, 2, 16),
        array(32, 2, 16),
        products=(queries, keys),
        out="abe",
        dtype="float32",
    )
    assert str(rule) == "ab(cd)e, f(cd)e, abce, fce -> abf {c: sum, d: whole, e: sum}"


def test_what_one_product_does_not_contract_is_whole() -> None:
    products = (("ac", "bc"), ("a", "b"))
    rule = sum_of_products(array(4, 6), array(8, 6), array(4), array(8), products=products, out="ab", dtype="float32")
    assert rule.kind(rule.operands[0][1][0]) == "whole"


def test_numbers_are_those_of_the_products_added_up() -> None:
    d = RandomArrays()
    a, b, c, e = d.real(4, 6), d.real(8, 6), d.real(4, 3), d.real(3, 8)
    with jax.enable_x64(True):
        got = sample((("ac", "bc"), ("ac", "cb")), "ab", (4, 6), (8, 6), (4, 3), (3, 8)).fn(a, b, c, e)[0]
        np.testing.assert_allclose(got, a @ b.T + c @ e, rtol=1e-12)
