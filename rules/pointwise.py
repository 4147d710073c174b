"""Rules of elementwise operations: every dimension is parallel.

Their partial passthrough is exact, for finite values: linear operations let sums through, multiplicative ones
products, increasing ones maxima and minima (only those defined everywhere: the logarithm of a partial maximum may be
NaN where that of the maximum is not), and min, max, and, or what distributivity allows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import numpy as jnp

from autoshard.ir.rule import Aval, Rule, RuleFn, replicated_rule
from autoshard.ir.spec import REDUCTION_KINDS
from autoshard.jaxpr import represents
from autoshard.rules.builders import (
    ANY_PARTIAL,
    build,
    dim_labels,
    elementwise,
    has_infinity,
    is_complex,
    is_float,
    is_integer,
    selection_passthrough,
    table,
)

INCREASING = "max: 0, min: 0"
MULTIPLICATIVE = "prod: 0"
LINEAR = "sum: 0"
CLAMPED = "max: 0 1 2 0+1, min: 0 1 2 0+2 1+2"
"""Passthrough of ``min(max(x, low), high)``, whose operands are low, x, high."""


def pointwise(passthrough: str = "", for_integers: str = "") -> RuleFn:
    """The rule of an elementwise operation.

    Args:
      passthrough: of floating-point operands; of complex ones only its sums and products.
      for_integers: passthrough of integers and booleans.
    """
    for_complex = ", ".join(t for t in passthrough.split(", ") if t.startswith(("sum", "prod")))

    def rule(*avals: Aval, **_: Any) -> Rule:
        dtype = avals[0].dtype
        chosen = passthrough if is_float(dtype) else for_complex if is_complex(dtype) else for_integers
        return elementwise(avals, passthrough=chosen)

    return rule


def select_n(which: Aval, *cases: Aval, **_: Any) -> Rule:
    """Each element is that of one case."""
    return elementwise((which, *cases), passthrough=selection_passthrough(*range(1, 1 + len(cases))))


def integer_pow(x: Aval, *, y: int, **_: Any) -> Rule:
    """Odd positive powers are increasing."""
    increasing = f"{MULTIPLICATIVE}, {INCREASING}" if y > 0 and y % 2 else MULTIPLICATIVE
    return pointwise(increasing, MULTIPLICATIVE if y >= 0 else "")(x)


def reshard(x: Aval, *, dst_sharding: Any, **_: Any) -> Rule:
    """In derivatives that are traced on a mesh JAX reshards to an empty mesh, which changes nothing."""
    if dst_sharding.mesh.empty:
        return elementwise((x,), passthrough=ANY_PARTIAL)
    return replicated_rule("it reshards its operand to another mesh", [x], [x])


def convert_element_type(x: Aval, *, new_dtype: Any, **_: Any) -> Rule:
    """Linear where no value is rounded; increasing where both dtypes are ordered and every number has a cast."""
    return elementwise((x,), passthrough=_conversion(x.dtype, new_dtype))


def _conversion(old: Any, new: Any) -> str:
    """The passthrough of a cast from dtype ``old`` to ``new``."""
    exact = represents(new, old)
    if is_float(old) or is_complex(old):
        algebraic = "sum: 0, prod: 0" if exact else ""
        ordered = INCREASING if is_float(old) and is_float(new) and (exact or has_infinity(new)) else ""
    elif is_float(new):
        algebraic, ordered = "", INCREASING if exact or has_infinity(new) else ""
    elif is_integer(new):
        modular = is_integer(old) and jnp.iinfo(new).bits <= jnp.iinfo(old).bits
        algebraic, ordered = "and: 0, or: 0" + (", sum: 0, prod: 0" if modular else ""), INCREASING if exact else ""
    elif new == np.bool_:
        algebraic, ordered = "or: 0" + (", and: 0" if old == np.bool_ else ""), ""
    else:
        algebraic, ordered = "", ""
    return ", ".join(filter(None, (algebraic, ordered)))


def polynomial(x: Aval, *coefficients: Aval, **_: Any) -> Rule:
    """Linear in its coefficients together."""
    joint = "+".join(str(i + 1) for i in range(len(coefficients)))
    return elementwise((x, *coefficients), passthrough=f"sum: {joint}" if coefficients else "")


def tuple_identity(*avals: Aval, **_: Any) -> Rule:
    """Result i is operand i; either all of them are partial or none."""
    labels = [dim_labels(a.shape, f"{i}.") for i, a in enumerate(avals)]
    joint = "+".join(map(str, range(len(avals))))
    return build(labels, labels, passthrough=", ".join(f"{kind}: {joint}" for kind in REDUCTION_KINDS) if avals else "")


def tie(x: Aval, y: Aval, **_: Any) -> Rule:
    """The result is the second operand, ordered after the first."""
    return build(
        [dim_labels(x.shape, "x"), dim_labels(y.shape)],
        [dim_labels(y.shape)],
        passthrough=selection_passthrough(1),
    )


def sink(*avals: Aval, **_: Any) -> Rule:
    """It has no result."""
    return build([dim_labels(a.shape, f"{i}.") for i, a in enumerate(avals)], [])


RULES: dict[str, RuleFn] = {
    "abs": pointwise(MULTIPLICATIVE),
    "acos": pointwise(),
    "acosh": pointwise(),
    "add": pointwise("sum: 0+1, max: 0 1, min: 0 1", "sum: 0+1"),
    "add_any": pointwise("sum: 0+1, max: 0 1, min: 0 1", "sum: 0+1"),
    "and": pointwise(for_integers="and: 0 1 0+1, or: 0 1"),
    "asin": pointwise(),
    "asinh": pointwise(INCREASING),
    "atan": pointwise(INCREASING),
    "atan2": pointwise(),
    "atanh": pointwise(),
    "bessel_i0e": pointwise(),
    "bessel_i1e": pointwise(),
    "cbrt": pointwise(f"{MULTIPLICATIVE}, {INCREASING}"),
    "ceil": pointwise(INCREASING),
    "clamp": pointwise(CLAMPED, CLAMPED),
    "clz": pointwise(),
    "complex": pointwise("sum: 0+1"),
    "conj": pointwise(f"{LINEAR}, {MULTIPLICATIVE}"),
    "convert_element_type": convert_element_type,
    "copy": pointwise(ANY_PARTIAL, ANY_PARTIAL),
    "cos": pointwise(),
    "cosh": pointwise(),
    "dce_sink": sink,
    "device_put": tuple_identity,
    "digamma": pointwise(),
    "div": pointwise("sum: 0, prod: 0+1"),
    "eq": pointwise(),
    "eq_to": pointwise(),
    "erf": pointwise(INCREASING),
    "erf_inv": pointwise(),
    "erfc": pointwise(),
    "exp": pointwise(INCREASING),
    "exp2": pointwise(INCREASING),
    "expm1": pointwise(INCREASING),
    "floor": pointwise(INCREASING),
    "from_edtype": pointwise(),
    "ge": pointwise(),
    "gt": pointwise(),
    "igamma": pointwise(),
    "igamma_grad_a": pointwise(),
    "igammac": pointwise(),
    "imag": pointwise(LINEAR),
    "integer_pow": integer_pow,
    "is_finite": pointwise(),
    "layout_constraint": pointwise(ANY_PARTIAL, ANY_PARTIAL),
    "le": pointwise(),
    "le_to": pointwise(),
    "lgamma": pointwise(),
    "log": pointwise(),
    "log1p": pointwise(),
    "log2": pointwise(),
    "logistic": pointwise(INCREASING),
    "lt": pointwise(),
    "lt_to": pointwise(),
    "max": pointwise("max: 0 1 0+1, min: 0 1", "max: 0 1 0+1, min: 0 1"),
    "min": pointwise("min: 0 1 0+1, max: 0 1", "min: 0 1 0+1, max: 0 1"),
    "mul": pointwise("sum: 0 1, prod: 0+1", "sum: 0 1, prod: 0+1"),
    "mulhi": pointwise(),
    "name": pointwise(ANY_PARTIAL, ANY_PARTIAL),
    "ne": pointwise(),
    "neg": pointwise(LINEAR, LINEAR),
    "nextafter": pointwise(),
    "not": pointwise(),
    "one_minus_square": pointwise(),
    "optimization_barrier": tuple_identity,
    "or": pointwise(for_integers="or: 0 1 0+1, and: 0 1"),
    "polygamma": pointwise(),
    "polynomial": polynomial,
    "population_count": pointwise(),
    "pow": pointwise(),
    "real": pointwise(LINEAR),
    "reduce_precision": pointwise(INCREASING),
    "regularized_incomplete_beta": pointwise(),
    "rem": pointwise(),
    "reshard": reshard,
    "round": pointwise(INCREASING),
    "rsqrt": pointwise(),
    "select_n": select_n,
    "shift_left": pointwise(for_integers="sum: 0, and: 0, or: 0"),
    "shift_right_arithmetic": pointwise(for_integers="and: 0, or: 0"),
    "shift_right_logical": pointwise(for_integers="and: 0, or: 0"),
    "sign": pointwise(f"{MULTIPLICATIVE}, {INCREASING}", INCREASING),
    "sin": pointwise(),
    "sinh": pointwise(INCREASING),
    "sqrt": pointwise(),
    "square": pointwise(MULTIPLICATIVE, MULTIPLICATIVE),
    "stop_gradient": pointwise(ANY_PARTIAL, ANY_PARTIAL),
    "sub": pointwise("sum: 0+1, max: 0, min: 0", "sum: 0+1"),
    "tan": pointwise(),
    "tanh": pointwise(INCREASING),
    "tie": tie,
    "to_edtype": pointwise(),
    "with_memory_space_constraint": pointwise(ANY_PARTIAL, ANY_PARTIAL),
    "xla_metadata_value": pointwise(ANY_PARTIAL, ANY_PARTIAL),
    "xor": pointwise(),
    "zeta": pointwise(),
}
TABLE = table(RULES)
