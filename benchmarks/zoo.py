"""Models as people write them, each dimension with the name that a sharding by hand goes by.

A parameter is `Named`: its shape and a name per dimension. A loss takes ``at``, what is written into it by hand
(`Marks`): nothing for autoshard, which gets no hint. Parameters are float32, products bfloat16.

Letters in shapes: B batch, S sequence, D model width, H query heads, K key-value heads, E head width, F MLP width,
V vocabulary, N groups of tokens, T tokens of one, X experts, C places of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from autoshard.train.models.decoder import rotary

type Tree = Any
"""A pytree."""
DTYPE = jnp.bfloat16


class Named(NamedTuple):
    """An array by shape, one name per dimension, and dtype."""

    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    dtype: Any = jnp.float32

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        """What traces."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


@dataclass(frozen=True)
class Marks:
    """What somebody writes into a model by hand; by itself nothing."""

    constraint: Callable[..., jax.Array] | None = None
    """Array, a name or None for each dimension -> the same array."""
    attention: Callable[[jax.Array, jax.Array, jax.Array, bool], jax.Array] | None = None
    """By a kernel: queries [B, S, H, E], keys and values [B, S, K, E], whether causal -> [B, S, H, E]."""
    loss: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None = None
    """As `_predicted`, without an array of all logits."""
    saved: tuple[str, ...] | None = None
    """Names of the activations that each block saves for the backward pass, which computes the others again; None: it
    saves all, and computes none."""

    def __call__(self, x: jax.Array, *names: str | None) -> jax.Array:
        """``x`` with a name or None for each dimension."""
        return x if self.constraint is None else self.constraint(x, *names)

    def named(self, x: jax.Array, name: str) -> jax.Array:
        """``x`` as an activation that may be saved."""
        return x if self.saved is None else checkpoint_name(x, name)


