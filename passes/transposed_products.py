"""A matrix product that only a transpose reads becomes one product with its operands swapped.

JAX computes the gradient of ``x @ w`` with respect to ``w`` as the transpose of ``g.T @ x``. XLA for TPU assigns the
layout of that product to the weight and its optimizer state too, and copies them into it. ``x.T @ g`` computes the same
numbers, each as the same sum, in the weight's own layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.ir.program import Program
from autoshard.transforms.pipeline import Pass


@dataclass(frozen=True)
class TransposedProducts(Pass):
    """Swaps the operands of products whose result is only transposed, and drops the transpose."""

    name: ClassVar[str] = "transposed_products"

    def __call__(self, program: Program) -> Program:
        after = _rewritten(program.jaxpr)
        return program if after is program.jaxpr else program.with_jaxpr(after)

    def change(self, before: Program, after: Program) -> str:
        old, new = (sum(e.primitive is _prims.transpose_p for e in jx.walk(p.jaxpr)) for p in (before, after))
        return f"{old - new} transposes of products removed by swapping the product's operands"


def _rewritten(jaxpr: jx.Jaxpr) -> jx.Jaxpr:
    """``jaxpr`` without transposes of products, at every depth; the same object where there are none."""
    uses = jx.use_counts(jaxpr)
    products = {e.outvars[0]: e for e in jaxpr.eqns if e.primitive is _prims.dot_general_p and uses[e.outvars[0]] == 1}
    swapped: dict[jx.JaxprEqn, jx.JaxprEqn] = {}
    dropped = set[jx.JaxprEqn]()
    for eqn in [e for e in jaxpr.eqns if e.primitive is _prims.transpose_p]:
        product = products.get(eqn.invars[0])  # type: ignore[arg-type]
        params = _swapped_params(product, eqn) if product is not None else None
        if product is not None and params is not None:
            swapped[product] = product.replace(invars=product.invars[::-1], outvars=eqn.outvars, params=params)
            dropped.add(eqn)
    eqns: list[jx.JaxprEqn] = []
    changed = bool(swapped)
    for eqn in jaxpr.eqns:
        if eqn in dropped:
            continue
        eqns.append(swapped.get(eqn) or jx.map_bodies(eqn, _rewritten))
        changed |= eqns[-1] is not eqn
    return jx.with_eqns(jaxpr, eqns) if changed else jaxpr


def _swapped_params(product: jx.JaxprEqn, transpose: jx.JaxprEqn) -> dict[str, Any] | None:
    """The parameters of ``product`` with its operands swapped; None if its result is not then that of ``transpose``."""
    (contracted, batch), precision = product.params["dimension_numbers"], product.params["precision"]
    batch_rank, rank = len(batch[0]), len(transpose.params["permutation"])
    middle = len(jx.aval(product.invars[0]).shape) - len(contracted[0])
    if transpose.params["permutation"] != (*range(batch_rank), *range(middle, rank), *range(batch_rank, middle)):
        return None
    if not (precision is None or isinstance(precision, tuple)):
        return None
    changed = {
        "dimension_numbers": tuple(tuple(pair[::-1]) for pair in (contracted, batch)),
        "precision": precision and precision[::-1],
        "out_sharding": product.params["out_sharding"] and jx.aval(transpose.outvars[0]).sharding,
    }
    return product.params | changed
