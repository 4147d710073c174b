"""Language models with experts that drop no token, un-annotated: rows of tokens are sorted by expert.

As Mixtral (arXiv:2401.04088): each token goes to the best by softmax, keys have fewer heads than queries. As
DeepSeek-V3 (arXiv:2412.19437): sigmoid gates, shared experts beside the routed ones, and keys and values from a latent
of few features, with one rotary part of the keys for all heads. ERNIE 4.5 has Mixtral's attention and shared experts.
Loads of experts are evened out by a loss, as Mixtral's, by a bias that follows them, as DeepSeek-V3's, or by both, as
ERNIE's.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import linen


def make(*, vocab, width, layers, heads, head, experts, picks, hidden, kv_heads=0, latent=0, rotary=0, **kinds):
    """A module: inputs -> logits [row, position, vocab], in training with how uneven loads are.

    Args:
      width: of an embedding; ``head``: of a head's keys and values; ``hidden``: of an expert's inner layer.
      experts: routed ones, of which a token goes to ``picks``.
      kv_heads: heads of keys and values, where these have fewer than queries.
      latent: features that keys and values are made of; 0 makes them of the embedding, and rotates the whole keys.
      rotary: with ``latent``, features of each query and of the one key for all heads that are rotated.
      kinds: ``shared``, the number of experts for all tokens; ``gate``: ``softmax`` over the experts, or ``sigmoid`` of
        each; ``rate``, by which a step changes the bias with which an expert is chosen.
    """
    shared, gate = kinds.get("shared", 0), kinds.get("gate", "softmax")
    keys = kv_heads or heads
    shapes = {"attend": (width,), "route": (width,), "out": (heads, head, width), "router": (width, experts)}
    shapes |= {"gate": (experts, width, hidden), "up": (experts, width, hidden), "down": (experts, hidden, width)}
    if latent:
        shapes |= {"query": (width, heads, head + rotary), "pressed": (width, latent), "turned": (width, rotary)}
        shapes |= {"key": (latent, heads, head), "value": (latent, heads, head)}
    else:
        shapes |= {"query": (width, heads, head), "key": (width, keys, head), "value": (width, keys, head)}
    if shared:
        inner = shared * hidden
        shapes |= {"shared_gate": (width, inner), "shared_up": (width, inner), "shared_down": (inner, width)}

    def init(key):
        names = iter(jax.random.split(key, len(shapes) + 2))

        def normal(*shape, fan):
            return jax.random.normal(next(names), shape) * fan**-0.5

        blocks = {
            name: jnp.ones((layers, *s)) if len(s) == 1 else normal(layers, *s, fan=s[0] if len(s) == 2 else width)
            for name, s in shapes.items()
        }
        embed, head_ = normal(vocab, width, fan=1), normal(width, vocab, fan=width)
        return {"embed": embed, "blocks": blocks, "norm": jnp.ones(width), "head": head_}

    def attention(p, x):
        x = norm(x, p["attend"])
        query = jnp.einsum("bsd,dhe->bshe", x, p["query"])
        if latent:
            pressed = jnp.einsum("bsd,dl->bsl", x, p["pressed"])
            key, value = (jnp.einsum("bsl,lhe->bshe", pressed, p[name]) for name in ("key", "value"))
            turned = turn(jnp.einsum("bsd,dr->bsr", x, p["turned"])[:, :, None])
            key = jnp.concatenate([key, jnp.broadcast_to(turned, (*key.shape[:3], rotary))], -1)
            query = jnp.concatenate([query[..., :head], turn(query[..., head:])], -1)
        else:
            key, value = (jnp.einsum("bsd,dke->bske", x, p[name]) for name in ("key", "value"))
            query, key = turn(query), jnp.repeat(turn(key), heads // keys, axis=2)
            value = jnp.repeat(value, heads // keys, axis=2)
        return jnp.einsum("bshe,hed->bsd", mix(query, key, value), p["out"])

    def routed(p, x, bias):
        """What experts make of ``x``, and of their loads: how many rows each has, and how uneven that is."""
        rows = x.reshape(-1, width)
        scores = jnp.matmul(rows, p["router"], preferred_element_type=jnp.float32)
        gates = jax.nn.sigmoid(scores) if gate == "sigmoid" else jax.nn.softmax(scores)
        chosen = jax.lax.top_k(gates + bias, picks)[1]
        best = jnp.take_along_axis(gates, chosen, -1)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=experts)
        sent = rows[order // picks]
        inner = jax.nn.silu(jax.lax.ragged_dot(sent, p["gate"], sizes)) * jax.lax.ragged_dot(sent, p["up"], sizes)
        back = jax.lax.ragged_dot(inner, p["down"], sizes)[jnp.argsort(order)].reshape(-1, picks, width)
        shares = (best / best.sum(-1, keepdims=True)).astype(x.dtype)
        uneven = sizes @ (gates / gates.sum(-1, keepdims=True)).mean(0) * experts / len(sent)
        return jnp.einsum("tkd,tk->td", back, shares).reshape(x.shape), (sizes, uneven)

    def block(x, of_layer):
        p, bias = of_layer
        x = x + attention(p, x)
        y = norm(x, p["route"])
        out, loads = routed(p, y, bias)
        if shared:
            out += (jax.nn.silu(y @ p["shared_gate"]) * (y @ p["shared_up"])) @ p["shared_down"]
        return x + out, loads

    def apply(params, bias, inputs):
        x, loads = jax.lax.scan(jax.checkpoint(block), params["embed"][inputs], (params["blocks"], bias))
        return norm(x, params["norm"]) @ params["head"], *loads

    return Balanced(init, apply, (layers, experts), kinds.get("rate", 0.0))


class Balanced(linen.Module):
    """The parameters, and a bias of each layer's experts that is not trained: it follows their loads."""

    make: Callable
    run: Callable
    shape: tuple
    rate: float

    @linen.compact
    def __call__(self, inputs, train=False):
        bias = self.variable("router", "bias", jnp.zeros, self.shape)
        logits, loads, uneven = self.run(self.param("model", self.make), bias.value, inputs)
        if train:
            bias.value += self.rate * jnp.sign(loads.mean(-1, keepdims=True) - loads)
        return (logits, uneven.mean()) if train else logits


def loss(outputs, batch, weight=0.0):
    """Cross-entropy of the next tokens, in training with ``weight`` times how uneven loads are, 1 of even ones."""
    logits, uneven = outputs if isinstance(outputs, tuple) else (outputs, None)
    error = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
    return error if uneven is None else (error + weight * uneven, {"uneven": uneven})


def norm(x, scale):
    """Root-mean-square norm over the last dimension."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def turn(x):
    """Rotary positions. x: [row, position, head, feature]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * 10000.0 ** (-jnp.arange(half) / half)
    left, right = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def mix(query, key, value):
    """Causal attention; values may be narrower than keys."""
    scores = jnp.einsum("bshe,bthe->bhst", query, key, preferred_element_type=jnp.float32) * key.shape[-1] ** -0.5
    seq = query.shape[1]
    odds = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((seq, seq), bool)), scores, -1e9), -1).astype(value.dtype)
    return jnp.einsum("bhst,bthe->bshe", odds, value)
