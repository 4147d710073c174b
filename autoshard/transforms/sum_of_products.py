"""A sum of matrix products as one primitive: with a sharded contracted dimension it takes one all-reduce, not several.

The case in point is the backward pass of Megatron tensor parallelism: the gradient of the activation that the query,
key and value projections read is the sum of three products whose contracted dimension is sharded. XLA all-reduces each
product before it adds them; as one operation, the partial sums are added first.
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
"""Einsum subscripts of a product's two operands; letters that the result lacks are contracted."""


def contracted_dims(product: ProductDims, out: str) -> str:
    """The letters that ``product`` contracts."""
    return "".join(c for c in product[0] if c in product[1] and c not in out)


def flops(operands: Sequence[Any], products: Sequence[ProductDims], out: str) -> float:
    """FLOPs of the products: a multiplication and an addition count as two."""
    total = 0.0
    for i, product in enumerate(products):
        sizes = {
            c: n
            for letters, x in zip(product, operands[2 * i :], strict=False)
            for c, n in zip(letters, x.shape, strict=True)
        }
        total += 2.0 * math.prod(sizes[c] for c in out + contracted_dims(product, out))
    return total


def sum_of_products(
    *operands: Any, products: tuple[ProductDims, ...], out: str, dtype: str, precision: Any, flops: float
) -> Any:
    """The sum of one einsum for each pair of operands: (left, right, left, right, ...) -> (sum,).

    Args:
      products: subscripts of each pair.
      out: subscripts of the result, the same for every product.
      dtype, precision: result dtype and `jax.lax` precision of every product.
      flops: FLOPs of all products, for cost models that see only the primitive.
    """
    del flops
    pairs = zip(operands[::2], operands[1::2], products, strict=True)
    terms = [_product(a, b, product, out, dtype, precision) for a, b, product in pairs]
    return (functools.reduce(operator.add, terms),)


def _product(a: Any, b: Any, product: ProductDims, out: str, dtype: str, precision: Any) -> Any:
    left, right = product
    contracted, batch = contracted_dims(product, out), [c for c in left if c in right and c in out]
    numbers = tuple(([left.index(c) for c in cs], [right.index(c) for c in cs]) for cs in (contracted, batch))
    result = lax.dot_general(
        a, b, (numbers[0], numbers[1]), precision=precision, preferred_element_type=jnp.dtype(dtype)
    )
    order = [*batch, *(c for dims in product for c in dims if c not in batch and c not in contracted)]
    return jnp.transpose(result, [order.index(c) for c in out])


def _shapes(
    *operands: Any, products: tuple[ProductDims, ...], out: str, dtype: str, precision: Any, flops: float
) -> Any:
    del precision, flops
    sizes = {
        c: n for letters, x in zip(products[0], operands, strict=False) for c, n in zip(letters, x.shape, strict=True)
    }
    return (operands[0].update(shape=tuple(sizes[c] for c in out), dtype=jnp.dtype(dtype), weak_type=False),)


sum_of_products_p = define_primitive("sum_of_products", sum_of_products, _shapes)
"""Operands and parameters as of `sum_of_products`."""
