"""Splash attention, interpreted: the numbers of plain code, for masks by block, and the gradient from what is given."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from autoshard.transforms.attention_kernels import KernelCall
from autoshard.transforms.kernel_op import attention_kernel_backward_p, attention_kernel_p

CALL = KernelCall("splash_interpreted", 0.3)
CASES = {
    "full": (CALL, 256, 2, 2),
    "full, gradient by two kernels": (CALL, 512, 2, 2),
    "causal": (replace(CALL, high=0), 256, 4, 2),
    "causal, gradient by two kernels": (replace(CALL, high=0), 512, 2, 1),
    "window": (replace(CALL, low=-100, high=0), 512, 2, 2),
    "window on both sides": (replace(CALL, low=-20, high=130), 384, 2, 1),
    "soft cap": (replace(CALL, high=0, soft_cap=2.0), 256, 2, 2),
}


def operands(length, heads, key_heads, widths=(16, 24), batch=2):
    rng = np.random.default_rng(0)
    sides = ((heads, widths[0]), (key_heads, widths[0]), (key_heads, widths[1]))
    return [jnp.asarray(rng.normal(size=(batch, length, n, w)), "float32") for n, w in sides]


def close(have, want):
    for x, y in zip(have, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(y))))


def run(primitive, call, *xs):
    return jax.jit(functools.partial(primitive.bind, call=call))(*xs)


def both(call, primitive, *xs):
    """By the kernel, and by plain code."""
    return run(primitive, call, *xs), run(primitive, replace(call, kernel="splash"), *xs)


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_those_of_plain_code(name):
    call, *sizes = CASES[name]
    ours = operands(*sizes)
    have, want = both(call, attention_kernel_p, *ours)
    close(have, want)
    close(*both(call, attention_kernel_backward_p, *ours, *want, jnp.cos(3 * want[0])))


@pytest.mark.parametrize(("distance", "low"), [(256, -300), (512, -300), (256, -256), (-256, -40)])
def test_keys_that_some_queries_do_not_see_have_no_weight_there(distance, low):
    """As in a ring: rows that see none have the log-sum-exp of a masked score, and no gradient."""
    call = replace(CALL, low=low, high=-low).shifted(distance, 256, 256)
    q, k, v = operands(256, 2, 2)
    (out, logsum), want = both(call, attention_kernel_p, q, k, v)
    assert not jnp.isnan(out).any()
    rest = 0.5 * want[0], jnp.zeros_like(logsum), jnp.cos(q[..., :1] + want[0])
    weight = [jnp.exp(x)[..., None].swapaxes(1, 2) for x in (logsum, want[1])]
    close([jnp.where(weight[0] > 0, out, 0), weight[0]], [jnp.where(weight[1] > 0, want[0], 0), weight[1]])
    close(*both(call, attention_kernel_backward_p, q, k, v, *rest))


@pytest.mark.parametrize("name", ["full", "causal", "causal, gradient by two kernels", "soft cap"])
@pytest.mark.parametrize("distance", [0, 128])
def test_queries_see_the_keys_of_their_segment(name, distance):
    """Whose ids may be others, as of keys that arrive in a ring: rows that see none have no weight there."""
    call, length, *heads = CASES[name]
    call, ours = call.shifted(distance, length, length), operands(length, *heads)
    ids = np.sort(np.random.default_rng(1).integers(0, 16, (2, length + distance)), 1).astype("int32")
    segments = jnp.asarray(ids[:, distance:]), jnp.asarray(ids[:, :length])
    (out, logsum), want = both(call, attention_kernel_p, *ours, *segments)
    weight = [jnp.exp(x)[..., None].swapaxes(1, 2) for x in (logsum, want[1])]
    assert bool((weight[0] == 0).any()) == bool(distance)
    assert not jnp.isnan(out).any()
    close([jnp.where(weight[0] > 0, out, 0), weight[0]], [jnp.where(weight[1] > 0, want[0], 0), weight[1]])
    rest = 0.5 * want[0], jnp.maximum(want[1], 0), jnp.cos(3 * want[0])
    close(*both(call, attention_kernel_backward_p, *ours, *rest, *segments))


def test_the_gradient_uses_the_given_output_and_the_forward_kernel_is_dead_code():
    ours = operands(256, 2, 2)
    out, logsum = run(attention_kernel_p, CALL, *ours)
    further = out / 2, logsum + 1, jnp.cos(3 * out)
    close(*both(CALL, attention_kernel_backward_p, *ours, *further))
    made = jax.make_jaxpr(functools.partial(attention_kernel_backward_p.bind, call=CALL))(*ours, *further)
    text = jax.jit(jax.extend.core.jaxpr_as_fun(made)).lower(*ours, *further).compile().as_text()
    assert "splash_mha_dkv" in text
    assert "splash_mha_fwd" not in text
