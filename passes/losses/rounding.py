"""Products of a loss's gradient in the dtype of the logits' operands.

Of logits that a product of bfloat16 operands makes in float32, JAX computes the gradients as products of the float32
cotangent with those operands, for which XLA for GPUs converts them to float32, at half the speed or less. Here the
cotangent is rounded to bfloat16, as TPUs do by themselves at default precision: beside operands that were rounded so,
that adds an error of the size of theirs. bfloat16 has the exponents of float32: nothing overflows or vanishes.
"""

from __future__ import annotations

import jax
from jax import lax
from jax import numpy as jnp
from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.passes.losses.region import is_large

_DEFAULT = (None, lax.Precision.DEFAULT, (lax.Precision.DEFAULT,) * 2)


def with_rounded_cotangents(jaxpr: jx.Jaxpr, seed: jx.JaxprEqn) -> jx.Jaxpr:
    """``jaxpr`` with the gradient's products of the logits that ``seed`` makes in bfloat16, if that is the dtype of its
    operands; the same object where they are already."""
    if any(jx.aval(a).dtype != jnp.bfloat16 for a in seed.invars):
        return jaxpr
    operands: dict[jx.Atom, jx.Atom] = {a: a for a in seed.invars if isinstance(a, jx.Var)}
    operands |= {
        e.outvars[0]: e.invars[0]
        for e in jaxpr.eqns
        if e.primitive is _prims.convert_element_type_p and any(e.invars[0] is a for a in seed.invars)
    }
    eqns: list[jx.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is _prims.dot_general_p and eqn.params["precision"] in _DEFAULT:
            eqns += _rounded(eqn, operands, seed)
        else:
            eqns.append(eqn)
    return jaxpr if len(eqns) == len(jaxpr.eqns) else jx.with_eqns(jaxpr, eqns)


def _rounded(product: jx.JaxprEqn, operands: dict[jx.Atom, jx.Atom], seed: jx.JaxprEqn) -> list[jx.JaxprEqn]:
    """The product of a float32 cotangent and an operand of the logits in bfloat16; any other as it is."""
    atoms = [a for a in product.invars if isinstance(a, jx.Var)]
    wide = [a for a in atoms if a not in operands and is_large(a, seed) and jx.aval(a).dtype == jnp.float32]
    if len(wide) != 1 or not any(a in operands for a in atoms):
        return [product]
    narrow = [operands.get(a, a) if isinstance(a, jx.Var) else a for a in product.invars]
    dtype = jx.aval(product.outvars[0]).dtype

    def multiplied(x: jax.Array, y: jax.Array) -> jax.Array:
        x, y = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
        return lax.dot_general(x, y, product.params["dimension_numbers"], preferred_element_type=dtype)

    return jx.splice(multiplied, product, narrow)
