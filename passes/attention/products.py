"""products: those that an attention ends in, forward and backward, and of cotangents with values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.errors import PassError
from autoshard.passes.attention.facts import Letters
from autoshard.passes.attention.polynomials import WEIGHTS, is_cotangent
from autoshard.passes.attention.site import (
    POLYNOMIAL,
    SCORES,
    STRANGE,
    Given,
    Known,
    Role,
    Site,
    is_float,
    is_free,
    product_letters,
)

_PASSED_ON = (_prims.convert_element_type_p, _prims.copy_p, _prims.transpose_p)
"""What may stand between the product of cotangent and values and what reads it."""


def backwards(known: Known, site: Site, atom: jx.Var | jx.Literal, letters: Letters) -> Letters:
    """Takes ``atom`` for the product of cotangent and values, if it is one; returns its letters."""
    missing = [c for c in site.cells if c not in letters]
    holes = [d for d, c in enumerate(letters) if c is None]
    if len(missing) == len(holes) == 1:
        letters = tuple(c or missing[0] for c in letters)
    sizes = tuple(site.sizes.get(c or "", 0) for c in letters)
    whole = sorted(c or "" for c in letters) == sorted(site.cells) and jx.aval(atom).shape == sizes
    if not isinstance(atom, jx.Var) or not whole:
        raise PassError(STRANGE)
    found = letters
    eqn = known.facts.defs.get(atom)
    while eqn is not None and eqn.primitive in _PASSED_ON:
        (operand,) = eqn.invars
        if not isinstance(operand, jx.Var) or not is_float(jx.aval(operand).dtype):
            break
        if eqn.primitive is _prims.transpose_p:
            permutation = eqn.params["permutation"]
            found = tuple(found[permutation.index(d)] for d in range(len(found)))
        eqn = known.facts.defs.get(operand)
    if eqn is None or eqn.primitive is not _prims.dot_general_p:
        raise PassError(STRANGE)
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    if len(left) != 1 or not _like(eqn, site.mixing) or not all(isinstance(a, jx.Var) for a in eqn.invars):
        raise PassError("the cotangent's product with the values is none that is known")
    sides: list[list[str | None]] = [[None] * len(jx.aval(a).shape) for a in eqn.invars]
    order = [(0, d) for d in left_batch]
    order += [(0, d) for d in range(len(sides[0])) if d not in (*left, *left_batch)]
    order += [(1, d) for d in range(len(sides[1])) if d not in (*right, *right_batch)]
    for (side, d), c in zip(order, found, strict=True):
        sides[side][d] = c
    for i, j in zip(left_batch, right_batch, strict=True):
        sides[1][j] = sides[0][i]
    sides[0][left[0]] = sides[1][right[0]] = site.width
    texts = ["".join(c or "" for c in side) for side in sides]
    if (site.col in texts[0]) == (site.col in texts[1]):
        raise PassError("the cotangent's product with the values is none that is known")
    v = 0 if site.col in texts[0] else 1
    site.mixing = [eqn.params["precision"]]
    _operand(known, site, "value", eqn.invars[v], texts[v])
    _operand(known, site, "cotangent", eqn.invars[1 - v], texts[1 - v])
    return letters


def _operand(known: Known, site: Site, what: str, atom: jx.Var | jx.Literal, letters: str) -> None:
    own = known.meaning(atom)
    if not isinstance(atom, jx.Var) or (own and (own.stage != SCORES or own.site is site)):
        raise PassError(f"its {what} comes of scores")
    old = getattr(site, what)
    if old not in (None, (atom, letters)):
        raise PassError(f"it meets two {what}s: its weights are used twice")
    setattr(site, what, (atom, letters))


def product(known: Known, at: int, eqn: jx.JaxprEqn, given: Given) -> None:
    """The product of what came of the scores with something else: one of the roles, or no attention."""
    n = 0 if given[0] is not None else 1
    m, other = given[n], eqn.invars[1 - n]
    assert m is not None
    site, shape = m.site, jx.aval(eqn.invars[n]).shape
    if given[1 - n] is not None or m.stage != POLYNOMIAL or not isinstance(other, jx.Var):
        raise PassError("a product of scores")
    weights, scores = m.terms == WEIGHTS, is_cotangent(m.terms, site.steps or ())
    precision = [site.eqn.params["precision"]] if scores else site.mixing
    if None in m.letters or set(m.letters) != set(site.cells) or not _like(eqn, precision):
        raise PassError(f"a product of what lies as {list(shape)}, or of another precision")
    contracted, batch = eqn.params["dimension_numbers"]
    theirs: list[str | None] = [None] * len(jx.aval(other).shape)
    for i, j in (*zip(contracted[n], contracted[1 - n], strict=True), *zip(batch[n], batch[1 - n], strict=True)):
        theirs[j] = m.letters[i]
    free = [d for d, c in enumerate(theirs) if c is None]
    over = {m.letters[d] for d in contracted[n]}
    if len(free) != 1:
        raise PassError("it meets something with more or fewer than one width")
    if not weights and not scores:
        raise PassError("neither softmax nor its cotangent is what enters the product")
    theirs[free[0]] = site.width if weights else site.within
    letters = "".join(c or "" for c in theirs)
    sides = [list(map(str, m.letters)), list(letters)] if n == 0 else [list(letters), list(map(str, m.letters))]
    result = "".join(product_letters(sides, *contracted, *batch))
    if weights:
        role, what = ("out", "value") if site.col in over else ("dv", "cotangent")
        if role == "out" and over != {site.col}:
            raise PassError("its weights are summed over more than the keys")
        _operand(known, site, what, other, letters)
        site.mixing = [eqn.params["precision"]]
        site.weights = site.weights or str(jx.aval(eqn.invars[n]).dtype)
    else:
        role, (var, own) = ("dq", site.key) if site.col in over else ("dk", site.query)
        if (other, letters) != (var, own):
            raise PassError("the scores' cotangent meets something else than the queries and keys")
        site.weights = site.weights or str(jx.aval(var).dtype)
    if role in site.roles:
        raise PassError("its weights are used twice")
    site.roles[role] = Role(at, eqn, result)


def _like(eqn: jx.JaxprEqn, precision: Sequence[Any]) -> bool:
    """Whether a product is of that ``precision``, where one is known."""
    return is_free(eqn) and precision in ([], [eqn.params["precision"]])
