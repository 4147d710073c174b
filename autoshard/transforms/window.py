"""View: an array as a window on another one, which nobody has computed yet.

Slices, padding and splits only say where elements come from, so one after another they are one view. Where a view is
computed it may be placed anywhere in a longer array: what then stands around it is arbitrary.
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

Place = tuple[int, int]
"""Along one dimension: where a view begins in the array that it is placed in, and that array's size."""


@dataclass(frozen=True, slots=True)
class Window:
    """Along one dimension: element j of a view is element ``at + j`` of its base, if that is in ``low <= . < high``."""

    at: int
    size: int
    low: int
    high: int


@dataclass(frozen=True)
class View:
    """``base`` seen through a window in every dimension; elsewhere ``fill``, a scalar."""

    base: jx.Atom
    windows: tuple[Window, ...]
    fill: jx.Atom | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(w.size for w in self.windows)

    @property
    def around(self) -> tuple[int, ...]:
        """The base's shape."""
        return tuple(jx.aval(self.base).shape)


def of(base: jx.Atom, shape: Sequence[int] | None = None) -> View:
    """All of ``base``, or its elements from the first on."""
    sizes = jx.aval(base).shape if shape is None else shape
    return View(base, tuple(Window(0, n, 0, n) for n in sizes))


def sliced(view: View, starts: Sequence[int], sizes: Sequence[int]) -> View:
    """``view[starts : starts + sizes]``."""
    windows = zip(view.windows, starts, sizes, strict=True)
    return replace(view, windows=tuple(replace(w, at=w.at + start, size=size) for w, start, size in windows))


def padded(view: View, edges: Sequence[tuple[int, int]], fill: jx.Atom) -> View | None:
    """``view`` with ``fill`` before and after, or less of it where edges are negative; None where that is no view."""
    if view.fill is not None and filled(view) and not _equal(view.fill, fill):
        return None
    windows = tuple(
        Window(w.at - before, w.size + before + after, max(w.low, w.at, 0), min(w.high, w.at + w.size, n))
        for w, n, (before, after) in zip(view.windows, view.around, edges, strict=True)
    )
    return View(view.base, windows, fill)


def placed(view: View, places: Sequence[Place]) -> Callable[..., Any]:
    """``fun(base)``, or ``fun(base, fill)``: an array that holds ``view`` at ``places``."""

    def fun(x: Any, fill: Any = None) -> Any:
        value = jnp.zeros((), x.dtype) if fill is None else fill
        for d, (w, (begin, size)) in enumerate(zip(view.windows, places, strict=True)):
            first, last = max(w.at, w.low, 0), min(w.at + w.size, w.high, x.shape[d])
            if 2 * (last - first) <= x.shape[d] != size and first < last:  # few, which are told rather than moved
                x = lax.slice_in_dim(x, first, last, axis=d)
                w = Window(w.at - first, w.size, 0, last - first)
            n = x.shape[d]
            before = begin - w.at
            after = size - before - n
            if before >= size or after >= size:
                x = jnp.broadcast_to(value, (*x.shape[:d], size, *x.shape[d + 1 :]))
                continue
            if max(w.at, 0) < w.low or min(w.at + w.size, n) > w.high:
                x = kept(x, d, w.low, w.high, value)
            if before > 0 or after > 0:
                x = lax.pad(x, value, [(before, after, 0) if e == d else (0, 0, 0) for e in range(x.ndim)])
            elif before or after:
                x = lax.slice_in_dim(x, -before, n + after, axis=d)
        return x

    return fun


def kept(x: Any, dim: int, low: int, high: int, fill: Any) -> Any:
    """``x`` with ``fill`` outside of ``low <= . < high`` along ``dim``."""
    n = x.shape[dim]
    if low <= 0 and n <= high:
        return x
    at = lax.broadcasted_iota("int32", x.shape, dim)
    inside = at < high if low <= 0 else at >= low if n <= high else (at >= low) & (at < high)
    return lax.select(inside, x, jnp.full(x.shape, fill, x.dtype))


def neutral(kind: str, dtype: Any) -> Any:
    """What changes nothing in a reduction of this kind; None where there is no such number."""
    if kind in ("sum", "or"):
        return np.zeros((), dtype)
    if kind == "prod":
        return np.ones((), dtype)
    if kind == "and":
        return np.asarray(True) if dtype == np.bool_ else np.asarray(-1).astype(dtype)
    if jax.dtypes.issubdtype(dtype, np.integer):
        return np.asarray(jnp.iinfo(dtype).min if kind == "max" else jnp.iinfo(dtype).max, dtype)
    if jax.dtypes.issubdtype(dtype, np.floating) and not math.isfinite(float(jnp.asarray(np.inf, dtype))):
        return jnp.asarray(-np.inf if kind == "max" else np.inf, dtype)
    return None


def filled(view: View) -> bool:
    """Whether a window reaches where the base does not count."""
    return any(
        w.at < max(w.low, 0) or w.at + w.size > min(w.high, n) for w, n in zip(view.windows, view.around, strict=True)
    )


def _equal(a: jx.Atom, b: jx.Atom) -> bool:
    if isinstance(a, jx.Literal) and isinstance(b, jx.Literal):
        return a.aval == b.aval and bool(np.array_equal(a.val, b.val))
    return a is b
