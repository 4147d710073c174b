"""Operations that act on each element by itself: every dimension passes.

What they let through is exact, for finite values: linear operations pass sums, multiplicative ones products,
increasing ones maxima and minima (only those defined everywhere: the logarithm of a partial maximum may be
NaN where that of the maximum is not), and lattice operations what their algebra says.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from autoshard.ir.rule import Aval, Rule, RuleFn, whole
from autoshard.ir.spec import KINDS
from autoshard.rules.builders import ANY, build, elementwise, is_complex, is_float, is_integer, rows, table, together

INCREASING = "max: 0, min: 0"
MULTIPLICATIVE = "prod: 0"
LINEAR = "sum: 0"
CLAMPED = "max: 0 1 2 0+1, min: 0 1 2 0+2 1+2"
"""Of ``min(max(x, low), high)``, operands in the order low, x, high."""


def pointwise(lets: str = "", whole_numbers: str = "") -> RuleFn:
    """``lets`` holds for floating point (complex: its sums and products), ``whole_numbers`` for integers and bools."""
    complex_lets = ", ".join(t for t in lets.split(", ") if t.startswith(("sum", "prod")))

    def rule(*avals: Aval, **_: Any) -> Rule:
        dtype = avals[0].dtype
        chosen = lets if is_float(dtype) else complex_lets if is_complex(dtype) else whole_numbers
        return elementwise(avals, lets=chosen)

    return rule


def select_n(which: Aval, *cases: Aval, **_: Any) -> Rule:
    """Each element comes from one case."""
    return elementwise((which, *cases), lets=together(1, len(cases)))


def integer_pow(x: Aval, *, y: int, **_: Any) -> Rule:
    """Odd positive powers increase."""
    increasing = f"{MULTIPLICATIVE}, {INCREASING}" if y > 0 and y % 2 else MULTIPLICATIVE
    return pointwise(increasing, MULTIPLICATIVE if y >= 0 else "")(x)


def reshard(x: Aval, *, dst_sharding: Any, **_: Any) -> Rule:
    """JAX puts one into derivatives that are traced on a mesh, to a place on no mesh: it says nothing."""
    if dst_sharding.mesh.empty:
        return elementwise((x,), lets=ANY)
    return whole("it says how its operand lies on another mesh", [x], [x])


def convert_element_type(x: Aval, *, new_dtype: Any, **_: Any) -> Rule:
    """Linear only where no value is rounded; increasing wherever both sides are ordered."""
    return elementwise((x,), lets=_conversion(x.dtype, new_dtype))


def _conversion(old: Any, new: Any) -> str:
    exact = _wider(old, new)
    if is_float(old) or is_complex(old):
        terms = "sum: 0, prod: 0" if exact else ""
        ordered = INCREASING if is_float(old) and is_float(new) else ""
    elif is_float(new):
        terms, ordered = "", INCREASING
    elif is_integer(new):
        modular = is_integer(old) and jnp.iinfo(new).bits <= jnp.iinfo(old).bits
        terms, ordered = "and: 0, or: 0" + (", sum: 0, prod: 0" if modular else ""), INCREASING if exact else ""
    elif new == np.bool_:
        terms, ordered = "or: 0" + (", and: 0" if old == np.bool_ else ""), ""
    else:
        terms, ordered = "", ""
    return ", ".join(filter(None, (terms, ordered)))


def _wider(old: Any, new: Any) -> bool:
    """Whether every value of ``old`` is one of ``new``."""
    return not jax.dtypes.issubdtype(old, jax.dtypes.extended) and jnp.promote_types(old, new) == new


def polynomial(x: Aval, *coefficients: Aval, **_: Any) -> Rule:
    """Linear in its coefficients, taken together."""
    joint = "+".join(str(i + 1) for i in range(len(coefficients)))
    return elementwise((x, *coefficients), lets=f"sum: {joint}" if coefficients else "")


def side_by_side(*avals: Aval, **_: Any) -> Rule:
    """Each operand is the result of the same position; all of them are partial, or none."""
    labels = [rows(a.shape, f"{i}.") for i, a in enumerate(avals)]
    joint = "+".join(map(str, range(len(avals))))
    return build(labels, labels, lets=", ".join(f"{kind}: {joint}" for kind in KINDS) if avals else "")


def tie(x: Aval, y: Aval, **_: Any) -> Rule:
    """The second operand, once the first is known."""
    return build([rows(x.shape, "x"), rows(y.shape)], [rows(y.shape)], lets=ANY.replace("0", "1"))


def sink(*avals: Aval, **_: Any) -> Rule:
    """No result."""
    return build([rows(a.shape, f"{i}.") for i, a in enumerate(avals)], [])


RULES: dict[str, RuleFn] = {
    "abs": pointwise(MULTIPLICATIVE),
    "acos": pointwise(),
    "acosh": pointwise(),
    "add": pointwise("sum: 0+1, max: 0 1, min: 0 1", "sum: 0+1"),
    "add_any": pointwise("sum: 0+1, max: 0 1, min: 0 1", "sum: 0+1"),
    "and": pointwise(whole_numbers="and: 0 1 0+1, or: 0 1"),
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
    "copy": pointwise(ANY, ANY),
    "cos": pointwise(),
    "cosh": pointwise(),
    "dce_sink": sink,
    "device_put": side_by_side,
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
    "layout_constraint": pointwise(ANY, ANY),
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
    "name": pointwise(ANY, ANY),
    "ne": pointwise(),
    "neg": pointwise(LINEAR, LINEAR),
    "nextafter": pointwise(),
    "not": pointwise(),
    "one_minus_square": pointwise(),
    "optimization_barrier": side_by_side,
    "or": pointwise(whole_numbers="or: 0 1 0+1, and: 0 1"),
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
    "shift_left": pointwise(whole_numbers="sum: 0, and: 0, or: 0"),
    "shift_right_arithmetic": pointwise(whole_numbers="and: 0, or: 0"),
    "shift_right_logical": pointwise(whole_numbers="and: 0, or: 0"),
    "sign": pointwise(f"{MULTIPLICATIVE}, {INCREASING}", INCREASING),
    "sin": pointwise(),
    "sinh": pointwise(INCREASING),
    "sqrt": pointwise(),
    "square": pointwise(MULTIPLICATIVE, MULTIPLICATIVE),
    "stop_gradient": pointwise(ANY, ANY),
    "sub": pointwise("sum: 0+1, max: 0, min: 0", "sum: 0+1"),
    "tan": pointwise(),
    "tanh": pointwise(INCREASING),
    "tie": tie,
    "to_edtype": pointwise(),
    "with_memory_space_constraint": pointwise(ANY, ANY),
    "xla_metadata_value": pointwise(ANY, ANY),
    "xor": pointwise(),
    "zeta": pointwise(),
}
TABLE = table(RULES)
