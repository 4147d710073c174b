"""A decoder-only transformer in Flax NNX and its train and eval steps: ordinary JAX, no sharding anywhere.

Root-mean-square norms before each block, rotary positions, grouped-query attention, a gated or plain
MLP or experts in its place, and the layers stacked and scanned so that depth costs no tracing time, or
traced once and written out for each.

Letters in shapes: B batch, S sequence, D model width, H query heads, K key-value heads, G = H / K,
E head width, F MLP width, V vocabulary, L layers; among experts N groups of T tokens, X experts, C places of each.
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

type Tree = Any
"""A pytree."""
type Metrics = Mapping[str, Any]
"""Scalar arrays by name."""


class ModelConfig(Config):
    """Sizes of a decoder. ``kv_heads`` defaults to ``heads``, ``d_ff`` to four (gelu) or 8/3 (swiglu) widths."""

    layers: int = Field(ge=1)
    d_model: int = Field(ge=2)
    heads: int = Field(ge=1)
    kv_heads: int | None = Field(default=None, ge=1)
    d_ff: int | None = Field(default=None, ge=1)
    vocab: int = Field(default=256, ge=2)
    seq: int = Field(ge=2)
    mlp: Literal["gelu", "swiglu"] = "swiglu"
    experts: int = Field(default=0, ge=0)
    """Gated MLPs of width ``d_ff`` that each token chooses among; 0: one MLP for all."""
    chosen: int = Field(default=2, ge=1, validate_default=True)
    """Experts a token, where there are experts."""
    shared: int = Field(default=0, ge=0)
    """Experts beside them that every token goes to, as one MLP of so many widths."""
    room: float = Field(default=1.25, gt=0)
    """Places of an expert, in those that it would need were all chosen equally often; who finds none is passed on."""
    tied: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype of the products; parameters, norms, softmax and loss stay float32."""
    rope_base: float = Field(default=10_000.0, gt=1)
    scan: bool = True

    @field_validator("heads")
    @classmethod
    def _even_width(cls, heads: int, info: ValidationInfo) -> int:
        if info.data.get("d_model", 0) % (2 * heads):
            raise ValueError(f"d_model {info.data['d_model']} is no multiple of {heads} heads of an even width")
        return heads

    @field_validator("kv_heads")
    @classmethod
    def _equal_groups(cls, kv_heads: int | None, info: ValidationInfo) -> int | None:
        if kv_heads is not None and info.data.get("heads", 0) % kv_heads:
            raise ValueError(f"{info.data['heads']} query heads are no multiple of {kv_heads} key-value heads")
        return kv_heads

    @field_validator("chosen")
    @classmethod
    def _enough_experts(cls, chosen: int, info: ValidationInfo) -> int:
        if 0 < info.data.get("experts", 0) < chosen:
            raise ValueError(f"a token cannot choose {chosen} of {info.data['experts']} experts")
        return chosen

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


class OptimizerConfig(Config):
    """AdamW under a linear warm-up, a cosine decay and a cap on the gradient's global norm."""

    learning_rate: float = Field(default=1e-3, gt=0)
    warmup: int = Field(default=0, ge=0)
    """Steps from zero to ``learning_rate``."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Step at which the cosine ends, warm-up included; the last step of the run when absent."""
    final: float = Field(default=0.1, ge=0, le=1)
    """The learning rate at the end, as a fraction of ``learning_rate``."""
    b1: float = Field(default=0.9, ge=0, lt=1)
    b2: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: float = Field(default=0.1, ge=0)
    clip: float = Field(default=1.0, gt=0)


def rotary(x: jax.Array, base: float) -> jax.Array:
    """Rotates the halves of the last dimension by position. x: [B, S, H, E] -> the same (RoFormer, eq. 34)."""
    half = x.shape[-1] // 2
    rates = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * rates
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _weights(rngs: nnx.Rngs, *shape: int, fan_in: int, gain: float = 1.0) -> nnx.Param[jax.Array]:
    """Normal weights, in float32, with standard deviation ``gain / sqrt(fan_in)``."""
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
    """Causal self-attention with rotary positions and shared key-value heads. x: [B, S, D] -> the same."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        width, heads, key_heads, head = config.d_model, config.heads, config.key_heads, config.head_width
        self.wq = _weights(rngs, width, heads, head, fan_in=width)
        self.wk = _weights(rngs, width, key_heads, head, fan_in=width)
        self.wv = _weights(rngs, width, key_heads, head, fan_in=width)
        self.wo = _weights(rngs, heads, head, width, fan_in=width, gain=(2 * config.layers) ** -0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        config, dtype = self.config, x.dtype
        batch, seq, _ = x.shape
        query = rotary(jnp.einsum("bsd,dhe->bshe", x, self.wq[...].astype(dtype)), config.rope_base)
        key = rotary(jnp.einsum("bsd,dke->bske", x, self.wk[...].astype(dtype)), config.rope_base)
        value = jnp.einsum("bsd,dke->bske", x, self.wv[...].astype(dtype))
        grouped = query.reshape(batch, seq, config.key_heads, -1, config.head_width)
        scores = jnp.einsum("bqkge,btke->bkgqt", grouped, key, preferred_element_type=jnp.float32)
        causal = jnp.arange(seq)[:, None] >= jnp.arange(seq)[None, :]
        scores = jnp.where(causal, scores * config.head_width**-0.5, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(dtype)
        mixed = jnp.einsum("bkgqt,btke->bqkge", weights, value).reshape(query.shape)
        return jnp.einsum("bshe,hed->bsd", mixed, self.wo[...].astype(dtype))


class MLP(nnx.Module):
    """Two products around a gelu, or three around a silu gate. x: [B, S, D] -> the same."""

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
    """Gated MLPs of which each token takes a few, as far as they have room, and one for all. x: [B, S, D] -> the same.

    Tokens compete for places in groups of up to 1,024 that follow one another, the earlier before the later (GShard,
    section 2.2). No loss here keeps the experts evenly used.
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
        room = math.ceil(config.room * config.chosen * tokens / config.experts)
        groups = x.reshape(-1, tokens, config.d_model)
        odds = jax.nn.softmax(jnp.einsum("ntd,dx->ntx", groups.astype(jnp.float32), self.router[...]))
        best, which = jax.lax.top_k(odds, config.chosen)
        picks = jax.nn.one_hot(which, config.experts)
        weights = jnp.einsum("ntk,ntkx->ntx", best / best.sum(-1, keepdims=True), picks)
        picked = picks.sum(2)
        place = jnp.where(picked > 0, jnp.cumsum(picked, 1) - 1, -1).astype(jnp.int32)
        slots = jax.nn.one_hot(place, room, dtype=dtype)  # [N, T, X, C]
        sent = jnp.einsum("ntxc,ntd->nxcd", slots, groups)
        inner = jax.nn.silu(jnp.einsum("nxcd,xdf->nxcf", sent, self.gate[...].astype(dtype)))
        inner = inner * jnp.einsum("nxcd,xdf->nxcf", sent, self.up[...].astype(dtype))
        back = jnp.einsum("nxcf,xfd->nxcd", inner, self.down[...].astype(dtype))
        mixed = jnp.einsum("ntxc,nxcd->ntd", slots * weights[..., None].astype(dtype), back).reshape(x.shape)
        return mixed if self.shared is None else mixed + self.shared(x)


