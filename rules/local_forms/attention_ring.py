"""Ring attention: the sequence is sharded, and blocks of keys and values travel from device to device.

Without a position mask every block goes all the way round the ring (Liu et al., arXiv:2310.01889). Where a causal or
window mask lets queries see only some of the keys, blocks travel along two chains instead, one in each direction, and
only as far as they are seen. A mask with a finite constant still gives keys out of reach some weight in rows that see
no key at all: as they all have the same score, the sum of their values stands for them.

In the backward part either keys and values travel, or queries with their statistics. In a ring the gradients of a
block travel with it, one hop behind, and reach its device with the last hop; in a chain each device sends what it has
computed directly to the block's device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
from jax import lax
from jax import numpy as jnp

from autoshard.ir.halo import permute_shards
from autoshard.ir.rule import CollectiveBytes
from autoshard.ir.spec import Axes
from autoshard.machine.collective import ALL_GATHER, COLLECTIVE_PERMUTE
from autoshard.rules.local_forms.attention_kernel import attend_fused, gradients_fused
from autoshard.rules.local_forms.online_softmax import (
    SoftmaxState,
    empty_state,
    merge_softmax_states,
    online_softmax_update,
    results_of_state,
)
from autoshard.transforms.attention_op import (
    AttentionConfig,
    block_gradients,
    finalize_gradients,
    logits,
    out_dot_cotangent,
)

Pairs = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Reach:
    """Of how many devices before and behind it in the sequence a device needs the keys."""

    before: int
    behind: int
    ring: bool
    """Whether it needs those of all devices, so that blocks go once round a ring."""


def key_reach(config: AttentionConfig, parts: int, length: int) -> Reach:
    """Which blocks of keys a device's queries can see, where each of ``parts`` devices has ``length`` positions."""
    most, bands = parts - 1, [op for op in config.score_ops if op.kind == "band"]
    if not bands or (not config.kernel and masked_score(config) is None):
        return Reach(most, 0, ring=True)
    low = max([op.low for op in bands if op.low is not None], default=-parts * length)
    high = min([op.high for op in bands if op.high is not None], default=parts * length)
    before, behind = (min(most, max(0, (length - 1 + n) // length)) for n in (-low, high))
    ring = before == behind == most and not config.kernel  # whose masks are of a distance known beforehand
    return Reach(before, 0 if ring else behind, ring)


def masked_score(config: AttentionConfig) -> float | None:
    """The score of keys outside a band after all score ops, perhaps minus infinity; None where it is not one number."""
    found: set[float] = set()
    only_band = sum(op.kind == "band" for op in config.score_ops) == 1
    for op in config.score_ops:
        if op.kind == "band":
            found = {op.constant} if only_band else found | {op.constant}
        elif op.is_mask:
            found |= {op.constant}
        elif op.kind == "tanh":
            found = {math.tanh(x) for x in found}
        elif op.kind == "bias" and found - {-math.inf}:
            return None
        elif op.kind != "bias":
            found = {x * op.constant if op.kind == "scale" else x + op.constant for x in found}
    (score,) = found if len(found) == 1 else (math.nan,)
    return score if score < math.inf else None


def out_of_window_score(config: AttentionConfig, reach: Reach) -> float | None:
    """The score of keys out of reach; None where none are, or where they have no weight."""
    score = None if reach.ring or config.kernel else masked_score(config)  # kernels give masked keys no weight
    return None if score == -math.inf else score


def attend_ring(
    config: AttentionConfig, reach: Reach, axes: Axes, query: Any, key: Any, value: Any, *extras: Any
) -> tuple[Any, Any, Any]:
    """The results of `attention_p` for one device's queries, inside `jax.shard_map` over ``axes``."""
    parts, me = lax.axis_size(axes), lax.axis_index(axes)
    queries = query.shape[config.query_dims.index(config.query_position)]
    keys = key.shape[config.key_dims.index(config.key_position)]

    def attend_block(state: SoftmaxState, k: Any, v: Any, source: Any, distance: int = 0) -> SoftmaxState:
        if config.kernel:
            starts = {"query_start": me * queries, "key_start": source * keys}
            results = attend_fused(config, query, k, v, *extras, distance=distance, **starts)
            return merge_softmax_states(config, state, results)
        scores = logits(config, query, k, extras, me * queries, source * keys)
        return online_softmax_update(config, state, scores, v)

    state = attend_block(empty_state(config, query, key, value), key, value, me)
    for step, hops in ((1, reach.before), (-1, reach.behind)):

        def receive(state: SoftmaxState, block: Any, hop: Any, step: int = step) -> SoftmaxState:
            source = me - step * hop
            k, v = block
            if reach.ring:
                return attend_block(state, k, v, source % parts)
            exists = (source >= 0) & (source < parts)
            attend = functools.partial(attend_block, distance=step * hop * keys)
            return lax.cond(exists, attend, lambda state, *_: state, state, k, v, source)

        state = circulate(axes, reach, step, hops, (key, value), state, receive)
    score = out_of_window_score(config, reach)
    if score is not None:
        values = jnp.sum(value, config.value_dims.index(config.key_position), config.accum_dtype, keepdims=True)
        unreached = _out_of_reach(reach, me, parts)
        count = jnp.sum(unreached) * keys
        scores = jnp.full((*state.row_max.shape, 1), jnp.where(count > 0, score, -jnp.inf), config.accum_dtype)
        values = jnp.tensordot(unreached.astype(config.accum_dtype), lax.all_gather(values, axes), 1)
        state = online_softmax_update(config, state, scores, values, count)
    return results_of_state(config, state)


def gradients_ring(
    config: AttentionConfig,
    reach: Reach,
    travelling: Literal["keys", "queries"],
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
    """The results of `attention_backward_p` for one device's queries and keys, inside `jax.shard_map` over ``axes``.

    Args:
      travelling: which blocks go round: keys with values, or queries with their statistics and cotangents.
    """
    parts, me, send_queries = lax.axis_size(axes), lax.axis_index(axes), travelling == "queries"
    queries = query.shape[config.query_dims.index(config.query_position)]
    keys = key.shape[config.key_dims.index(config.key_position)]
    if config.kernel:
        stats = (out, row_max, row_sum)
    else:
        stats = jnp.stack([row_max, row_sum, out_dot_cotangent(config, out, cotangent)])
    query_block, key_block = (query, stats, cotangent), (key, value)
    # XLA would otherwise merge these sends with the forward part's and keep all blocks until here.
    query_block, key_block = lax.optimization_barrier((query_block, key_block))
    own_block = query_block if send_queries else key_block

    def kernel_gradients(q: Any, stats: Any, ct: Any, k: Any, v: Any, source: Any, distance: int) -> tuple[Any, Any]:
        """`gradients_of_block` by the fused kernel, where keys travel."""
        dims, dtypes = (config.query_dims, config.key_dims, config.value_dims), (str(config.accum_dtype),) * 3
        out, row_max, row_sum = stats
        unconverted = replace(config, grad_dims=dims, grad_dtypes=dtypes)
        dq, *dkv = gradients_fused(
            *(unconverted, q, k, v, out, row_max, row_sum, ct, *extras),
            distance=distance,
            query_start=me * queries,
            key_start=source * keys,
        )
        return dkv, [dq]

    def gradients_of_block(block: Any, source: Any, distance: int = 0) -> tuple[Any, Any]:
        """What a block that came from ``source`` adds to its own gradients, and to those of what stays here."""
        (q, stats, ct), (k, v) = (block, key_block) if send_queries else (query_block, block)
        if config.kernel:
            return kernel_gradients(q, stats, ct, k, v, source, distance)
        starts = (source * queries, me * keys) if send_queries else (me * queries, source * keys)
        dq, *dkv = block_gradients(config, q, k, v, stats[0], stats[1], ct, stats[2], extras, *starts)
        return ([dq], dkv) if send_queries else (dkv, [dq])

    travelled, stayed = gradients_of_block(own_block, me)
    for step, hops in ((1, reach.before), (-1, reach.behind)):
        direction = -step if send_queries else step  # queries travel to the keys that they see

        def receive(grads: Any, block: Any, hop: Any, step: int = direction) -> Any:
            travelled, stayed = grads
            source = me - step * hop
            if reach.ring:
                of_block, here = gradients_of_block(block, source % parts)
                pairs = send_pairs(step, 1, parts, True)
                travelled = [permute_shards(x + y, axes, pairs) for x, y in zip(travelled, of_block, strict=True)]
            else:
                zeros = jax.tree.map(jnp.zeros_like, (travelled, stayed))
                exists = (source >= 0) & (source < parts)
                gradients = functools.partial(gradients_of_block, distance=step * hop * keys)
                of_block, here = lax.cond(exists, gradients, lambda *_: zeros, block, source)
                home = [(p, p - step * hop) for p in range(parts) if 0 <= p - step * hop < parts]
                travelled = [x + permute_shards(y, axes, home) for x, y in zip(travelled, of_block, strict=True)]
            return travelled, jax.tree.map(jnp.add, stayed, here)

        start = jax.tree.map(jnp.zeros_like, travelled), stayed
        returned, stayed = circulate(axes, reach, direction, hops, own_block, start, receive)
        travelled = jax.tree.map(jnp.add, travelled, returned)
    dq, dk, dv = (*travelled, *stayed) if send_queries else (*stayed, *travelled)
    score = out_of_window_score(config, reach)
    if score is not None:
        text = f"{config.row_dims},{config.cotangent_dims}->{config.value_dims.replace(config.key_position, '')}"
        p = (jnp.exp(score - row_max) / row_sum).astype(config.weight_dtype)
        per_key = jnp.einsum(
            text, p, cotangent, precision=config.value_precision, preferred_element_type=config.accum_dtype
        )
        unreached = jax.vmap(lambda device: _out_of_reach(reach, device, parts)[me])(jnp.arange(parts))
        per_key = jnp.tensordot(unreached.astype(config.accum_dtype), lax.all_gather(per_key, axes), 1)
        dv = dv + jnp.expand_dims(per_key, config.value_dims.index(config.key_position))
    return finalize_gradients(config, (dq, dk, dv))


def circulate(
    axes: Axes, reach: Reach, step: int, hops: int, block: Any, state: Any, receive: Callable[[Any, Any, Any], Any]
) -> Any:
    """``state`` after ``receive(state, block, hop)`` of every block that arrives in ``hops`` hops.

    Args:
      step: 1 where blocks travel to the next device, -1 to the one before.
      block: this device's own; an arrived block is sent on before it is used, so that both run at once.
    """
    parts = lax.axis_size(axes)

    def send(block: Any, hop: int) -> Any:
        return jax.tree.map(lambda x: permute_shards(x, axes, send_pairs(step, hop, parts, reach.ring)), block)

    def next_hop(carry: tuple[Any, Any], hop: Any) -> tuple[tuple[Any, Any], None]:
        block, state = carry
        # In an unrolled chain, no hop starts before the block of the last but one is used, or all blocks pile up.
        return lax.optimization_barrier((send(block, hop + 1), receive(state, block, hop))), None

    if hops == 0:
        return state
    carry = send(block, 1), state
    if reach.ring:
        carry, _ = lax.scan(next_hop, carry, jnp.arange(1, hops))
    else:
        for hop in range(1, hops):
            carry, _ = next_hop(carry, hop)
    return receive(carry[1], carry[0], hops)


def send_pairs(step: int, hop: Any, parts: int, ring: bool) -> Pairs:
    """(sender, receiver) of a hop: all devices in a ring, in a chain those that a block has arrived at."""
    if ring:
        return [(p, (p + step) % parts) for p in range(parts)]
    senders = range(hop - 1, parts - 1) if step > 0 else range(1, parts - hop + 1)
    return [(p, p + step) for p in senders]


def _out_of_reach(reach: Reach, device: Any, parts: int) -> Any:
    """Whose keys the queries of ``device`` do not reach: [parts] booleans."""
    source = jnp.arange(parts)
    return (source < device - reach.before) | (source > device + reach.behind)


def ring_collectives(
    config: AttentionConfig, reach: Reach, parts: int, sent: Sequence[int], returned: Sequence[int], values: int
) -> CollectiveBytes:
    """The collectives of one device, as (kind, bytes).

    Args:
      sent: bytes of each array of a block, per hop.
      returned: bytes of each of its gradients, per hop.
      values: bytes of the values of one key, all-gathered where keys out of reach have weight.
    """
    hop: CollectiveBytes = tuple((COLLECTIVE_PERMUTE, n) for n in (*sent, *returned))
    hops = hop * (reach.before + reach.behind)
    return hops if out_of_window_score(config, reach) is None else (*hops, (ALL_GATHER, values * parts))
