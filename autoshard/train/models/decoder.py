"""A decoder-only transformer in Flax NNX, its train and eval steps, and its step with a cache: ordinary JAX without any
sharding.

Pre-norm blocks with RMS norms, rotary positions, grouped-query attention, and a gated or plain MLP or a mixture of
experts. Layers are stacked and scanned, so that depth costs no tracing time, or unrolled with one trace for all.

Letters in shapes: B batch, S sequence, D model width, H query heads, K key-value heads, G = H / K, E head width, F MLP
width, V vocabulary, L layers; of experts: N groups of T tokens, X experts, C capacity of an expert.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from pydantic import Field, ValidationInfo, field_validator

from autoshard.strict_config import Config
from autoshard.train.optimizer import OptimizerConfig, make_optimizer
from autoshard.weights.models.cache import Position, recalled

type Tree = Any
"""A pytree."""
type Metrics = Mapping[str, Any]
"""Scalar arrays by name."""


MAX_SIZE = 2**24
"""Of a dimension of a model, and of a batch."""


class ModelConfig(Config):
    """Sizes of a decoder. ``kv_heads`` defaults to ``heads``, ``d_ff`` to four (gelu) or 8/3 (swiglu) widths."""

    layers: int = Field(ge=1, le=MAX_SIZE)
    """Number of blocks."""
    d_model: int = Field(ge=2, le=MAX_SIZE)
    """Width of a token between blocks."""
    heads: int = Field(ge=1, le=MAX_SIZE)
    """Number of query heads; ``d_model`` is a multiple of twice as many."""
    kv_heads: int | None = Field(default=None, ge=1, le=MAX_SIZE)
    """Number of key and value heads, which divides ``heads``; left out, as many."""
    d_ff: int | None = Field(default=None, ge=1, le=MAX_SIZE)
    """Width of the MLP; left out, four times ``d_model`` (gelu) or 8/3 of it (swiglu), up to a multiple of 32."""
    vocab: int = Field(default=256, ge=2, le=MAX_SIZE)
    """Number of tokens; of text, whose tokens are bytes, 256 or more."""
    seq: int = Field(ge=2, le=MAX_SIZE)
    """Tokens in a sequence."""
    mlp: Literal["gelu", "swiglu"] = "swiglu"
    """The MLP of a block: two matrices, or three with a gate."""
    experts: int = Field(default=0, ge=0, le=MAX_SIZE)
    """Number of routed experts, gated MLPs of width ``d_ff``; 0 is one MLP for all tokens."""
    experts_per_token: int = Field(default=2, ge=1, validate_default=True, le=MAX_SIZE)
    """Routed experts per token."""
    shared: int = Field(default=0, ge=0, le=MAX_SIZE)
    """Number of shared experts, which every token passes; together they are one MLP of that many times the width."""
    capacity_factor: float = Field(default=1.25, gt=0)
    """Tokens per group that an expert takes, relative to an even load; others skip the expert."""
    tied: bool = False
    """Whether the output projection is the embedding."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype of matrix products; parameters, norms, softmax and loss are float32."""
    rope_base: float = Field(default=10_000.0, gt=1)
    """Base of the wavelengths of rotary positions."""
    scan: bool = True
    """Whether blocks are stacked and scanned over, or unrolled."""

    @field_validator("heads")
    @classmethod
    def _even_width(cls, heads: int, info: ValidationInfo) -> int:
        if info.data.get("d_model", 0) % (2 * heads):
            raise ValueError(f"d_model {info.data['d_model']} is not a multiple of {heads} heads of an even width")
        return heads

    @field_validator("kv_heads")
    @classmethod
    def _equal_groups(cls, kv_heads: int | None, info: ValidationInfo) -> int | None:
        if kv_heads is not None and info.data.get("heads", 0) % kv_heads:
            raise ValueError(f"{info.data['heads']} query heads are not a multiple of {kv_heads} key-value heads")
        return kv_heads

    @field_validator("experts_per_token")
    @classmethod
    def _enough_experts(cls, experts_per_token: int, info: ValidationInfo) -> int:
        if 0 < info.data.get("experts", 0) < experts_per_token:
            raise ValueError(f"a token cannot choose {experts_per_token} of {info.data['experts']} experts")
        return experts_per_token

    @property
    def key_heads(self) -> int:
        """K, the number of key-value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        """E, the width of one head."""
        return self.d_model // self.heads

    @property
    def mlp_width(self) -> int:
        """F; the default is a multiple of 32 so that it divides over a mesh."""
        if self.d_ff is not None:
            return self.d_ff
        width = 4 * self.d_model if self.mlp == "gelu" else 8 * self.d_model // 3
        return -(-width // 32) * 32


def rotary(x: jax.Array, base: float, position: Position = 0) -> jax.Array:
    """Rotary position embedding (RoFormer, eq. 34) over the halves of the last dimension. x: [B, S, H, E] -> the
    same.
    """
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = (position + jnp.arange(x.shape[1])).astype(jnp.float32)[:, None] * frequencies
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def _weights(rngs: nnx.Rngs, *shape: int, fan_in: int, gain: float = 1.0) -> nnx.Param[jax.Array]:
    """float32 parameters from a normal distribution with standard deviation ``gain / sqrt(fan_in)``."""
    return nnx.Param(jax.random.normal(rngs.params(), shape, jnp.float32) * (gain * fan_in**-0.5))


class RMSNorm(nnx.Module):
    """Divides by the root mean square over the last dimension, then scales. x: [..., D] -> the same."""

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean_square + 1e-6) * self.scale[...]).astype(x.dtype)


class Attention(nnx.Module):
    """Causal grouped-query self-attention with rotary positions. x: [B, S, D] -> the same."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        width, heads, key_heads, head = config.d_model, config.heads, config.key_heads, config.head_width
        self.wq = _weights(rngs, width, heads, head, fan_in=width)
        self.wk = _weights(rngs, width, key_heads, head, fan_in=width)
        self.wv = _weights(rngs, width, key_heads, head, fan_in=width)
        self.wo = _weights(rngs, heads, head, width, fan_in=width, gain=(2 * config.layers) ** -0.5)

    def __call__(self, x: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        seq = x.shape[1]
        seen = jnp.arange(seq)[:, None] >= jnp.arange(seq)[None, :]
        if segment_ids is not None:  # [B, 1, 1, S, S]; positions are relative, so that each segment may begin anywhere
            seen = seen & (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None, None]
        return self._mixed(*self._projected(x, 0), seen)

    def step(self, x: jax.Array, cache: Tree, layer: int | jax.Array, position: Position) -> tuple[jax.Array, Tree]:
        """The same of tokens from ``position`` on that see those in a cache, and the cache with them."""
        query, key, value = self._projected(x, position)
        known = recalled(cache, layer, position, {"key": key, "value": value})
        return self._mixed(query, known.entries["key"], known.entries["value"], known.seen), known.cache

    def _projected(self, x: jax.Array, position: Position) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [B, S, H, E], keys and values [B, S, K, E]."""
        base, dtype = self.config.rope_base, x.dtype
        query = rotary(jnp.einsum("bsd,dhe->bshe", x, self.wq[...].astype(dtype)), base, position)
        key = rotary(jnp.einsum("bsd,dke->bske", x, self.wk[...].astype(dtype)), base, position)
        return query, key, jnp.einsum("bsd,dke->bske", x, self.wv[...].astype(dtype))

    def _mixed(self, query: jax.Array, key: jax.Array, value: jax.Array, seen: jax.Array) -> jax.Array:
        """The values that each query finds. seen: bool [..., S, T], which of T keys -> [B, S, D]."""
        config, dtype = self.config, query.dtype
        grouped = query.reshape(*query.shape[:2], config.key_heads, -1, config.head_width)
        scores = jnp.einsum("bqkge,btke->bkgqt", grouped, key, preferred_element_type=jnp.float32)
        scores = jnp.where(seen, scores * config.head_width**-0.5, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(dtype)
        mixed = jnp.einsum("bkgqt,btke->bqkge", weights, value).reshape(query.shape)
        return jnp.einsum("bshe,hed->bsd", mixed, self.wo[...].astype(dtype))


class MLP(nnx.Module):
    """A gelu MLP of two products, or a silu-gated one of three. x: [B, S, D] -> the same."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, inner: int | None = None):
        width, inner = config.d_model, inner or config.mlp_width
        self.up = _weights(rngs, width, inner, fan_in=width)
        self.gate = _weights(rngs, width, inner, fan_in=width) if config.mlp == "swiglu" else None
        self.down = _weights(rngs, inner, width, fan_in=inner, gain=(2 * config.layers) ** -0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        inner = x @ self.up[...].astype(x.dtype)
        inner = jax.nn.gelu(inner) if self.gate is None else jax.nn.silu(x @ self.gate[...].astype(x.dtype)) * inner
        return inner @ self.down[...].astype(x.dtype)


class Experts(nnx.Module):
    """Mixture of experts with top-k routing and a fixed capacity, and a shared expert. x: [B, S, D] -> the same.

    Tokens compete for capacity within groups of up to 1,024 consecutive ones, earlier tokens first (GShard, section
    2.2). There is no load-balancing loss.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        width, inner, count, gain = config.d_model, config.mlp_width, config.experts, (2 * config.layers) ** -0.5
        self.router = _weights(rngs, width, count, fan_in=width)
        self.up = _weights(rngs, count, width, inner, fan_in=width)
        self.gate = _weights(rngs, count, width, inner, fan_in=width)
        self.down = _weights(rngs, count, inner, width, fan_in=inner, gain=gain)
        self.shared = MLP(config, rngs, config.shared * inner) if config.shared else None

    def __call__(self, x: jax.Array) -> jax.Array:
        config, dtype = self.config, x.dtype
        tokens = math.gcd(x.shape[1], 1024)
        capacity = math.ceil(config.capacity_factor * config.experts_per_token * tokens / config.experts)
        groups = x.reshape(-1, tokens, config.d_model)
        probabilities = jax.nn.softmax(jnp.einsum("ntd,dx->ntx", groups.astype(jnp.float32), self.router[...]))
        best, which = jax.lax.top_k(probabilities, config.experts_per_token)
        routes = jax.nn.one_hot(which, config.experts)
        weights = jnp.einsum("ntk,ntkx->ntx", best / best.sum(-1, keepdims=True), routes)
        routed = routes.sum(2)
        slot = jnp.where(routed > 0, jnp.cumsum(routed, 1) - 1, -1).astype(jnp.int32)
        dispatch = jax.nn.one_hot(slot, capacity, dtype=dtype)  # [N, T, X, C]
        sent = jnp.einsum("ntxc,ntd->nxcd", dispatch, groups)
        inner = jax.nn.silu(jnp.einsum("nxcd,xdf->nxcf", sent, self.gate[...].astype(dtype)))
        inner = inner * jnp.einsum("nxcd,xdf->nxcf", sent, self.up[...].astype(dtype))
        outputs = jnp.einsum("nxcf,xfd->nxcd", inner, self.down[...].astype(dtype))
        mixed = jnp.einsum("ntxc,nxcd->ntd", dispatch * weights[..., None].astype(dtype), outputs).reshape(x.shape)
        return mixed if self.shared is None else mixed + self.shared(x)


class Layer(nnx.Module):
    """One pre-norm residual block. x: [B, S, D] -> the same."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.d_model)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.d_model)
        self.mlp = Experts(config, rngs) if config.experts else MLP(config, rngs)

    def __call__(self, x: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        with jax.named_scope("attention"):
            x = x + self.attention(self.attention_norm(x), segment_ids)
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x))

    def step(self, x: jax.Array, cache: Tree, layer: int | jax.Array, position: Position) -> tuple[jax.Array, Tree]:
        """The same of tokens from ``position`` on that see those in a cache, and the cache with them."""
        with jax.named_scope("attention"):
            mixed, cache = self.attention.step(self.attention_norm(x), cache, layer, position)
            x = x + mixed
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x)), cache


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _apply_layer(graph: Any, weights: Tree, x: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """A layer of ``x``, jitted so that JAX traces and differentiates the first and reuses that for all others."""
    return nnx.merge(graph, weights)(x, segment_ids)


class Decoder(nnx.Module):
    """Token identifiers to next-token logits. tokens: int [B, S] -> float32 [B, S, V].

    With ``segment_ids``, int [B, S], rows are several texts, packed: a token sees those of its own segment alone.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = _weights(rngs, config.vocab, config.d_model, fan_in=config.d_model)
        if config.scan:
            make = nnx.vmap(lambda keys: Layer(config, keys), in_axes=0, out_axes=0)
            self.layers: Any = make(rngs.split(config.layers))
        else:
            self.layers = nnx.List([Layer(config, rngs) for _ in range(config.layers)])
        self.norm = RMSNorm(config.d_model)
        self.head = None if config.tied else _weights(rngs, config.d_model, config.vocab, fan_in=config.d_model)

    def __call__(self, tokens: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        x = self._embedded(tokens)
        if self.config.scan:
            graph, stacked = nnx.split(self.layers)
            x, _ = jax.lax.scan(lambda h, weights: (nnx.merge(graph, weights)(h, segment_ids), None), x, stacked)
        else:
            for i, layer in enumerate(self.layers):
                with jax.named_scope(f"layer_{i}"):
                    x = _apply_layer(*nnx.split(layer), x, segment_ids)
        return self._logits(x)

    def step(self, tokens: jax.Array, cache: Tree, position: Position) -> tuple[jax.Array, Tree]:
        """Logits of the token after the last, float32 [B, V], of tokens from ``position`` on; and the cache with them.

        Experts have room for the tokens of the call: those of a prompt compete, a token by itself does not.
        """
        x = self._embedded(tokens)
        if self.config.scan:
            graph, stacked = nnx.split(self.layers)

            def block(carry: tuple[jax.Array, Tree], of: tuple[Any, jax.Array]) -> tuple[tuple[jax.Array, Tree], None]:
                return nnx.merge(graph, of[0]).step(*carry, of[1], position), None

            (x, cache), _ = jax.lax.scan(block, (x, cache), (stacked, jnp.arange(self.config.layers)))
        else:
            for number, layer in enumerate(self.layers):
                x, cache = layer.step(x, cache, number, position)
        return self._logits(x[:, -1:])[:, 0], cache

    def _embedded(self, tokens: jax.Array) -> jax.Array:
        return self.embed[...].astype(self.config.dtype)[tokens] * self.config.d_model**0.5

    def _logits(self, x: jax.Array) -> jax.Array:
        with jax.named_scope("head"):
            return self._onto_tokens(self.norm(x))

    def _onto_tokens(self, x: jax.Array) -> jax.Array:
        if self.head is None:
            x = x * self.config.d_model**-0.5  # else the initial model predicts each token to repeat, with certainty
            return jnp.einsum("bsd,vd->bsv", x, self.embed[...].astype(x.dtype), preferred_element_type=jnp.float32)
        return jnp.einsum("bsd,dv->bsv", x, self.head[...].astype(x.dtype), preferred_element_type=jnp.float32)


class Steps(NamedTuple):
    """The functions of one training run; the decoder's are over a state ``{"params", "opt_state", "step"}``."""

    init: Callable[[jax.Array], Tree]
    """Random key -> the initial state."""
    train: Callable[[Tree, Mapping[str, jax.Array]], tuple[Tree, Metrics]]
    """state, batch -> the next state and the scalars ``loss`` (nats per token), ``grad_norm``, ``learning_rate``."""
    evaluate: Callable[[Tree, Mapping[str, jax.Array]], Metrics] | None
    """What `evaluated` gives, batch -> metrics, of the decoder the scalar ``loss`` (nats per token); or None."""
    evaluated: Callable[[Tree], Tree] = lambda state: state["params"]
    """The part of a state that is evaluated."""


def make_steps(model: ModelConfig, optimizer: OptimizerConfig, steps: int) -> Steps:
    """The init, train and eval functions of a decoder, all pure.

    A batch is ``{"inputs": int [B, S], "targets": int [B, S]}``, the targets one token ahead.
    """
    update, rate = make_optimizer(optimizer, steps)
    graph, abstract_state = nnx.split(nnx.eval_shape(lambda: Decoder(model, nnx.Rngs(0))))

    def init(key: jax.Array) -> Tree:
        params = nnx.to_pure_dict(nnx.state(Decoder(model, nnx.Rngs(params=key))))
        return {"params": params, "opt_state": update.init(params), "step": jnp.zeros((), jnp.int32)}

    def loss_of(params: Tree, batch: Mapping[str, jax.Array]) -> jax.Array:
        state = nnx.clone(abstract_state)
        nnx.replace_by_pure_dict(state, params)
        logits = nnx.merge(graph, state)(batch["inputs"])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]))

    def train(state: Tree, batch: Mapping[str, jax.Array]) -> tuple[Tree, Metrics]:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        with jax.named_scope("update"):
            updates, opt_state = update.update(grads, state["opt_state"], state["params"])
            params = optax.apply_updates(state["params"], updates)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "learning_rate": rate(state["step"])}
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, metrics

    def evaluate(params: Tree, batch: Mapping[str, jax.Array]) -> Metrics:
        return {"loss": loss_of(params, batch)}

    return Steps(init, train, evaluate)