class Layer(nnx.Module):
    """One pre-norm residual block. x: [B, S, D] -> the same."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.d_model)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.d_model)
        self.mlp = Experts(config, rngs) if config.experts else MLP(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _apply_layer(graph: Any, weights: Tree, x: jax.Array) -> jax.Array:
    """A layer of ``x``; JAX traces, and differentiates, the first and takes the others, which are alike, to be so."""
    return nnx.merge(graph, weights)(x)


class Decoder(nnx.Module):
    """Token identifiers to next-token logits. tokens: int [B, S] -> float32 [B, S, V]."""

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

    def __call__(self, tokens: jax.Array) -> jax.Array:
        dtype = jnp.dtype(self.config.dtype)
        x = self.embed[...].astype(dtype)[tokens] * self.config.d_model**0.5
        if self.config.scan:
            graph, stacked = nnx.split(self.layers)
            x, _ = jax.lax.scan(lambda h, weights: (nnx.merge(graph, weights)(h), None), x, stacked)
        else:
            for layer in self.layers:
                x = _apply_layer(*nnx.split(layer), x)
        x = self.norm(x)
        if self.head is None:
            x = x * self.config.d_model**-0.5  # else each token starts out certain that it repeats itself
            return jnp.einsum("bsd,vd->bsv", x, self.embed[...].astype(dtype), preferred_element_type=jnp.float32)
        return jnp.einsum("bsd,dv->bsv", x, self.head[...].astype(dtype), preferred_element_type=jnp.float32)


class Steps(NamedTuple):
    """The functions of one training run over a plain-dict state ``{"params", "opt_state", "step"}``."""

    init: Callable[[jax.Array], Tree]
    """Random key -> the state before the first step."""
    train: Callable[[Tree, Mapping[str, jax.Array]], tuple[Tree, Metrics]]
    """state, batch -> the next state and the scalars ``loss`` (nats a token), ``grad_norm``, ``learning_rate``."""
    evaluate: Callable[[Tree, Mapping[str, jax.Array]], Metrics]
    """params, batch -> the scalar ``loss`` (nats a token)."""


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by step for a run of ``steps`` steps."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if config.warmup else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup,
        decay_steps=max(config.decay_steps or steps, config.warmup + 1),
        end_value=config.learning_rate * config.final,
    )


def _decay_mask(params: Tree) -> Tree:
    """True where weight decay applies: everywhere but the norms' scales."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1] != jax.tree_util.DictKey("scale"), params)


def make_steps(model: ModelConfig, optimizer: OptimizerConfig, steps: int) -> Steps:
    """The init, train and eval functions of a decoder; pure, so they can be traced anywhere.

    A batch is ``{"inputs": int [B, S], "targets": int [B, S]}``, the targets one token ahead.
    """
    rate = schedule(optimizer, steps)
    update = optax.chain(
        optax.clip_by_global_norm(optimizer.clip),
        optax.adamw(rate, b1=optimizer.b1, b2=optimizer.b2, weight_decay=optimizer.weight_decay, mask=_decay_mask),
    )
    graph, blank = nnx.split(nnx.eval_shape(lambda: Decoder(model, nnx.Rngs(0))))

    def init(key: jax.Array) -> Tree:
        params = nnx.to_pure_dict(nnx.state(Decoder(model, nnx.Rngs(params=key))))
        return {"params": params, "opt_state": update.init(params), "step": jnp.zeros((), jnp.int32)}

    def loss_of(params: Tree, batch: Mapping[str, jax.Array]) -> jax.Array:
        state = nnx.clone(blank)
        nnx.replace_by_pure_dict(state, params)
        logits = nnx.merge(graph, state)(batch["inputs"])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]))

    def train(state: Tree, batch: Mapping[str, jax.Array]) -> tuple[Tree, Metrics]:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, opt_state = update.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "learning_rate": rate(state["step"])}
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, metrics

    def evaluate(params: Tree, batch: Mapping[str, jax.Array]) -> Metrics:
        return {"loss": loss_of(params, batch)}

    return Steps(init, train, evaluate)
