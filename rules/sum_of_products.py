"""The rule of `autoshard.transforms.sum_of_products`: contracted dimensions of all products are sharded together."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax.extend.core import Primitive

from autoshard.ir.rule import Aval, Local, Rule, RuleFn
from autoshard.rules.builders import Label, build, rounded_kinds
from autoshard.transforms.sum_of_products import ProductDims, contracted_dims, sum_of_products_p


def sum_of_products(*operands: Aval, products: tuple[ProductDims, ...], out: str, dtype: str, **_: Any) -> Rule:
    """The dimensions of the result are parallel. The first contracted dimensions of all products share a factor, of the
    greatest common divisor of their sizes, which leaves a partial sum; so do the second ones, and so on. A contracted
    dimension that not all products have is kept whole."""
    contracted = [contracted_dims(product, out) for product in products]
    sizes: dict[str, int] = {}
    kinds: dict[str, str] = {}
    labels: list[dict[str, Label]] = [{c: c for c in out} for _ in products]
    for j in range(max(map(len, contracted))):
        having = [(i, letters[j]) for i, letters in enumerate(contracted) if len(letters) > j]
        lengths = [operands[2 * i].shape[products[i][0].index(c)] for i, c in having]
        common = math.gcd(*lengths)
        for (i, c), n in zip(having, lengths, strict=True):
            rest = f"rest {i} {j}"
            labels[i][c] = (f"sum {j}", rest) if len(having) == len(products) else rest
            sizes |= {f"sum {j}": common, rest: n // common if len(having) == len(products) else n}
            kinds |= {f"sum {j}": "sum", rest: "whole"}
    dims = [[labels[i][c] for c in letters] for i, product in enumerate(products) for letters in product]
    kinds = rounded_kinds(kinds, np.dtype(dtype))
    return build(dims, [list(out)], kinds, sizes=sizes, local=Local(None, lambda *_: (), used_when="partial"))


TABLE: dict[Primitive, RuleFn] = {sum_of_products_p: sum_of_products}
