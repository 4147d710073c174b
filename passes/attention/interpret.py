"""The symbolic result of one equation whose operands are scores, their maxima, or polynomials in what comes after.

Each function takes the environment, the equation and the symbolic values of its operands, and raises `PassError` with
the reason where no attention contains such an equation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.errors import PassError
from autoshard.passes.attention.candidate import (
    POLYNOMIAL,
    ROW_MAX,
    SCORES,
    SHIFTED_SCORES,
    AttentionCandidate,
    Env,
    OperandValues,
    SymbolicValue,
    UnorientedMask,
    is_wide_float,
)
from autoshard.passes.attention.facts import reshape_dims
from autoshard.passes.attention.masks import Band, Letters, Segments
from autoshard.passes.attention.polynomials import DOT, EXP, ROW_SUM, combine, slope, sum_over_keys
from autoshard.passes.attention.products import match_cotangent_product
from autoshard.transforms.attention_op import ScoreOp


def interpret_rearrangement(env: Env, eqn: jx.JaxprEqn, operand_values: OperandValues) -> SymbolicValue:
    """Transposes, broadcasts, and reshapes that add or drop dimensions of size 1."""
    m, (shape, after) = _only_value(eqn, operand_values), _shapes(eqn)
    op, p, old = eqn.primitive, eqn.params, m.letters
    if op is _prims.transpose_p:
        return replace(m, letters=tuple(old[d] for d in p["permutation"]))
    if op is _prims.broadcast_in_dim_p:
        letters: list[str | None] = [None] * len(after)
        for d, to in enumerate(p["broadcast_dimensions"]):
            letters[to] = old[d] if shape[d] == after[to] else None
        return replace(m, letters=tuple(letters))
    places = reshape_dims(shape, after)
    if places is None or (op is _prims.reshape_p and p["dimensions"] is not None):
        raise PassError(f"{op} from {list(shape)} to {list(after)} merges or splits dimensions")
    return replace(m, letters=tuple(old[d] if d is not None else None for d in places))


def interpret_cast(env: Env, eqn: jx.JaxprEqn, operand_values: OperandValues) -> SymbolicValue:
    """Casts between floats, and operations that return their operand."""
    dtype = jx.aval(eqn.outvars[0]).dtype
    if not is_wide_float(dtype):
        raise PassError(f"it is cast to {dtype}")
    return _only_value(eqn, operand_values)


def interpret_max(env: Env, eqn: jx.JaxprEqn, operand_values: OperandValues) -> SymbolicValue:
    """The maximum along the keys; the first one found says which dimension the keys' is."""
    m, (shape, _) = _only_value(eqn, operand_values), _shapes(eqn)
    axes = [int(d) for d in eqn.params["axes"]]
    reduced = [m.letters[d] for d in axes if m.letters[d] is not None]
    if m.stage != SCORES or len(reduced) != 1 or any(m.letters[d] is None and shape[d] > 1 for d in axes):
        raise PassError("a maximum is taken of something else than scores along the keys")
    (col,) = reduced
    candidate = m.candidate
    assert col is not None
    if candidate.key_position not in {"", col} or sum(col in dims for dims in candidate.operand_dims) != 1:
        raise PassError("its softmax is not along the keys")
    if not candidate.key_position:
        left, right = candidate.operand_dims
        keys, queries = (right, left) if col in right else (left, right)
        if set(keys) - set(queries) - {col}:
            raise PassError("its keys have a further dimension that the softmax is not taken along")
        candidate.key_position = col
    return SymbolicValue(candidate, ROW_MAX, _dropped(m.letters, axes), m.score_ops)


def interpret_exp(env: Env, eqn: jx.JaxprEqn, operand_values: OperandValues) -> SymbolicValue:
    """The exponential of scores minus their maximum: from here on values are polynomials."""
    m = _only_value(eqn, operand_values)
    if m.stage != SHIFTED_SCORES:
        raise PassError("an exponential is taken of something else than scores minus their maximum")
    candidate, score_ops = m.candidate, _oriented(m.candidate, m.score_ops)
    dtype = str(jx.aval(eqn.outvars[0]).dtype)
    if candidate.score_ops is not None and (candidate.score_ops, candidate.softmax_dtype) != (score_ops, dtype):
        raise PassError("two softmaxes are taken of its scores")
    candidate.score_ops, candidate.softmax_dtype = score_ops, dtype
    return SymbolicValue(candidate, POLYNOMIAL, m.letters, polynomial={((EXP, 1),): 1.0})


