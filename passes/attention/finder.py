"""Finds the attentions of a jaxpr, by symbolic evaluation of what is computed from products of queries and keys.

Patterns would not do: there are many ways to write one softmax, and above all its gradient. Instead every value that is
computed from a product which may be the scores is given a symbolic value. Before the exponential that is the list of
score ops applied; from there on it is a polynomial, with integer exponents, in

    e   the exponentials                      z   their sum along the keys      mask(i)   1 where mask i keeps a score
    d   the product of cotangent and values   t   the sum of e d along the keys
    u(i)   the derivative of score op i, a hyperbolic tangent

The softmax is ``e/z`` in whichever way it was computed, and its gradient with respect to the product of queries and
keys is ``scale (e d/z - e t/z^2)`` where no mask and no soft cap applies. Only products of exactly these with values,
cotangent, keys or queries belong to an attention. Any other use of such a value rejects the candidate that it was
computed from, with a reason.
"""

from __future__ import annotations

import string
from collections.abc import Collection

from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.errors import PassError
from autoshard.ir.rule_registry import Rules
from autoshard.passes.attention.candidate import (
    SCORES,
    AttentionCandidate,
    Env,
    OperandValues,
    SymbolicValue,
    is_unconstrained,
    is_wide_float,
    product_dims,
)
from autoshard.passes.attention.facts import Facts, OuterValues
from autoshard.passes.attention.interpret import INTERPRETERS
from autoshard.passes.attention.products import interpret_product
from autoshard.transforms.attention_op import AttentionConfig


class AttentionFinder:
    """The candidates of one jaxpr, found in one pass over its equations."""

    def __init__(
        self, jaxpr: jx.Jaxpr, rules: Rules, outer: OuterValues | None = None, *, segments: bool = False
    ) -> None:
        """``segments`` as in `Env`."""
        self.jaxpr = jaxpr
        self.env = Env(Facts(jaxpr, rules, outer), segments)
        self.candidates: list[AttentionCandidate] = []
        self.escaping: list[AttentionCandidate] = []
        """Candidates rejected for one reason only: scores or weights are results of the jaxpr."""
        values = self.env.values
        for at, eqn in enumerate(jaxpr.eqns):
            for a in eqn.invars:
                if isinstance(a, jx.Var) and a in values:
                    break
            else:  # the fast path: most equations read no symbolic value
                if eqn.primitive is _prims.dot_general_p:
                    self.add_candidate(eqn)
                continue
            operand_values = self.operand_values(eqn)
            touched = list(dict.fromkeys(m.candidate for m in operand_values if m))
            if not touched:
                if eqn.primitive is _prims.dot_general_p:
                    self.add_candidate(eqn)
                continue
            try:
                if len(touched) > 1:
                    raise PassError(f"{eqn.primitive.name} combines the weights of two attentions")
                self.interpret(at, eqn, operand_values)
            except PassError as e:
                for candidate in touched:
                    candidate.reject(str(e), jx.source(eqn))
        for atom in jaxpr.outvars:
            m = self.env.read(atom)
            if m is not None:
                if not m.candidate.reason:
                    self.escaping.append(m.candidate)
                m.candidate.reject(
                    "its scores or weights are saved for a backward part elsewhere; with the pass recompute:full "
                    "they are recomputed there",
                    jx.source(m.candidate.eqn),
                )

    def eqns_of(self, candidates: Collection[AttentionCandidate]) -> list[jx.JaxprEqn]:
        """The equations that compute scores and weights of ``candidates``, from the product of queries and keys on."""
        values = self.env.values
        return [e for e in self.jaxpr.eqns if any(v in values and values[v].candidate in candidates for v in e.outvars)]

    def attentions(self) -> list[tuple[AttentionCandidate, AttentionConfig]]:
        """The complete attentions among the equations of this jaxpr, nested ones aside."""
        found: list[tuple[AttentionCandidate, AttentionConfig]] = []
        for candidate in self.candidates:
            if candidate.score_ops is not None and candidate.products and not candidate.reason:
                try:
                    found.append((candidate, candidate.config()))
                except PassError as e:
                    candidate.reject(str(e), jx.source(candidate.eqn))
        return found

    def rejected(self) -> list[AttentionCandidate]:
        """Candidates worth reporting: softmaxes that have a batch dimension, or whose weights enter a product."""
        self.attentions()
        return [s for s in self.candidates if s.score_ops is not None and s.reason and (s.has_batch or s.products)]

    def operand_values(self, eqn: jx.JaxprEqn) -> list[SymbolicValue | None]:
        """The operands' symbolic values, once it is settled which products still may be scores.

        Any product of floats starts as a candidate. One that enters another product, or is combined with what comes
        after another candidate's softmax, is an ordinary value instead.
        """
        found = [self.env.read(a) for a in eqn.invars]
        past_scores = {m.candidate for m in found if m and m.stage != SCORES}
        if eqn.primitive is not _prims.dot_general_p and not past_scores:
            return found
        for m in found:
            if m and m.stage == SCORES and m.candidate not in past_scores:
                m.candidate.reject(f"its scores enter {eqn.primitive.name}", jx.source(eqn))
        return [m if m and (m.stage != SCORES or m.candidate in past_scores) else None for m in found]

    def add_candidate(self, eqn: jx.JaxprEqn) -> None:
        """Makes the product ``eqn`` a candidate, if it contracts one dimension of two different float arrays."""
        (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
        operands = eqn.invars
        floats = all(isinstance(a, jx.Var) and is_wide_float(jx.aval(a).dtype) for a in (*operands, *eqn.outvars))
        if len(left) != 1 or not floats or operands[0] is operands[1] or not is_unconstrained(eqn):
            return
        ranks = [len(jx.aval(a).shape) for a in operands]
        names = iter(string.ascii_letters)
        if sum(ranks) + 2 > len(string.ascii_letters):
            return
        dims = [[next(names) for _ in range(n)] for n in ranks]
        for i, j in (*zip(left, right, strict=True), *zip(left_batch, right_batch, strict=True)):
            dims[1][j] = dims[0][i]
        score_dims = product_dims(dims, left, right, left_batch, right_batch)
        operand_dims = "".join(dims[0]), "".join(dims[1])
        candidate = AttentionCandidate(eqn, operand_dims, "".join(score_dims), dims[0][left[0]], next(names))
        self.candidates.append(candidate)
        self.env.values[eqn.outvars[0]] = SymbolicValue(candidate, SCORES, tuple(score_dims))

    def interpret(self, at: int, eqn: jx.JaxprEqn, operand_values: OperandValues) -> None:
        """Writes the symbolic value of the result of ``eqn``, equation ``at`` of the jaxpr.

        Raises:
          PassError: no attention does this with such a value.
        """
        name = eqn.primitive.name
        if eqn.primitive is _prims.dot_general_p:
            interpret_product(self.env, at, eqn, operand_values)
            return
        if eqn.primitive not in INTERPRETERS or len(eqn.outvars) != 1:
            raise PassError(f"its scores or weights enter {name}")
        result = INTERPRETERS[eqn.primitive](self.env, eqn, operand_values)
        shape, sizes = jx.aval(eqn.outvars[0]).shape, result.candidate.sizes
        if any(c is not None and n != sizes[c] for c, n in zip(result.letters, shape, strict=True)):
            raise PassError(f"{name} broadcasts it to {list(shape)}")
        self.env.values[eqn.outvars[0]] = result
