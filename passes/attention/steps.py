"""steps: the meaning of what an equation makes of scores, maxima, exponentials and what came of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.errors import PassError
from autoshard.passes.attention.facts import Band, Letters, outside, reshaped
from autoshard.passes.attention.polynomials import D, E, Z, combine, row_sum
from autoshard.passes.attention.products import backwards
from autoshard.passes.attention.site import GAP, PEAK, POLYNOMIAL, SCORES, Given, Known, Meaning, Site, is_float
from autoshard.transforms.attention_op import ScoreOp


def moved(known: Known, eqn: jx.JaxprEqn, given: Given) -> Meaning:
    m, (shape, after) = _only(eqn, given), _shapes(eqn)
    op, p, old = eqn.primitive, eqn.params, m.letters
    if op is _prims.transpose_p:
        return replace(m, letters=tuple(old[d] for d in p["permutation"]))
    if op is _prims.broadcast_in_dim_p:
        letters: list[str | None] = [None] * len(after)
        for d, to in enumerate(p["broadcast_dimensions"]):
            letters[to] = old[d] if shape[d] == after[to] else None
        return replace(m, letters=tuple(letters))
    places = reshaped(shape, after)
    if places is None or (op is _prims.reshape_p and p["dimensions"] is not None):
        raise PassError(f"{op} from {list(shape)} to {list(after)} merges dimensions")
    return replace(m, letters=tuple(old[d] if d is not None else None for d in places))


def same(known: Known, eqn: jx.JaxprEqn, given: Given) -> Meaning:
    dtype = jx.aval(eqn.outvars[0]).dtype
    if not is_float(dtype):
        raise PassError(f"it is made {dtype}")
    return _only(eqn, given)


def highest(known: Known, eqn: jx.JaxprEqn, given: Given) -> Meaning:
    m, (shape, _) = _only(eqn, given), _shapes(eqn)
    axes = [int(d) for d in eqn.params["axes"]]
    reduced = [m.letters[d] for d in axes if m.letters[d] is not None]
    if m.stage != SCORES or len(reduced) != 1 or any(m.letters[d] is None and shape[d] > 1 for d in axes):
        raise PassError("a maximum of something else than scores along the keys")
    (col,) = reduced
    site = m.site
    assert col is not None
    if site.col not in {"", col} or sum(col in side for side in site.sides) != 1:
        raise PassError("the softmax is not along the keys")
    if not site.col:
        other = site.sides[0] if col in site.sides[1] else site.sides[1]
        if set(site.sides[col in site.sides[1]]) - set(other) - {col}:
            raise PassError("its keys have a further dimension that the softmax does not go along")
        site.col = col
    return Meaning(site, PEAK, _dropped(m.letters, axes), m.steps)


def exponential(known: Known, eqn: jx.JaxprEqn, given: Given) -> Meaning:
    m = _only(eqn, given)
    if m.stage != GAP:
        raise PassError("an exponential of something else than scores less their maximum")
    site, steps = m.site, _settle(known, m.site, m.steps)
    dtype = str(jx.aval(eqn.outvars[0]).dtype)
    if site.steps is not None and (site.steps, site.dtype) != (steps, dtype):
        raise PassError("two softmaxes are taken of its scores")
    site.steps, site.dtype = steps, dtype
    return Meaning(site, POLYNOMIAL, m.letters, terms={((E, 1),): 1.0})


def _settle(known: Known, site: Site, steps: tuple[ScoreOp, ...]) -> tuple[ScoreOp, ...]:
    """``steps`` with bands turned the way of queries and keys, now that these are told apart."""
    done: list[ScoreOp] = []
    for step in steps:
        if step.kind in _KINDS:
            done.append(step)
            continue
        band = Band(step.kind[0], step.kind[1], step.low, step.high)
        band = band if band.col == site.col else band.turned()
        if band.col != site.col or site.row not in {"", band.row}:
            raise PassError("its masks are of positions in several dimensions")
        site.row = band.row
        done.append(ScoreOp("band", step.constant, low=band.low, high=band.high))
    return tuple(done)


def summed(known: Known, eqn: jx.JaxprEqn, given: Given) -> Meaning:
    m, (shape, _) = _only(eqn, given), _shapes(eqn)
    if m.stage != POLYNOMIAL:
        raise PassError("a sum of scores")
    terms, axes = m.terms, [int(d) for d in eqn.params["axes"]]
    for d in axes:
        if m.letters[d] is None:
            terms = {t: shape[d] * c for t, c in terms.items()}
        elif m.letters[d] == m.site.col:
            terms = row_sum(terms, shape[d])
        elif shape[d] != 1:
            raise PassError("a sum along another dimension than the keys', as for the gradient of a bias")
    return replace(m, letters=_dropped(m.letters, axes), terms=terms)


def binary(known: Known, eqn: jx.JaxprEqn, given: Given) -> Meaning:
    x, y = given
    m = x or y
    assert m is not None
    numbers = [None if g else known.facts.const(a) for g, a in zip(given, eqn.invars, strict=True)]
    shape = jx.aval(eqn.outvars[0]).shape
    name = ARITHMETIC[eqn.primitive]
    if x is not None and y is not None:
        letters = _merged(x.letters, y.letters)
        if (x.stage, y.stage, name) == (SCORES, PEAK, "sub") and x.steps == y.steps:
            return Meaning(m.site, GAP, letters, x.steps)
        if (x.stage, y.stage) == (POLYNOMIAL, POLYNOMIAL):
            return Meaning(m.site, POLYNOMIAL, letters, terms=combine(name, x.terms, y.terms))
        raise PassError(f"{name} of scores and what came of them")
    if len(m.letters) != len(shape):
        raise PassError(f"{name} stretches it")
    number = numbers[0] if y is not None else numbers[1]
    if m.stage == PEAK and name == "max" and number == -math.inf:
        return m
    if m.stage == SCORES:
        return replace(m, steps=(*m.steps, _step(known, eqn, name, m, x is not None, number)))
    if m.stage != POLYNOMIAL:
        raise PassError(f"{name} of a maximum")
    if number is not None:
        if not math.isfinite(number):
            raise PassError(f"{name} of weights and {number}")
        own, other = m.terms, {(): number}
        letters = m.letters
    else:
        other_atom = eqn.invars[1] if x is not None else eqn.invars[0]
        own, other = m.terms, {((D, 1),): 1.0}
        letters = backwards(known, m.site, other_atom, m.letters)
        letters = _merged(letters, m.letters)
    return Meaning(m.site, POLYNOMIAL, letters, terms=combine(name, own, other) if x else combine(name, other, own))


def _step(known: Known, eqn: jx.JaxprEqn, name: str, m: Meaning, first: bool, number: float | None) -> ScoreOp:
    """What a binary equation does to scores."""
    if number is not None and math.isfinite(number):
        if name == "mul":
            return ScoreOp("scale", number)
        if name == "div" and first and number:
            return ScoreOp("scale", 1 / number)
        if name == "add" or (name == "sub" and first):
            return ScoreOp("shift", number if name == "add" else -number)
    if name == "add" and number is None:
        return ScoreOp("bias", extra=_extra(known, m.site, eqn.invars[first], m.letters))
    raise PassError(f"{name} of scores and something that is no number and no bias")


def negative(known: Known, eqn: jx.JaxprEqn, given: Given) -> Meaning:
    m = _only(eqn, given)
    if m.stage == SCORES:
        return replace(m, steps=(*m.steps, ScoreOp("scale", -1.0)))
    if m.stage != POLYNOMIAL:
        raise PassError("the negative of a maximum")
    return replace(m, terms={t: -c for t, c in m.terms.items()})


def power(known: Known, eqn: jx.JaxprEqn, given: Given) -> Meaning:
    m = _only(eqn, given)
    y = int(eqn.params.get("y", 2))
    if m.stage != POLYNOMIAL or len(m.terms) != 1:
        raise PassError("a power of scores")
    ((term, c),) = m.terms.items()
    if any(a != Z for a, _ in term) or not c:
        raise PassError("a power of more than sums of exponentials")
    return replace(m, terms={tuple((a, n * y) for a, n in term if n * y): c**y})


def chosen(known: Known, eqn: jx.JaxprEqn, given: Given) -> Meaning:
    cases = given[1:]
    if given[0] is not None or len(cases) != 2 or all(cases):
        raise PassError("it chooses by scores, or among them")
    kept = 0 if cases[0] is not None else 1
    m, fill = cases[kept], known.facts.const(eqn.invars[2 - kept])
    assert m is not None
    if fill is None:
        raise PassError("what stands where scores are masked is not one number")
    if m.stage not in {SCORES, POLYNOMIAL}:
        raise PassError("a choice of maxima")
    step = _mask(known, m.site, eqn.invars[0], m.letters, kept == 1, fill)
    if m.stage == SCORES:
        return replace(m, steps=(*m.steps, step))
    steps = m.site.steps or ()
    same = [i for i, s in enumerate(steps) if s.is_mask and replace(s, constant=0.0) == replace(step, constant=0.0)]
    if fill or not same:
        raise PassError("weights are masked, not scores")
    return replace(m, terms=combine("mul", m.terms, {((i, 1),): 1.0 for i in same[:1]}))


def _extra(known: Known, site: Site, atom: jx.Var | jx.Literal, letters: Letters) -> int:
    """The number of an operand among the site's extras."""
    if not isinstance(atom, jx.Var) or not jx.is_array(atom):
        raise PassError("a mask or bias is no array")
    if len(jx.aval(atom).shape) != len(letters):
        raise PassError("a mask or bias has another rank than the scores")
    var, own = known.facts.source(atom, letters)
    if any(c is None and n != 1 for c, n in zip(own, jx.aval(var).shape, strict=True)):
        raise PassError("a mask or bias lies otherwise than the scores")
    entry = var, "".join(c or "." for c in own)
    if entry not in site.extras:
        site.extras.append(entry)
    return site.extras.index(entry)