def _oriented(candidate: AttentionCandidate, score_ops: tuple[ScoreOp | UnorientedMask, ...]) -> tuple[ScoreOp, ...]:
    """``score_ops`` with all masks as of keys relative to queries, now that the keys' dimension is known."""
    oriented: list[ScoreOp] = []
    for op in score_ops:
        if isinstance(op, ScoreOp):
            oriented.append(op)
            continue
        mask = op.mask if op.mask.col == candidate.key_position else op.mask.transposed()
        if mask.col != candidate.key_position or candidate.query_position not in {"", mask.row}:
            raise PassError("its masks are of positions along several dimensions")
        oriented.append(_oriented_op(candidate, mask, op.constant))
    return tuple(oriented)


def _oriented_op(candidate: AttentionCandidate, mask: Band | Segments, fill: float) -> ScoreOp:
    """The score op of a mask of keys relative to queries, which says which dimension the queries' is."""
    candidate.query_position = mask.row
    if isinstance(mask, Band):
        return ScoreOp("band", fill, low=mask.low, high=mask.high)
    return ScoreOp("segments", fill, candidate.extra_index(mask.operand))


def interpret_sum(env: Env, eqn: jx.JaxprEqn, operand_values: OperandValues) -> SymbolicValue:
    """Sums along the keys, and along dimensions that the value does not depend on."""
    m, (shape, _) = _only_value(eqn, operand_values), _shapes(eqn)
    if m.stage != POLYNOMIAL:
        raise PassError("its scores are summed")
    polynomial, axes = m.polynomial, [int(d) for d in eqn.params["axes"]]
    for d in axes:
        if m.letters[d] is None:
            polynomial = {t: shape[d] * c for t, c in polynomial.items()}
        elif m.letters[d] == m.candidate.key_position:
            polynomial = sum_over_keys(polynomial, shape[d])
        elif shape[d] != 1:
            raise PassError(
                "its weights are summed along another dimension than the keys, as for the gradient of a bias"
            )
    return replace(m, letters=_dropped(m.letters, axes), polynomial=polynomial)


def interpret_binary(env: Env, eqn: jx.JaxprEqn, operand_values: OperandValues) -> SymbolicValue:
    """Arithmetic of two values: both symbolic, or one a number, a bias, or the product of cotangent and values."""
    x, y = operand_values
    m = x or y
    assert m is not None
    numbers = [None if g else env.facts.const(a) for g, a in zip(operand_values, eqn.invars, strict=True)]
    shape = jx.aval(eqn.outvars[0]).shape
    name = ARITHMETIC[eqn.primitive]
    if x is not None and y is not None:
        letters = _merged(x.letters, y.letters)
        if (x.stage, y.stage, name) == (SCORES, ROW_MAX, "sub") and x.score_ops == y.score_ops:
            return SymbolicValue(m.candidate, SHIFTED_SCORES, letters, x.score_ops)
        if (x.stage, y.stage) == (POLYNOMIAL, POLYNOMIAL):
            return SymbolicValue(m.candidate, POLYNOMIAL, letters, polynomial=combine(name, x.polynomial, y.polynomial))
        raise PassError(f"{name} combines its scores with what is computed from them")
    if len(m.letters) != len(shape):
        raise PassError(f"{name} broadcasts it to another rank")
    number = numbers[0] if y is not None else numbers[1]
    if m.stage == ROW_MAX and name == "max" and number == -math.inf:
        return m
    if m.stage == SCORES:
        return replace(m, score_ops=(*m.score_ops, _score_op(env, eqn, name, m, x is not None, number)))
    if m.stage != POLYNOMIAL:
        raise PassError(f"its row maximum enters {name}")
    if number is not None:
        if not math.isfinite(number):
            raise PassError(f"{name} combines its weights with {number}")
        own, other = m.polynomial, {(): number}
        letters = m.letters
    else:
        other_atom = eqn.invars[1] if x is not None else eqn.invars[0]
        own, other = m.polynomial, {((DOT, 1),): 1.0}
        letters = match_cotangent_product(env, m.candidate, other_atom, m.letters)
        letters = _merged(letters, m.letters)
    polynomial = combine(name, own, other) if x else combine(name, other, own)
    return SymbolicValue(m.candidate, POLYNOMIAL, letters, polynomial=polynomial)


