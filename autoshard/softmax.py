"""softmax: reads what the equations around a softmax compute, and finds the attentions among them.

Equations are not compared with patterns: JAX writes one softmax, and above all its gradient, in many ways. Every value
that stems from the product of queries and keys is given its meaning instead. On the way to the exponential that is the
list of steps taken; from there on a polynomial, with integer exponents, in

    e   the exponentials                z   their sums, a row          keep(i)   1 where step i keeps a score
    d   cotangent times values          t   the sums of e d, a row

The softmax is ``e/z`` however it came about, and the scores' cotangent is ``scale (e d/z - e t/z^2)`` where all steps
keep. Only a product of exactly these with the values, the cotangent, the keys or the queries is an attention's.
Whatever has no meaning here, or is used for anything else, refuses the attention it belongs to, with the reason.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

from autoshard import jaxpr as jx
from autoshard.attention import Form, Step
from autoshard.errors import PassError
from autoshard.facts import Above, Band, Facts, Letters, outside, reshaped
from autoshard.terms import WEIGHTS, D, E, Term, Terms, Z, combine, is_cotangent, row_sum

SCORES, PEAK, GAP, POLYNOMIAL = "scores", "peak", "gap", "polynomial"
_STRANGE = "it is combined with something that is no number and no cotangent of it, as by dropout"


@dataclass(frozen=True)
class Meaning:
    """What a variable holds."""

    site: Site
    stage: str
    letters: Letters
    steps: tuple[Step, ...] = ()
    terms: Terms = field(default_factory=dict[Term, float])


@dataclass
class Role:
    """One of the products that an attention ends in."""

    at: int
    eqn: jx.JaxprEqn
    letters: str


@dataclass(eq=False)
class Site:
    """A product that may be one of queries and keys, and what is known of it."""

    eqn: jx.JaxprEqn
    sides: tuple[str, str]
    """Letters of its operands."""
    cells: str
    """Letters of its result."""
    within: str
    width: str
    col: str = ""
    row: str = ""
    steps: tuple[Step, ...] | None = None
    """Known once the exponential is taken."""
    dtype: str = ""
    extras: list[tuple[jx.Var, str]] = field(default_factory=list[tuple[jx.Var, str]])
    value: tuple[jx.Var, str] | None = None
    cotangent: tuple[jx.Var, str] | None = None
    weights: str = ""
    mixing: list[Any] = field(default_factory=list[Any])
    """The precision of the products with values, once one is known."""
    roles: dict[str, Role] = field(default_factory=dict[str, Role])
    reason: str = ""
    where: str = ""

    @property
    def rows(self) -> str:
        return self.cells.replace(self.col, "")

    @property
    def batched(self) -> bool:
        return bool(set(self.sides[0]) & set(self.sides[1]) & set(self.cells))

    @property
    def sizes(self) -> dict[str, int]:
        """Of each letter of the scores."""
        return dict(zip(self.cells, jx.aval(self.eqn.outvars[0]).shape, strict=True))

    @property
    def query(self) -> tuple[jx.Var, str]:
        return self._side(0)

    @property
    def key(self) -> tuple[jx.Var, str]:
        return self._side(1)

    def _side(self, which: int) -> tuple[jx.Var, str]:
        n = which if self.col in self.sides[1] else 1 - which
        operand = self.eqn.invars[n]
        assert isinstance(operand, jx.Var)
        return operand, self.sides[n]

    def refuse(self, reason: str, where: str) -> None:
        self.reason, self.where = self.reason or reason, self.where or where

    def form(self) -> Form:
        """Raises `PassError` where what was found is no whole attention."""
        if self.value is None:
            raise PassError("its values are not known")
        (_, query), (_, key), (_, value) = self.query, self.key, self.value
        free = [c for c in self.rows if c in query and c not in key + value]
        sizes = dict(zip(query, jx.aval(self.query[0]).shape, strict=True))
        length = jx.aval(self.key[0]).shape[key.index(self.col)]
        if set(key) - set(self.cells) - {self.within} or (self.row and self.row not in free) or not free:
            raise PassError("queries have no position of their own")
        row = self.row or next((c for c in reversed(free) if sizes[c] == length), free[-1])
        forward = self.roles.get("out")
        if forward is not None:
            out, result = forward.letters, str(jx.aval(forward.eqn.outvars[0]).dtype)
        elif self.cotangent is not None:
            out, result = self.cotangent[1], str(jx.aval(self.cotangent[0]).dtype)
        else:
            raise PassError("it is not multiplied by values")
        if set(out) != set(self.rows) | {self.width} or set(value) - set(self.rows) != {self.col, self.width}:
            raise PassError("its values lie otherwise than its scores")
        form = Form(
            query,
            key,
            value,
            out,
            self.rows,
            row,
            self.col,
            self.steps or (),
            tuple(letters for _, letters in self.extras),
            str(jx.aval(self.eqn.outvars[0]).dtype),
            self.dtype,
            self.weights,
            result,
            self.eqn.params["precision"],
            self.mixing[0] if self.mixing else None,
        )
        if len(self.roles) == (forward is not None):
            return form
        if self.cotangent is None or set(self.cotangent[1]) != set(out):
            raise PassError("the cotangent lies otherwise than the result")
        own = {"dq": self.query, "dk": self.key, "dv": self.value}
        found = [
            (self.roles[n].letters, str(jx.aval(self.roles[n].eqn.outvars[0]).dtype))
            if n in self.roles
            else (letters, str(jx.aval(x).dtype))
            for n, (x, letters) in own.items()
        ]
        if any(set(to) != set(letters) for (to, _), (_, letters) in zip(found, own.values(), strict=True)):
            raise PassError("a cotangent lies otherwise than what it is of")
        grads, dtypes = zip(*found, strict=True)
        return replace(form, cotangent=self.cotangent[1], grads=grads, dtypes=dtypes)


class Reader:
    """Reads one jaxpr, equation by equation."""

    def __init__(self, jaxpr: jx.Jaxpr, above: Above | None = None) -> None:
        self.facts = Facts(jaxpr, above)
        self.meanings: dict[jx.Var, Meaning] = {}
        self.sites: list[Site] = []
        for at, eqn in enumerate(jaxpr.eqns):
            given = self.given(eqn)
            met = list(dict.fromkeys(m.site for m in given if m))
            if not met:
                if eqn.primitive.name == "dot_general":
                    self.begin(eqn)
                continue
            try:
                if len(met) > 1:
                    raise PassError(f"{eqn.primitive.name} brings two of them together")
                self.follow(at, eqn, given)
            except PassError as e:
                for site in met:
                    site.refuse(str(e), jx.source(eqn))
        for atom in jaxpr.outvars:
            m = self.meaning(atom)
            if m is not None:
                m.site.refuse(
                    "its scores or weights leave the place where they are made, as for a backward part "
                    "elsewhere, which must make them again (recompute:full)",
                    jx.source(m.site.eqn),
                )

    def attentions(self) -> list[tuple[Site, Form]]:
        """Those among the equations of this jaxpr itself."""
        found: list[tuple[Site, Form]] = []
        for site in self.sites:
            if site.steps is not None and site.roles and not site.reason:
                try:
                    found.append((site, site.form()))
                except PassError as e:
                    site.refuse(str(e), jx.source(site.eqn))
        return found

    def refused(self) -> list[Site]:
        """What looked like an attention and is left alone: softmaxes over a batch, and those that met values."""
        self.attentions()
        return [s for s in self.sites if s.steps is not None and s.reason and (s.batched or s.roles)]

    def meaning(self, atom: jx.Var | jx.Literal) -> Meaning | None:
        return None if isinstance(atom, jx.Literal) else self.meanings.get(atom)

    def given(self, eqn: jx.JaxprEqn) -> list[Meaning | None]:
        """What is known of the operands. Any product may be one of queries and keys, until it is used otherwise."""
        found = [self.meaning(a) for a in eqn.invars]
        product = eqn.primitive.name == "dot_general"
        further = {m.site for m in found if m and m.stage != SCORES}
        if not product and not further:
            return found
        for m in found:
            if m and m.stage == SCORES and m.site not in further:
                m.site.refuse(f"its scores enter {eqn.primitive.name}", jx.source(eqn))
        return [m if m and (m.stage != SCORES or m.site in further) else None for m in found]

    def begin(self, eqn: jx.JaxprEqn) -> None:
        (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
        operands = eqn.invars
        plain = all(isinstance(a, jx.Var) and _is_float(jx.aval(a).dtype) for a in (*operands, *eqn.outvars))
        if len(left) != 1 or not plain or operands[0] is operands[1] or not _free(eqn):
            return
        ranks = [len(jx.aval(a).shape) for a in operands]
        names = iter(string.ascii_letters)
        if sum(ranks) + 2 > len(string.ascii_letters):
            return
        sides = [[next(names) for _ in range(n)] for n in ranks]
        for i, j in (*zip(left, right, strict=True), *zip(left_batch, right_batch, strict=True)):
            sides[1][j] = sides[0][i]
        cells = _product(sides, left, right, left_batch, right_batch)
        site = Site(eqn, ("".join(sides[0]), "".join(sides[1])), "".join(cells), sides[0][left[0]], next(names))
        self.sites.append(site)
        self.meanings[eqn.outvars[0]] = Meaning(site, SCORES, tuple(cells))

    def follow(self, at: int, eqn: jx.JaxprEqn, given: Sequence[Meaning | None]) -> None:
        name = eqn.primitive.name
        if name == "dot_general":
            self.product(at, eqn, given)
            return
        if name not in _READERS or len(eqn.outvars) != 1:
            raise PassError(f"{name} is no part of an attention")
        made = _READERS[name](self, eqn, given)
        shape, sizes = jx.aval(eqn.outvars[0]).shape, made.site.sizes
        if any(c is not None and n != sizes[c] for c, n in zip(made.letters, shape, strict=True)):
            raise PassError(f"{name} stretches it to {list(shape)}")
        self.meanings[eqn.outvars[0]] = made

    def extra(self, site: Site, atom: jx.Var | jx.Literal, letters: Letters) -> int:
        """The number of an operand among the site's extras."""
        if not isinstance(atom, jx.Var) or not jx.is_array(atom):
            raise PassError("a mask or bias is no array")
        if len(jx.aval(atom).shape) != len(letters):
            raise PassError("a mask or bias has another rank than the scores")
        var, own = self.facts.source(atom, letters)
        if any(c is None and n != 1 for c, n in zip(own, jx.aval(var).shape, strict=True)):
            raise PassError("a mask or bias lies otherwise than the scores")
        entry = var, "".join(c or "." for c in own)
        if entry not in site.extras:
            site.extras.append(entry)
        return site.extras.index(entry)

    def mask(self, site: Site, atom: jx.Var | jx.Literal, letters: Letters, positive: bool, fill: float) -> Step:
        """The step that keeps a score where ``atom`` is ``positive``."""
        if not isinstance(atom, jx.Var) or jx.aval(atom).dtype != np.bool_:
            raise PassError("it chooses by something that is no mask")
        band = self.facts.band(atom, letters)
        if band is not None and not positive:
            band = outside(band)
        if band is None or {band.row, band.col} - set(site.cells) or band.row == band.col:
            return Step("keep", fill, self.extra(site, atom, letters), positive)
        if (site.col and band.col != site.col) or (site.row and band.row != site.row):
            band = band.turned()
        if (site.col and band.col != site.col) or (site.row and band.row != site.row):
            return Step("keep", fill, self.extra(site, atom, letters), positive)
        if not site.col:  # keys and queries are told apart by which is reduced: remember the pair until then
            return Step(f"{band.row}{band.col}", fill, low=band.low, high=band.high)
        site.row = band.row
        return Step("band", fill, low=band.low, high=band.high)

    # Dimensions.

    def moved(self, eqn: jx.JaxprEqn, given: Sequence[Meaning | None]) -> Meaning:
        m, (shape, after) = _only(eqn, given), _shapes(eqn)
        name, p, old = eqn.primitive.name, eqn.params, m.letters
        if name == "transpose":
            return replace(m, letters=tuple(old[d] for d in p["permutation"]))
        if name == "broadcast_in_dim":
            letters: list[str | None] = [None] * len(after)
            for d, to in enumerate(p["broadcast_dimensions"]):
                letters[to] = old[d] if shape[d] == after[to] else None
            return replace(m, letters=tuple(letters))
        places = reshaped(shape, after)
        if places is None or (name == "reshape" and p["dimensions"] is not None):
            raise PassError(f"{name} from {list(shape)} to {list(after)} merges dimensions")
        return replace(m, letters=tuple(old[d] if d is not None else None for d in places))

    def same(self, eqn: jx.JaxprEqn, given: Sequence[Meaning | None]) -> Meaning:
        dtype = jx.aval(eqn.outvars[0]).dtype
        if not _is_float(dtype):
            raise PassError(f"it is made {dtype}")
        return _only(eqn, given)

    # From scores to exponentials.

    def highest(self, eqn: jx.JaxprEqn, given: Sequence[Meaning | None]) -> Meaning:
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

    def exponential(self, eqn: jx.JaxprEqn, given: Sequence[Meaning | None]) -> Meaning:
        m = _only(eqn, given)
        if m.stage != GAP:
            raise PassError("an exponential of something else than scores less their maximum")
        site, steps = m.site, self.settle(m.site, m.steps)
        dtype = str(jx.aval(eqn.outvars[0]).dtype)
        if site.steps is not None and (site.steps, site.dtype) != (steps, dtype):
            raise PassError("two softmaxes are taken of its scores")
        site.steps, site.dtype = steps, dtype
        return Meaning(site, POLYNOMIAL, m.letters, terms={((E, 1),): 1.0})

    def settle(self, site: Site, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        """``steps`` with bands turned the way of queries and keys, now that these are told apart."""
        done: list[Step] = []
        for step in steps:
            if step.kind in _KINDS:
                done.append(step)
                continue
            band = Band(step.kind[0], step.kind[1], step.low, step.high)
            band = band if band.col == site.col else band.turned()
            if band.col != site.col or site.row not in {"", band.row}:
                raise PassError("its masks are of positions in several dimensions")
            site.row = band.row
            done.append(Step("band", step.number, low=band.low, high=band.high))
        return tuple(done)

    def summed(self, eqn: jx.JaxprEqn, given: Sequence[Meaning | None]) -> Meaning:
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

    def binary(self, eqn: jx.JaxprEqn, given: Sequence[Meaning | None]) -> Meaning:
        x, y = given
        m = x or y
        assert m is not None
        numbers = [None if g else self.facts.const(a) for g, a in zip(given, eqn.invars, strict=True)]
        shape = jx.aval(eqn.outvars[0]).shape
        name = eqn.primitive.name.removesuffix("_any")
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
            return replace(m, steps=(*m.steps, self.step(eqn, name, m, x is not None, number)))
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
            letters = self.backwards(m.site, other_atom, m.letters)
            letters = _merged(letters, m.letters)
        return Meaning(m.site, POLYNOMIAL, letters, terms=combine(name, own, other) if x else combine(name, other, own))

    def step(self, eqn: jx.JaxprEqn, name: str, m: Meaning, first: bool, number: float | None) -> Step:
        """What a binary equation does to scores."""
        if number is not None and math.isfinite(number):
            if name == "mul":
                return Step("scale", number)
            if name == "div" and first and number:
                return Step("scale", 1 / number)
            if name == "add" or (name == "sub" and first):
                return Step("shift", number if name == "add" else -number)
        if name == "add" and number is None:
            return Step("bias", operand=self.extra(m.site, eqn.invars[first], m.letters))
        raise PassError(f"{name} of scores and something that is no number and no bias")

    def negative(self, eqn: jx.JaxprEqn, given: Sequence[Meaning | None]) -> Meaning:
        m = _only(eqn, given)
        if m.stage == SCORES:
            return replace(m, steps=(*m.steps, Step("scale", -1.0)))
        if m.stage != POLYNOMIAL:
            raise PassError("the negative of a maximum")
        return replace(m, terms={t: -c for t, c in m.terms.items()})

    def power(self, eqn: jx.JaxprEqn, given: Sequence[Meaning | None]) -> Meaning:
        m = _only(eqn, given)
        y = int(eqn.params.get("y", 2))
        if m.stage != POLYNOMIAL or len(m.terms) != 1:
            raise PassError("a power of scores")
        ((term, c),) = m.terms.items()
        if any(a != Z for a, _ in term) or not c:
            raise PassError("a power of more than sums of exponentials")
        return replace(m, terms={tuple((a, n * y) for a, n in term if n * y): c**y})

    def chosen(self, eqn: jx.JaxprEqn, given: Sequence[Meaning | None]) -> Meaning:
        cases = given[1:]
        if given[0] is not None or len(cases) != 2 or all(cases):
            raise PassError("it chooses by scores, or among them")
        kept = 0 if cases[0] is not None else 1
        m, fill = cases[kept], self.facts.const(eqn.invars[2 - kept])
        assert m is not None
        if fill is None:
            raise PassError("what stands where scores are masked is not one number")
        if m.stage not in {SCORES, POLYNOMIAL}:
            raise PassError("a choice of maxima")
        step = self.mask(m.site, eqn.invars[0], m.letters, kept == 1, fill)
        if m.stage == SCORES:
            return replace(m, steps=(*m.steps, step))
        steps = m.site.steps or ()
        same = [i for i, s in enumerate(steps) if s.masks and replace(s, number=0.0) == replace(step, number=0.0)]
        if fill or not same:
            raise PassError("weights are masked, not scores")
        return replace(m, terms=combine("mul", m.terms, {((i, 1),): 1.0 for i in same[:1]}))

    # Products.

    def backwards(self, site: Site, atom: jx.Var | jx.Literal, letters: Letters) -> Letters:
        """Takes ``atom`` for the product of cotangent and values, if it is one; returns its letters."""
        missing = [c for c in site.cells if c not in letters]
        holes = [d for d, c in enumerate(letters) if c is None]
        if len(missing) == len(holes) == 1:
            letters = tuple(c or missing[0] for c in letters)
        sizes = tuple(site.sizes.get(c or "", 0) for c in letters)
        whole = sorted(c or "" for c in letters) == sorted(site.cells) and jx.aval(atom).shape == sizes
        if not isinstance(atom, jx.Var) or not whole:
            raise PassError(_STRANGE)
        found = letters
        eqn = self.facts.defs.get(atom)
        while eqn is not None and eqn.primitive.name in {"transpose", "convert_element_type", "copy"}:
            (operand,) = eqn.invars
            if not isinstance(operand, jx.Var) or not _is_float(jx.aval(operand).dtype):
                break
            if eqn.primitive.name == "transpose":
                permutation = eqn.params["permutation"]
                found = tuple(found[permutation.index(d)] for d in range(len(found)))
            eqn = self.facts.defs.get(operand)
        if eqn is None or eqn.primitive.name != "dot_general":
            raise PassError(_STRANGE)
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
        self.known(site, "value", eqn.invars[v], texts[v])
        self.known(site, "cotangent", eqn.invars[1 - v], texts[1 - v])
        return letters

    def known(self, site: Site, what: str, atom: jx.Var | jx.Literal, letters: str) -> None:
        own = self.meaning(atom)
        if not isinstance(atom, jx.Var) or (own and (own.stage != SCORES or own.site is site)):
            raise PassError(f"its {what} comes of scores")
        old = getattr(site, what)
        if old not in (None, (atom, letters)):
            raise PassError(f"it meets two {what}s: its weights are used twice")
        setattr(site, what, (atom, letters))

    def product(self, at: int, eqn: jx.JaxprEqn, given: Sequence[Meaning | None]) -> None:
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
        result = "".join(_product(sides, *contracted, *batch))
        if weights:
            role, what = ("out", "value") if site.col in over else ("dv", "cotangent")
            if role == "out" and over != {site.col}:
                raise PassError("its weights are summed over more than the keys")
            self.known(site, what, other, letters)
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


_KINDS = frozenset({"scale", "shift", "bias", "keep", "band"})


def _product(
    sides: Sequence[Sequence[str]],
    left: Sequence[int],
    right: Sequence[int],
    left_batch: Sequence[int],
    right_batch: Sequence[int],
) -> list[str]:
    """Letters of a matrix product's result."""
    found = [sides[0][d] for d in left_batch]
    found += [c for d, c in enumerate(sides[0]) if d not in (*left, *left_batch)]
    return found + [c for d, c in enumerate(sides[1]) if d not in (*right, *right_batch)]


def _like(eqn: jx.JaxprEqn, precision: Sequence[Any]) -> bool:
    """Whether a product is of that ``precision``, where one is known."""
    return _free(eqn) and precision in ([], [eqn.params["precision"]])


def _free(eqn: jx.JaxprEqn) -> bool:
    """Whether a product's result may lie as it comes. (On axes that a planner decides, what stands there is void.)"""
    sharding = eqn.params.get("out_sharding")
    return sharding is None or all(t is AxisType.Auto for t in sharding.mesh.axis_types)


def _only(eqn: jx.JaxprEqn, given: Sequence[Meaning | None]) -> Meaning:
    if len(given) != 1 or given[0] is None:
        raise PassError(f"{eqn.primitive.name} of several values")
    return given[0]


def _shapes(eqn: jx.JaxprEqn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return jx.aval(eqn.invars[0]).shape, jx.aval(eqn.outvars[0]).shape


def _is_float(dtype: Any) -> bool:
    """Whether numbers survive in ``dtype``, up to how they are rounded."""
    return jax.dtypes.issubdtype(dtype, np.floating) and jx.dtype_bits(dtype) >= 16


def _dropped(letters: Letters, axes: Sequence[int]) -> Letters:
    return tuple(c for d, c in enumerate(letters) if d not in axes)


def _merged(x: Letters, y: Letters) -> Letters:
    if len(x) != len(y) or any(a != b and a is not None and b is not None for a, b in zip(x, y, strict=True)):
        raise PassError("two values that lie differently are combined")
    return tuple(a or b for a, b in zip(x, y, strict=True))


_READERS: Mapping[str, Callable[[Reader, jx.JaxprEqn, Sequence[Meaning | None]], Meaning]] = {
    "add": Reader.binary,
    "add_any": Reader.binary,
    "broadcast_in_dim": Reader.moved,
    "convert_element_type": Reader.same,
    "copy": Reader.same,
    "copy_p": Reader.same,
    "div": Reader.binary,
    "exp": Reader.exponential,
    "integer_pow": Reader.power,
    "max": Reader.binary,
    "mul": Reader.binary,
    "name": Reader.same,
    "neg": Reader.negative,
    "reduce_max": Reader.highest,
    "reduce_sum": Reader.summed,
    "reshape": Reader.moved,
    "select_n": Reader.chosen,
    "square": Reader.power,
    "squeeze": Reader.moved,
    "stop_gradient": Reader.same,
    "sub": Reader.binary,
    "transpose": Reader.moved,
}
