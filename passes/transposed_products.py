"""Turned: a product and the transpose that alone reads it become one product, its operands changed over.

The derivative of ``x @ w`` by ``w`` is made by JAX as the transpose of ``g.T @ x``. A compiler takes the orientation of
the product for that of the weight's state too, and XLA's for TPU then copies the weight and both its moments into it.
``x.T @ g`` is the same numbers, element by element, as they lie.
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
    """Writes products the way round in which they are read."""

    name: ClassVar[str] = "transposed_products"

    def __call__(self, program: Program) -> Program:
        after = _rewritten(program.jaxpr)
        return program if after is program.jaxpr else program.with_jaxpr(after)

    def change(self, before: Program, after: Program) -> str:
        had, has = (sum(e.primitive is _prims.transpose_p for e in jx.walk(p.jaxpr)) for p in (before, after))
        return f"{had - has} products written the other way round"


def _rewritten(jaxpr: jx.Jaxpr) -> jx.Jaxpr:
    """``jaxpr`` with its products turned, at every depth; itself where none is."""
    uses = jx.use_counts(jaxpr)
    products = {e.outvars[0]: e for e in jaxpr.eqns if e.primitive is _prims.dot_general_p and uses[e.outvars[0]] == 1}
    turned: dict[jx.JaxprEqn, jx.JaxprEqn] = {}
    dropped = set[jx.JaxprEqn]()
    for eqn in [e for e in jaxpr.eqns if e.primitive is _prims.transpose_p]:
        product = products.get(eqn.invars[0])  # type: ignore[arg-type]
        params = _other_way(product, eqn) if product is not None else None
        if product is not None and params is not None:
            turned[product] = product.replace(invars=product.invars[::-1], outvars=eqn.outvars, params=params)
            dropped.add(eqn)
    eqns: list[jx.JaxprEqn] = []
    changed = bool(turned)
    for eqn in jaxpr.eqns:
        if eqn in dropped:
            continue
        eqns.append(turned.get(eqn) or jx.map_bodies(eqn, _rewritten))
        changed |= eqns[-1] is not eqn
    return jx.with_eqns(jaxpr, eqns) if changed else jaxpr


def _other_way(product: jx.JaxprEqn, transpose: jx.JaxprEqn) -> dict[str, Any] | None:
    """The parameters of ``product`` with its operands changed over, if that gives what ``transpose`` does."""
    (summed, batch), precision = product.params["dimension_numbers"], product.params["precision"]
    both, rank = len(batch[0]), len(transpose.params["permutation"])
    middle = len(jx.aval(product.invars[0]).shape) - len(summed[0])
    if transpose.params["permutation"] != (*range(both), *range(middle, rank), *range(both, middle)):
        return None
    if not (precision is None or isinstance(precision, tuple)):
        return None
    changed = {
        "dimension_numbers": tuple(tuple(pair[::-1]) for pair in (summed, batch)),
        "precision": precision and precision[::-1],
        "out_sharding": product.params["out_sharding"] and jx.aval(transpose.outvars[0]).sharding,
    }
    return product.params | changed
