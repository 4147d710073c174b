"""Matrix products that are only added to one another become one operation (`autoshard.transforms.sum_of_products`).

Where the contracted dimension of such products is sharded, each is a partial sum, which XLA all-reduces before it adds
them. As one operation, partial sums are added first and all-reduced once; more than `MAX_PRODUCTS` become several such
operations, whose results are added. Results change by rounding only.
"""

from __future__ import annotations

import functools
import operator
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
MAX_PRODUCTS = 32
"""In one operation: its strategies, one for every contracted dimension, are each as long as its operands are many."""


@dataclass(frozen=True)
class SumProducts(Pass):
    """Joins products that are only added to one another, so that a plan all-reduces their sum once."""

    name: ClassVar[str] = "sum_products"

    def __call__(self, program: Program) -> Program:
        after = _rewritten(program.jaxpr, program.rules, {})
        return program if after is program.jaxpr else program.with_jaxpr(jx.eliminate_dead_code(after))

    def change(self, before: Program, after: Program) -> str:
        count = sum(e.primitive is sum_of_products_p for e in jx.walk(after.jaxpr))
        return f"{count} sums of products replaced by one operation each"


@dataclass(frozen=True)
class _Product:
    """A term of a sum: a `dot_general`, perhaps transposed."""

    eqn: jx.JaxprEqn
    order: tuple[int, ...]
    """Of each dimension of the term, the dimension of the product that it is."""

    @property
    def dtypes_and_precision(self) -> Any:
        """What the products of one operation have in common."""
        left, right = (jx.aval(a).dtype for a in self.eqn.invars)
        p = self.eqn.params
        return left, right, jx.aval(self.eqn.outvars[0]).dtype, p["precision"]


def _rewritten(jaxpr: jx.Jaxpr, rules: Rules, known: dict[Any, jx.Jaxpr]) -> jx.Jaxpr:
    """``jaxpr`` with its sums of products joined, at every depth; the same object where there are none.

    Args:
      known: sums traced before, by what they depend on: layers of a model share theirs.
    """
    made = {v: e for e in jaxpr.eqns for v in e.outvars}
    uses = jx.use_counts(jaxpr)
    additions = [e for e in jaxpr.eqns if rules.traits(e.primitive).adds and _is_elementwise(e)]
    chained = {e for e in additions if uses[e.outvars[0]] == 1}
    inner = {a for e in additions for a in e.invars if isinstance(a, jx.Var) and uses[a] == 1}

    def terms(sum_of: jx.JaxprEqn) -> Iterator[jx.Atom]:
        waiting = [*reversed(sum_of.invars)]
        while waiting:
            atom = waiting.pop()
            eqn = made.get(atom) if isinstance(atom, jx.Var) else None
            if eqn is not None and eqn in chained:
                waiting += reversed(eqn.invars)
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
        found = list(terms(eqn))
        products = {i: p for i, a in enumerate(found) if (p := product(a)) is not None}
        if len(products) < 2:
            continue
        commonest = Counter(p.dtypes_and_precision for p in products.values()).most_common(1)
        joined = {i: p for i, p in products.items() if p.dtypes_and_precision == commonest[0][0]}
        if len(joined) > 1:
            rest = [a for i, a in enumerate(found) if i not in joined]
            instead[eqn] = _joined(eqn, list(joined.values()), rest, known)
    if not instead:
        return jaxpr
    return jx.with_eqns(jaxpr, [new for eqn in jaxpr.eqns for new in instead.get(eqn, (eqn,))])


def _is_elementwise(eqn: jx.JaxprEqn) -> bool:
    """Whether an addition is of arrays of one shape, which is not that of a scalar."""
    shape = jx.aval(eqn.outvars[0]).shape
    return bool(shape) and all(jx.aval(a).shape == shape for a in eqn.invars)


def _joined(
    eqn: jx.JaxprEqn, products: list[_Product], rest: list[jx.Atom], known: dict[Any, jx.Jaxpr]
) -> list[jx.JaxprEqn]:
    """The equations that replace the addition ``eqn``: the sum of ``products``, to which the other terms are added."""
    result = jx.aval(eqn.outvars[0])
    out = LETTERS[: len(result.shape)]
    dims = tuple(_subscripts(p, out) for p in products)
    operands = [a for p in products for a in p.eqn.invars]
    avals = list(map(jx.aval, operands))
    precision = products[0].eqn.params["precision"]

    def fun(*values: Any) -> Any:
        sums: list[Any] = []
        for i in range(0, len(dims), MAX_PRODUCTS):
            part, among = slice(i, i + MAX_PRODUCTS), slice(2 * i, 2 * (i + MAX_PRODUCTS))
            sums += sum_of_products_p.bind(
                *values[: len(operands)][among],
                products=dims[part],
                out=out,
                dtype=str(result.dtype),
                precision=precision,
                flops=flops(avals[among], dims[part], out),
            )
        return functools.reduce(operator.add, (*sums, *values[len(operands) :]))

    values = [*operands, *rest]
    key = dims, out, str(result.dtype), precision, tuple((jx.aval(a).shape, str(jx.aval(a).dtype)) for a in values)
    if key not in known:
        known[key] = jx.stage_out(fun, eqn, values)
    return jx.splice(known[key], eqn, values)


def _subscripts(product: _Product, out: str) -> ProductDims:
    """Einsum subscripts of a product's operands, where ``out`` are those of the term; contracted letters come after."""
    contracted, batch = product.eqn.params["dimension_numbers"]
    ranks = [len(jx.aval(a).shape) for a in product.eqn.invars]
    operands: list[dict[int, str]] = [{}, {}]
    result = [out[product.order.index(d)] for d in range(len(out))]
    for i, (l, r) in enumerate(zip(*batch, strict=True)):
        operands[0][l] = operands[1][r] = result[i]
    for k, (l, r) in enumerate(zip(*contracted, strict=True)):
        operands[0][l] = operands[1][r] = LETTERS[len(out) + k]
    free = iter(result[len(batch[0]) :])
    for letters, rank in zip(operands, ranks, strict=True):
        letters.update({d: next(free) for d in range(rank) if d not in letters})
    left, right = ("".join(letters[d] for d in range(rank)) for letters, rank in zip(operands, ranks, strict=True))
    return left, right
