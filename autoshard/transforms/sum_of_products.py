"""A sum of matrix products as one primitive: with a sharded contracted dimension it takes one all-reduce, not several.

The terms may be scaled, transposed or multiplied by further matrices, and there may be several results: whatever is
linear in a product is a sum of products again. As one operation, all of it is computed of partial sums, and only the
results are reduced. Two cases in point:

- the backward pass of Megatron tensor parallelism: the gradient of the activation that the query, key and value
  projections read is the sum of three products whose contracted dimension is sharded. XLA all-reduces each product
  before it adds them; as one operation, the partial sums are added first;
- LoRA: the gradient of ``w + a @ b``, a sum over the batch, is only multiplied by ``a`` and by ``b``. As one operation,
  the small results are all-reduced in place of the gradient of ``w``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend.core import Primitive

from autoshard.ir.rule import Rule
from autoshard.transforms.composed_rule import InnerDim
from autoshard.transforms.primitive import define_primitive


class Constant(NamedTuple):
    """A scalar operand, as its bytes, so that equal ones are equal and NaN is equal to itself."""

    dtype: str
    bytes: bytes

    @property
    def value(self) -> Any:
        return np.frombuffer(self.bytes, jnp.dtype(self.dtype))[0]


class Step(NamedTuple):
    """One operation of a sum of products."""

    primitive: Primitive
    params: tuple[tuple[str, Any], ...]
    """Sorted."""
    operands: tuple[int | Constant, ...]
    """Numbers of values: the operands of the whole, then the results of the steps."""
    dims: tuple[InnerDim, ...]
    """Factors of the result's dimensions."""
    dtype: str
    """Of the result."""
    shape_param: str | None = None
    """The parameter that states the shape of the result."""
    flops: float = 0.0
    """FLOPs of the unsharded product; 0 of what is no product."""
    factors: tuple[str, ...] = ()
    """Those that split a product: of its operands and its result."""

    def __repr__(self) -> str:
        read = (f"%{x}" if isinstance(x, int) else repr(x.value.item()) for x in self.operands)
        return f"{self.primitive}({', '.join(read)})"

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the result, for factors of these sizes."""
        return tuple(math.prod(f if isinstance(f, int) else sizes[f] for f in dim) for dim in self.dims)

    def run(self, operands: Sequence[Any], sizes: Mapping[str, int]) -> Any:
        """The result, for factors of these sizes."""
        params, shape = dict(self.params), self.shape(sizes)
        if self.shape_param is not None:
            params[self.shape_param] = shape
        if self.primitive is lax.slice_p:
            starts, strides = params["start_indices"], params["strides"] or (1,) * len(shape)
            params["limit_indices"] = tuple(
                at + (n - 1) * stride + 1 for at, n, stride in zip(starts, shape, strides, strict=True)
            )
        return self.primitive.bind(*operands, **params)


def factor_sizes(rule: Rule, shapes: Iterable[Sequence[int]]) -> dict[str, int]:
    """The sizes that the factors of ``rule`` have where its operands have these ``shapes``: whole, or of shards.

    Of a dimension of several factors, a minor one is split only where each more major one is down to parts of one.
    """
    whole, known = dict(rule.sizes), zip(rule.operands, shapes, strict=False)
    dim_sizes = [(dim, n) for dims, shape in known for dim, n in zip(dims, shape, strict=True)]
    found = {dim[0]: n for dim, n in dim_sizes if len(dim) == 1}
    for dim, n in dim_sizes:
        for f in dim[:0:-1]:
            n //= found.setdefault(f, math.gcd(n, whole[f]))
        found.update(dict.fromkeys(dim[:1], n))
    return found


def sum_of_products(*operands: Any, steps: tuple[Step, ...], results: tuple[int, ...], rule: Rule, flops: float) -> Any:
    """The results of ``steps``, on whole operands or on shards of them.

    Args:
      results: numbers of the values that are results.
      rule: factors of the operands and the results.
      flops: FLOPs of all products, for cost models that see only the primitive.
    """
    del flops
    sizes, values = factor_sizes(rule, [x.shape for x in operands]), [*operands]
    for step in steps:
        values.append(step.run([values[x] if isinstance(x, int) else x.value for x in step.operands], sizes))
    return tuple(values[i] for i in results)


def _shapes(*operands: Any, steps: tuple[Step, ...], results: tuple[int, ...], rule: Rule, flops: float) -> Any:
    del flops
    sizes = factor_sizes(rule, [x.shape for x in operands])
    made = [steps[i - len(operands)] for i in results]
    avals = [(step.shape(sizes), jnp.dtype(step.dtype)) for step in made]
    return tuple(operands[0].update(shape=shape, dtype=dtype, weak_type=False) for shape, dtype in avals)


sum_of_products_p = define_primitive("sum_of_products", sum_of_products, _shapes)
"""Operands and parameters as of `sum_of_products`."""