def _mask(
    known: Known, site: Site, atom: jx.Var | jx.Literal, letters: Letters, positive: bool, fill: float
) -> ScoreOp:
    """The step that keeps a score where ``atom`` is ``positive``."""
    if not isinstance(atom, jx.Var) or jx.aval(atom).dtype != np.bool_:
        raise PassError("it chooses by something that is no mask")
    band = known.facts.band(atom, letters)
    if band is not None and not positive:
        band = outside(band)
    if band is None or {band.row, band.col} - set(site.cells) or band.row == band.col:
        return ScoreOp("mask", fill, _extra(known, site, atom, letters), positive)
    if (site.col and band.col != site.col) or (site.row and band.row != site.row):
        band = band.turned()
    if (site.col and band.col != site.col) or (site.row and band.row != site.row):
        return ScoreOp("mask", fill, _extra(known, site, atom, letters), positive)
    if not site.col:  # keys and queries are told apart by which is reduced: remember the pair until then
        return ScoreOp(f"{band.row}{band.col}", fill, low=band.low, high=band.high)
    site.row = band.row
    return ScoreOp("band", fill, low=band.low, high=band.high)


_KINDS = frozenset({"scale", "shift", "bias", "mask", "band"})


def _only(eqn: jx.JaxprEqn, given: Sequence[Meaning | None]) -> Meaning:
    if len(given) != 1 or given[0] is None:
        raise PassError(f"{eqn.primitive.name} of several values")
    return given[0]


