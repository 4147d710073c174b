"""The rule of `autoshard.transforms.sum_of_products`: contracted dimensions are split alike in every term, and the sum is partial."""

from __future__ import annotations

import math
from typing import Any

from jax.extend.core import Primitive

from autoshard.ir.rule import Aval, Local, Rule, RuleFn
from autoshard.rules.builders import Label, build
from autoshard.transforms.sum_of_products import ProductDims, contracted_dims, sum_of_products_p


def sum_of_products(*operands: Aval, products: tuple[ProductDims, ...], out: str, **_: Any) -> Rule:
    """The dimensions of the sum pass. The first contracted dimensions of all products are split together, as far as their
    sizes have parts in common, and so on with the second; one that some term has not stays whole."""
    sums = [contracted_dims(term, out) for term in products]
    sizes: dict[str, int] = {}
    kinds: dict[str, str] = {}
    labels: list[dict[str, Label]] = [{c: c for c in out} for _ in products]
    for j in range(max(map(len, sums))):
        having = [(t, s[j]) for t, s in enumerate(sums) if len(s) > j]
        lengths = [operands[2 * t].shape[products[t][0].index(c)] for t, c in having]
        common = math.gcd(*lengths)
        for (t, c), n in zip(having, lengths, strict=True):
            rest = f"rest {t} {j}"
            labels[t][c] = (f"sum {j}", rest) if len(having) == len(products) else rest
            sizes |= {f"sum {j}": common, rest: n // common if len(having) == len(products) else n}
            kinds |= {f"sum {j}": "sum", rest: "whole"}
    sides = [[labels[t][c] for c in letters] for t, term in enumerate(products) for letters in term]
    return build(sides, [list(out)], kinds, sizes=sizes, local=Local(None, lambda *_: (), used_when="partial"))


TABLE: dict[Primitive, RuleFn] = {sum_of_products_p: sum_of_products}
