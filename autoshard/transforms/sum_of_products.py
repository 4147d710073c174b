"""Sums of products as one operation, so that what every product leaves partial is put together once, after the sum.

Megatron's backward pass is the case in point: the gradients of what a layer's query, key and value projections read
are three products whose contracted dimension is split, and only their sum is wanted.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

from jax import lax
from jax import numpy as jnp

from autoshard.transforms.primitive import define_primitive

ProductDims = tuple[str, str]
"""How the two operands of a product lie, a letter a dimension; letters that the sum has not are contracted."""


def contracted_dims(term: ProductDims, out: str) -> str:
    """The letters that ``term`` sums over."""
    return "".join(c for c in term[0] if c in term[1] and c not in out)


def flops(operands: Sequence[Any], terms: Sequence[ProductDims], out: str) -> float:
    """Floating-point operations of the products, multiply and add counted."""
    total = 0.0
    for i, term in enumerate(terms):
        sizes = {
            c: n
            for letters, x in zip(term, operands[2 * i :], strict=False)
            for c, n in zip(letters, x.shape, strict=True)
        }
        total += 2.0 * math.prod(sizes[c] for c in out + contracted_dims(term, out))
    return total


def sum_of_products(
    *operands: Any, terms: tuple[ProductDims, ...], out: str, dtype: str, precision: Any, flops: float
) -> Any:
    """``sum(left * right for left, right in pairs of operands)``, contracted as ``terms`` say."""
    del flops
    pairs = zip(operands[::2], operands[1::2], terms, strict=True)
    found = [_product(a, b, term, out, dtype, precision) for a, b, term in pairs]
    return (functools.reduce(operator.add, found),)


def _product(a: Any, b: Any, term: ProductDims, out: str, dtype: str, precision: Any) -> Any:
    left, right = term
    summed, both = contracted_dims(term, out), [c for c in left if c in right and c in out]
    numbers = tuple(([left.index(c) for c in cs], [right.index(c) for c in cs]) for cs in (summed, both))
    made = lax.dot_general(a, b, (numbers[0], numbers[1]), precision=precision, preferred_element_type=jnp.dtype(dtype))
    order = [*both, *(c for x in term for c in x if c not in both and c not in summed)]
    return jnp.transpose(made, [order.index(c) for c in out])


def _shapes(*operands: Any, terms: tuple[ProductDims, ...], out: str, dtype: str, precision: Any, flops: float) -> Any:
    del precision, flops
    sizes = {
        c: n for letters, x in zip(terms[0], operands, strict=False) for c, n in zip(letters, x.shape, strict=True)
    }
    return (operands[0].update(shape=tuple(sizes[c] for c in out), dtype=jnp.dtype(dtype), weak_type=False),)


sum_of_products_p = define_primitive("sum_of_products", sum_of_products, _shapes)
