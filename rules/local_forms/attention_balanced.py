"""Causal attention in a ring in which all devices compute as much: each has an early and a late half-block.

In a causal ring of contiguous blocks the last device computes with the keys of all and the first with its own only.
Here the sequence is taken as ``2 * parts`` half-blocks, of which device ``i`` has ``2 * i`` and ``2 * i + 1``. It keeps
the first and exchanges the second with its mirror, device ``parts - 1 - i``: it then has half-blocks ``2 * i`` and
``2 * parts - 1 - 2 * i``, of which one is in the early half of the sequence and the other as far from its end (zigzag
attention, as in Llama 3, arXiv:2407.21783, and in Megatron's context parallelism). Late queries see all early keys.
Of the other blocks that arrive, early queries see the early keys if these are before them, and else late queries see
the late keys: in each hop every device computes two blocks of scores without a masked one.

Results and gradients go back by the same exchange. A score that masked keys have is handled as in `attention_ring`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
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
from autoshard.rules.local_forms.attention_ring import Reach, circulate, masked_score, out_of_window_score, send_pairs
from autoshard.rules.local_forms.online_softmax import (
    SoftmaxState,
    empty_state,
    merge_softmax_states,
    online_softmax_update,
    results_of_state,
)
from autoshard.transforms.attention_kernels import unsupported_lengths
from autoshard.transforms.attention_op import (
    AttentionConfig,
    block_gradients,
    finalize_gradients,
    logits,
    out_dot_cotangent,
)


def can_balance(config: AttentionConfig, keys: int) -> bool:
    """Whether a ring of blocks of ``keys`` can be balanced: its mask is the causal one, and no other mask and no bias
    depends on the query, as segment ids do."""
    bands = [op for op in config.score_ops if op.kind == "band"]
    if config.segments is not None or keys % 2:
        return False
    if not bands or any(op.low is not None or op.high != 0 for op in bands):
        return False
    if config.kernel:
        return not unsupported_lengths(config.kernel, keys // 2, keys // 2)
    return masked_score(config) is not None and not any(config.query_position in x for x in config.extra_dims)


@dataclass(frozen=True, slots=True)
class _HalfBlocks:
    """Who has which half-block, inside `jax.shard_map` over ``axes``. A pair is (early, late)."""

    axes: Axes

    @property
    def parts(self) -> int:
        """The number of devices."""
        return lax.axis_size(self.axes)

    def numbers(self, device: Any) -> tuple[Any, Any]:
        """The numbers of a device's half-blocks, or of those of several devices."""
        early = jnp.where(2 * device < self.parts, 2 * device, 2 * self.parts - 1 - 2 * device)
        return early, 2 * self.parts - 1 - early

    @property
    def of_all(self) -> Any:
        """`numbers` of every device: [parts, 2]."""
        return jnp.stack(self.numbers(jnp.arange(self.parts)), 1)

    def paired(self, x: Any, dim: int) -> Any:
        """A contiguous block -> this device's early half-block and then its late one, along dimension ``dim``."""
        first, second = jnp.split(x, 2, dim)
        return self._joined(first, self._mirrored(second), dim)

    def contiguous(self, x: Any, dim: int) -> Any:
        """The inverse of `paired`."""
        early, late = jnp.split(x, 2, dim)
        keeps_early = self._keeps_early
        first, second = jnp.where(keeps_early, early, late), jnp.where(keeps_early, late, early)
        return jnp.concatenate([first, self._mirrored(second)], dim)

    @property
    def _keeps_early(self) -> Any:
        """Whether the half-block that this device does not exchange is its early one."""
        return 2 * lax.axis_index(self.axes) < self.parts

    def _joined(self, kept: Any, received: Any, dim: int) -> Any:
        keeps_early = self._keeps_early
        early, late = jnp.where(keeps_early, kept, received), jnp.where(keeps_early, received, kept)
        return jnp.concatenate([early, late], dim)

    def _mirrored(self, x: Any) -> Any:
        return permute_shards(x, self.axes, [(p, self.parts - 1 - p) for p in range(self.parts)])


