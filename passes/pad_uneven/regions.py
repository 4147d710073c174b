"""Loops, branches and rematerialized calls on padded operands: their bodies are rewritten for operands with padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoshard import jaxpr as jx
from autoshard.passes.pad_uneven.state import PaddingState
from autoshard.passes.pad_uneven.window import leading_window

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Body:
    """The body of one region, rewritten but for its results."""

    region: jx.Region
    state: PaddingState
    inputs: list[jx.Var]
    result_shapes: list[Shape]
    """The shape of each result of the body, with padding where it is computed so."""


def pad_regions(state: PaddingState, eqn: jx.JaxprEqn, rewrite: Callable[[PaddingState, jx.JaxprEqn], None]) -> bool:
    """Runs ``eqn`` on its padded operands, its bodies rewritten by ``rewrite``; False where that cannot be, and nothing
    was done.

    A value that a loop carries has padding where it begins with it.
    """
    regions = jx.regions(eqn)
    by_position = any(hasattr(e, "input_index") for e in eqn.effects)  # effects on references
    if not jx.takes_other_sizes(eqn) or by_position or not all(map(jx.is_shaped, eqn.outvars)):
        return False
    iterated = {w.outside for r in regions for w in r.inputs if w.stacked}
    shapes = [_padded_shape(state, a, keep_first=i in iterated) for i, a in enumerate(eqn.invars)]
    if all(s is None or s == tuple(jx.aval(a).shape) for s, a in zip(shapes, eqn.invars, strict=True)):
        return False
    bodies = [_rewritten(state, eqn, r, shapes, rewrite) for r in regions]
    results: dict[int, Shape] = {}
    for b in bodies:
        for end, start in b.region.carries:
            b.result_shapes[end] = tuple(jx.aval(b.inputs[start]).shape)
        for w in b.region.outputs:
            inner = b.result_shapes[w.inside]
            shape = (b.region.trip_count, *inner) if w.stacked else inner
            before = results.get(w.outside, shape)
            results[w.outside] = tuple(map(max, before, shape))
    outvars = [jx.resized_var(v, results[i]) for i, v in enumerate(eqn.outvars)]
    new = jx.with_bodies(eqn, [_finished(b, eqn, results) for b in bodies])
    operands = [a if s is None else state.padded(a, s, eqn) for a, s in zip(eqn.invars, shapes, strict=True)]
    state.eqns.append(new.replace(invars=operands, outvars=outvars))
    state.changed = True
    state.set_windows(eqn, [leading_window(o, jx.aval(v).shape) for v, o in zip(eqn.outvars, outvars, strict=True)])
    return True


def _padded_shape(state: PaddingState, atom: jx.Atom, *, keep_first: bool = False) -> Shape | None:
    """The shape that ``atom`` is computed with; None of what is no plain array."""
    if not jx.is_array(atom):
        return None
    window = state.window_of(atom)
    sizes = [state.padded_size(m, n) or m for m, n in zip(window.shape, window.base_shape, strict=True)]
    return tuple(window.shape[:1] + tuple(sizes[1:])) if keep_first else tuple(sizes)


def _rewritten(
    state: PaddingState,
    eqn: jx.JaxprEqn,
    region: jx.Region,
    shapes: list[Shape | None],
    rewrite: Callable[[PaddingState, jx.JaxprEqn], None],
) -> _Body:
    body, inner = region.body, PaddingState(state.rules, state.mesh, state.stored)
    inputs = list(body.invars)
    for w in region.inputs:
        shape, var = shapes[w.outside], body.invars[w.inside]
        shape = shape[1:] if shape is not None and w.stacked else shape
        if shape not in (None, tuple(jx.aval(var).shape)):
            inputs[w.inside] = jx.resized_var(var, shape)
            inner.windows[var] = leading_window(inputs[w.inside], jx.aval(var).shape)
            inner.producers[var] = eqn
    for e in body.eqns:
        rewrite(inner, e)
    results = [_padded_shape(inner, a) or tuple(jx.aval(a).shape) for a in body.outvars]
    return _Body(region, inner, inputs, results)


def _finished(b: _Body, eqn: jx.JaxprEqn, results: dict[int, Shape]) -> jx.Jaxpr:
    """The body with its results in the shapes ``results`` that those of the equation have."""
    for w in b.region.outputs:
        b.result_shapes[w.inside] = results[w.outside][1:] if w.stacked else results[w.outside]
    outvars = [
        b.state.padded(a, shape, eqn) if jx.is_array(a) else a
        for a, shape in zip(b.region.body.outvars, b.result_shapes, strict=True)
    ]
    return jx.with_eqns(b.region.body, b.state.eqns, invars=b.inputs, outvars=outvars)
