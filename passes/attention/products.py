"""The products that an attention ends in, forward and backward, and the product of cotangent and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.errors import PassError
from autoshard.passes.attention.candidate import (
    POLYNOMIAL,
    SCORES,
    UNKNOWN_FACTOR,
    AttentionCandidate,
    Env,
    FinalProduct,
    OperandValues,
    is_unconstrained,
    is_wide_float,
    product_dims,
)
from autoshard.passes.attention.masks import Letters
from autoshard.passes.attention.polynomials import WEIGHTS, is_score_gradient


def match_cotangent_product(
    env: Env, candidate: AttentionCandidate, atom: jx.Var | jx.Literal, letters: Letters
) -> Letters:
    """The letters of ``atom``, which must be the product of cotangent and values; both are noted in the candidate.

    Args:
      letters: those of the value that it is combined with; None where that one is broadcast.

    Raises:
      PassError: it is not that product.
    """
    missing = [c for c in candidate.score_dims if c not in letters]
    holes = [d for d, c in enumerate(letters) if c is None]
    if len(missing) == len(holes) == 1:
        letters = tuple(c or missing[0] for c in letters)
    sizes = tuple(candidate.sizes.get(c or "", 0) for c in letters)
    whole = sorted(c or "" for c in letters) == sorted(candidate.score_dims) and jx.aval(atom).shape == sizes
    if not isinstance(atom, jx.Var) or not whole:
        raise PassError(UNKNOWN_FACTOR)
    found = letters
    eqn = env.facts.defs.get(atom)
    while eqn is not None and (
        eqn.primitive is _prims.transpose_p
        or eqn.primitive is _prims.copy_p
        or env.facts.rules.traits(eqn.primitive).casts
    ):
        (operand,) = eqn.invars
        if not isinstance(operand, jx.Var) or not is_wide_float(jx.aval(operand).dtype):
            break
        if eqn.primitive is _prims.transpose_p:
            permutation = eqn.params["permutation"]
            found = tuple(found[permutation.index(d)] for d in range(len(found)))
        eqn = env.facts.defs.get(operand)
    if eqn is None or eqn.primitive is not _prims.dot_general_p:
        raise PassError(UNKNOWN_FACTOR)
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    variables = all(isinstance(a, jx.Var) for a in eqn.invars)
    if len(left) != 1 or not variables or not _has_precision(eqn, candidate.value_precision):
        raise PassError("its weights are combined with a product that is not the one of cotangent and values")
    dims: list[list[str | None]] = [[None] * len(jx.aval(a).shape) for a in eqn.invars]
    order = [(0, d) for d in left_batch]
    order += [(0, d) for d in range(len(dims[0])) if d not in (*left, *left_batch)]
    order += [(1, d) for d in range(len(dims[1])) if d not in (*right, *right_batch)]
    for (operand, d), c in zip(order, found, strict=True):
        dims[operand][d] = c
    for i, j in zip(left_batch, right_batch, strict=True):
        dims[1][j] = dims[0][i]
    dims[0][left[0]] = dims[1][right[0]] = candidate.value_width
    texts = ["".join(c or "" for c in letters) for letters in dims]
    if (candidate.key_position in texts[0]) == (candidate.key_position in texts[1]):
        raise PassError("its weights are combined with a product that is not the one of cotangent and values")
    v = 0 if candidate.key_position in texts[0] else 1
    candidate.value_precision = [eqn.params["precision"]]
    _set_operand(env, candidate, "value", eqn.invars[v], texts[v])
    _set_operand(env, candidate, "cotangent", eqn.invars[1 - v], texts[1 - v])
    return letters


def _set_operand(env: Env, candidate: AttentionCandidate, what: str, atom: jx.Var | jx.Literal, letters: str) -> None:
    """Notes the ``value`` or ``cotangent`` of a candidate, of which there may be one only."""
    own = env.read(atom)
    if not isinstance(atom, jx.Var) or (own and (own.stage != SCORES or own.candidate is candidate)):
        raise PassError(f"its {what} depends on its scores")
    old = getattr(candidate, what)
    if old not in (None, (atom, letters)):
        raise PassError(f"its weights are used twice, with two {what}s")
    setattr(candidate, what, (atom, letters))


def interpret_product(env: Env, at: int, eqn: jx.JaxprEqn, operand_values: OperandValues) -> None:
    """Notes a product of something symbolic with an ordinary array: the output, or the gradient of query, key or value.

    Raises:
      PassError: it is none of these.
    """
    n = 0 if operand_values[0] is not None else 1
    m, other = operand_values[n], eqn.invars[1 - n]
    assert m is not None
    candidate, shape = m.candidate, jx.aval(eqn.invars[n]).shape
    if operand_values[1 - n] is not None or m.stage != POLYNOMIAL or not isinstance(other, jx.Var):
        raise PassError("its scores enter a product")
    weights, scores = m.polynomial == WEIGHTS, is_score_gradient(m.polynomial, candidate.score_ops or ())
    precision = [candidate.eqn.params["precision"]] if scores else candidate.value_precision
    if None in m.letters or set(m.letters) != set(candidate.score_dims) or not _has_precision(eqn, precision):
        raise PassError(f"a product of its weights of shape {list(shape)} lacks a dimension, or has another precision")
    contracted, batch = eqn.params["dimension_numbers"]
    theirs: list[str | None] = [None] * len(jx.aval(other).shape)
    for i, j in (*zip(contracted[n], contracted[1 - n], strict=True), *zip(batch[n], batch[1 - n], strict=True)):
        theirs[j] = m.letters[i]
    free = [d for d, c in enumerate(theirs) if c is None]
    over = {m.letters[d] for d in contracted[n]}
    if len(free) != 1:
        raise PassError("its weights are multiplied by an array with more or fewer than one feature dimension")
    if not weights and not scores:
        raise PassError("what enters the product is neither the softmax nor its gradient")
    theirs[free[0]] = candidate.value_width if weights else candidate.head_width
    letters = "".join(c or "" for c in theirs)
    own = list(map(str, m.letters))
    result = "".join(product_dims([own, list(letters)] if n == 0 else [list(letters), own], *contracted, *batch))
    if weights:
        role, what = ("out", "value") if candidate.key_position in over else ("dv", "cotangent")
        if role == "out" and over != {candidate.key_position}:
            raise PassError("the product with the values contracts more than the keys")
        _set_operand(env, candidate, what, other, letters)
        candidate.value_precision = [eqn.params["precision"]]
        candidate.weight_dtype = candidate.weight_dtype or str(jx.aval(eqn.invars[n]).dtype)
    else:
        role, (var, dims) = ("dq", candidate.key) if candidate.key_position in over else ("dk", candidate.query)
        if (other, letters) != (var, dims):
            raise PassError("the gradient of its scores is multiplied by something else than its queries or keys")
        candidate.weight_dtype = candidate.weight_dtype or str(jx.aval(var).dtype)
    if role in candidate.products:
        raise PassError("its weights are used twice")
    candidate.products[role] = FinalProduct(at, eqn, result)


def _has_precision(eqn: jx.JaxprEqn, precision: Sequence[Any]) -> bool:
    """Whether a product has the one precision in ``precision``, where that is known, and no sharding of its own."""
    return is_unconstrained(eqn) and precision in ([], [eqn.params["precision"]])