def _score_op(env: Env, eqn: jx.JaxprEqn, name: str, m: SymbolicValue, first: bool, number: float | None) -> ScoreOp:
    """What arithmetic with one symbolic operand does to scores: ``number`` is the other operand, None for an array."""
    if number is not None and math.isfinite(number):
        if name == "mul":
            return ScoreOp("scale", number)
        if name == "div" and first and number:
            return ScoreOp("scale", 1 / number)
        if name == "add" or (name == "sub" and first):
            return ScoreOp("shift", number if name == "add" else -number)
    if name == "add" and number is None:
        return ScoreOp("bias", extra=_extra_index(env, m.candidate, eqn.invars[first], m.letters))
    raise PassError(f"{name} combines its scores with something that is no number and no bias")


def interpret_neg(env: Env, eqn: jx.JaxprEqn, operand_values: OperandValues) -> SymbolicValue:
    """Negation."""
    m = _only_value(eqn, operand_values)
    if m.stage == SCORES:
        return replace(m, score_ops=(*m.score_ops, ScoreOp("scale", -1.0)))
    if m.stage != POLYNOMIAL:
        raise PassError("its row maximum is negated")
    return replace(m, polynomial={t: -c for t, c in m.polynomial.items()})


def interpret_tanh(env: Env, eqn: jx.JaxprEqn, operand_values: OperandValues) -> SymbolicValue:
    """The hyperbolic tangent of a soft cap."""
    m = _only_value(eqn, operand_values)
    if m.stage != SCORES:
        raise PassError("a hyperbolic tangent is taken of something else than scores")
    return replace(m, score_ops=(*m.score_ops, ScoreOp("tanh")))


def interpret_one_minus_square(env: Env, eqn: jx.JaxprEqn, operand_values: OperandValues) -> SymbolicValue:
    """The derivative of a soft cap, from its result."""
    m = _only_value(eqn, operand_values)
    if m.stage != SCORES or m.score_ops[-1:] != (ScoreOp("tanh"),):
        raise PassError("one minus the square is taken of something else than a hyperbolic tangent")
    return SymbolicValue(m.candidate, POLYNOMIAL, m.letters, polynomial={((slope(m.score_ops), 1),): 1.0})


def interpret_power(env: Env, eqn: jx.JaxprEqn, operand_values: OperandValues) -> SymbolicValue:
    """Integer powers of row sums, as in the gradient of a quotient."""
    m = _only_value(eqn, operand_values)
    y = int(eqn.params.get("y", 2))
    if m.stage != POLYNOMIAL or len(m.polynomial) != 1:
        raise PassError("a power is taken of its scores, or of a sum of weights")
    ((term, c),) = m.polynomial.items()
    if any(a != ROW_SUM for a, _ in term) or not c:
        raise PassError("a power is taken of something else than row sums of exponentials")
    return replace(m, polynomial={tuple((a, n * y) for a, n in term if n * y): c**y})


def interpret_select(env: Env, eqn: jx.JaxprEqn, operand_values: OperandValues) -> SymbolicValue:
    """Masks: of scores by a constant, and of their gradients by zero where the scores were masked."""
    cases = operand_values[1:]
    if operand_values[0] is not None or len(cases) != 2 or all(cases):
        raise PassError("a select depends on its scores, or selects among them")
    kept = 0 if cases[0] is not None else 1
    m, fill = cases[kept], env.facts.const(eqn.invars[2 - kept])
    assert m is not None
    if fill is None:
        raise PassError("its masked scores are not replaced by one number")
    if m.stage not in {SCORES, POLYNOMIAL}:
        raise PassError("its row maximum is masked")
    masks = _mask_ops(env, m.candidate, eqn.invars[0], m.letters, kept == 1, fill)
    if m.stage == SCORES:
        return replace(m, score_ops=(*m.score_ops, *masks))
    applied = [replace(op, constant=0.0) if op.is_mask else None for op in m.candidate.score_ops or ()]
    if fill or any(mask not in applied for mask in masks):
        raise PassError("its weights are masked, not its scores")
    quantities = tuple((i, 1) for i, op in enumerate(applied) if op in masks)
    return replace(m, polynomial=combine("mul", m.polynomial, {quantities: 1.0}))


