"""Products, and what is linear in them, become one operation (`autoshard.transforms.sum_of_products`) where that leaves
less to reduce.

Where the contracted dimension of a product is sharded, the product is a partial sum, which XLA all-reduces before
anything else reads it. As one operation, partial sums are added, scaled, transposed or summed further first, and what
is left is all-reduced: the sum of several products once, in place of each of them. Between products of matrices and a
smaller product of their result, as in the gradients of LoRA's ``w + a @ b``, that costs compute, since all devices
along the sharded dimension compute the later product; ``"sum_products:through"`` does that too.

Results change by rounding only, of finite numbers: partial sums of fewer than 32 bits are added and moved, but not
scaled or multiplied, which would round each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from autoshard import jaxpr as jx
from autoshard.errors import PassError
from autoshard.ir.program import Program
from autoshard.passes.sum_products.partial_values import MAX_PRODUCTS as MAX_PRODUCTS
from autoshard.passes.sum_products.partial_values import LinearRules, PartialValues, grouped_additions
from autoshard.transforms.composed_rule import Part, compose
from autoshard.transforms.pipeline import Pass
from autoshard.transforms.sum_of_products import Constant, Step, sum_of_products_p

THROUGH = "through"
SHARDINGS = frozenset({"out_sharding", "sharding"})
"""Parameters that state shardings, which are the plan's."""


@dataclass(frozen=True)
class SumProducts(Pass):
    """Joins products and what is linear in them, so that a plan reduces less."""

    name: ClassVar[str] = "sum_products"

    option: str = ""
    """``"through"``: partial sums are carried through later products too."""

    def __call__(self, program: Program) -> Program:
        if self.option not in ("", THROUGH):
            raise PassError(f"{self}: the only option of this pass is {THROUGH!r}")
        rules = LinearRules(program.rules, program.mesh, self.option == THROUGH)
        after = _rewritten(program.jaxpr, rules)
        return program if after is program.jaxpr else program.with_jaxpr(after)

    def change(self, before: Program, after: Program) -> str:
        count = sum(e.primitive is sum_of_products_p for e in jx.walk(after.jaxpr))
        return f"{count} sums of products replaced by one operation each"

    def variants(self, program: Program, batch_axes: Sequence[str] | None = None) -> tuple[Pass, ...]:
        """This pass, where its option makes a difference."""
        rules = LinearRules(program.rules, program.mesh, self.option == THROUGH)
        return (self,) if not self.option or _has_later_products(program.jaxpr, rules) else ()


def _has_later_products(jaxpr: jx.Jaxpr, rules: LinearRules) -> bool:
    """Whether some partial sum is carried through a product."""
    values = grouped_additions(PartialValues(jaxpr, rules))
    if not values.products.isdisjoint(values.carried):
        joined = {n for sets in values.regions() for eqns in sets for n in eqns}
        if any(n in values.products for n in joined & values.carried.keys()):
            return True
    return any(_has_later_products(r.body, rules) for e in jx.eqns_with_regions(jaxpr) for r in jx.regions(e))


def _rewritten(jaxpr: jx.Jaxpr, rules: LinearRules) -> jx.Jaxpr:
    """``jaxpr`` with sums of products joined, at every depth; the same object where there are none."""
    eqns = [jx.map_bodies(e, lambda b: _rewritten(b, rules)) for e in jaxpr.eqns]
    if any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        jaxpr = jx.with_eqns(jaxpr, eqns)
    values = grouped_additions(PartialValues(jaxpr, rules))
    joined: dict[int, list[int]] = {}
    operations: dict[int, jx.JaxprEqn] = {}
    for sets in values.regions():
        found, operation = _largest(values, sets, joined)
        if operation is not None:
            joined.update(dict.fromkeys(found, found))
            operations[found[-1]] = operation
    return jx.with_eqns(values.jaxpr, list(_in_order(values, joined, operations))) if operations else jaxpr


