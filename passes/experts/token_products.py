"""Products of rows with values of their tokens become steps of the operation that has the rows.

A token adds up the rows of its picks by weights. Backward, each row starts from the token's cotangent times its weight,
and the weight's gradient is the row's product with that cotangent. As steps, these take the cotangent of a token and
give a number for a row: no device makes all rows, and where rows are exchanged fewer are sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.ir.rule import Dims, Rule
from autoshard.transforms.composed_rule import InnerDim
from autoshard.transforms.grouped_rows import is_row_result, row_factor
from autoshard.transforms.sum_of_products import Step

_OUTER = (((), ()), ((0,), (0,)))
"""A product of [token, feature] and [token, pick], in one order or the other."""


class _Product(NamedTuple):
    """A product of each row with a value of its token."""

    eqn: jx.JaxprEqn
    token: int
    """Which operand has a value for each token."""
    picks: int


def with_token_products(
    eqns: Sequence[jx.JaxprEqn], eqn: jx.JaxprEqn, returned: set[jx.Var]
) -> tuple[list[jx.JaxprEqn], jx.JaxprEqn, int]:
    """``eqns`` with such products as steps of ``eqn``; this operation; and a token's picks, 1 where there are none.

    Args:
      returned: variables that are results of all.
    """
    rows = eqn.params["rows"]
    made = {v: e for e in eqns for v in e.outvars}
    scaled = {i: found for i in range(1, rows + 1) if (found := _scaled(eqn.invars[i], made))}
    dotted = {i: found for i, v in enumerate(eqn.outvars) if (found := _dotted(i, v, eqn, eqns, returned))}
    picks = next((p.picks for p in (*scaled.values(), *dotted.values())), 1)
    if picks == 1 or any(p.picks != picks for p in (*scaled.values(), *dotted.values())):
        return [*eqns], eqn, 1
    before, joined = _joined(eqn, scaled, dotted)
    after, gone = list[jx.JaxprEqn](), set[int]()
    for i, product in dotted.items():
        shape = jx.aval(product.eqn.outvars[0]).shape
        after += jx.splice(lambda x, shape=shape: x.reshape(shape), product.eqn, [joined.outvars[i]])
        gone |= {id(product.eqn)} | {id(e) for e in eqns if eqn.outvars[i] in e.invars}
    kept = [e for e in eqns if id(e) not in gone]
    at = next(i for i, e in enumerate(kept) if e is eqn)
    return [*kept[:at], *before, joined, *after, *kept[at + 1 :]], joined, picks


def _scaled(rows: jx.Atom, made: Mapping[jx.Var, jx.JaxprEqn]) -> _Product | None:
    """The product that makes ``rows``, each a token's value times the number of a pick.

    Args:
      made: by variable, what makes it.
    """

    def maker(atom: jx.Atom) -> jx.JaxprEqn | None:
        return made.get(atom) if isinstance(atom, jx.Var) else None

    reshape = maker(rows)
    if reshape is None or reshape.primitive is not _prims.reshape_p:
        return None
    product, order = maker(reshape.invars[0]), (0, 1, 2)
    if product is not None and product.primitive is _prims.transpose_p:
        order, product = product.params["permutation"], maker(product.invars[0])
    if product is None or product.primitive is not _prims.dot_general_p:
        return None
    shapes = [jx.aval(a).shape for a in product.invars]
    if product.params["dimension_numbers"] != _OUTER or {len(s) for s in shapes} != {2} or order[0] != 0:
        return None
    pick = order[1] - 1  # the operand whose dimension the picks are
    tokens, picks = shapes[pick]
    fits = jx.aval(rows).shape == (tokens * picks, shapes[1 - pick][1])
    return _Product(product, 1 - pick, picks) if fits else None


def _dotted(i: int, v: jx.Var, eqn: jx.JaxprEqn, eqns: Sequence[jx.JaxprEqn], returned: set[jx.Var]) -> _Product | None:
    """The product of each row of result ``v`` with its token's value, which alone reads that."""
    if not is_row_result(eqn.params["rule"])[i] or len(jx.aval(v).shape) != 2:
        return None
    reshape = _only_reader(v, eqns, returned)
    if reshape is None or reshape.primitive is not _prims.reshape_p:
        return None
    (whole,) = reshape.outvars
    product, shape = _only_reader(whole, eqns, returned), jx.aval(whole).shape
    if product is None or product.primitive is not _prims.dot_general_p or product.invars.count(whole) != 1:
        return None
    at = product.invars.index(whole)
    contracted, batch = product.params["dimension_numbers"]
    if len(shape) != 3 or batch != ((0,), (0,)) or contracted[at] != (2,) or contracted[1 - at] != (1,):
        return None
    token = product.invars[1 - at]
    if len(jx.aval(token).shape) != 2 or token in _descendants(eqn, eqns):
        return None
    return _Product(product, 1 - at, shape[1])


