"""Slices, padding, splits, tiles and concatenations of uneven sizes, as windows and as arrays overlaid on one another.

Each function rewrites one equation of a `PaddingState`; it returns False where it cannot, and nothing was done.
"""

from __future__ import annotations

from typing import Any

from jax import lax

from autoshard import jaxpr as jx
from autoshard.passes.pad_uneven.state import PaddingState
from autoshard.passes.pad_uneven.window import DimWindow, Window, needs_fill, pad_window, slice_window

MOST_PIECES = 4
"""Most operands of a concatenation that are overlaid."""


def window_slice(state: PaddingState, eqn: jx.JaxprEqn) -> bool:
    """The result is a window on what is sliced."""
    window, p = state.window_of(eqn.invars[0]), eqn.params
    if p["strides"] is not None and set(p["strides"]) != {1}:
        return _strided_slice(state, eqn, window)
    _defer(state, eqn, [slice_window(window, p["start_indices"], jx.aval(eqn.outvars[0]).shape)])
    return True


def window_split(state: PaddingState, eqn: jx.JaxprEqn) -> bool:
    """The results are windows on what is split."""
    window, p = state.window_of(eqn.invars[0]), eqn.params
    offsets = [sum(p["sizes"][:i]) for i in range(len(p["sizes"]))]
    parts = [
        slice_window(window, [at if d == p["axis"] else 0 for d in range(len(window.shape))], jx.aval(v).shape)
        for at, v in zip(offsets, eqn.outvars, strict=True)
    ]
    _defer(state, eqn, parts)
    return True


def window_pad(state: PaddingState, eqn: jx.JaxprEqn) -> bool:
    """The result is a window on what is padded."""
    edges = eqn.params["padding_config"]
    if any(between for _, _, between in edges):
        return _interior_pad(state, eqn)
    window, fill = state.window_of(eqn.invars[0]), state.unpadded(eqn.invars[1])
    found = pad_window(window, [(int(before), int(after)) for before, after, _ in edges], fill)
    if found is None:
        return False
    _defer(state, eqn, [found])
    return True


def _defer(state: PaddingState, eqn: jx.JaxprEqn, windows: list[Window]) -> None:
    state.set_windows(eqn, windows)
    state.deferred.update(eqn.outvars)


def _strided_slice(state: PaddingState, eqn: jx.JaxprEqn, window: Window) -> bool:
    """Every s-th element: a window on every s-th element of the whole base."""
    starts, strides = eqn.params["start_indices"], eqn.params["strides"]
    sizes, base_shape = jx.aval(eqn.outvars[0]).shape, window.base_shape
    begins = [w.start + start if s > 1 else 0 for w, start, s in zip(window.dims, starts, strides, strict=True)]
    fits = all(b >= 0 and n % s == 0 for b, n, s in zip(begins, base_shape, strides, strict=True))
    strided = [n // s for n, s in zip(base_shape, strides, strict=True)]
    uneven = any(s > 1 and state.is_uneven(m, n) for s, m, n in zip(strides, sizes, strided, strict=True))
    if not fits or needs_fill(window) or not (uneven or eqn.invars[0] in state.windows):
        return False
    first = [b % s for b, s in zip(begins, strides, strict=True)]
    (base,) = state.emit(lambda x: lax.slice(x, first, x.shape, strides), eqn, window.base)
    dims = [
        DimWindow(b // s if s > 1 else w.start + start, m, 0, n)
        for w, start, b, s, m, n in zip(window.dims, starts, begins, strides, sizes, strided, strict=True)
    ]
    state.set_windows(eqn, [Window(base, tuple(dims))])
    return True


def _interior_pad(state: PaddingState, eqn: jx.JaxprEqn) -> bool:
    """Padding between elements: of an operand that is first padded at its ends, until it divides as the result does."""
    edges, window = eqn.params["padding_config"], state.window_of(eqn.invars[0])
    sizes, result = window.shape, jx.aval(eqn.outvars[0]).shape
    steps = [int(between) + 1 for _, _, between in edges]
    strided = [n // s for n, s in zip(result, steps, strict=True)]
    before = [int(low) // s for (low, _, _), s in zip(edges, steps, strict=True)]
    after = [n - b - m if s > 1 else int(high)
             for n, b, m, s, (_, high, _) in zip(strided, before, sizes, steps, edges, strict=True)]  # fmt: skip
    fits = all(s == 1 or (n % s == 0 and b >= 0 <= a)
               for n, b, a, s in zip(result, before, after, steps, strict=True))  # fmt: skip
    uneven = any(s > 1 and state.is_uneven(m, n) for m, n, s in zip(sizes, strided, steps, strict=True))
    fill = state.unpadded(eqn.invars[1])
    whole = pad_window(window, list(zip(before, after, strict=True)), fill) if fits and uneven else None
    if whole is None:
        return False
    inner = [(int(low) % s, s - 1 - int(low) % s, s - 1) if s > 1 else (0, 0, 0)
             for (low, _, _), s in zip(edges, steps, strict=True)]  # fmt: skip
    x = state.place(whole, [(0, n) for n in whole.shape], eqn)
    state.replace_eqn(eqn, lambda x, fill: lax.pad(x, fill, inner), [x, fill], [result])
    return True


def tile_by_dimension(state: PaddingState, eqn: jx.JaxprEqn) -> bool:
    """Repeats one dimension at a time."""
    reps = eqn.params["reps"]
    repeated = [d for d, (n, r) in enumerate(zip(jx.aval(eqn.invars[0]).shape, reps, strict=True)) if n > 1 < r]
    if state.mesh.size == 1 or len(repeated) < 2:
        return False

    def fun(x: Any) -> Any:
        for d in sorted(range(x.ndim), key=lambda d: -x.shape[d]):  # the dimension that is split before x is larger
            x = lax.tile(x, [r if e == d else 1 for e, r in enumerate(reps)]) if reps[d] != 1 else x
        return x

    state.replace_eqn(eqn, fun, [state.unpadded(eqn.invars[0])], [jx.aval(eqn.outvars[0]).shape])
    return True


def overlay_concatenation(state: PaddingState, eqn: jx.JaxprEqn) -> bool:
    """The operands overlaid on one another, each placed in an array of the size of the result."""
    axis, (result,) = eqn.params["dimension"], eqn.outvars
    windows, shape = [state.window_of(a) for a in eqn.invars], jx.aval(result).shape
    bases = [w.base for w in windows if w.shape != w.base_shape]
    parted = any(state.is_uneven(w.shape[axis], w.base_shape[axis]) for w in windows)
    if len(windows) > MOST_PIECES or not (parted or len(set(bases)) < len(bases)):
        return False
    size = state.padded_size(shape[axis], max(w.base_shape[axis] for w in windows))
    if size is None:
        return False
    sizes = [max(state.padded_size(n, w.base_shape[d]) or n for w in windows) for d, n in enumerate(shape)]
    begin, pieces, begins = 0, list[jx.Atom](), list[int]()
    for w in windows:
        placements = [(begin, size) if d == axis else (0, n) for d, n in enumerate(sizes)]
        pieces.append(state.place(w, placements, eqn))
        begins.append(begin)
        begin += w.shape[axis]

    def overlay(x: Any, *others: Any) -> Any:
        for at, y in zip(begins[1:], others, strict=True):
            x = lax.select(lax.broadcasted_iota("int32", x.shape, axis) >= at, y, x)
        return x

    state.replace_eqn(eqn, overlay, pieces, [shape])
    return True
