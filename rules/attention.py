"""The rules of attention: batch and heads are parallel, and a sequence that queries and keys share has a local form.

Where the sequence is sharded, the local form is whichever sends fewest bytes: all-to-alls that shard the heads instead
(`autoshard.rules.local_forms.attention_ulysses`), or a ring of keys and values, or in the backward part of queries
(`attention_ring`). Where it is not, one device attends in chunks (`attention_chunked`). An attention that the target's
fused kernel supports is computed by that kernel, in all of these (`attention_cudnn`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax import numpy as jnp
from jax.extend.core import Primitive

from autoshard.ir.rule import Aval, CollectiveBytes, Local, Rule, RuleFn
from autoshard.machine.collective import ALL_TO_ALL, COLLECTIVE_PERMUTE
from autoshard.rules.builders import Label, build
from autoshard.rules.local_forms.attention_chunked import attend_chunked, gradients_chunked
from autoshard.rules.local_forms.attention_cudnn import attend_fused, gradients_fused
from autoshard.rules.local_forms.attention_ring import attend_ring, gradients_ring, key_reach, ring_collectives
from autoshard.rules.local_forms.attention_ulysses import attend_ulysses, exchangeable_dims, gradients_ulysses
from autoshard.transforms.attention_op import (
    AttentionConfig,
    attend,
    attention_backward_p,
    attention_gradients,
    attention_p,
)
from autoshard.transforms.cudnn_attention import causal_fill

SEQUENCE = "sequence"


def attention(query: Aval, key: Aval, value: Aval, *extras: Aval, config: AttentionConfig, **_: Any) -> Rule:
    """Feature dimensions are kept whole; so are keys where there are not as many as queries."""
    parallel = set(config.row_dims)
    operands = [*_operands(config, query, key, parallel), *_extras(config, query, key, parallel)]
    results = [_labels(x, config, query, key, parallel) for x in (config.out_dims, config.row_dims, config.row_dims)]
    on_one_device = attend_fused if config.fused else attend_chunked
    local = _local_form(config, attend, on_one_device, _forward_algorithms, (query, key, value))
    return _rule(operands, results, local)


def attention_backward(query: Aval, key: Aval, value: Aval, *rest: Aval, config: AttentionConfig, **_: Any) -> Rule:
    """As forward. Dimensions that query, key and value do not all have are summed over in some gradient, and are kept
    whole; but not the queries' sequence, along which the gradients of keys and values are partial sums."""
    parallel = set(config.row_dims) & set(config.query_dims) & set(config.key_dims) & set(config.value_dims)
    parallel |= {config.query_position}
    row_like = (config.out_dims, config.row_dims, config.row_dims, config.cotangent_dims)
    operands = [
        *_operands(config, query, key, parallel),
        *(_labels(x, config, query, key, parallel) for x in row_like),
        *_extras(config, query, key, parallel),
    ]
    results = [_labels(x, config, query, key, parallel) for x in config.grad_dims]
    on_one_device = gradients_fused if config.fused else gradients_chunked
    local = _local_form(config, attention_gradients, on_one_device, _backward_algorithms, (query, key, value))
    return _rule(operands, results, local)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to compute attention over a sharded sequence."""

    fun: Callable[..., Any]
    """``fun(axes, *operands)`` inside `jax.shard_map`, as `Local.fun`."""
    collectives: CollectiveBytes
    imbalance: float = 1.0
    """The work of the busiest device over the average."""

    def bytes_sent(self, parts: int) -> float:
        """Bytes that the busiest device sends."""
        return sum(n if kind == COLLECTIVE_PERMUTE else n * (parts - 1) / parts for kind, n in self.collectives)


@dataclass(frozen=True, slots=True)
class SequenceShard:
    """What one device has of an attention whose sequence is sharded."""

    parts: int
    """Devices that the sequence is sharded over."""
    sizes: Sequence[int]
    """Bytes of this device's part of each operand, and then of each result."""
    accum_sizes: Sequence[int]
    """Bytes of its query, key and value in ``accum_dtype``."""
    keys: int
    """How many keys of each sequence it has."""
    heads: int
    """The number of heads times sequences (product of `exchangeable_dims`) that it has."""

    @property
    def can_exchange(self) -> bool:
        """Whether the heads can be sharded over the same devices instead."""
        return self.heads >= self.parts and self.heads % self.parts == 0

    def all_to_alls(self, *sizes: int) -> CollectiveBytes:
        """One all-to-all for each of these sizes in bytes."""
        return tuple((ALL_TO_ALL, n) for n in sizes)


Algorithms = Callable[[AttentionConfig, SequenceShard], Iterator[Algorithm]]


