"""The rules of attention: batch and heads are parallel, and a sequence that queries and keys share has a local form.

Where the sequence is sharded, the local form is whichever takes least time by what is predicted of the busiest device,
what it computes and what it waits for: all-to-alls that shard the heads instead
(`autoshard.rules.local_forms.attention_ulysses`), or a ring of keys and values, or in the backward part of queries
(`attention_ring`), with the work of a causal mask balanced or not (`attention_balanced`). Where it is not, one device
attends in chunks (`attention_chunked`). An attention that the target's kernel supports is computed by that kernel, in
all of these (`attention_kernel`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
from jax import numpy as jnp
from jax.extend.core import Primitive

from autoshard.ir.rule import Aval, CollectiveBytes, Local, LocalAlgorithm, Rule, RuleFn
from autoshard.machine.collective import ALL_TO_ALL, COLLECTIVE_PERMUTE
from autoshard.rules.builders import Label, build
from autoshard.rules.local_forms.attention_balanced import (
    attend_balanced,
    can_balance,
    exchange_collectives,
    gradients_balanced,
)
from autoshard.rules.local_forms.attention_chunked import attend_chunked, gradients_chunked
from autoshard.rules.local_forms.attention_kernel import attend_fused, gradients_fused
from autoshard.rules.local_forms.attention_ring import attend_ring, gradients_ring, key_reach, ring_collectives
from autoshard.rules.local_forms.attention_ulysses import attend_ulysses, exchangeable_dims, gradients_ulysses
from autoshard.rules.local_forms.attention_work import balanced_work, chain_work
from autoshard.transforms.attention_kernels import in_rings, unsupported_lengths
from autoshard.transforms.attention_op import (
    AttentionConfig,
    attend,
    attention_backward_p,
    attention_gradients,
    attention_p,
)

SEQUENCE = "sequence"


def attention(
    query: Aval, key: Aval, value: Aval, *extras: Aval, config: AttentionConfig, flops: float = 0.0, **_: Any
) -> Rule:
    """Feature dimensions are kept whole; so are keys where there are not as many as queries."""
    parallel = set(config.row_dims)
    operands = [*_operands(config, query, key, parallel), *_extras(config, query, key, parallel)]
    results = [_labels(x, config, query, key, parallel) for x in (config.out_dims, config.row_dims, config.row_dims)]
    plain = config.flops(query, key, value) / flops if flops else 1.0
    on_one_device = attend_fused if config.kernel else attend_chunked
    local = _local_form(config, attend, on_one_device, _forward_algorithms, (query, key, value), plain)
    return _rule(operands, results, local)


def attention_backward(
    query: Aval, key: Aval, value: Aval, *rest: Aval, config: AttentionConfig, flops: float = 0.0, **_: Any
) -> Rule:
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
    plain = config.flops(query, key, value, backward=True) / flops if flops else 1.0
    on_one_device = gradients_fused if config.kernel else gradients_chunked
    local = _local_form(config, attention_gradients, on_one_device, _backward_algorithms, (query, key, value), plain)
    return _rule(operands, results, local)


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
    plain: float = 1.0
    """FLOPs of the attention over those that its kernel's time is worth."""

    @property
    def can_exchange(self) -> bool:
        """Whether the heads can be sharded over the same devices instead."""
        return self.heads >= self.parts and self.heads % self.parts == 0

    def all_to_alls(self, *sizes: int) -> CollectiveBytes:
        """One all-to-all for each of these sizes in bytes."""
        return tuple((ALL_TO_ALL, n) for n in sizes)

    def ring(
        self,
        config: AttentionConfig,
        fun: Callable[..., Any],
        sent: Sequence[int],
        returned: Sequence[int] = (),
        travelling: tuple[str, ...] = (),
        *,
        backward: bool,
    ) -> LocalAlgorithm:
        """``fun(config, reach, *travelling)`` as an algorithm.

        Args:
          config: as `_ring_config` gives it.
          sent, returned: as `ring_collectives` takes them.
        """
        reach = key_reach(config, self.parts, self.keys)
        found = ring_collectives(config, reach, self.parts, sent, returned, self.accum_sizes[2] // self.keys)
        hops = tuple(x for x in found if x[0] == COLLECTIVE_PERMUTE)
        whole = tuple(x for x in found if x[0] != COLLECTIVE_PERMUTE)
        work = chain_work(config, reach, self.parts, self.keys, backward) * (1.0 if config.kernel else self.unfused)
        fun = functools.partial(fun, config, reach, *travelling)
        return LocalAlgorithm(fun, whole, hops, 1 + reach.before + reach.behind, work)

    def balanced(
        self,
        config: AttentionConfig,
        fun: Callable[..., Any],
        exchanged: Sequence[int],
        picked: int,
        sent: Sequence[int],
        returned: Sequence[int] = (),
        travelling: tuple[str, ...] = (),
        *,
        backward: bool,
    ) -> Iterator[LocalAlgorithm]:
        """As `ring`, with the work balanced, where it can be.

        Args:
          exchanged: bytes of this device's part of what the devices exchange halves of.
          picked: bytes of what it has two halves of, of which each hop takes one.
        """
        if not can_balance(config, self.keys):
            return
        exchange = exchange_collectives(config, self.parts, exchanged, self.accum_sizes[2] // self.keys)
        work = balanced_work(config, self.parts, self.keys, backward) * (1.0 if config.kernel else self.unfused)
        hop: CollectiveBytes = tuple((COLLECTIVE_PERMUTE, n) for n in (*sent, *returned))
        fun = functools.partial(fun, config, *travelling)
        # A half is chosen by a copy, which reads both and writes one; what is exchanged is chosen and joined.
        moved = 3 * picked // 2 * (self.parts - 1) + 3 * sum(exchanged)
        yield LocalAlgorithm(fun, exchange, hop * (self.parts - 1), self.parts, work, moved)

    @property
    def unfused(self) -> float:
        """What the attention takes without its kernel, over what it is priced at; at least 1."""
        return max(1.0, self.plain)


Algorithms = Callable[[AttentionConfig, SequenceShard], Iterator[LocalAlgorithm]]


def _forward_algorithms(config: AttentionConfig, shard: SequenceShard) -> Iterator[LocalAlgorithm]:
    in_ring, (q, k, v) = _ring_config(config, shard), shard.sizes[:3]
    results = shard.sizes[-3:] if config.cotangent_dims else shard.sizes[-3:-2]  # row statistics: backward only
    yield shard.ring(in_ring, attend_ring, (k, v), backward=False)
    # The output so far is as large: with a kernel half of it is merged twice, else it is taken and put back twice.
    picked = q + (2 * shard.accum_sizes[0] // 3 if in_ring.kernel else 3 * shard.accum_sizes[0])
    yield from shard.balanced(in_ring, attend_balanced, (q, k, v, *results), picked, (k, v), backward=False)
    if shard.can_exchange:
        yield LocalAlgorithm(functools.partial(attend_ulysses, config), shard.all_to_alls(q, k, v, *results))


def _ring_config(config: AttentionConfig, shard: SequenceShard) -> AttentionConfig:
    """``config`` without its kernel where that takes no blocks of its masks, or not as few positions as there are."""
    if config.kernel and (not in_rings(config) or unsupported_lengths(config.kernel, shard.keys, shard.keys)):
        return replace(config, kernel="")
    return config


def _backward_algorithms(config: AttentionConfig, shard: SequenceShard) -> Iterator[LocalAlgorithm]:
    in_ring, (q, k, v, out, row, _, ct) = _ring_config(config, shard), shard.sizes[:7]
    dq, dk, dv = shard.accum_sizes
    rings: list[tuple[Literal["keys", "queries"], tuple[int, ...], tuple[int, ...]]] = [("keys", (k, v), (dk, dv))]
    # Queries would have to take masks that depend on them along, and for a kernel the output.
    if not in_ring.kernel and not any(config.query_position in x for x in config.extra_dims):
        rings.append(("queries", (q, 3 * row, ct), (dq,)))
    for travelling, sent, returned in rings:
        yield shard.ring(in_ring, gradients_ring, sent, returned, (travelling,), backward=True)
        stats = (out, row) if in_ring.kernel else (3 * row,)
        exchanged, picked = (q, k, v, *stats, ct, *shard.sizes[-3:]), q + sum(stats) + ct
        yield from shard.balanced(
            in_ring, gradients_balanced, exchanged, picked, sent, returned, (travelling,), backward=True
        )
    if shard.can_exchange:
        sent = (ct, out, row) if config.kernel else (ct, row, row, row)
        exchanges = shard.all_to_alls(q, k, v, *sent, *shard.sizes[-3:])
        yield LocalAlgorithm(functools.partial(gradients_ulysses, config), exchanges)


def _local_form(
    config: AttentionConfig,
    reference: Callable[..., Any],
    on_one_device: Callable[..., Any],
    algorithms: Algorithms,
    whole: Sequence[Aval],
    plain: float,
) -> Local:
    """The local form that runs whichever algorithm takes least time.

    Args:
      reference: the attention as plain JAX code, for the shapes of its results.
      on_one_device: ``on_one_device(config, *operands)`` computes it where the sequence is not sharded.
      algorithms: those for a sharded sequence.
      whole: query, key and value before sharding.
      plain: FLOPs of the attention over those that its kernel's time is worth.
    """
    lengths, accum_itemsize = config.sizes(*whole), jnp.dtype(config.accum_dtype).itemsize
    exchangeable = math.prod([lengths[c] for c in exchangeable_dims(config)])
    key_bytes = max(1, math.prod(whole[1].shape) * whole[1].dtype.itemsize)

    def choices(parts: int, sizes: Sequence[int]) -> tuple[LocalAlgorithm, ...]:
        # Keys are sharded along the sequence and along exchangeable dimensions only: their bytes tell these's part.
        heads = exchangeable * parts * sizes[1] // key_bytes
        accum_sizes = [n // x.dtype.itemsize * accum_itemsize for n, x in zip(sizes, whole, strict=False)]
        shard = SequenceShard(parts, sizes, accum_sizes, max(1, lengths[config.key_position] // parts), heads, plain)
        return tuple(algorithms(config, shard))

    def of_fewest_bytes(parts: int, sizes: Sequence[int]) -> LocalAlgorithm:
        return min(choices(parts, sizes), key=lambda algorithm: _bytes_sent(algorithm, parts))

    def fun(axes: tuple[str, ...], *operands: Any) -> Any:
        if not axes:
            return on_one_device(config, *operands)
        results = jax.eval_shape(functools.partial(reference, config=config), *operands)
        sizes = [math.prod(x.shape) * x.dtype.itemsize for x in (*operands, *results)]
        return of_fewest_bytes(jax.lax.axis_size(axes), sizes).fun(axes, *operands)

    return Local(
        fun,
        lambda parts, sizes: of_fewest_bytes(parts, sizes).sent if parts > 1 else (),
        used_when="always",
        algorithms=choices,
    )


def _bytes_sent(algorithm: LocalAlgorithm, parts: int) -> float:
    """Bytes that the busiest device sends: what algorithms are compared by where no machine is known."""
    return sum(n if kind == COLLECTIVE_PERMUTE else n * (parts - 1) / parts for kind, n in algorithm.sent)


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
    """Masks, biases and segment ids are whole along the keys: a device computes with blocks of keys from all others."""
    return [_labels(x.replace(config.key_position, "."), config, query, key, parallel) for x in config.extra_dims]


def _rule(operands: list[list[Label]], results: list[list[Label]], local: Local) -> Rule:
    kinds = {SEQUENCE: "local"} if any(SEQUENCE in side for side in operands) else {}
    kinds |= {c: "sum" for c in operands[0] if isinstance(c, str) and any(c not in side for side in results)}
    return build(operands, results, kinds, local=local)


TABLE: dict[Primitive, RuleFn] = {attention_p: attention, attention_backward_p: attention_backward}
