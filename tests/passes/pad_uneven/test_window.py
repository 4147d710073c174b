"""Windows: a chain of slices and padding, computed at once and placed anywhere, is what it is step by step."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax import numpy as jnp

from autoshard import jaxpr as jx
from autoshard.passes.pad_uneven.window import (
    fill_outside,
    leading_window,
    neutral_element,
    pad_window,
    place_window,
    slice_window,
)

STEP = st.tuples(st.booleans(), st.integers(-3, 4), st.integers(-3, 4))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 9), st.lists(STEP, max_size=5), st.integers(0, 3), st.integers(0, 3))
def test_a_chain_at_once(size: int, chain: list[tuple[bool, int, int]], before: int, after: int) -> None:
    eqn = jax.make_jaxpr(lambda x: lax.pad(x, jnp.float32(-1), ((1, 1, 0),)))(np.ones(size, "f4")).eqns[0]
    base, fill = eqn.invars
    x, window = np.arange(size, dtype="f4") + 1, leading_window(base)
    for pad, a, b in chain:
        if len(x) + (a + b if pad else -abs(a) - abs(b)) < 1:
            continue
        if pad:
            x = np.asarray(lax.pad(x, np.float32(-1), ((a, b, 0),)))
            window = pad_window(window, [(a, b)], fill)
            assert window is not None
        else:
            x = x[abs(a) : len(x) - abs(b)]
            window = slice_window(window, [abs(a)], [len(x)])
    assert window.shape == x.shape
    given_fill = [] if window.fill is None else [np.float32(-1)]
    whole = place_window(window, [(before, before + len(x) + after)])(np.arange(size, dtype="f4") + 1, *given_fill)
    assert whole.shape == (before + len(x) + after,)
    np.testing.assert_array_equal(whole[before : before + len(x)], x)


def test_padding_with_another_value_is_no_window() -> None:
    (one, two) = (jx.Literal(np.float32(n), jax.typeof(np.float32(n))) for n in (1, 2))
    base = jax.make_jaxpr(lambda x: x)(np.ones(4, "f4")).invars[0]
    first = pad_window(leading_window(base), [(1, 0)], one)
    assert first is not None
    assert pad_window(first, [(1, 0)], one) is not None
    assert pad_window(first, [(1, 0)], two) is None
    assert pad_window(slice_window(first, [1], [4]), [(1, 0)], two) is not None


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float32", "int8", "uint16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min"])
def test_what_changes_no_reduction(kind: str, dtype: str) -> None:
    reduce = getattr(jnp, kind)
    number = neutral_element(kind, jnp.dtype(dtype))
    if number is None:
        assert (kind, dtype) in [("max", "bool"), ("min", "bool")]
        return
    signs = (1,) if dtype in ("bool", "uint16") else (1, -1)
    for x in (jnp.asarray([1, 2, 1, 0, 3]).astype(dtype) * jnp.asarray(sign).astype(dtype) for sign in signs):
        np.testing.assert_array_equal(reduce(fill_outside(x, 0, 0, 3, number)), reduce(x[:3]))
