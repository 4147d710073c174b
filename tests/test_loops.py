"""Everyday loops: planned in the end, and sharded as on one device.

Many begin from numbers (a counter, a flag, the best loss so far) that come round to themselves: carried on unchanged,
swapped, or passed through a branch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.scipy.sparse import linalg

import autoshard

MESH = {"data": 4, "model": 2}
A = (np.eye(16) * 4 + np.sin(np.arange(256.0)).reshape(16, 16) / 4).astype(np.float32)
SYMMETRIC = (A + A.T) / 2
B = np.cos(np.arange(16.0)).astype(np.float32)
X = np.sin(np.arange(128.0)).reshape(8, 16).astype(np.float32)
W = np.cos(np.arange(64.0)).reshape(16, 4).astype(np.float32)


def loss(w: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ w) - 0.5) ** 2)


def rotated_numbers(x: Any) -> Any:
    """Two numbers swap places, a third stays."""
    return lax.while_loop(
        lambda c: c[0] < 5, lambda c: (c[0] + 1, c[2], c[1], c[3] * c[1] + c[4], c[4]), (0, 1.0, 2.0, x, 0.5)
    )


def rotated_through_an_inner_loop(x: Any) -> Any:
    def inner(c: Any, _: Any) -> Any:
        return (c[1], c[2], c[0], c[3] + c[0]), None

    def outer(c: Any, _: Any) -> Any:
        done, _ = lax.scan(inner, c, None, length=4)
        return (done[2], done[0], done[1], done[3] / 2), done[1]

    return lax.scan(outer, (1.0, 2.0, 3.0, x), None, length=3)


def fibonacci(x: Any) -> Any:
    return lax.fori_loop(0, 6, lambda _, c: (c[1], c[0] + c[1], c[2] * c[0]), (0, 1, x))


def stopped_early(w: Any, x: Any) -> Any:
    """A flag that a branch carries on once it is set."""

    def body(c: Any, _: Any) -> Any:
        w, stop = c

        def update(c: Any) -> Any:
            value, g = jax.value_and_grad(loss)(c[0], x)
            return c[0] - g, value < 0.2

        c = lax.cond(stop, lambda c: c, update, (w, stop))
        return c, c[1]

    return lax.scan(body, (w, False), None, length=8)


def best_so_far(w: Any, x: Any) -> Any:
    def body(c: Any, i: Any) -> Any:
        w, best, best_w, at = c
        value, g = jax.value_and_grad(loss)(w, x)
        better = value < best
        best_w = jnp.where(better, w, best_w)
        return (w - 3 * g, jnp.where(better, value, best), best_w, jnp.where(better, i, at)), value

    return lax.scan(body, (w, jnp.inf, w, -1), jnp.arange(6))


def best_by_branches(w: Any, x: Any) -> Any:
    def body(c: Any, i: Any) -> Any:
        w, best = c
        value, g = jax.value_and_grad(loss)(w, x)
        best = lax.cond(value < best[0], lambda b: (value, w, i), lambda b: b, best)
        return (w - 3 * g, best), value

    return lax.scan(body, (w, (jnp.inf, w, 0)), jnp.arange(6))


def with_patience(w: Any, x: Any) -> Any:
    def cond(c: Any) -> Any:
        return (c["left"] > 0) & (c["step"] < 20)

    def body(c: Any) -> Any:
        value, g = jax.value_and_grad(loss)(c["w"], x)
        better = value < c["best"] - 0.01
        return {
            "w": c["w"] - g,
            "best": jnp.minimum(value, c["best"]),
            "left": jnp.where(better, c["patience"], c["left"] - 1),
            "patience": c["patience"],
            "step": c["step"] + 1,
        }

    start = {"w": w, "best": jnp.inf, "left": 3, "patience": 3, "step": 0}
    return lax.while_loop(cond, body, start)


def lbfgs(w: Any, x: Any) -> Any:
    def fun(w: Any) -> Any:
        return loss(w, x)

    solver = optax.lbfgs(memory_size=3)
    value_and_grad = optax.value_and_grad_from_state(fun)

    def body(c: Any, _: Any) -> Any:
        w, state = c
        value, grad = value_and_grad(w, state=state)
        updates, state = solver.update(grad, state, w, value=value, grad=grad, value_fn=fun)
        return (optax.apply_updates(w, updates), state), value

    (w, _), values = lax.scan(body, (w, solver.init(w)), None, length=3)
    return w, values


def swapped_buffers(x: Any) -> Any:
    def body(_: Any, c: Any) -> Any:
        new, old = c
        return (jnp.roll(new, 1, 0) + old) / 2, new

    return lax.fori_loop(0, 5, body, (x, jnp.zeros_like(x)))


def search_within_scan(xs: Any) -> Any:
    """Each step of a scan has a loop that halves until small enough."""

    def halve(scale: Any, x: Any) -> Any:
        def body(c: Any) -> Any:
            return c[0] / 2, c[1], c[2] + 1

        y, _, n = lax.while_loop(lambda c: jnp.sum(c[0] ** 2) > c[1], body, (x * scale, 1.0, 0))
        return scale * 0.9, (y, n)

    return lax.scan(halve, 1.0, xs)


def branch_in_a_loop(x: Any) -> Any:
    def body(c: Any) -> Any:
        x, n, sign = c
        x, sign = lax.cond(n % 2 == 0, lambda a: (a[0] * 2, a[1]), lambda a: (a[0] - a[1], -a[1]), (x, sign))
        return x, n + 1, sign

    return lax.while_loop(lambda c: c[1] < 7, body, (x, 0, 1.0))


def collatz(n: Any) -> Any:
    """Rows that end at different iterations, held once they do."""

    def body(c: Any) -> Any:
        n, steps = c
        following = jnp.where(n % 2 == 0, n // 2, 3 * n + 1)
        return jnp.where(n == 1, n, following), steps + (n != 1)

    return lax.while_loop(lambda c: jnp.any(c[0] != 1), body, (n, jnp.zeros_like(n)))


def noisy_walk(seed: Any, x: Any) -> Any:
    def body(c: Any, _: Any) -> Any:
        key, x, scale = c
        key, sub = jax.random.split(key)
        return (key, x + scale * jax.random.normal(sub, x.shape), scale), x.mean()

    (key, x, _), means = lax.scan(body, (jax.random.key(seed), x, 0.1), None, length=4)
    return jax.random.key_data(key), x, means


def newton(x: Any) -> Any:
    def body(c: Any) -> Any:
        x, _, n, tolerance = c
        step = (x**3 - 2) / (3 * x**2)
        return x - step, jnp.max(jnp.abs(step)), n + 1, tolerance

    return lax.while_loop(lambda c: (c[1] > c[3]) & (c[2] < 20), body, (x, jnp.inf, 0, 1e-3))


def bisection(target: Any) -> Any:
    def body(_: Any, c: Any) -> Any:
        low, high = c
        middle = (low + high) / 2
        above = middle**3 > target
        return jnp.where(above, low, middle), jnp.where(above, middle, high)

    return lax.fori_loop(0, 12, body, (jnp.zeros_like(target), jnp.full_like(target, 4.0)))


def bisection_of_one_number(x: Any) -> Any:
    def body(c: Any) -> Any:
        low, high, width = c
        middle = (low + high) / 2
        above = jnp.sum(jnp.tanh(x * middle) ** 2) > 40
        return jnp.where(above, low, middle), jnp.where(above, middle, high), width

    return lax.while_loop(lambda c: c[1] - c[0] > c[2], body, (0.0, 4.0, 0.01))


def beam_search(table: Any, start: Any) -> Any:
    """Three hypotheses of each sequence, by the sum of their scores."""
    rows, beams, words = start.shape[0], 3, table.shape[0]

    def body(c: Any, t: Any) -> Any:
        scores, tokens, out = c
        following = scores[..., None] + jax.nn.log_softmax(table[tokens])
        scores, at = lax.top_k(following.reshape(rows, -1), beams)
        beam, tokens = at // words, at % words
        out = jnp.take_along_axis(out, beam[..., None], 1).at[:, :, t].set(tokens)
        return (scores, tokens, out), None

    tokens = jnp.broadcast_to(start[:, None], (rows, beams))
    scores = jnp.where(jnp.arange(beams) == 0, 0.0, -jnp.inf) + jnp.zeros((rows, beams))
    (scores, _, out), _ = lax.scan(body, (scores, tokens, jnp.zeros((rows, beams, 4), jnp.int32)), jnp.arange(4))
    return scores, out


def moving_average(w: Any, x: Any) -> Any:
    def body(c: Any, _: Any) -> Any:
        w, ema, decay, power = c
        w = w - jax.grad(loss)(w, x)
        ema, power = decay * ema + (1 - decay) * w, power * decay
        return (w, ema, decay, power), jnp.sum((ema / (1 - power)) ** 2)

    return lax.scan(body, (w, jnp.zeros_like(w), 0.9, 1.0), None, length=5)


def kahan_sum(xs: Any) -> Any:
    def body(c: Any, x: Any) -> Any:
        total, rest = c
        y = x - rest
        new = total + y
        return (new, (new - total) - y), None

    return lax.scan(body, (jnp.zeros_like(xs[0]), jnp.zeros_like(xs[0])), xs)


def kahan_sum_of_numbers(xs: Any) -> Any:
    def body(c: Any, x: Any) -> Any:
        y = jnp.sum(x) - c[1]
        new = c[0] + y
        return (new, (new - c[0]) - y), None

    return lax.scan(body, (0.0, 0.0), xs)


def line_search(w: Any, x: Any) -> Any:
    value, g = jax.value_and_grad(loss)(w, x)
    slope = jnp.vdot(g, g)

    def body(c: Any) -> Any:
        return c[0] * c[2], loss(w - c[0] * c[2] * g, x), c[2]

    rate, _, _ = lax.while_loop(lambda c: c[1] > value - 0.5 * c[0] * slope, body, (64.0, jnp.inf, 0.5))
    return w - rate * g, rate


def power_iteration(a: Any, b: Any) -> Any:
    def body(c: Any) -> Any:
        v, _, old, n = c
        u = a @ v
        norm = jnp.linalg.norm(u)
        return u / norm, jnp.abs(norm - old), norm, n + 1

    return lax.while_loop(lambda c: (c[1] > 1e-2) & (c[3] < 50), body, (b, jnp.inf, 0.0, 0))


LOOPS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "rotated numbers": (rotated_numbers, (X,)),
    "rotated through an inner loop": (rotated_through_an_inner_loop, (X,)),
    "fibonacci": (fibonacci, (X,)),
    "stopped early": (stopped_early, (W, X)),
    "best so far": (best_so_far, (W, X)),
    "best by branches": (best_by_branches, (W, X)),
    "with patience": (with_patience, (W, X)),
    "L-BFGS": (lbfgs, (W, X)),
    "gmres": (lambda a, b: linalg.gmres(lambda v: a @ v, b, restart=4, maxiter=2), (A, B)),
    "gmres, one column at a time": (
        lambda a, b: linalg.gmres(lambda v: a @ v, b, restart=4, maxiter=2, solve_method="incremental"),
        (A, B),
    ),
    "cg": (lambda a, b: linalg.cg(lambda v: a @ v, b, maxiter=6), (SYMMETRIC, B)),
    "bicgstab": (lambda a, b: linalg.bicgstab(lambda v: a @ v, b, maxiter=4), (A, B)),
    "swapped buffers": (swapped_buffers, (X,)),
    "search within scan": (search_within_scan, (X.reshape(4, 2, 16),)),
    "branch in a loop": (branch_in_a_loop, (X,)),
    "collatz": (collatz, (np.arange(1, 17, dtype=np.int32),)),
    "noisy walk": (noisy_walk, (0, X)),
    "newton": (newton, (1 + X**2,)),
    "bisection": (bisection, (1 + X**2,)),
    "bisection of one number": (bisection_of_one_number, (X,)),
    "beam search": (beam_search, (A, np.arange(8, dtype=np.int32))),
    "moving average": (moving_average, (W, X)),
    "Kahan sum": (kahan_sum, (X.reshape(8, 4, 4),)),
    "Kahan sum of numbers": (kahan_sum_of_numbers, (X,)),
    "line search": (line_search, (W, X)),
    "power iteration": (power_iteration, (SYMMETRIC, B)),
}


@pytest.mark.parametrize(("fun", "args"), LOOPS.values(), ids=LOOPS)
def test_loop_is_as_on_one_device(fun: Callable[..., Any], args: tuple[Any, ...]):
    chex.assert_trees_all_close(autoshard.jit(fun, mesh=MESH)(*args), jax.jit(fun)(*args), rtol=2e-4, atol=2e-5)
