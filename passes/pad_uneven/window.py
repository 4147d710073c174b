"""Windows: arrays given as parts of other arrays, which nothing has computed yet.

Slices, padding and splits only say where elements come from, so a chain of them is one window on the array at its
beginning. Where a window is computed it may be placed anywhere in a longer array: what then surrounds it is arbitrary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from autoshard import jaxpr as jx

Placement = tuple[int, int]
"""Along one dimension: where a window begins in the array that it is placed in, and that array's size."""


@dataclass(frozen=True, slots=True)
class DimWindow:
    """Along one dimension: element j is element ``start + j`` of the base where ``valid_start <= start + j <
    valid_stop``, else the fill value."""

    start: int
    size: int
    valid_start: int
    valid_stop: int


@dataclass(frozen=True)
class Window:
    """``base`` through a window in every dimension; outside of what is valid in it, ``fill``, a scalar."""

    base: jx.Atom
    dims: tuple[DimWindow, ...]
    fill: jx.Atom | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(w.size for w in self.dims)

    @property
    def base_shape(self) -> tuple[int, ...]:
        return tuple(jx.aval(self.base).shape)


def leading_window(base: jx.Atom, shape: Sequence[int] | None = None) -> Window:
    """The first ``shape`` elements of ``base``; all of it where no shape is given."""
    sizes = jx.aval(base).shape if shape is None else shape
    return Window(base, tuple(DimWindow(0, n, 0, n) for n in sizes))


def slice_window(window: Window, starts: Sequence[int], sizes: Sequence[int]) -> Window:
    """``window[starts : starts + sizes]``."""
    dims = zip(window.dims, starts, sizes, strict=True)
    return replace(window, dims=tuple(replace(w, start=w.start + start, size=size) for w, start, size in dims))


def pad_window(window: Window, edges: Sequence[tuple[int, int]], fill: jx.Atom) -> Window | None:
    """``window`` with ``fill`` before and after it, or less of it where edges are negative; None where two fill values
    would be needed."""
    if window.fill is not None and needs_fill(window) and not _same_scalar(window.fill, fill):
        return None
    dims = tuple(
        DimWindow(
            w.start - before,
            w.size + before + after,
            max(w.valid_start, w.start, 0),
            min(w.valid_stop, w.start + w.size, n),
        )
        for w, n, (before, after) in zip(window.dims, window.base_shape, edges, strict=True)
    )
    return Window(window.base, dims, fill)


def place_window(window: Window, placements: Sequence[Placement]) -> Callable[..., Any]:
    """``fun(base)``, or ``fun(base, fill)``: an array with ``window`` at ``placements``, arbitrary elsewhere."""

    def fun(x: Any, fill: Any = None) -> Any:
        value = jnp.zeros((), x.dtype) if fill is None else fill
        for d, (w, (begin, size)) in enumerate(zip(window.dims, placements, strict=True)):
            first = max(w.start, w.valid_start, 0)
            last = min(w.start + w.size, w.valid_stop, x.shape[d])
            if 2 * (last - first) <= x.shape[d] != size and first < last:  # few: cheaper to broadcast than to shift
                x = lax.slice_in_dim(x, first, last, axis=d)
                w = DimWindow(w.start - first, w.size, 0, last - first)
            n = x.shape[d]
            before = begin - w.start
            after = size - before - n
            if before >= size or after >= size:
                x = jnp.broadcast_to(value, (*x.shape[:d], size, *x.shape[d + 1 :]))
                continue
            if max(w.start, 0) < w.valid_start or min(w.start + w.size, n) > w.valid_stop:
                x = fill_outside(x, d, w.valid_start, w.valid_stop, value)
            if before > 0 or after > 0:
                x = lax.pad(x, value, [(before, after, 0) if e == d else (0, 0, 0) for e in range(x.ndim)])
            elif before or after:
                x = lax.slice_in_dim(x, -before, n + after, axis=d)
        return x

    return fun


def fill_outside(x: Any, dim: int, start: int, stop: int, fill: Any) -> Any:
    """``x`` with ``fill`` outside of ``start <= index < stop`` along ``dim``."""
    n = x.shape[dim]
    if start <= 0 and n <= stop:
        return x
    at = lax.broadcasted_iota("int32", x.shape, dim)
    inside = at < stop if start <= 0 else at >= start if n <= stop else (at >= start) & (at < stop)
    return lax.select(inside, x, jnp.full(x.shape, fill, x.dtype))


def neutral_element(kind: str, dtype: Any) -> Any:
    """What changes nothing in a reduction of this kind; None where the dtype has no such number."""
    if kind in ("sum", "or"):
        return np.zeros((), dtype) if jx.represents(dtype, np.dtype(bool)) else None  # powers of two have no zero
    if kind == "prod":
        return np.ones((), dtype)
    if kind == "and":
        return np.asarray(True) if dtype == np.bool_ else np.asarray(-1).astype(dtype)
    if jax.dtypes.issubdtype(dtype, np.integer):
        return np.asarray(jnp.iinfo(dtype).min if kind == "max" else jnp.iinfo(dtype).max, dtype)
    if jax.dtypes.issubdtype(dtype, np.floating):
        infinite = np.asarray(-np.inf if kind == "max" else np.inf, dtype)  # a jnp.asarray is a tracer in a trace
        least = jnp.finfo(dtype).min if kind == "max" else jnp.finfo(dtype).max
        return infinite if math.isinf(float(infinite)) else np.asarray(least, dtype)
    return None


def needs_fill(window: Window) -> bool:
    """Whether some of it is the fill value rather than an element of the base."""
    return any(
        w.start < max(w.valid_start, 0) or w.start + w.size > min(w.valid_stop, n)
        for w, n in zip(window.dims, window.base_shape, strict=True)
    )


def _same_scalar(a: jx.Atom, b: jx.Atom) -> bool:
    if isinstance(a, jx.Literal) and isinstance(b, jx.Literal):
        return a.aval == b.aval and bool(np.array_equal(a.val, b.val))
    return a is b
