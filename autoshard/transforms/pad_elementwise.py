"""longer: operations run on operands that are longer than they should be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from autoshard import jaxpr as jx
from autoshard.ir.annotate import annotate_p
from autoshard.ir.rule import Dims, Rule
from autoshard.ir.rule_registry import lookup
from autoshard.ir.spec import REDUCTION_KINDS
from autoshard.transforms.pad_state import SIZED, Body
from autoshard.transforms.window import kept, neutral

REDUCED = frozenset({"dot_general", *(f"reduce_{k}" for k in REDUCTION_KINDS)})
"""Operations that read nothing of a reduced dimension but its elements."""
ITERATIVE = frozenset(
    {
        "eig",
        "eigh",
        "igamma",
        "igamma_grad_a",
        "igammac",
        "random_gamma",
        "regularized_incomplete_beta",
        "schur",
        "svd",
    }
)
"""Operations that run until every element has converged, which one that means nothing may not."""


def longer(body: Body, eqn: jx.JaxprEqn) -> bool:
    """Runs the operation on longer operands, where its rule says that their other elements stay as they are."""
    rule = _rule(body, eqn)
    if rule is None:
        return False
    wanted: dict[str, int] = {}
    for a, dims in zip(eqn.invars, rule.operands, strict=True):
        view = body.view(a)
        for dim, m, n in zip(dims, view.shape, view.around, strict=False):
            length = body.length(m, n)
            if length and length > m and len(dim) == 1 and _passes(eqn, rule, dim[0]):
                wanted.setdefault(dim[0], length)
    fills = {f: rule.kind(f) for f in wanted if rule.kind(f) in REDUCTION_KINDS}
    if not wanted:
        return False
    lengths, results = (
        [
            [wanted[dim[0]] if dim and dim[0] in wanted else n for dim, n in zip(dims, jx.aval(a).shape, strict=True)]
            for a, dims in zip(atoms, side, strict=True)
        ]
        for atoms, side in ((eqn.invars, rule.operands), (eqn.outvars, rule.results))
    )
    params = dict(eqn.params)
    if eqn.primitive.name in SIZED:
        params[SIZED[eqn.primitive.name]] = tuple(results[0])

    def run(*xs: Any) -> Any:
        masked = [
            _masked(x, dims, jx.aval(a).shape, fills) for x, dims, a in zip(xs, rule.operands, eqn.invars, strict=True)
        ]
        return eqn.primitive.bind(*masked, **params)

    sides = [
        [jax.ShapeDtypeStruct(shape, jx.aval(a).dtype) for a, shape in zip(atoms, shapes, strict=True)]
        for atoms, shapes in ((eqn.invars, lengths), (eqn.outvars, results))
    ]
    try:
        found = jax.tree.leaves(jax.eval_shape(run, *sides[0]))
    except (TypeError, ValueError):  # its parameters say other sizes
        return False
    if [(x.shape, x.dtype) for x in found] != [(x.shape, x.dtype) for x in sides[1]]:
        return False
    operands = [body.lengthened(a, sizes, eqn) for a, sizes in zip(eqn.invars, lengths, strict=True)]
    body.become(eqn, run, operands, [jx.aval(v).shape for v in eqn.outvars])
    return True


def _rule(body: Body, eqn: jx.JaxprEqn) -> Rule | None:
    """The rule of an operation that can be run on longer operands."""
    fixed = eqn.effects or jx.names(eqn) or jx.regions(eqn) or eqn.primitive in (annotate_p, jx.CONSTRAINT)
    if fixed or eqn.primitive.name in ITERATIVE or not all(map(jx.is_array, eqn.invars)):
        return None
    return lookup(eqn, body.rules, body.mesh)


def _passes(eqn: jx.JaxprEqn, rule: Rule, factor: str) -> bool:
    """Whether elements more of ``factor`` leave the others as they are, or can be made to."""
    kind = rule.kind(factor)
    if any(factor in dim and len(dim) > 1 for dims in (*rule.operands, *rule.results) for dim in dims):
        return False
    if kind in REDUCTION_KINDS:
        able = all(neutral(kind, jx.aval(a).dtype) is not None for a in eqn.invars)
        return able and eqn.primitive.name in REDUCED
    return kind == "parallel"


def _masked(x: Any, dims: Dims, shape: Sequence[int], fills: Mapping[str, str]) -> Any:
    """``x`` with neutral elements where it is longer than ``shape``."""
    for d, (dim, n) in enumerate(zip(dims, shape, strict=True)):
        if dim and dim[0] in fills:
            x = kept(x, d, 0, n, neutral(fills[dim[0]], x.dtype))
    return x
