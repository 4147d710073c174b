"""Operations on padded operands: those whose rule says that the other elements of a dimension stay as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from autoshard import jaxpr as jx
from autoshard.ir.rule import Dims, Rule
from autoshard.ir.rule_registry import lookup_rule
from autoshard.ir.spec import REDUCTION_KINDS
from autoshard.ir.traits import Traits
from autoshard.passes.pad_uneven.state import PaddingState
from autoshard.passes.pad_uneven.window import fill_outside, neutral_element


def run_padded(state: PaddingState, eqn: jx.JaxprEqn) -> bool:
    """Runs the operation on padded operands; False where it cannot be, and nothing was done.

    The padding of a reduced dimension is first overwritten by the reduction's neutral element.
    """
    traits = state.rules.traits(eqn.primitive)
    rule = _rule(state, eqn, traits)
    if rule is None:
        return False
    padded: dict[str, int] = {}
    for a, dims in zip(eqn.invars, rule.operands, strict=True):
        window = state.window_of(a)
        for dim, m, n in zip(dims, window.shape, window.base_shape, strict=False):
            size = state.padded_size(m, n)
            if size and size > m and len(dim) == 1 and _can_pad(eqn, rule, traits, dim[0]):
                padded.setdefault(dim[0], size)
    masked = {f: rule.kind(f) for f in padded if rule.kind(f) in REDUCTION_KINDS}
    if not padded:
        return False
    operand_shapes, result_shapes = (
        [
            [padded[dim[0]] if dim and dim[0] in padded else n for dim, n in zip(dims, jx.aval(a).shape, strict=True)]
            for a, dims in zip(atoms, side, strict=True)
        ]
        for atoms, side in ((eqn.invars, rule.operands), (eqn.outvars, rule.results))
    )
    params = dict(eqn.params)
    if traits.shape_param is not None:
        params[traits.shape_param] = tuple(result_shapes[0])

    def run(*xs: Any) -> Any:
        operands = [
            _mask_padding(x, dims, jx.aval(a).shape, masked)
            for x, dims, a in zip(xs, rule.operands, eqn.invars, strict=True)
        ]
        return eqn.primitive.bind(*operands, **params)

    operands, results = (
        [jax.ShapeDtypeStruct(shape, jx.aval(a).dtype) for a, shape in zip(atoms, shapes, strict=True)]
        for atoms, shapes in ((eqn.invars, operand_shapes), (eqn.outvars, result_shapes))
    )
    try:
        found = jax.tree.leaves(jax.eval_shape(run, *operands))
    except (TypeError, ValueError):  # its parameters say other sizes
        return False
    if [(x.shape, x.dtype) for x in found] != [(x.shape, x.dtype) for x in results]:
        return False
    arrays = [state.padded(a, shape, eqn) for a, shape in zip(eqn.invars, operand_shapes, strict=True)]
    state.replace_eqn(eqn, run, arrays, [jx.aval(v).shape for v in eqn.outvars])
    return True


def _rule(state: PaddingState, eqn: jx.JaxprEqn, traits: Traits) -> Rule | None:
    """The rule of an operation that can be run on padded operands."""
    fixed = eqn.effects or jx.op_names(eqn) or jx.regions(eqn) or traits.constrains
    if fixed or traits.iterates_to_convergence or not all(map(jx.is_array, eqn.invars)):
        return None
    return lookup_rule(eqn, state.rules, state.mesh)


def _can_pad(eqn: jx.JaxprEqn, rule: Rule, traits: Traits, factor: str) -> bool:
    """Whether more elements of ``factor`` leave the others as they are, or do so once they are masked."""
    kind = rule.kind(factor)
    if any(factor in dim and len(dim) > 1 for dims in (*rule.operands, *rule.results) for dim in dims):
        return False
    if kind in REDUCTION_KINDS:
        maskable = all(neutral_element(kind, jx.aval(a).dtype) is not None for a in eqn.invars)
        return maskable and traits.ignores_neutral
    return kind == "parallel"


def _mask_padding(x: Any, dims: Dims, shape: Sequence[int], masked: Mapping[str, str]) -> Any:
    """``x`` with neutral elements where it is longer than ``shape`` in a dimension that is reduced."""
    for d, (dim, n) in enumerate(zip(dims, shape, strict=True)):
        if dim and dim[0] in masked:
            x = fill_outside(x, d, 0, n, neutral_element(masked[dim[0]], x.dtype))
    return x
