"""rules: how each operation can be split.

In come an operation's abstract values and parameters; out goes a `Rule`. `TABLE` has such a function for JAX's own
primitives, `OWN` for those that passes put in a program, and `autoshard.rules.traits` what else the engine may assume
of each. Every primitive of the installed JAX is in `TABLE`, in `STRUCTURAL` (the engine knows its structure), or in
`KEPT_WHOLE` (with the reason). The engine does not know this package: `autoshard.api` hands it the tables.

May import: transforms, cost, and what they may.
"""

from __future__ import annotations

from jax.extend.core import Primitive

from autoshard.errors import RuleError
from autoshard.ir.rule import RuleFn
from autoshard.ir.rule_registry import Rules
from autoshard.rules import (
    attention,
    composed,
    contract,
    index,
    linalg,
    move,
    pointwise,
    random,
    reduce,
    shape,
    sort,
    window,
)
from autoshard.rules.kept_whole import KEPT_WHOLE as KEPT_WHOLE
from autoshard.rules.structural import STRUCTURAL as STRUCTURAL
from autoshard.rules.traits import TRAITS

FAMILIES = (contract, index, linalg, move, pointwise, random, reduce, shape, sort, window)


def join(*tables: dict[Primitive, RuleFn]) -> dict[Primitive, RuleFn]:
    """One table out of several.

    Raises:
      RuleError: a primitive stands in two of them.
    """
    joined: dict[Primitive, RuleFn] = {}
    for one in tables:
        twice = joined.keys() & one.keys()
        if twice:
            raise RuleError(f"two tables have a rule for {', '.join(sorted(p.name for p in twice))}")
        joined |= one
    return joined


TABLE = join(*(family.TABLE for family in FAMILIES))
OWN = join(attention.TABLE, composed.TABLE, move.OWN)
"""The rules of what passes put in a program: primitives of autoshard's own."""
SHIPPED = Rules({}, (TABLE, OWN), TRAITS)
"""All of them, without any that a user gave."""