def _only_reader(v: jx.Var, eqns: Sequence[jx.JaxprEqn], returned: set[jx.Var]) -> jx.JaxprEqn | None:
    reading = [e for e in eqns if v in e.invars]
    return reading[0] if len(reading) == 1 and v not in returned else None


def _descendants(eqn: jx.JaxprEqn, eqns: Sequence[jx.JaxprEqn]) -> set[jx.Atom]:
    """What is computed of the results of ``eqn``; ``eqns`` are in order."""
    found: set[jx.Atom] = set(eqn.outvars)
    for e in eqns:
        if not found.isdisjoint(a for a in e.invars if isinstance(a, jx.Var)):
            found.update(e.outvars)
    return found


def _joined(
    eqn: jx.JaxprEqn, scaled: Mapping[int, _Product], dotted: Mapping[int, _Product]
) -> tuple[list[jx.JaxprEqn], jx.JaxprEqn]:
    """The operation with these products as steps, and what it needs before."""
    params, rule, old = eqn.params, eqn.params["rule"], len(eqn.invars)
    row, rows, before = row_factor(rule), eqn.params["rows"], list[jx.JaxprEqn]()
    of_rows, dims = [*eqn.invars[1 : rows + 1]], [*rule.operands[1 : rows + 1]]

    def operand(atom: jx.Atom, of: Dims) -> int:
        """The number of an operand with a value for each row or token."""
        if atom not in of_rows:
            of_rows.append(atom)
            dims.append(of)
        return of_rows.index(atom) + 1

    read = dict[int, dict[int, int]]()
    """By product's ``id``: the numbers of its operands."""
    for i, product in scaled.items():
        token, weight = product.eqn.invars[product.token], product.eqn.invars[1 - product.token]
        made, (flat,) = jx.emit(lambda x: x.reshape(-1), product.eqn, weight)
        before += made
        if token not in of_rows:
            of_rows[i - 1] = token
        read[i] = {product.token: operand(token, dims[i - 1]), 1 - product.token: operand(flat, ((row,),))}
    tokens = {i: operand(p.eqn.invars[p.token], ((row,), rule.results[i][1])) for i, p in dotted.items()}

    count = 1 + len(of_rows) + old - rows - 1
    first = {i: count + 1 + n for n, i in enumerate(scaled)}

    def number(x: Any) -> Any:
        if not isinstance(x, int) or x == 0:
            return x
        if x <= rows:
            return first.get(x, x)
        return x + count - old + (len(scaled) if x > old else 0)

    steps = [_step(p.eqn, read[i], [*_inner(eqn.invars[i], rule.operands[i])]) for i, p in scaled.items()]
    steps += [s._replace(operands=tuple(map(number, s.operands))) for s in params["steps"]]
    results, ends, outvars = [*map(number, params["results"])], [*rule.results], [*eqn.outvars]
    whole = dict[str, str]()
    for i, product in dotted.items():
        own = _step(product.eqn, {product.token: tokens[i], 1 - product.token: results[i]}, [(row,)])
        results[i], ends[i] = count + 1 + len(steps), ((row,),)
        steps.append(own)
        whole |= dict.fromkeys(rule.results[i][1], "whole")
        outvars[i] = jx.resized_var(product.eqn.outvars[0], jx.aval(eqn.invars[0]).shape)
    kinds = tuple(sorted((dict(rule.kinds) | whole).items()))
    joined = Rule((rule.operands[0], *dims, *rule.operands[rows + 1 :]), tuple(ends), kinds, sizes=rule.sizes)
    params = {**params, "rule": joined, "steps": tuple(steps), "rows": len(of_rows), "results": tuple(results)}
    invars = [eqn.invars[0], *of_rows, *eqn.invars[rows + 1 :]]
    return before, eqn.replace(params=params, invars=invars, outvars=outvars)


def _inner(atom: jx.Atom, dims: Dims) -> list[InnerDim]:
    """Factors of its dimensions, sizes of those without."""
    return [d or (n,) for d, n in zip(dims, jx.aval(atom).shape, strict=True)]


def _step(product: jx.JaxprEqn, numbers: Mapping[int, int], dims: Sequence[InnerDim]) -> Step:
    """The product for rows: their numbers take the place of tokens and picks.

    Args:
      numbers: of its operands.
      dims: of its result.
    """
    ((contracted, _), _), batch = product.params["dimension_numbers"], ((0,), (0,))
    params = dict(product.params) | {
        "dimension_numbers": (((1,), (1,)) if contracted else ((), ()), batch),
        "out_sharding": None,
    }
    return Step(
        product.primitive,
        tuple(sorted(params.items())),
        (numbers[0], numbers[1]),
        tuple(dims),
        jx.dtype_name(jx.aval(product.outvars[0]).dtype),
    )
