"""The operations of random programs: how each runs, and a table that says how it is drawn.

Values stay near one; what jumps (comparisons, argmax, indices) reads `steps`, whole numbers that lie far from where
they change, so that rounding decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import autoshard
from tests.random_draws import (
    Op,
    Shape,
    axes_of,
    axis,
    binary,
    filtered,
    indexed,
    padded,
    product,
    reshaped,
    same_rank,
    sliced,
    unary,
    whole,
    window,
)


def steps(x: Any) -> Any:
    """Whole numbers from floats."""
    return jnp.floor(jnp.clip(x, -9, 9) * 3 + 0.3717).astype(jnp.int32)


def weights(*dims: int) -> Any:
    """A constant that no arithmetic of the program can meet."""
    return jnp.asarray(np.sin(np.arange(math.prod(dims)) * 1.7 + 0.2).reshape(dims))


def tame(x: Any) -> Any:
    return x / (1 + jnp.max(jnp.abs(x), initial=0.0))


def half(x: Any, d: int) -> int:
    return -(-x.shape[d] // 2)


def widened(p: tuple[int, int], x: Any) -> Any:
    return jnp.broadcast_to(jnp.expand_dims(x, p[0]), (*x.shape[: p[0]], p[1], *x.shape[p[0] :]))


def normalised(p: tuple[tuple[int, ...]], x: Any) -> Any:
    return (x - x.mean(p[0], keepdims=True)) * lax.rsqrt(x.var(p[0], keepdims=True) + 0.1)


def updated(p: tuple[int], x: Any, i: Any) -> Any:
    return lax.dynamic_update_slice_in_dim(x, lax.slice_in_dim(x, 0, 1, axis=p[0]) + 1, jnp.sum(i), p[0])


def added(p: tuple[int], x: Any, i: Any) -> Any:
    return x.at[i].add(jnp.sin(i.astype(x.dtype)).reshape(i.shape + (1,) * (x.ndim - 1)))


def convolution(p: tuple[int, ...], x: Any) -> Any:
    k, stride, out, groups = p
    kernel = weights(k, k, x.shape[3] // groups, out) / (k * k)
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def counted(p: tuple[Any, ...], x: Any) -> Any:
    """A loop whose number of turns is read from the values."""
    turns = jnp.clip(steps(jnp.sum(x)), 0, 3)
    return lax.while_loop(lambda s: s[0] < turns, lambda s: (s[0] + 1, jnp.sin(s[1]) + 0.1), (0, x))[1]


def branched(p: tuple[Any, ...], x: Any) -> Any:
    ways = (jnp.tanh, lambda x: jnp.flip(x, -1), lambda x: x - jnp.mean(x, -1, keepdims=True))
    return lax.switch(steps(jnp.mean(x)) % 3, ways, x)


def recurrent(p: tuple[bool], x: Any) -> Any:
    """A scan over the first dimension, its carry and its steps both read."""

    def body(h: Any, row: Any) -> tuple[Any, Any]:
        h = jnp.tanh(h * 0.5 + row)
        return h, h * row

    last, rows = lax.scan(body, jnp.zeros(x.shape[1:]), x, reverse=p[0])
    return rows + last


def layered(p: tuple[int], x: Any) -> Any:
    """A scan over constant layers, its carry multiplied by each."""
    n = x.shape[-1]
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights(p[0], n, n) / n)[0]


@jax.custom_jvp
def clipped(x: Any) -> Any:
    return jnp.clip(x, -1, 1)


clipped.defjvp(lambda xs, ts: (clipped(*xs), ts[0] * 0.5))


@jax.custom_vjp
def bounded(x: Any) -> Any:
    return jnp.tanh(x)


bounded.defvjp(lambda x: (jnp.tanh(x), x), lambda x, ct: (ct * jnp.cos(x),))


def slope(f: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda p, x: jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))(x)


def solved(p: tuple[Any, ...], x: Any) -> Any:
    a = x @ jnp.swapaxes(x, -1, -2) + 3 * jnp.eye(x.shape[-2])
    return lax.linalg.triangular_solve(lax.linalg.cholesky(a), x, left_side=True, lower=True)


ELEMENTWISE = (
    jnp.tanh,
    jnp.sin,
    jnp.negative,
    jnp.abs,
    lambda x: jnp.exp2(jnp.minimum(x, 9)),
    jax.nn.gelu,
    lambda x: jnp.log1p(jnp.abs(x)),
    lax.stop_gradient,
)
REDUCTIONS = (
    jnp.sum,
    jnp.mean,
    jnp.max,
    jnp.min,
    lambda x, d: jnp.prod(jnp.tanh(x), d),
    jax.nn.logsumexp,
    lambda x, d: jnp.any(x > 7, d).astype(x.dtype),
    jnp.var,
)
SCANS = (
    jnp.cumsum,
    lax.cummax,
    lambda x, d: jnp.cumprod(jnp.cos(x), d),
    lambda x, d: lax.cumlogsumexp(x, d, reverse=True),
    lambda x, d: lax.cummin(x, d, reverse=True),
)
POOLS = ((-jnp.inf, lax.max), (0.0, lax.add), (jnp.inf, lax.min))


def many(ops: Sequence[Callable[..., Any]], rest: Callable[[Random, Shape], tuple[Any, ...]] | None = None) -> Op:
    """One of several operations, with the parameters that ``rest`` draws."""
    return unary(
        lambda p, x: ops[p[0]](x, *p[1:]),
        1 if rest else 0,
        lambda rng, s: (rng.randrange(len(ops)), *(rest(rng, s) if rest else ())),
    )


OPS: dict[str, Op] = {
    "add": Op(binary, lambda p, x, y: (x + y) / 2),
    "annotate": Op(binary, lambda p, x: autoshard.annotate(x, p[0])),
    "argmax": unary(lambda p, x: jnp.argmax(steps(x), p[0]).astype(jnp.int32), 1, axis),
    "argsort": unary(lambda p, x: jnp.argsort(steps(x), p[0], stable=True).astype(jnp.int32), 1, axis),
    "branches": unary(branched, 1),
    "broadcast": unary(widened, 0, lambda rng, s: (rng.randint(0, len(s)), rng.choice((2, 3, 4)))),
    "concatenate": Op(same_rank, lambda p, x, y: jnp.concatenate([x, y], p[0])),
    "conditional": unary(lambda p, x: lax.cond(steps(jnp.sum(x)) > 0, jnp.sin, lambda x: x * 0.3, x)),
    "convolution": Op(filtered, convolution),
    "counted loop": unary(counted),
    "cumulative": many(SCANS, axis),
    "custom_jvp": unary(slope(clipped)),
    "custom_vjp": unary(slope(bounded)),
    "divide": Op(binary, lambda p, x, y: x / (1 + y * y)),
    "dynamic_slice": Op(indexed, lambda p, x, i: lax.dynamic_slice_in_dim(x, jnp.sum(i), half(x, p[0]), p[0])),
    "dynamic_update": Op(indexed, updated),
    "elementwise": many(ELEMENTWISE),
    "einsum": Op(product, lambda p, x, y: tame(jnp.einsum(p[0], x, y))),
    "fft": unary(lambda p, x: jnp.real(jnp.fft.fft(x)) / x.shape[-1], 1),
    "from steps": Op(whole, lambda p, i: jnp.sin(i * 1.3)),
    "gather": Op(indexed, lambda p, x, i: jnp.take(x, i, p[0], mode="fill", fill_value=0.7)),
    "gather's gradient": Op(indexed, lambda p, x, i: jax.grad(lambda x: jnp.sum(jnp.sin(x[i])))(x)),
    "iota": unary(lambda p, x: x + lax.broadcasted_iota(x.dtype, x.shape, p[0]) / x.shape[p[0]], 1, axis),
    "layer_norm": unary(normalised, 1, axes_of),
    "maximum": Op(binary, lambda p, x, y: jnp.maximum(x, y)),
    "multiply": Op(binary, lambda p, x, y: jnp.sin(x) * jnp.cos(y)),
    "network's gradient": unary(slope(lambda x: jnp.tanh(x @ weights(x.shape[-1], 8)) @ weights(8, 4)), 1),
    "one_hot": Op(whole, lambda p, i: jax.nn.one_hot(i, p[0])),
    "pad": unary(lambda p, x: lax.pad(x, jnp.asarray(0.4, x.dtype), p[0]), 1, padded),
    "pool": unary(
        lambda p, x: lax.reduce_window(x, *POOLS[p[0]], *p[1:]),
        1,
        lambda rng, s: (rng.randrange(len(POOLS)), *window(rng, s)),
    ),
    "random": unary(lambda p, x: x * jax.random.uniform(jax.random.key(7), x.shape)),
    "recurrence": unary(recurrent, 1, lambda rng, s: (rng.random() < 0.5,)),
    "reduce": many(REDUCTIONS, axes_of),
    "remat": unary(slope(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)) * 2))),
    "repeat": unary(lambda p, x: jnp.repeat(x, 2, p[0]), 1, axis),
    "reshape": unary(lambda p, x: x.reshape(p[0]), 0, reshaped),
    "reverse": unary(lambda p, x: lax.rev(x, p[0]), 1, axes_of),
    "roll": unary(lambda p, x: jnp.roll(x, p[1], p[0]), 1, lambda rng, s: (*axis(rng, s), rng.choice([1, 2, -1]))),
    "scan of layers": unary(layered, 1, lambda rng, s: (rng.choice([1, 2, 3]),)),
    "scatter_add": Op(indexed, added),
    "scatter_max": Op(indexed, lambda p, x, i: x.at[i].max(0.3, mode="drop")),
    "select": Op(binary, lambda p, x, y: jnp.where(steps(x) > steps(y), x, y * 0.5)),
    "slice": unary(lambda p, x: lax.slice(x, *zip(*p[0], strict=True)), 1, sliced),
    "softmax": unary(lambda p, x: jax.nn.softmax(x, p[0]), 1, axis),
    "solve": unary(solved, 2),
    "sort": unary(lambda p, x: lax.sort(x, dimension=p[0]), 1, axis),
    "steps": unary(lambda p, x: steps(x)),
    "take_along": unary(lambda p, x: jnp.take_along_axis(x, steps(x) % x.shape[p[0]], p[0]), 1, axis),
    "tile": unary(lambda p, x: jnp.tile(x, p[0]), 1, lambda rng, s: (tuple(rng.choice([1, 1, 2]) for _ in s),)),
    "top_k": unary(lambda p, x: lax.top_k(x, half(x, -1))[0], 1),
    "transpose": unary(lambda p, x: x.transpose(p[0]), 1, lambda rng, s: (tuple(rng.sample(range(len(s)), len(s))),)),
    "vmap": unary(lambda p, x: jax.vmap(lambda r: r / (1 + jnp.max(jnp.abs(r))), p[0], p[0])(x), 1, axis),
}
