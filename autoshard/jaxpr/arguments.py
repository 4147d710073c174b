"""The abstract value of an argument, as `jax.jit` takes it."""

from __future__ import annotations

from typing import Any

import jax

from autoshard.jaxpr.value import array_aval

ArgumentAval = tuple[tuple[int, ...], Any, bool]
"""Shape, dtype and weak type."""


def argument_aval(x: Any) -> ArgumentAval:
    """Shape, dtype and weak type of an argument, as `jax.jit` sees it (64-bit types narrowed where x64 is off).

    Raises:
      TypeError: ``x`` is not an array.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
        return tuple(x.shape), dtype, bool(x.weak_type)
    x = x if isinstance(x, jax.Array) else array_aval(x)
    return tuple(x.shape), x.dtype, bool(getattr(x, "weak_type", False))  # key arrays have no weak_type
