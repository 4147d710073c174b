"""Pads dimensions that the mesh does not divide (1023 -> 1024); padding is arbitrary and masked before reductions.

``x[1:] - x[:-1]`` of 1024 rows has 1023, which no mesh divides; each slice would have to be gathered first. Here it is
computed of 1024 rows, the last of which is padding: a shift of ``x``, for which neighbours exchange a row, less ``x``.
Padding goes along through every operation whose rule has that dimension pass, is overwritten by the neutral element
before it is reduced, and is cut off where the value is concatenated with others, padded, or a result.

So a chain of slices, padding and concatenations, as `jax.numpy.roll` is one, becomes one shift of its operand a piece.
Programs in which no such size arises stay as they are. Values are the same, up to the order in which sums are added.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from jax import lax
from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.ir.program import Program
from autoshard.ir.rule_registry import Rules, has_own_rule
from autoshard.machine.mesh import LogicalMesh
from autoshard.passes.pad_uneven.elementwise import run_padded
from autoshard.passes.pad_uneven.indexed import gather_padded, scatter_padded
from autoshard.passes.pad_uneven.moves import (
    overlay_concatenation,
    tile_by_dimension,
    window_pad,
    window_slice,
    window_split,
)
from autoshard.passes.pad_uneven.regions import pad_regions
from autoshard.passes.pad_uneven.state import PaddingState
from autoshard.transforms.pipeline import Pass

MOVES: Mapping[jx.Primitive, Callable[[PaddingState, jx.JaxprEqn], bool]] = {
    lax.concatenate_p: overlay_concatenation,
    lax.pad_p: window_pad,
    lax.slice_p: window_slice,
    lax.split_p: window_split,
    lax.tile_p: tile_by_dimension,
}
"""Operations that uneven sizes come from, or that would undo them."""
INDEXED: Mapping[jx.Primitive, Callable[[PaddingState, jx.JaxprEqn], bool]] = {
    lax.gather_p: gather_padded,
    lax.scatter_add_p: scatter_padded,
    lax.scatter_max_p: scatter_padded,
    lax.scatter_min_p: scatter_padded,
    lax.scatter_mul_p: scatter_padded,
    lax.scatter_p: scatter_padded,
    lax.scatter_sub_p: scatter_padded,
}
"""Operations at computed positions, which must not reach what is padding."""
MOST_REPORTED = 4
"""Most sizes that the report names."""


@dataclass(frozen=True)
class PadUneven(Pass):
    """Pads dimensions that the mesh does not divide, so that values stay split where their operands are."""

    name: ClassVar[str] = "pad_uneven"

    def __call__(self, program: Program) -> Program:
        stored = frozenset(
            (m, n)
            for leaf in program.inputs
            for m, n in zip(leaf.shape, leaf.stored_shape or leaf.shape, strict=True)
            if m != n
        )
        after = _padded(program.jaxpr, program.rules, program.mesh, stored)
        if after is program.jaxpr:
            return program
        return replace(program, jaxpr=after, unpadded_jaxpr=program.unpadded_jaxpr or program.jaxpr)

    def change(self, before: Program, after: Program) -> str:
        if before is after:
            return "nothing to pad"
        gone = _uneven_dims(before)
        gone.subtract(_uneven_dims(after))
        rows = [f"{size} ({count} times)" for size, count in sorted(gone.items(), reverse=True) if count > 0]
        if len(rows) > MOST_REPORTED:
            rows[MOST_REPORTED:] = [f"{len(rows) - MOST_REPORTED} other sizes"]
        return f"padded dimensions of size {', '.join(rows)}" if rows else "slices and repeats rewritten"


def _uneven_dims(program: Program) -> Counter[int]:
    """How many dimensions of intermediate values have each size that the mesh does not divide."""
    sizes = (n for e in jx.walk(program.jaxpr) for v in e.outvars if jx.is_shaped(v) for n in jx.aval(v).shape)
    return Counter(n for n in sizes if n % program.mesh.size)


def _padded(jaxpr: jx.Jaxpr, rules: Rules, mesh: LogicalMesh, stored: frozenset[tuple[int, int]]) -> jx.Jaxpr:
    """``jaxpr`` with its uneven values padded, at every depth; itself where there are none."""
    state = PaddingState(rules, mesh, stored)
    for eqn in jaxpr.eqns:
        _rewrite(state, eqn)
    outvars = [state.unpadded(a) for a in jaxpr.outvars]
    return jx.with_eqns(jaxpr, state.eqns, outvars=outvars) if state.changed else jaxpr


def _rewrite(state: PaddingState, eqn: jx.JaxprEqn) -> None:
    """Adds to ``state`` what ``eqn`` becomes."""
    op, traits = eqn.primitive, state.rules.traits(eqn.primitive)
    uneven = bool(state.windows) and any(isinstance(a, jx.Var) and a in state.windows for a in eqn.invars)
    if not uneven and op not in MOVES and not jx.regions(eqn):
        if traits.broadcasts and state.broadcast(eqn):
            return
        if traits.broadcasts:
            state.producers[eqn.outvars[0]] = eqn
        state.eqns.append(eqn)
        return
    shaped = [a for a in (*eqn.invars, *eqn.outvars) if jx.is_shaped(a)]
    full = all(map(jx.is_array, eqn.outvars)) and all(math.prod(jx.aval(a).shape) for a in shaped)
    if full and op in MOVES and MOVES[op](state, eqn):
        return
    ruled = has_own_rule(eqn, state.rules)
    if uneven and not ruled and jx.regions(eqn) and pad_regions(state, eqn, _rewrite):
        return
    if full and uneven:
        inline = op is _prims.custom_jvp_call_p and not ruled
        if op in INDEXED and INDEXED[op](state, eqn):
            return
        if _inline_call(state, eqn) if inline else run_padded(state, eqn):
            return
    eqn = eqn.replace(invars=[state.unpadded(a) for a in eqn.invars])
    if traits.broadcasts:
        state.producers[eqn.outvars[0]] = eqn
    new = eqn if ruled else jx.map_bodies(eqn, lambda b: _padded(b, state.rules, state.mesh, state.stored))
    state.changed |= new is not eqn
    state.eqns.append(new)


def _inline_call(state: PaddingState, eqn: jx.JaxprEqn) -> bool:
    """Rewrites the body of a `custom_jvp` function in place of its call: no derivative is taken of it any more."""
    (region,), windows = jx.regions(eqn), [state.window_of(a) for a in eqn.invars]
    wider = any((state.padded_size(m, n) or m) > m for w in windows for m, n in zip(w.shape, w.base_shape, strict=True))
    if region.body.constvars or not wider:
        return False
    state.windows.update(zip(region.body.invars, windows, strict=True))
    state.producers.update(dict.fromkeys(region.body.invars, eqn))
    for e in region.body.eqns:
        _rewrite(state, e)
    state.set_windows(eqn, [state.window_of(a) for a in region.body.outvars])
    state.changed = True
    return True
