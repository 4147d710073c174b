"""DeepSpeed-Ulysses attention: all-to-alls turn a sharded sequence into sharded heads, and back (arXiv:2309.14509).

One all-to-all of each operand and result. Batch and head dimensions serve equally: all dimensions that query, key and
value share are flattened into one, which the all-to-all splits. Each device then attends over the whole sequence, one
block of keys at a time, so that no more scores are alive than in ring attention; or with the target's fused kernel.
"""

from __future__ import annotations

import string
from dataclasses import replace
from typing import Any

from jax import lax
from jax import numpy as jnp

from autoshard.ir.spec import Axes
from autoshard.rules.local_forms.attention_kernel import attend_fused, gradients_fused
from autoshard.rules.local_forms.online_softmax import empty_state, online_softmax_update, results_of_state
from autoshard.transforms.attention_op import (
    AttentionConfig,
    block_gradients,
    finalize_gradients,
    logits,
    out_dot_cotangent,
)


def exchangeable_dims(config: AttentionConfig) -> str:
    """The dimensions that can be sharded in place of the sequence; none where a mask or bias depends on the query."""
    shared = [c for c in config.row_dims if c in config.query_dims and c in config.key_dims and c in config.value_dims]
    only_shared = set(config.key_dims) == {*shared, config.key_position, config.head_width}
    only_shared &= set(config.value_dims) == {*shared, config.key_position, config.value_width}
    return "".join(shared) if only_shared and not any(config.query_position in x for x in config.extra_dims) else ""


def attend_ulysses(
    config: AttentionConfig, axes: Axes, query: Any, key: Any, value: Any, *extras: Any
) -> tuple[Any, ...]:
    """The results of `attention_p` for one device's part of the sequence, inside `jax.shard_map` over ``axes``."""
    exchange = _Exchange(config, axes, config.sizes(query, key, value))
    flat, parts = exchange.config, lax.axis_size(axes)
    operands = ((query, config.query_dims), (key, config.key_dims), (value, config.value_dims))
    q, k, v = (exchange.to_heads(x, letters) for x, letters in operands)
    extras = tuple(exchange.own_part(x, letters) for x, letters in zip(extras, config.extra_dims, strict=True))

    def attend_block(state: Any, i: Any) -> Any:
        (k_block, v_block), key_start = exchange.key_block(k, v, i)
        scores = logits(flat, q, k_block, extras, 0, key_start)
        return online_softmax_update(flat, state, scores, v_block), None

    if config.kernel:
        results = attend_fused(flat, q, k, v, *extras)
    else:
        state, _ = lax.scan(attend_block, empty_state(flat, q, k, v), jnp.arange(parts))
        results = results_of_state(flat, state)
    result_dims = (config.out_dims, config.row_dims, config.row_dims)
    return tuple(exchange.to_sequence(x, letters) for x, letters in zip(results, result_dims, strict=True))


def gradients_ulysses(
    config: AttentionConfig,
    axes: Axes,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    row_max: Any,
    row_sum: Any,
    cotangent: Any,
    *extras: Any,
) -> tuple[Any, ...]:
    """The results of `attention_backward_p` for one device's part of the sequence, inside `jax.shard_map`."""
    exchange = _Exchange(config, axes, config.sizes(query, key, value))
    flat, parts = exchange.config, lax.axis_size(axes)
    # XLA would otherwise merge these all-to-alls with the forward part's and keep their results until here.
    query, key, value, cotangent = lax.optimization_barrier((query, key, value, cotangent))
    operands = ((query, config.query_dims), (key, config.key_dims), (value, config.value_dims))
    q, k, v, ct = (exchange.to_heads(x, dims) for x, dims in (*operands, (cotangent, config.cotangent_dims)))
    extras = tuple(exchange.own_part(x, letters) for x, letters in zip(extras, config.extra_dims, strict=True))
    if config.kernel:
        whole_out = exchange.to_heads(out, config.out_dims)
        logsumexp = exchange.to_heads(row_max + jnp.log(row_sum), config.row_dims)
        grads = gradients_fused(flat, q, k, v, whole_out, logsumexp, jnp.ones_like(logsumexp), ct, *extras)
        return tuple(exchange.to_sequence(x, letters) for x, letters in zip(grads, config.grad_dims, strict=True))
    stats = (row_max, row_sum, out_dot_cotangent(config, out, cotangent))
    row_max, row_sum, delta = (exchange.to_heads(x, config.row_dims) for x in stats)

    def block(dq: Any, i: Any) -> Any:
        (k_block, v_block), key_start = exchange.key_block(k, v, i)
        added, dk, dv = block_gradients(flat, q, k_block, v_block, row_max, row_sum, ct, delta, extras, 0, key_start)
        return dq + added, (dk, dv)

    dq, stacked = lax.scan(block, jnp.zeros(q.shape, config.accum_dtype), jnp.arange(parts))
    dk, dv = (
        jnp.moveaxis(x, 0, letters.index(config.key_position)).reshape(whole.shape)
        for x, letters, whole in zip(stacked, (flat.key_dims, flat.value_dims), (k, v), strict=True)
    )
    grads = finalize_gradients(flat, (dq, dk, dv))
    return tuple(exchange.to_sequence(x, letters) for x, letters in zip(grads, config.grad_dims, strict=True))


