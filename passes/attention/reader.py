"""reader: reads what the equations around a softmax compute, and finds the attentions among them.

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

import string
from collections.abc import Collection

from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.errors import PassError
from autoshard.ir.rule_registry import Rules
from autoshard.passes.attention.facts import Above, Facts
from autoshard.passes.attention.products import product
from autoshard.passes.attention.site import SCORES, Given, Known, Meaning, Site, is_float, is_free, product_letters
from autoshard.passes.attention.steps import READERS
from autoshard.transforms.attention_op import AttentionConfig


class Reader:
    """Reads one jaxpr, equation by equation."""

    def __init__(self, jaxpr: jx.Jaxpr, rules: Rules, above: Above | None = None) -> None:
        self.jaxpr = jaxpr
        self.known = Known(Facts(jaxpr, rules, above))
        self.sites: list[Site] = []
        self.leaving: list[Site] = []
        """Those of which nothing else is wrong than that scores or weights are results of the jaxpr."""
        meanings = self.known.meanings
        for at, eqn in enumerate(jaxpr.eqns):
            for a in eqn.invars:
                if isinstance(a, jx.Var) and a in meanings:
                    break
            else:  # most have nothing to do with any
                if eqn.primitive is _prims.dot_general_p:
                    self.begin(eqn)
                continue
            given = self.given(eqn)
            met = list(dict.fromkeys(m.site for m in given if m))
            if not met:
                if eqn.primitive is _prims.dot_general_p:
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
            m = self.known.meaning(atom)
            if m is not None:
                if not m.site.reason:
                    self.leaving.append(m.site)
                m.site.refuse(
                    "its scores or weights leave the place where they are made, as for a backward part "
                    "elsewhere, which must make them again (recompute:full)",
                    jx.source(m.site.eqn),
                )

    def within(self, sites: Collection[Site]) -> list[jx.JaxprEqn]:
        """What makes scores and weights of ``sites``, the product of queries and keys included."""
        meanings = self.known.meanings
        return [e for e in self.jaxpr.eqns if any(v in meanings and meanings[v].site in sites for v in e.outvars)]

    def attentions(self) -> list[tuple[Site, AttentionConfig]]:
        """Those among the equations of this jaxpr itself."""
        found: list[tuple[Site, AttentionConfig]] = []
        for site in self.sites:
            if site.steps is not None and site.roles and not site.reason:
                try:
                    found.append((site, site.config()))
                except PassError as e:
                    site.refuse(str(e), jx.source(site.eqn))
        return found

    def refused(self) -> list[Site]:
        """What looked like an attention and is left alone: softmaxes over a batch, and those that met values."""
        self.attentions()
        return [s for s in self.sites if s.steps is not None and s.reason and (s.batched or s.roles)]

    def given(self, eqn: jx.JaxprEqn) -> list[Meaning | None]:
        """What is known of the operands. Any product may be one of queries and keys, until it is used otherwise."""
        found = [self.known.meaning(a) for a in eqn.invars]
        product = eqn.primitive is _prims.dot_general_p
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
        plain = all(isinstance(a, jx.Var) and is_float(jx.aval(a).dtype) for a in (*operands, *eqn.outvars))
        if len(left) != 1 or not plain or operands[0] is operands[1] or not is_free(eqn):
            return
        ranks = [len(jx.aval(a).shape) for a in operands]
        names = iter(string.ascii_letters)
        if sum(ranks) + 2 > len(string.ascii_letters):
            return
        sides = [[next(names) for _ in range(n)] for n in ranks]
        for i, j in (*zip(left, right, strict=True), *zip(left_batch, right_batch, strict=True)):
            sides[1][j] = sides[0][i]
        cells = product_letters(sides, left, right, left_batch, right_batch)
        site = Site(eqn, ("".join(sides[0]), "".join(sides[1])), "".join(cells), sides[0][left[0]], next(names))
        self.sites.append(site)
        self.known.meanings[eqn.outvars[0]] = Meaning(site, SCORES, tuple(cells))

    def follow(self, at: int, eqn: jx.JaxprEqn, given: Given) -> None:
        name = eqn.primitive.name
        if eqn.primitive is _prims.dot_general_p:
            product(self.known, at, eqn, given)
            return
        if eqn.primitive not in READERS or len(eqn.outvars) != 1:
            raise PassError(f"{name} is no part of an attention")
        made = READERS[eqn.primitive](self.known, eqn, given)
        shape, sizes = jx.aval(eqn.outvars[0]).shape, made.site.sizes
        if any(c is not None and n != sizes[c] for c, n in zip(made.letters, shape, strict=True)):
            raise PassError(f"{name} stretches it to {list(shape)}")
        self.known.meanings[eqn.outvars[0]] = made