def attend_balanced(
    config: AttentionConfig, axes: Axes, query: Any, key: Any, value: Any, *extras: Any
) -> tuple[Any, Any, Any]:
    """The results of `attention_p` for one device's queries, inside `jax.shard_map` over ``axes``."""
    blocks, parts, me = _HalfBlocks(axes), lax.axis_size(axes), lax.axis_index(axes)
    query_dim, key_dims = _query_dim(config), _key_dims(config)
    query = blocks.paired(query, query_dim)
    key, value = (blocks.paired(x, dim) for x, dim in zip((key, value), key_dims, strict=True))
    queries, half = jnp.split(query, 2, query_dim), query.shape[query_dim] // 2

    def attend(
        state: SoftmaxState, q: Any, block: tuple[Any, Any], number: Any, source: Any, distance: int = half
    ) -> SoftmaxState:
        """``state`` of the queries of half-block ``number`` after keys of half-block ``source``."""
        k, v = block
        if config.kernel:
            return merge_softmax_states(config, state, attend_fused(config, q, k, v, distance=distance))
        return online_softmax_update(config, state, logits(config, q, k, extras, number * half, source * half), v)

    early, late = blocks.numbers(me)
    early_keys, late_keys = _halves((key, value), key_dims)
    empty = empty_state(config, queries[0], *early_keys)
    own_early = attend(empty, queries[0], early_keys, early, early, 0)
    own_late = attend(attend(empty, queries[1], early_keys, late, early), queries[1], late_keys, late, late, 0)

    def receive(states: tuple[SoftmaxState, SoftmaxState], block: Any, hop: Any) -> tuple[SoftmaxState, SoftmaxState]:
        sources, blocks_of_keys = blocks.numbers((me - hop) % parts), _halves(block, key_dims)
        early_state, late_state = states[0], attend(states[1], queries[1], blocks_of_keys[0], late, sources[0])
        before = sources[0] < early
        pick = functools.partial(_pick, before)
        seen = pick((queries[0], blocks_of_keys[0]), (queries[1], blocks_of_keys[1]))
        if config.kernel:  # merged into both states, into one of them with no weight: no state is copied
            out, logsumexp, ones = attend_fused(config, seen[0], *seen[1], distance=half)
            weights = _pick(before, logsumexp, -math.inf), _pick(before, -math.inf, logsumexp)
            merge = functools.partial(merge_softmax_states, config)
            return merge(early_state, (out, weights[0], ones)), merge(late_state, (out, weights[1], ones))
        numbers = pick((early, sources[0]), (late, sources[1]))
        state = attend(pick(early_state, late_state), *seen, *numbers)
        return pick(state, early_state), pick(late_state, state)

    states = circulate(axes, _ring(parts), 1, parts - 1, (key, value), (own_early, own_late), receive)
    score = out_of_window_score(config, _CHAIN)
    if score is not None:
        sums = [jnp.sum(v, key_dims[1], config.accum_dtype, keepdims=True) for _, v in (early_keys, late_keys)]
        sums = lax.all_gather(jnp.stack(sums), axes)
        unreached = [(blocks.of_all > number) for number in (early, late)]
        states = tuple(
            online_softmax_update(config, state, *_unreached(config, state, score, masked, sums, half))
            for state, masked in zip(states, unreached, strict=True)
        )
    results = zip(*(results_of_state(config, state) for state in states), strict=True)
    row_dim = config.row_dims.index(config.query_position)
    dims = (config.out_dims.index(config.query_position), row_dim, row_dim)
    out, row_max, row_sum = (
        blocks.contiguous(jnp.concatenate(pair, dim), dim) for pair, dim in zip(results, dims, strict=True)
    )
    return out, row_max, row_sum


def _unreached(
    config: AttentionConfig, state: SoftmaxState, score: float, masked: Any, sums: Any, half: int
) -> tuple[Any, Any, Any]:
    """Scores, values and their number, as `online_softmax_update` takes them, of the half-blocks of keys that are
    ``masked``: [parts, 2] booleans."""
    count = jnp.sum(masked) * half
    scores = jnp.full((*state.row_max.shape, 1), jnp.where(count > 0, score, -jnp.inf), config.accum_dtype)
    return scores, jnp.tensordot(masked.astype(config.accum_dtype), sums, 2), count


