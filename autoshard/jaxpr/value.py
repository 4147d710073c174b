"""Abstract values of variables and arrays, new variables, and sizes and names of dtypes."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
from jax._src import core as _core
from jax.extend.core import Literal, Var

Atom = Var | Literal


def is_tracer(x: Any) -> bool:
    """Whether ``x`` is a tracer."""
    return isinstance(x, _core.Tracer)


def aval(atom: Atom) -> Any:
    """The abstract value of ``atom``, typed Any: JAX's annotation is a base class without shape and dtype."""
    return atom.aval


def is_shaped(atom: Atom) -> bool:
    """Whether ``atom`` has a shape and a dtype, unlike a token or a reference."""
    return isinstance(atom.aval, _core.ShapedArray)


def array_aval(x: Any) -> Any:
    """The abstract value of ``x``, an array or a number.

    Raises:
      TypeError: ``x`` is neither, such as a reference to an array.
    """
    found = jax.typeof(x)
    if not isinstance(found, _core.ShapedArray):
        raise TypeError(f"{type(x).__name__} is not an array")
    return found


def is_array(atom: Atom) -> bool:
    """Whether ``atom`` is an array of a plain dtype: no token, reference or key array."""
    dtype = getattr(atom.aval, "dtype", None)
    return is_shaped(atom) and not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def new_var(var: Var) -> Var:
    """A new variable of the type of ``var``."""
    return Var(var.aval)


def stacked_var(var: Var, length: int) -> Var:
    """A new variable for ``length`` values of the type of ``var``, stacked along a new leading dimension."""
    return Var(_core.unmapped_aval(length, 0, var.aval))


def aval_bytes(aval: Any) -> int:
    """Size of a value in bytes; 0 where it is no array, such as a token."""
    return -(-math.prod(aval.shape) * dtype_bits(aval.dtype) // 8) if hasattr(aval, "dtype") else 0


@functools.cache
def dtype_bits(dtype: Any) -> int:
    """Bits per element; sub-byte types count their own size."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=dtype._impl.name)))
        return key.size * key.dtype.itemsize * 8
    if dtype == bool:
        return 8
    info = jax.numpy.iinfo if jax.dtypes.issubdtype(dtype, jax.numpy.integer) else jax.numpy.finfo
    if jax.dtypes.issubdtype(dtype, jax.numpy.complexfloating):
        return dtype.itemsize * 8
    try:
        return int(info(dtype).bits)
    except ValueError:
        return dtype.itemsize * 8


@functools.cache
def dtype_name(dtype: Any) -> str:
    """Name of a dtype, which `dtype_from_name` reads; of PRNG keys with the generator: ``key<threefry2x32>``."""
    return f"key<{dtype._impl.name}>" if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) else str(dtype)


def dtype_from_name(name: str) -> Any:
    """The inverse of `dtype_name`.

    Raises:
      ValueError, TypeError: no such dtype or generator.
    """
    if name.startswith("key<"):
        return jax.eval_shape(lambda: jax.random.key(0, impl=name[4:-1])).dtype
    return jax.numpy.dtype(name)