def _forward_algorithms(config: AttentionConfig, shard: SequenceShard) -> Iterator[Algorithm]:
    reach, (q, k, v) = key_reach(config, shard.parts, shard.keys), shard.sizes[:3]
    ring = ring_collectives(config, reach, shard.parts, (k, v), (), shard.accum_sizes[2] // shard.keys)
    yield Algorithm(functools.partial(attend_ring, config, reach), ring, _ring_imbalance(config, shard.parts))
    if shard.can_exchange:
        results = shard.sizes[-3:] if config.cotangent_dims else shard.sizes[-3:-2]  # row statistics: backward only
        yield Algorithm(functools.partial(attend_ulysses, config), shard.all_to_alls(q, k, v, *results))


def _ring_imbalance(config: AttentionConfig, parts: int) -> float:
    """A causal kernel skips masked blocks: the last device computes all of them (one by half), the average device half.

    Without the kernel masked scores are computed too, so that all devices have the same work.
    """
    return (2 * parts - 1) / parts if config.fused and causal_fill(config) is not None else 1.0


def _backward_algorithms(config: AttentionConfig, shard: SequenceShard) -> Iterator[Algorithm]:
    reach, (q, k, v, out, row, _, ct) = key_reach(config, shard.parts, shard.keys), shard.sizes[:7]
    dq, dk, dv = shard.accum_sizes
    rings: list[tuple[Literal["keys", "queries"], tuple[int, ...], tuple[int, ...]]] = [("keys", (k, v), (dk, dv))]
    # Queries would have to take masks that depend on them along, and for a fused kernel the output.
    if not config.fused and not any(config.query_position in x for x in config.extra_dims):
        rings.append(("queries", (q, 3 * row, ct), (dq,)))
    for travelling, sent, returned in rings:
        ring = ring_collectives(config, reach, shard.parts, sent, returned, dv // shard.keys)
        fun = functools.partial(gradients_ring, config, reach, travelling)
        yield Algorithm(fun, ring, _ring_imbalance(config, shard.parts))
    if shard.can_exchange:
        sent = (ct, out, row) if config.fused else (ct, row, row, row)
        exchanges = shard.all_to_alls(q, k, v, *sent, *shard.sizes[-3:])
        yield Algorithm(functools.partial(gradients_ulysses, config), exchanges)


def _local_form(
    config: AttentionConfig,
    reference: Callable[..., Any],
    on_one_device: Callable[..., Any],
    algorithms: Algorithms,
    whole: Sequence[Aval],
) -> Local:
    """The local form that runs whichever algorithm sends fewest bytes.

    Args:
      reference: the attention as plain JAX code, for the shapes of its results.
      on_one_device: ``on_one_device(config, *operands)`` computes it where the sequence is not sharded.
      algorithms: those for a sharded sequence.
      whole: query, key and value before sharding.
    """
    lengths, accum_itemsize = config.sizes(*whole), jnp.dtype(config.accum_dtype).itemsize
    exchangeable = math.prod([lengths[c] for c in exchangeable_dims(config)])
    key_bytes = max(1, math.prod(whole[1].shape) * whole[1].dtype.itemsize)

    def cheapest(parts: int, sizes: Sequence[int]) -> Algorithm:
        # Keys are sharded along the sequence and along exchangeable dimensions only: their bytes tell these's part.
        heads = exchangeable * parts * sizes[1] // key_bytes
        accum_sizes = [n // x.dtype.itemsize * accum_itemsize for n, x in zip(sizes, whole, strict=False)]
        shard = SequenceShard(parts, sizes, accum_sizes, max(1, lengths[config.key_position] // parts), heads)
        return min(algorithms(config, shard), key=lambda algorithm: algorithm.bytes_sent(parts))

    def fun(axes: tuple[str, ...], *operands: Any) -> Any:
        if not axes:
            return on_one_device(config, *operands)
        results = jax.eval_shape(functools.partial(reference, config=config), *operands)
        sizes = [math.prod(x.shape) * x.dtype.itemsize for x in (*operands, *results)]
        return cheapest(jax.lax.axis_size(axes), sizes).fun(axes, *operands)

    return Local(
        fun,
        lambda parts, sizes: cheapest(parts, sizes).collectives if parts > 1 else (),
        used_when="always",
        imbalance=lambda parts, sizes: cheapest(parts, [int(n) for n in sizes]).imbalance if parts > 1 else 1.0,
    )


def _labels(letters: str, config: AttentionConfig, query: Aval, key: Aval, parallel: set[str]) -> list[Label]:
    """A factor for each dimension; one for the sequence where there are as many keys as queries, else no key factor."""
    queries = query.shape[config.query_dims.index(config.query_position)]
    keys = key.shape[config.key_dims.index(config.key_position)]
    positions = {config.query_position: config.query_position}
    if queries == keys:
        positions = {config.query_position: SEQUENCE, config.key_position: SEQUENCE}
    return [positions.get(c, c if c in parallel else None) for c in letters]


def _operands(config: AttentionConfig, query: Aval, key: Aval, parallel: set[str]) -> list[list[Label]]:
    return [_labels(x, config, query, key, parallel) for x in (config.query_dims, config.key_dims, config.value_dims)]


def _extras(config: AttentionConfig, query: Aval, key: Aval, parallel: set[str]) -> list[list[Label]]:
    """Masks and biases are whole along the keys: a device computes with blocks of keys from every other."""
    return [_labels(x.replace(config.key_position, "."), config, query, key, parallel) for x in config.extra_dims]


def _rule(operands: list[list[Label]], results: list[list[Label]], local: Local) -> Rule:
    kinds = {SEQUENCE: "local"} if any(SEQUENCE in side for side in operands) else {}
    kinds |= {c: "sum" for c in operands[0] if isinstance(c, str) and any(c not in side for side in results)}
    return build(operands, results, kinds, local=local)


TABLE: dict[Primitive, RuleFn] = {attention_p: attention, attention_backward_p: attention_backward}
