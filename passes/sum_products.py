"""Sums: products that are only added to one another become one operation.

Where the contracted dimension of such products is split, each leaves a partial sum; XLA puts every one of them together
before it adds them. As one operation they are added first. Numbers change by how sums are rounded, no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.ir.program import Program
from autoshard.ir.rule_registry import Rules
from autoshard.transforms.pipeline import Pass
from autoshard.transforms.sum_of_products import ProductDims, flops, sum_of_products_p

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class SumProducts(Pass):
    """Joins products that are only added to one another; the plan then reduces their sum once."""

    name: ClassVar[str] = "sum_products"

    def __call__(self, program: Program) -> Program:
        after = _rewritten(program.jaxpr, program.rules, {})
        return program if after is program.jaxpr else program.with_jaxpr(jx.eliminate_dead_code(after))

    def change(self, before: Program, after: Program) -> str:
        made = sum(e.primitive is sum_of_products_p for e in jx.walk(after.jaxpr))
        return f"{made} sums of products made one operation each"


@dataclass(frozen=True)
class _Product:
    """A `dot_general`, perhaps transposed: its equation, and where each dimension of what is added comes from."""

    eqn: jx.JaxprEqn
    order: tuple[int, ...]

    @property
    def alike(self) -> Any:
        """What products have in common that can be joined."""
        left, right = (jx.aval(a).dtype for a in self.eqn.invars)
        p = self.eqn.params
        return left, right, jx.aval(self.eqn.outvars[0]).dtype, p["precision"]


def _rewritten(jaxpr: jx.Jaxpr, rules: Rules, known: dict[Any, jx.Jaxpr]) -> jx.Jaxpr:
    """``jaxpr`` with its sums joined, at every depth; itself where there are none. ``known``: sums that were staged."""
    made = {v: e for e in jaxpr.eqns for v in e.outvars}
    uses = jx.use_counts(jaxpr)
    additions = [e for e in jaxpr.eqns if rules.traits(e.primitive).adds and _terms_of(e)]
    chained = {e for e in additions if uses[e.outvars[0]] == 1}
    inner = {a for e in additions for a in e.invars if isinstance(a, jx.Var) and uses[a] == 1}

    def leaves(atom: jx.Atom) -> Iterator[jx.Atom]:
        eqn = made.get(atom) if isinstance(atom, jx.Var) else None
        if eqn is not None and eqn in chained:
            for a in eqn.invars:
                yield from leaves(a)
        else:
            yield atom

    def product(atom: jx.Atom) -> _Product | None:
        eqn = made.get(atom) if isinstance(atom, jx.Var) else None
        order = tuple(range(len(jx.aval(atom).shape)))
        while eqn is not None and uses[eqn.outvars[0]] == 1 and eqn.primitive is _prims.transpose_p:
            order = tuple(eqn.params["permutation"][d] for d in order)
            eqn = made.get(eqn.invars[0])  # type: ignore[arg-type]
        if eqn is None or uses[eqn.outvars[0]] != 1 or eqn.primitive is not _prims.dot_general_p:
            return None
        return _Product(eqn, order)

    instead: dict[jx.JaxprEqn, list[jx.JaxprEqn]] = {}
    for eqn in jx.eqns_with_regions(jaxpr):
        new = jx.map_bodies(eqn, lambda b: _rewritten(b, rules, known))
        if new is not eqn:
            instead[eqn] = [new]
    for eqn in additions:
        if eqn.outvars[0] in inner:
            continue
        found = [a for side in eqn.invars for a in leaves(side)]
        products = {i: p for i, a in enumerate(found) if (p := product(a)) is not None}
        if len(products) < 2:
            continue
        commonest = Counter(p.alike for p in products.values()).most_common(1)
        joined = {i: p for i, p in products.items() if p.alike == commonest[0][0]}
        if len(joined) > 1:
            rest = [a for i, a in enumerate(found) if i not in joined]
            instead[eqn] = _joined(eqn, list(joined.values()), rest, known)
    if not instead:
        return jaxpr
    return jx.with_eqns(jaxpr, [new for eqn in jaxpr.eqns for new in instead.get(eqn, (eqn,))])


def _terms_of(eqn: jx.JaxprEqn) -> list[jx.Atom]:
    """The operands of an addition of arrays of one shape."""
    shape = jx.aval(eqn.outvars[0]).shape
    return list(eqn.invars) if shape and all(jx.aval(a).shape == shape for a in eqn.invars) else []


def _joined(
    eqn: jx.JaxprEqn, products: list[_Product], rest: list[jx.Atom], known: dict[Any, jx.Jaxpr]
) -> list[jx.JaxprEqn]:
    """The equations that make what ``eqn`` makes: the sum of ``products``, and ``rest`` added to it."""
    result = jx.aval(eqn.outvars[0])
    out = LETTERS[: len(result.shape)]
    terms = tuple(_letters(p, out) for p in products)
    operands = [a for p in products for a in p.eqn.invars]
    avals = list(map(jx.aval, operands))
    precision = products[0].eqn.params["precision"]

    def fun(*values: Any) -> Any:
        (total,) = sum_of_products_p.bind(
            *values[: len(operands)],
            products=terms,
            out=out,
            dtype=str(result.dtype),
            precision=precision,
            flops=flops(avals, terms, out),
        )
        for x in values[len(operands) :]:
            total = total + x
        return total

    values = [*operands, *rest]
    key = terms, out, str(result.dtype), precision, tuple((jx.aval(a).shape, str(jx.aval(a).dtype)) for a in values)
    if key not in known:
        known[key] = jx.stage_out(fun, eqn, values)
    return jx.splice(known[key], eqn, values)


def _letters(product: _Product, out: str) -> ProductDims:
    """A letter for every dimension of the two operands: those of ``out`` where the sum has them, others after them."""
    (summed, batch), ranks = (
        product.eqn.params["dimension_numbers"],
        [len(jx.aval(a).shape) for a in product.eqn.invars],
    )
    sides: list[dict[int, str]] = [{}, {}]
    made = [out[product.order.index(d)] for d in range(len(out))]
    for i, (l, r) in enumerate(zip(*batch, strict=True)):
        sides[0][l] = sides[1][r] = made[i]
    for k, (l, r) in enumerate(zip(*summed, strict=True)):
        sides[0][l] = sides[1][r] = LETTERS[len(out) + k]
    free = iter(made[len(batch[0]) :])
    for side, rank in zip(sides, ranks, strict=True):
        side.update({d: next(free) for d in range(rank) if d not in side})
    left, right = ("".join(side[d] for d in range(rank)) for side, rank in zip(sides, ranks, strict=True))
    return left, right
