"""The rule of `autoshard.transforms.sum_of_products`, which it carries with it: that of its steps composed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import Primitive

from autoshard.ir.rule import Aval, Local, LocalWork, Rule, RuleFn
from autoshard.jaxpr import dtype_bits, dtype_from_name
from autoshard.transforms.sum_of_products import Step, factor_sizes, sum_of_products_p


def sum_of_products(*operands: Aval, steps: tuple[Step, ...], rule: Rule, **_: Any) -> Rule:
    """What its steps read of one another is no operand or result; partial sums of the results are reduced."""
    sizes, stored = factor_sizes(rule, [x.shape for x in operands]), _stored(steps, len(operands))

    def work(parts: Mapping[str, int]) -> LocalWork:
        local = {f: n // parts.get(f, 1) for f, n in sizes.items()}
        flops = sum(s.flops / math.prod(parts.get(f, 1) for f in s.factors) for s in steps)
        bits = sum(math.prod(s.shape(local)) * dtype_bits(dtype_from_name(s.dtype)) for s in stored)
        return LocalWork(flops, bits // 8)

    reads = [[x for x in s.operands if isinstance(x, int)] for s in steps if s.flops]
    starts = tuple(tuple(r) for r in reads if max(r) < len(operands))
    contracted = {f for s in steps for f in s.factors if not any(f in dim for dim in s.dims)}
    computed = {f for s in steps for f in s.factors} - contracted
    parallel = frozenset(f for f, kind in rule.kinds if kind == "sum" and f in computed)
    local = Local(None, lambda *_: (), used_when="partial", work=work, starts=starts, parallel=parallel)
    return replace(rule, local=local)


def _stored(steps: Sequence[Step], operands: int) -> list[Step]:
    """The steps whose results are stored because products read them, perhaps through a view or a scaling."""
    found: dict[int, Step] = {}
    for step in steps if len(steps) > 1 else ():
        for x in step.operands if step.flops else ():
            at = x - operands if isinstance(x, int) else -1
            while at >= 0 and not (found.get(at) or steps[at].flops):
                inner = [y - operands for y in steps[at].operands if isinstance(y, int) and y >= operands]
                if len(inner) != 1:
                    break
                (at,) = inner
            if at >= 0:
                found[at] = steps[at]
    return list(found.values())


TABLE: dict[Primitive, RuleFn] = {sum_of_products_p: sum_of_products}
