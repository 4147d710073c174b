"""Baichuan-13B's form, un-annotated: attention that knows positions by a bias that grows with distance alone.

ALiBi is arXiv:2108.12409, the model github.com/baichuan-inc/Baichuan-13B.
"""

import jax
import jax.numpy as jnp


def make(*, vocab, width, layers, heads, hidden):
    """``init(key)`` -> weights, ``apply(weights, tokens)`` -> logits [row, position, vocab]."""
    shapes = {"packed": (width, 3 * width), "out": (width, width), "gate": (width, hidden), "up": (width, hidden)}
    shapes |= {"down": (hidden, width)}

    def init(key):
        keys = iter(jax.random.split(key, len(shapes) + 2))
        blocks = {n: jax.random.normal(next(keys), (layers, *s)) * s[0] ** -0.5 for n, s in shapes.items()}
        blocks |= {"attend": jnp.ones((layers, width)), "think": jnp.ones((layers, width))}
        embed = jax.random.normal(next(keys), (vocab, width)) * width**-0.5
        head = jax.random.normal(next(keys), (width, vocab)) * width**-0.5
        return {"embed": embed, "blocks": blocks, "norm": jnp.ones(width), "head": head}

    def attention(p, x):
        rows, seq, _ = x.shape
        query, key, value = jnp.split((x @ p["packed"]).reshape(rows, seq, 3 * heads, width // heads), 3, axis=2)
        scores = jnp.einsum("bqhe,bkhe->bhqk", query, key, preferred_element_type=jnp.float32)
        distance = jnp.arange(seq)[None, :] - jnp.arange(seq)[:, None]
        scores = scores * (width // heads) ** -0.5 + slopes(heads)[:, None, None] * distance
        shares = jax.nn.softmax(jnp.where(distance <= 0, scores, -1e9)).astype(x.dtype)
        return jnp.einsum("bhqk,bkhe->bqhe", shares, value).reshape(x.shape) @ p["out"]

    def block(x, p):
        x = x + attention(p, norm(x, p["attend"]))
        y = norm(x, p["think"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

    def apply(weights, tokens):
        x, _ = jax.lax.scan(jax.checkpoint(block), weights["embed"][tokens], weights["blocks"])
        return norm(x, weights["norm"]) @ weights["head"]

    return init, apply


def slopes(heads):
    """By how much a head's scores fall with each position: powers of two, and between them those of twice as many."""
    whole = 2 ** (heads.bit_length() - 1)
    first = 2.0 ** (-8 / whole * jnp.arange(1, whole + 1))
    between = 2.0 ** (-4 / whole * jnp.arange(1, 2 * (heads - whole), 2))
    return jnp.concatenate([first, between])


def norm(x, scale):
    """Root-mean-square norm over the last dimension."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale
