"""The weight whose product is the cotangent of an attention by a kernel, with each head's features next to one another.

A kernel takes cotangents head by head. Where a head is narrower than the chip's matrix unit, and the weight's minor
dimension is the contracted one, as that of a block's last product in the attention is on the way back, XLA for TPU
writes such a result in twice the time (libtpu 0.0.50.1, v6e: 1.85 ms for what takes 0.90 at the peak). With the head's
features minor it takes 0.96 ms, so the weight, which is smaller, is put so before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.transforms.attention_op import attention_backward_p

_COTANGENT = 6
"""Operand of `attention_backward_p`."""


def product_of_cotangent(
    eqn: jx.JaxprEqn, made: Mapping[jx.Var, jx.JaxprEqn], unit: int
) -> tuple[jx.JaxprEqn, list[jx.JaxprEqn]] | None:
    """The product that makes the cotangent which ``eqn`` reads, if it is the backward part of an attention by a kernel,
    and what computes the same with the weight, its right operand [heads, features, contracted], laid out by head; None
    where there is no such product, or features fill the matrix unit.

    Args:
      made: the equation that makes each variable.
      unit: columns of the chip's matrix unit.
    """
    if eqn.primitive is not attention_backward_p or not eqn.params["config"].kernel:
        return None
    product = _maker(eqn.invars[_COTANGENT], made)
    while product is not None and product.primitive is _prims.transpose_p:
        product = _maker(product.invars[0], made)
    if product is None or product.primitive is not _prims.dot_general_p:
        return None
    (contracted, by), batch = product.params["dimension_numbers"]
    weight = jx.aval(product.invars[1])
    if tuple(by) != (2,) or any(batch) or weight.ndim != 3 or weight.shape[1] >= unit:
        return None
    numbers = ((contracted, (1,)), ((), ()))

    def by_head(x: Any, w: Any) -> Any:
        w = with_layout_constraint(lax.transpose(w, (0, 2, 1)), Layout((0, 1, 2)))
        return lax.dot_general_p.bind(x, w, **product.params | {"dimension_numbers": numbers})

    return product, jx.splice(by_head, product, product.invars)


def _maker(atom: jx.Atom, made: Mapping[jx.Var, jx.JaxprEqn]) -> jx.JaxprEqn | None:
    return made.get(atom) if isinstance(atom, jx.Var) else None