def _in_order(
    values: PartialValues, joined: Mapping[int, Sequence[int]], operations: Mapping[int, jx.JaxprEqn]
) -> Iterator[jx.JaxprEqn]:
    """The equations, with each operation in the place of the last one that it replaces, or before what reads it.

    Args:
      joined: by equation, those that one operation replaces.
      operations: these operations, by the last equation.
    """
    eqns, readers = values.jaxpr.eqns, values.readers
    if all(m > last for last, e in operations.items() for v in e.outvars for m in readers[v]):  # nothing has to move
        yield from (operations.get(n) or e for n, e in enumerate(eqns) if joined.get(n, [n])[-1] == n)
        return
    done = set[int]()
    for n in range(len(eqns)):
        todo = [n] if joined.get(n, [n])[-1] == n else []
        while todo:
            last = todo[-1]
            eqn = operations.get(last) or eqns[last]
            reads = {m for a in eqn.invars if isinstance(a, jx.Var) and (m := values.made.get(a)) is not None}
            before = {joined.get(m, [m])[-1] for m in reads} - done
            if before and last not in done:
                todo += sorted(before, reverse=True)
                continue
            todo.pop()
            if last not in done:
                done.add(last)
                yield eqn


def _largest(
    values: PartialValues, sets: Sequence[Sequence[int]], joined: Mapping[int, Sequence[int]]
) -> tuple[list[int], jx.JaxprEqn | None]:
    """The operation that replaces the most of these sets of equations, in their order, and those equations.

    Args:
      joined: by equation, those that another operation replaces.
    """
    every = sorted({n for eqns in sets for n in eqns})
    operation = _joined(values, every, joined)
    if operation is not None or len(sets) == 1:
        return every, operation
    kept = list[int]()
    for eqns in sets:
        wider = sorted({*kept, *eqns})
        if (found := _joined(values, wider, joined)) is not None:
            kept, operation = wider, found
    return kept, operation


def _joined(values: PartialValues, numbers: Sequence[int], joined: Mapping[int, Sequence[int]]) -> jx.JaxprEqn | None:
    """The operation that replaces the equations of these numbers; None where they cannot be one."""
    eqns, inside = [values.jaxpr.eqns[n] for n in numbers], set(numbers)
    made = {e.outvars[0] for e in eqns}
    results = {v for v in made if values.is_read_outside(v, inside)}
    parts = [Part(e, values.rules.rule(e), values.carried.get(n, ())) for n, e in zip(numbers, eqns, strict=True)]
    reads = ((a, i in p.partial) for p in parts for i, a in enumerate(p.eqn.invars) if isinstance(a, jx.Var))
    if any((a in made) != partial for a, partial in reads):
        return None  # one reads what another computes once that is reduced, or a partial sum of none of them
    composed = compose(parts, results)
    if composed is None or values.is_out_of_order(inside, joined):
        return None
    operands: list[jx.Atom] = [a for e in eqns for a in e.invars if isinstance(a, jx.Var) and a not in made]
    number: dict[jx.Var, int] = {e.outvars[0]: len(operands) + i for i, e in enumerate(eqns)}
    positions = iter(range(len(operands)))

    def read(atom: jx.Atom) -> int | Constant:
        if isinstance(atom, jx.Literal):
            return Constant(jx.dtype_name(jx.aval(atom).dtype), np.asarray(atom.val, jx.aval(atom).dtype).tobytes())
        return number[atom] if atom in number else next(positions)

    steps: list[Step] = []
    for e, dims, factors in zip(eqns, composed.dims, composed.factors, strict=True):
        flops = jx.contraction_flops(e)
        steps.append(
            Step(
                e.primitive,
                tuple(sorted((k, None if k in SHARDINGS else v) for k, v in e.params.items())),
                tuple(map(read, e.invars)),
                dims,
                jx.dtype_name(jx.aval(e.outvars[0]).dtype),
                values.rules.traits(e).shape_param,
                flops,
                factors if flops else (),
            )
        )
    outvars = [e.outvars[0] for e in eqns if e.outvars[0] in results]
    params: dict[str, Any] = {
        "steps": tuple(steps),
        "results": tuple(number[v] for v in outvars),
        "rule": composed.rule,
        "flops": sum(s.flops for s in steps),
    }
    return eqns[-1].replace(primitive=sum_of_products_p, params=params, invars=operands, outvars=outvars)