class _Exchange:
    """All-to-alls between a part of the sequence with all heads and the whole sequence with a part of the heads."""

    def __init__(self, config: AttentionConfig, axes: Axes, sizes: dict[str, int]) -> None:
        self.axes, self.sizes, self.shared = axes, sizes, exchangeable_dims(config)
        used = config.query_dims + config.key_dims + config.value_dims
        self.letter = next(c for c in string.ascii_letters if c not in used)
        self.config = replace(
            config,
            query_dims=self.flattened(config.query_dims),
            key_dims=self.flattened(config.key_dims),
            value_dims=self.flattened(config.value_dims),
            out_dims=self.flattened(config.out_dims),
            row_dims=self.flattened(config.row_dims),
            cotangent_dims=self.flattened(config.cotangent_dims),
            extra_dims=tuple(map(self.flattened, config.extra_dims)),
            grad_dims=tuple(map(self.flattened, config.grad_dims)),
        )
        """The attention over the whole sequence, its shared dimensions flattened into one leading dimension."""

    def flattened(self, letters: str) -> str:
        """``letters`` with one leading letter for all shared dimensions, where there are any."""
        rest = "".join(c for c in letters if c not in self.shared)
        return self.letter + rest if rest != letters else letters

    def own_part(self, x: Any, letters: str) -> Any:
        """The part of a mask or bias for this device's heads."""
        if self.flattened(letters) == letters:
            return x
        missing = [c for c in self.shared if c not in letters]
        x = self.flatten(lax.expand_dims(x, range(len(missing))), "".join(missing) + letters)
        size = x.shape[0] // lax.axis_size(self.axes)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axes) * size, size)

    def flatten(self, x: Any, letters: str) -> Any:
        """``x`` with its shared dimensions as one leading dimension."""
        rest = [d for d, c in enumerate(letters) if c not in self.shared]
        x = jnp.transpose(x, [*(letters.index(c) for c in self.shared), *rest])
        count = len(self.shared)
        x = jnp.broadcast_to(x, (*(self.sizes[c] for c in self.shared), *x.shape[count:]))
        return x.reshape(-1, *x.shape[count:])

    def to_heads(self, x: Any, letters: str) -> Any:
        """``x`` over the whole sequence, for this device's part of the flattened heads."""
        return lax.all_to_all(self.flatten(x, letters), self.axes, 0, self.sequence_dim(letters), tiled=True)

    def to_sequence(self, x: Any, letters: str) -> Any:
        """The inverse of `to_heads`; ``letters`` are the subscripts of the result."""
        x = lax.all_to_all(x, self.axes, self.sequence_dim(letters), 0, tiled=True)
        x = x.reshape(*(self.sizes[c] for c in self.shared), *x.shape[1:])
        unflattened = self.shared + self.flattened(letters)[1:]
        return jnp.transpose(x, [unflattened.index(c) for c in letters])

    def sequence_dim(self, letters: str) -> int:
        """The sequence dimension of an array whose heads are flattened."""
        letters = self.flattened(letters)
        return letters.index(
            self.config.query_position if self.config.query_position in letters else self.config.key_position
        )

    def key_block(self, key: Any, value: Any, i: Any) -> tuple[list[Any], Any]:
        """Block ``i`` of keys and values, as many as a device had before, and its first position."""
        size = self.sizes[self.config.key_position]
        sides = ((key, self.config.key_dims), (value, self.config.value_dims))
        return [
            lax.dynamic_slice_in_dim(x, i * size, size, c.index(self.config.key_position)) for x, c in sides
        ], i * size