@dataclass(frozen=True)
class Model:
    """Parameters, a batch, and ``loss(params, batch, at)``."""

    params: Tree
    batch: Tree
    loss: Callable[[Tree, Tree, Marks], jax.Array]

    def step(self, at: Marks | None = None) -> Callable[[Tree, Tree], tuple[Tree, jax.Array]]:
        """One step of AdamW: state, batch -> state, loss."""

        def train(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
            loss, grads = jax.value_and_grad(self.loss)(state["params"], batch, at or Marks())
            updates, opt = _ADAM.update(grads, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

        return train

    @property
    def state(self) -> Tree:
        """The state as `Named` leaves: parameters, and moments named as they are."""
        blank = jax.eval_shape(_ADAM.init, jax.tree.map(lambda p: p.abstract, self.params, is_leaf=is_named))
        opt = optax.tree.map_params(
            _ADAM, lambda _, p: p, blank, self.params, transform_non_params=lambda x: Named(x.shape, (), x.dtype)
        )
        return {"params": self.params, "opt": opt}


_ADAM = optax.adamw(1e-4)


def is_named(x: Any) -> bool:
    """Where a tree of `Named` ends."""
    return isinstance(x, Named)


@dataclass(frozen=True)
class Transformer:
    """Sizes of transformer blocks and how their stack is written."""

    layers: int
    width: int
    heads: int
    mlp: int
    vocab: int = 0
    kv_heads: int = 0
    """Heads of keys and values; 0: as many as of queries."""
    head_width: int = 0
    """0: the width over the heads."""
    gated: bool = False
    """Three products with a silu gate, root-mean-square norms and rotary positions; else two with a gelu."""
    experts: int = 0
    """MLPs that each token goes to ``picks`` of; 0: one for all."""
    picks: int = 2
    """MLPs of a token."""
    drops: bool = True
    """Whether each MLP takes tokens up to a capacity and drops others; else rows of tokens are sorted by MLP."""
    scan: bool = True
    remat: bool = False
    """Whether each block is recomputed in the backward pass."""

    def block(self, *, causal: bool = True, crossed: bool = False) -> Tree:
        """Parameters of one block; ``crossed``: it also looks at another sequence."""
        del causal
        width, head = self.width, self.head_width or self.width // self.heads
        keys = self.kv_heads or self.heads
        attention = {
            "norm": Named((width,), ("embed",)),
            "query": Named((width, self.heads, head), ("embed", "heads", None)),
            "key": Named((width, keys, head), ("embed", "heads", None)),
            "value": Named((width, keys, head), ("embed", "heads", None)),
            "out": Named((self.heads, head, width), ("heads", None, "embed")),
        }
        lead, named = ((self.experts,), ("expert",)) if self.experts else ((), ())
        up = Named((*lead, width, self.mlp), (*named, "embed", "mlp"))
        mlp = {"norm": Named((width,), ("embed",)), "up": up, "down": up._replace(
            shape=(*lead, self.mlp, width), names=(*named, "mlp", "embed"))}  # fmt: skip
        mlp |= {"gate": up} if self.gated else {}
        mlp |= {"router": Named((width, self.experts), ("embed", None))} if self.experts else {}
        return {"self": attention, "mlp": mlp} | ({"cross": attention} if crossed else {})

    def stacked(self, *, crossed: bool = False) -> Tree:
        """Parameters of all blocks: stacked where they are scanned, else a list."""
        block = self.block(crossed=crossed)
        if not self.scan:
            return [block] * self.layers
        return jax.tree.map(
            lambda p: Named((self.layers, *p.shape), (None, *p.names), p.dtype), block, is_leaf=is_named
        )

    def run(self, blocks: Tree, x: jax.Array, at: Marks, *, causal: bool, other: jax.Array | None = None) -> jax.Array:
        """All blocks in turn. x, other: [B, S, D] -> [B, S, D]."""

        def block(x: jax.Array, p: Tree) -> tuple[jax.Array, None]:
            x = x + self._attend(p["self"], x, None, at, causal)
            if other is not None:
                x = x + self._attend(p["cross"], x, other, at, causal=False)
            x = at(x + self._mlp(p["mlp"], x, at), "batch", None, None)
            return x, None

        body = block
        if at.saved is not None:
            body = jax.checkpoint(block, policy=jax.checkpoint_policies.save_only_these_names(*at.saved))
        elif self.remat:
            body = jax.checkpoint(block)
        if self.scan:
            return jax.lax.scan(body, x, blocks)[0]
        for p in blocks:
            x, _ = body(x, p)
        return x

    def norm(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        """Root-mean-square or layer norm over the last dimension."""
        wide = x.astype(jnp.float32)
        if not self.gated:
            wide = wide - wide.mean(-1, keepdims=True)
        return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6) * scale).astype(DTYPE)

    def _attend(self, p: Tree, x: jax.Array, other: jax.Array | None, at: Marks, causal: bool) -> jax.Array:
        x = self.norm(x, p["norm"])
        seen = x if other is None else other
        query = at(jnp.einsum("bsd,dhe->bshe", x, p["query"].astype(DTYPE)), "batch", None, "heads", None)
        key = at(jnp.einsum("bsd,dke->bske", seen, p["key"].astype(DTYPE)), "batch", None, "heads", None)
        value = at(jnp.einsum("bsd,dke->bske", seen, p["value"].astype(DTYPE)), "batch", None, "heads", None)
        if self.gated:
            query, key = rotary(query, 500_000.0), rotary(key, 500_000.0)
        query, key, value = (at.named(a, n) for a, n in ((query, "query"), (key, "key"), (value, "value")))
        mixed = at.attention(query, key, value, causal) if at.attention else self._mix(query, key, value, at, causal)
        return at.named(jnp.einsum("bshe,hed->bsd", mixed, p["out"].astype(DTYPE)), "out")

    def _mix(self, query: jax.Array, key: jax.Array, value: jax.Array, at: Marks, causal: bool) -> jax.Array:
        shared = self.heads // key.shape[2]
        if shared > 1:
            key, value = jnp.repeat(key, shared, axis=2), jnp.repeat(value, shared, axis=2)
        scores = jnp.einsum("bshe,bthe->bhst", query, key, preferred_element_type=jnp.float32) * key.shape[-1] ** -0.5
        if causal:
            seq = query.shape[1]
            scores = jnp.where(jnp.tril(jnp.ones((seq, seq), bool)), scores, -1e9)
        odds = jax.nn.softmax(at(scores, "batch", "heads", None, None), axis=-1).astype(DTYPE)
        return at(jnp.einsum("bhst,bthe->bshe", odds, value), "batch", None, "heads", None)

    def _mlp(self, p: Tree, x: jax.Array, at: Marks) -> jax.Array:
        x = self.norm(x, p["norm"])
        if self.experts:
            return self._experts(p, x, at) if self.drops else self._sorted_experts(p, x)
        up = at.named(jnp.einsum("bsd,df->bsf", x, p["up"].astype(DTYPE)), "up")
        if self.gated:
            up = jax.nn.silu(at.named(jnp.einsum("bsd,df->bsf", x, p["gate"].astype(DTYPE)), "gate")) * up
        else:
            up = jax.nn.gelu(up)
        return at.named(jnp.einsum("bsf,fd->bsd", at(up, "batch", None, "mlp"), p["down"].astype(DTYPE)), "down")

    def _experts(self, p: Tree, x: jax.Array, at: Marks) -> jax.Array:
        """Each token to some experts as far as their capacity allows (GShard, section 2.2)."""
        tokens = math.gcd(x.shape[1], 1024)
        capacity = math.ceil(1.25 * self.picks * tokens / self.experts)
        groups = at(x.reshape(-1, tokens, x.shape[-1]), "batch", None, None)
        odds = jax.nn.softmax(jnp.einsum("ntd,dx->ntx", groups.astype(jnp.float32), p["router"]))
        best, which = jax.lax.top_k(odds, self.picks)
        picks = jax.nn.one_hot(which, self.experts)
        weights = jnp.einsum("ntk,ntkx->ntx", best / best.sum(-1, keepdims=True), picks)
        picked = picks.sum(2)
        place = jnp.where(picked > 0, jnp.cumsum(picked, 1) - 1, -1).astype(jnp.int32)
        slots = at(jax.nn.one_hot(place, capacity, dtype=DTYPE), "batch", None, None, None)
        sent = at(jnp.einsum("ntxc,ntd->nxcd", slots, groups), "batch", "expert", None, None)
        up = at.named(jnp.einsum("nxcd,xdf->nxcf", sent, p["up"].astype(DTYPE)), "up")
        up = jax.nn.silu(at.named(jnp.einsum("nxcd,xdf->nxcf", sent, p["gate"].astype(DTYPE)), "gate")) * up
        up = at(up, "batch", "expert", None, "mlp")
        back = at(jnp.einsum("nxcf,xfd->nxcd", up, p["down"].astype(DTYPE)), "batch", "expert", None, None)
        return jnp.einsum("ntxc,nxcd->ntd", slots * weights[..., None].astype(DTYPE), back).reshape(x.shape)

    def _sorted_experts(self, p: Tree, x: jax.Array) -> jax.Array:
        """Each token to some experts, rows sorted by expert (MegaBlocks, as MaxText and Mixtral do)."""
        rows = x.reshape(-1, x.shape[-1])
        odds = jax.nn.softmax(rows.astype(jnp.float32) @ p["router"])
        best, which = jax.lax.top_k(odds, self.picks)
        order = jnp.argsort(which.reshape(-1))
        sizes = jnp.bincount(which.reshape(-1), length=self.experts)
        sent = rows[order // self.picks]
        up = jax.lax.ragged_dot(sent, p["up"].astype(DTYPE), sizes)
        up = jax.nn.silu(jax.lax.ragged_dot(sent, p["gate"].astype(DTYPE), sizes)) * up
        back = jax.lax.ragged_dot(up, p["down"].astype(DTYPE), sizes)[jnp.argsort(order)]
        weights = (best / best.sum(-1, keepdims=True)).astype(DTYPE)
        return jnp.einsum("tkd,tk->td", back.reshape(*which.shape, -1), weights).reshape(x.shape)


def _predicted(x: jax.Array, head: jax.Array, targets: jax.Array, at: Marks) -> jax.Array:
    """Mean cross-entropy of targets: int [B, S]. x: [B, S, D], head: [D, V]."""
    if at.loss:
        return at.loss(x, head.astype(DTYPE), targets)
    logits = jnp.einsum("bsd,dv->bsv", x, head.astype(DTYPE), preferred_element_type=jnp.float32)
    logits = at(logits, "batch", None, "vocab")
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def _tokens(batch: int, seq: int) -> Named:
    return Named((batch, seq), ("batch", None), jnp.int32)


def decoder(batch: int, seq: int, **sizes: Any) -> Model:
    """A decoder-only language model; learned positions where it is not gated."""
    t = Transformer(**sizes)
    params = {
        "embed": Named((t.vocab, t.width), ("vocab", "embed")),
        "blocks": t.stacked(),
        "norm": Named((t.width,), ("embed",)),
        "head": Named((t.width, t.vocab), ("embed", "vocab")),
    }
    if not t.gated:
        params["positions"] = Named((seq, t.width), (None, "embed"))

    def loss(params: Tree, batch: Tree, at: Marks) -> jax.Array:
        x = params["embed"].astype(DTYPE)[batch["inputs"]]
        if not t.gated:
            x = x + params["positions"].astype(DTYPE)
        x = t.run(params["blocks"], at(x, "batch", None, None), at, causal=True)
        return _predicted(t.norm(x, params["norm"]), params["head"], batch["targets"], at)

    return Model(params, {"inputs": _tokens(batch, seq), "targets": _tokens(batch, seq)}, loss)


def translator(batch: int, seq: int, **sizes: Any) -> Model:
    """An encoder and a decoder that looks at what it made (T5), as many blocks of each, one embedding."""
    t = Transformer(**sizes)
    params = {
        "embed": Named((t.vocab, t.width), ("vocab", "embed")),
        "encoder": t.stacked(),
        "decoder": t.stacked(crossed=True),
        "norms": Named((2, t.width), (None, "embed")),
        "head": Named((t.width, t.vocab), ("embed", "vocab")),
    }

    def loss(params: Tree, batch: Tree, at: Marks) -> jax.Array:
        table = params["embed"].astype(DTYPE)
        seen = t.run(params["encoder"], at(table[batch["source"]], "batch", None, None), at, causal=False)
        seen = t.norm(seen, params["norms"][0])
        x = at(table[batch["inputs"]], "batch", None, None)
        x = t.run(params["decoder"], x, at, causal=True, other=seen)
        return _predicted(t.norm(x, params["norms"][1]), params["head"], batch["targets"], at)

    return Model(params, {k: _tokens(batch, seq) for k in ("source", "inputs", "targets")}, loss)


def vision(batch: int, size: int, patch: int, classes: int, **sizes: Any) -> Model:
    """A vision transformer over patches of images: [B, size, size, 3]."""
    t, count = Transformer(**sizes), (size // patch) ** 2
    params = {
        "patches": Named((patch * patch * 3, t.width), (None, "embed")),
        "positions": Named((count, t.width), (None, "embed")),
        "blocks": t.stacked(),
        "norm": Named((t.width,), ("embed",)),
        "head": Named((t.width, classes), ("embed", "vocab")),
    }

    def loss(params: Tree, batch: Tree, at: Marks) -> jax.Array:
        side = size // patch
        x = batch["images"].reshape(-1, side, patch, side, patch, 3).transpose(0, 1, 3, 2, 4, 5)
        x = x.reshape(-1, count, patch * patch * 3) @ params["patches"].astype(DTYPE)
        x = at(x + params["positions"].astype(DTYPE), "batch", None, None)
        x = t.run(params["blocks"], x, at, causal=False)
        return classified(t.norm(x, params["norm"]).mean(1), params["head"], batch["labels"], at)

    return Model(params, image_batch(batch, size, 3) | {"labels": Named((batch,), ("batch",), jnp.int32)}, loss)


def classified(x: jax.Array, head: jax.Array, labels: jax.Array, at: Marks) -> jax.Array:
    """Mean cross-entropy of labels: int [B]. x: [B, D], head: [D, V]."""
    logits = at((x @ head.astype(DTYPE)).astype(jnp.float32), "batch", "vocab")
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def image_batch(batch: int, size: int, channels: int) -> dict[str, Named]:
    """Images: [B, size, size, channels]."""
    return {"images": Named((batch, size, size, channels), ("batch", None, None, None), DTYPE)}