def gradients_balanced(
    config: AttentionConfig,
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
      travelling: which blocks go round: keys with values, or, not with a kernel, queries with their statistics and
        cotangents.
    """
    blocks, parts, me = _HalfBlocks(axes), lax.axis_size(axes), lax.axis_index(axes)
    send_queries, half = travelling == "queries", query.shape[_query_dim(config)] // 2
    row_dim = config.row_dims.index(config.query_position)
    if config.kernel:
        stats = (out, row_max + jnp.log(row_sum))
        stats_dims = (config.out_dims.index(config.query_position), row_dim)
    else:
        stats = (jnp.stack([row_max, row_sum, out_dot_cotangent(config, out, cotangent)]),)
        stats_dims = (1 + row_dim,)
    query_dims = (_query_dim(config), *stats_dims, config.cotangent_dims.index(config.query_position))
    key_dims = _key_dims(config)
    # XLA would otherwise merge these exchanges with the forward part's and keep what they give until here.
    operands = lax.optimization_barrier((query, *stats, cotangent, key, value))
    paired = [blocks.paired(x, dim) for x, dim in zip(operands, (*query_dims, *key_dims), strict=True)]
    query_block, key_block = tuple(paired[:-2]), tuple(paired[-2:])

    def pair_gradients(queries: Any, keys: Any, number: Any, source: Any, distance: int = half) -> tuple[Any, Any]:
        """What the queries of one half-block and the keys of another add to the gradients: [dq], and [dk, dv]."""
        (q, *stats, ct), (k, v) = queries, keys
        if config.kernel:
            dims, dtypes = (config.query_dims, config.key_dims, config.value_dims), (str(config.accum_dtype),) * 3
            unconverted, (out, logsumexp) = replace(config, grad_dims=dims, grad_dtypes=dtypes), stats
            ones = jnp.ones_like(logsumexp)
            dq, *dkv = gradients_fused(unconverted, q, k, v, out, logsumexp, ones, ct, distance=distance)
            return [dq], dkv
        row_max, row_sum, delta = stats[0]
        starts = (number * half, source * half)
        dq, *dkv = block_gradients(config, q, k, v, row_max, row_sum, ct, delta, extras, *starts)
        return [dq], dkv

    def joined(pairs: tuple[Any, Any], dims: Sequence[int]) -> list[Any]:
        return [jnp.concatenate(x, dim) for *x, dim in zip(*pairs, dims, strict=True)]

    own_queries, own_keys = _halves(query_block, query_dims), _halves(key_block, key_dims)

    def gradients(queries: Any, keys: Any, query_device: Any, key_device: Any) -> tuple[Any, Any]:
        """What the queries of one device and the keys of another add to the gradients of each half-block."""
        (early, late), (early_keys, late_keys) = queries, keys
        numbers, sources = blocks.numbers(query_device), blocks.numbers(key_device)
        of_late, of_early_keys = pair_gradients(late, early_keys, numbers[1], sources[0])
        before = sources[0] < numbers[0]
        seen = _pick(before, (early, early_keys, numbers[0], sources[0]), (late, late_keys, numbers[1], sources[1]))
        of_queries, of_keys = pair_gradients(*seen)
        of_queries = _pick(before, of_queries, 0), jax.tree.map(jnp.add, of_late, _pick(before, 0, of_queries))
        return of_queries, (jax.tree.map(jnp.add, of_early_keys, _pick(before, of_keys, 0)), _pick(before, 0, of_keys))

    def own_gradients() -> tuple[Any, Any]:
        (early, late), (early_keys, late_keys) = own_queries, own_keys
        first, second = blocks.numbers(me)
        dq_early, dkv_early = pair_gradients(early, early_keys, first, first, 0)
        dq, dkv = pair_gradients(late, early_keys, second, first)
        dq_late, dkv_late = pair_gradients(late, late_keys, second, second, 0)
        return (dq_early, jax.tree.map(jnp.add, dq, dq_late)), (jax.tree.map(jnp.add, dkv_early, dkv), dkv_late)

    def receive(grads: Any, block: Any, hop: Any) -> Any:
        (travelled, stayed), source = grads, (me - hop) % parts
        if send_queries:
            of_block, here = gradients(_halves(block, query_dims), own_keys, source, me)
        else:
            here, of_block = gradients(own_queries, _halves(block, key_dims), me, source)
        pairs, of_block = send_pairs(1, 1, parts, True), joined(of_block, travelled_dims)
        travelled = [permute_shards(x + y, axes, pairs) for x, y in zip(travelled, of_block, strict=True)]
        return travelled, jax.tree.map(jnp.add, stayed, here)

    of_queries, of_keys = own_gradients()
    travelled_dims, stayed_dims = (query_dims[:1], key_dims) if send_queries else (key_dims, query_dims[:1])
    travelled, stayed = (of_queries, of_keys) if send_queries else (of_keys, of_queries)
    travelled = joined(travelled, travelled_dims)
    start = jax.tree.map(jnp.zeros_like, travelled), stayed
    block = query_block if send_queries else key_block
    returned, stayed = circulate(axes, _ring(parts), 1, parts - 1, block, start, receive)
    travelled, stayed = jax.tree.map(jnp.add, travelled, returned), joined(stayed, stayed_dims)
    dq, dk, dv = (*travelled, *stayed) if send_queries else (*stayed, *travelled)
    score = out_of_window_score(config, _CHAIN)
    if score is not None:
        text = f"{config.row_dims},{config.cotangent_dims}->{config.value_dims.replace(config.key_position, '')}"
        per_half = [
            jnp.einsum(
                text,
                (jnp.exp(score - stats[0]) / stats[1]).astype(config.weight_dtype),
                ct,
                precision=config.value_precision,
                preferred_element_type=config.accum_dtype,
            )
            for _, stats, ct in own_queries
        ]
        per_half = lax.all_gather(jnp.stack(per_half), axes)
        added = [
            jnp.expand_dims(
                jnp.tensordot((blocks.of_all < number).astype(config.accum_dtype), per_half, 2), key_dims[1]
            )
            for number in blocks.numbers(me)
        ]
        dv = jnp.concatenate([x + y for x, y in zip(jnp.split(dv, 2, key_dims[1]), added, strict=True)], key_dims[1])
    grads = finalize_gradients(config, (dq, dk, dv))
    positions = (config.query_position, config.key_position, config.key_position)
    return tuple(
        blocks.contiguous(x, dims.index(c)) for x, dims, c in zip(grads, config.grad_dims, positions, strict=True)
    )


_CHAIN = Reach(0, 0, ring=False)
"""Of a ring in which masked keys are left out, as in a chain."""


def _ring(parts: int) -> Reach:
    return Reach(parts - 1, 0, ring=True)


def _pick(first: Any, x: Any, y: Any) -> Any:
    """``x`` where ``first``, else ``y``: trees of arrays, one of which may be a number."""
    if isinstance(x, int | float):
        return jax.tree.map(lambda b: jnp.where(first, x, b), y)
    if isinstance(y, int | float):
        return jax.tree.map(lambda a: jnp.where(first, a, y), x)
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), x, y)


def _halves(block: Sequence[Any], dims: Sequence[int]) -> list[Any]:
    """The arrays of a block, [early, late] along these dimensions -> those of its early half, and of its late one."""
    return list(zip(*(jnp.split(x, 2, dim) for x, dim in zip(block, dims, strict=True)), strict=True))


def _query_dim(config: AttentionConfig) -> int:
    return config.query_dims.index(config.query_position)


def _key_dims(config: AttentionConfig) -> tuple[int, int]:
    return config.key_dims.index(config.key_position), config.value_dims.index(config.key_position)


def exchange_collectives(config: AttentionConfig, parts: int, sizes: Sequence[int], values: int) -> CollectiveBytes:
    """The collectives of one device beside the ring's, as (kind, bytes).

    Args:
      sizes: bytes of this device's part of each operand and result, half of which it exchanges.
      values: bytes of the values of one key, all-gathered for each half-block where masked keys have weight.
    """
    halves: CollectiveBytes = tuple((COLLECTIVE_PERMUTE, math.ceil(n / 2)) for n in sizes)
    score = out_of_window_score(config, _CHAIN)
    return halves if score is None else (*halves, (ALL_GATHER, 2 * values * parts))