def _shapes(eqn: jx.JaxprEqn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return jx.aval(eqn.invars[0]).shape, jx.aval(eqn.outvars[0]).shape


def _dropped(letters: Letters, axes: Sequence[int]) -> Letters:
    return tuple(c for d, c in enumerate(letters) if d not in axes)


def _merged(x: Letters, y: Letters) -> Letters:
    if len(x) != len(y) or any(a != b and a is not None and b is not None for a, b in zip(x, y, strict=True)):
        raise PassError("two values that lie differently are combined")
    return tuple(a or b for a, b in zip(x, y, strict=True))


ARITHMETIC: Mapping[jx.Primitive, str] = {
    _prims.add_jaxvals_p: "add",
    _prims.add_p: "add",
    _prims.div_p: "div",
    _prims.max_p: "max",
    _prims.mul_p: "mul",
    _prims.sub_p: "sub",
}
"""What an equation of two operands does, in the words of `polynomials`."""
READERS: Mapping[jx.Primitive, Callable[[Known, jx.JaxprEqn, Given], Meaning]] = {
    **dict.fromkeys(ARITHMETIC, binary),
    _prims.broadcast_in_dim_p: moved,
    _prims.convert_element_type_p: same,
    _prims.copy_p: same,
    _prims.exp_p: exponential,
    _prims.integer_pow_p: power,
    _prims.name_p: same,
    _prims.neg_p: negative,
    _prims.reduce_max_p: highest,
    _prims.reduce_sum_p: summed,
    _prims.reshape_p: moved,
    _prims.select_n_p: chosen,
    _prims.square_p: power,
    _prims.squeeze_p: moved,
    _prims.stop_gradient_p: same,
    _prims.transpose_p: moved,
}
