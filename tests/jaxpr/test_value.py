"""Sizes and ranges of dtypes, against every number that they have."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import jaxpr as jx

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in cast")
SMALL = (
    *("bool", "int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16"),
    *("float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "bfloat16", "float16"),
)
REAL = (*SMALL, "int32", "uint32", "int64", "uint64", "float32", "float64")


def every_number(dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The finite numbers of a dtype of at most 16 bits, as float64, which represents them all."""
    if dtype == np.bool_:
        return np.array([0.0, 1.0])
    if jax.dtypes.issubdtype(dtype, np.integer):
        return np.arange(int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max) + 1).astype(np.float64)
    patterns = np.arange(2 ** jx.dtype_bits(dtype)).astype(f"uint{8 * dtype.itemsize}")
    numbers = patterns.view(dtype).astype(np.float64)
    return numbers[np.isfinite(numbers)]


@pytest.mark.parametrize("old", SMALL)
def test_a_dtype_represents_another_if_it_has_all_its_numbers(old: str) -> None:
    numbers = every_number(np.dtype(old))
    for new in REAL:
        has_them = np.array_equal(numbers.astype(new).astype(np.float64), numbers)
        assert jx.represents(np.dtype(new), np.dtype(old)) == has_them, new


def test_complex_numbers_and_keys_are_not_cast() -> None:
    key = jax.eval_shape(lambda: jax.random.key(0)).dtype
    single, double, real = (np.dtype(d) for d in ("complex64", "complex128", "float32"))
    assert jx.represents(double, single)
    assert jx.represents(single, real)
    assert not jx.represents(real, single)
    assert not jx.represents(single, double)
    assert jx.represents(key, key)
    assert not jx.represents(key, np.dtype("uint32"))


@pytest.mark.parametrize("dtype", [d for d in SMALL if d != "bool"])
def test_indices_are_represented_up_to_the_first_that_is_none(dtype: str) -> None:
    numbers, size = set(every_number(np.dtype(dtype)).tolist()), 1
    while size < 3000 and size in numbers:
        size += 1
    if 0 not in numbers:
        size = 0
    floats = jax.dtypes.issubdtype(np.dtype(dtype), np.floating)
    for n in (1, size, size + 1):
        assert jx.represents_indices(np.dtype(dtype), n) == (not floats or n <= size or size == 3000), n
