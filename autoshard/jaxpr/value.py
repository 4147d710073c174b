"""Abstract values of variables and arrays, new variables, and sizes and names of dtypes."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np
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


def resized_var(var: Var, shape: tuple[int, ...]) -> Var:
    """A new variable of the dtype of ``var`` and another shape of the same rank."""
    return Var(aval(var).update(shape=shape))


def host_var(var: Var) -> Var:
    """A new variable of the type of ``var``, in the host's memory."""
    return Var(aval(var).update(memory_space=jax.memory.Space.Host))


def stacked_var(var: Var, length: int, axis: int = 0) -> Var:
    """A new variable for ``length`` values of the type of ``var``, stacked along a new dimension ``axis``."""
    return Var(_core.unmapped_aval(length, axis, var.aval))


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
def represents(new: Any, old: Any) -> bool:
    """Whether every finite value of dtype ``old`` is one of dtype ``new``, so that a cast of it rounds nothing.

    (JAX's promotion would say so of most dtypes, but refuses integers and floats of few bits.)
    """
    extended = [d for d in (new, old) if jax.dtypes.issubdtype(d, jax.dtypes.extended)]
    if extended or new == old:
        return new == old
    real, imaginary = (jax.dtypes.issubdtype(d, np.complexfloating) for d in (new, old))
    (digits, step, low, high), (least_digits, least_step, lowest, highest) = map(_number_range, (new, old))
    exact = digits >= least_digits and step <= least_step and low <= lowest and high >= highest
    return exact and (real or not imaginary)


def _number_range(dtype: Any) -> tuple[int, float, Any, Any]:
    """Of a dtype's finite numbers: significant binary digits, the smallest step between two, the lowest, the highest;
    of complex ones, those of a part."""
    if dtype == np.bool_:
        return 1, 1.0, 0, 1
    if jax.dtypes.issubdtype(dtype, np.integer):
        whole = jax.numpy.iinfo(dtype)
        return int(whole.max).bit_length(), 1.0, int(whole.min), int(whole.max)
    info = jax.numpy.finfo(dtype)
    return int(info.nmant) + 1, math.ldexp(1.0, int(info.minexp - info.nmant)), float(info.min), float(info.max)


def represents_indices(dtype: Any, size: int) -> bool:
    """Whether ``dtype`` represents every index of a dimension of ``size`` elements."""
    if not jax.dtypes.issubdtype(dtype, np.floating):
        return True
    digits, _, low, high = _number_range(dtype)
    return not size or (low <= 0 and size - 1 <= min(2**digits, high))


def is_narrow_float(dtype: Any) -> bool:
    """Whether ``dtype`` is floating point of fewer than 16 bits: with so few digits, a sum of rounded sums is not the
    rounded sum by far."""
    return jax.dtypes.issubdtype(dtype, np.floating) and dtype_bits(dtype) < 16


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