def _extra_index(env: Env, candidate: AttentionCandidate, atom: jx.Var | jx.Literal, letters: Letters) -> int:
    """The index of a mask or bias with these letters among the candidate's extras."""
    if not isinstance(atom, jx.Var) or not jx.is_array(atom):
        raise PassError("its mask or bias is no array")
    if len(jx.aval(atom).shape) != len(letters):
        raise PassError("its mask or bias has another rank than the scores")
    var, own = env.facts.source(atom, letters)
    if any(c is None and n != 1 for c, n in zip(own, jx.aval(var).shape, strict=True)):
        raise PassError("its mask or bias has a dimension that the scores do not have")
    return candidate.extra_index((var, "".join(c or "." for c in own)))


def _mask_ops(
    env: Env, candidate: AttentionCandidate, atom: jx.Var | jx.Literal, letters: Letters, keep_true: bool, fill: float
) -> tuple[ScoreOp | UnorientedMask, ...]:
    """The score ops that replace scores by ``fill``, keeping them where ``atom`` is True (or False)."""
    if not isinstance(atom, jx.Var) or jx.aval(atom).dtype != np.bool_:
        raise PassError("a select among its scores is by something that is no mask")
    known = [_fitting(env, candidate, m) for m in env.facts.mask(atom, letters, keep_true) or ()]
    masks = [m for m in known if m is not None]
    if not masks or len(masks) < len(known) or len({frozenset((m.row, m.col)) for m in masks}) > 1:
        return (ScoreOp("mask", fill, _extra_index(env, candidate, atom, letters), keep_true),)
    if not candidate.key_position:
        return tuple(UnorientedMask(m, fill) for m in masks)
    return tuple(_oriented_op(candidate, m, fill) for m in masks)


def _fitting(env: Env, candidate: AttentionCandidate, mask: Band | Segments) -> Band | Segments | None:
    """``mask`` as of keys relative to queries, as far as the candidate's positions are known; None where it is not."""
    if isinstance(mask, Segments):
        own = [set(dims) & {mask.row, mask.col} for dims in candidate.operand_dims]
        if not env.segments or sorted(map(len, own)) != [1, 1] or own[0] == own[1]:
            return None
    if {mask.row, mask.col} - set(candidate.score_dims) or mask.row == mask.col:
        return None
    for m in (mask, mask.transposed()):
        if candidate.key_position in {"", m.col} and candidate.query_position in {"", m.row}:
            return m
    return None


def _only_value(eqn: jx.JaxprEqn, operand_values: Sequence[SymbolicValue | None]) -> SymbolicValue:
    if len(operand_values) != 1 or operand_values[0] is None:
        raise PassError(f"{eqn.primitive.name} has several operands")
    return operand_values[0]


def _shapes(eqn: jx.JaxprEqn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return jx.aval(eqn.invars[0]).shape, jx.aval(eqn.outvars[0]).shape


def _dropped(letters: Letters, axes: Sequence[int]) -> Letters:
    return tuple(c for d, c in enumerate(letters) if d not in axes)


def _merged(x: Letters, y: Letters) -> Letters:
    if len(x) != len(y) or any(a != b and a is not None and b is not None for a, b in zip(x, y, strict=True)):
        raise PassError("two values with different dimensions are combined")
    return tuple(a or b for a, b in zip(x, y, strict=True))


ARITHMETIC: Mapping[jx.Primitive, str] = {
    _prims.add_jaxvals_p: "add",
    _prims.add_p: "add",
    _prims.div_p: "div",
    _prims.max_p: "max",
    _prims.mul_p: "mul",
    _prims.sub_p: "sub",
}
"""What an equation of two operands does, as `combine` calls it."""
INTERPRETERS: Mapping[jx.Primitive, Callable[[Env, jx.JaxprEqn, OperandValues], SymbolicValue]] = {
    **dict.fromkeys(ARITHMETIC, interpret_binary),
    _prims.broadcast_in_dim_p: interpret_rearrangement,
    _prims.convert_element_type_p: interpret_cast,
    _prims.copy_p: interpret_cast,
    _prims.exp_p: interpret_exp,
    _prims.integer_pow_p: interpret_power,
    _prims.name_p: interpret_cast,
    _prims.neg_p: interpret_neg,
    _prims.one_minus_square_p: interpret_one_minus_square,
    _prims.reduce_max_p: interpret_max,
    _prims.reduce_sum_p: interpret_sum,
    _prims.reshape_p: interpret_rearrangement,
    _prims.select_n_p: interpret_select,
    _prims.square_p: interpret_power,
    _prims.squeeze_p: interpret_rearrangement,
    _prims.stop_gradient_p: interpret_cast,
    _prims.tanh_p: interpret_tanh,
    _prims.transpose_p: interpret_rearrangement,
}
