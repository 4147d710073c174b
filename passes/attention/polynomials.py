"""Polynomials in the quantities that a softmax and its gradient consist of; `finder` defines these.

Exponents are integers, perhaps negative. A mask is 0 or 1, so that every power of it is itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autoshard.errors import PassError
from autoshard.transforms.attention_op import ScoreOp

Monomial = tuple[tuple[Any, int], ...]
"""(quantity, exponent) of each factor, sorted; the quantity of a mask is the index of its score op."""
Polynomial = dict[Monomial, float]
"""The coefficient of each monomial."""
EXP, ROW_SUM, DOT, ROW_DOT = "e", "z", "d", "t"


def slope(score_ops: Sequence[Any]) -> tuple[str, tuple[Any, ...]]:
    """The derivative of the hyperbolic tangent that is the last of these score ops, as a quantity."""
    return "u", tuple(score_ops)


WEIGHTS: Polynomial = {((EXP, 1), (ROW_SUM, -1)): 1.0}


def combine(name: str, x: Polynomial, y: Polynomial) -> Polynomial:
    """``x`` and ``y`` added, subtracted, multiplied or divided.

    Raises:
      PassError: another operation, or a quotient that is no polynomial.
    """
    if name in {"add", "sub"}:
        sign = 1 if name == "add" else -1
        done = {t: x.get(t, 0.0) + sign * y.get(t, 0.0) for t in {**x, **y}}
    elif name == "mul":
        done: Polynomial = {}
        for s, a in x.items():
            for t, b in y.items():
                powers: dict[Any, int] = {}
                for atom, n in (*s, *t):
                    powers[atom] = 1 if isinstance(atom, int) else powers.get(atom, 0) + n
                term = tuple(sorted(((k, n) for k, n in powers.items() if n), key=lambda p: str(p[0])))
                done[term] = done.get(term, 0.0) + a * b
    elif name == "div" and len(y) == 1:
        ((term, c),) = y.items()
        if not c or any(a != ROW_SUM for a, _ in term):
            raise PassError("weights are divided by something else than row sums of exponentials")
        return combine("mul", x, {tuple((a, -n) for a, n in term): 1 / c})
    else:
        raise PassError(f"weights enter {name}")
    return {t: c for t, c in done.items() if c}


def sum_over_keys(polynomial: Polynomial, size: int) -> Polynomial:
    """The sum along ``size`` keys.

    Raises:
      PassError: the sum is not one of the known quantities.
    """
    done: Polynomial = {}
    for term, c in polynomial.items():
        row = tuple((a, n) for a, n in term if a in {ROW_SUM, ROW_DOT})
        per_key = tuple((a, n) for a, n in term if a not in {ROW_SUM, ROW_DOT})
        if not per_key:
            added: Polynomial = {row: c * size}
        elif per_key in {((EXP, 1),), ((DOT, 1), (EXP, 1))}:
            added = combine("mul", {row: c}, {((ROW_SUM if len(per_key) == 1 else ROW_DOT, 1),): 1.0})
        else:
            raise PassError("something else than weights, or weights times their cotangent, is summed along the keys")
        done = combine("add", done, added)
    return done


def is_score_gradient(polynomial: Polynomial, score_ops: Sequence[ScoreOp]) -> bool:
    """Whether ``polynomial`` is the gradient of the softmax with respect to the product of queries and keys."""
    scale = math.prod([op.constant for op in score_ops if op.kind == "scale"])
    masks = tuple((i, 1) for i, op in enumerate(score_ops) if op.is_mask)
    slopes = tuple((slope(score_ops[: i + 1]), 1) for i, op in enumerate(score_ops) if op.kind == "tanh")
    expected: Polynomial = {(): scale}
    for factor in (WEIGHTS, {masks: 1.0}, {slopes: 1.0}, {((DOT, 1),): 1.0, ((ROW_DOT, 1), (ROW_SUM, -1)): -1.0}):
        expected = combine("mul", expected, factor)
    if polynomial.keys() != expected.keys():
        return False
    return all(math.isclose(c, expected[t], rel_tol=1e-6) for t, c in polynomial.items())
