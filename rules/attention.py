"""Attention: batch and heads pass; a sequence that queries and keys share is split, and its parts meet.

How they meet is what sends least: the whole sequence traded for fewer heads (`autoshard.rules.local_forms.attention_ulysses`), or
blocks that travel (`autoshard.rules.local_forms.attention_ring`), of keys and values, or in the backward part of queries. A sequence
that is not split is taken a few heads or queries at a time (`autoshard.rules.local_forms.attention_chunked`). What the target has a kernel
for, that computes, blocks too (`autoshard.rules.local_forms.attention_cudnn`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import numpy as jnp
from jax.extend.core import Primitive

from autoshard.ir.rule import Aval, Local, Rule, RuleFn
from autoshard.machine.collective import ALL_TO_ALL, COLLECTIVE_PERMUTE, CollectiveKind
from autoshard.rules.builders import Label, build
from autoshard.rules.local_forms.attention_chunked import attend_few, gradients_few
from autoshard.rules.local_forms.attention_cudnn import attend_fused, gradients_fused
from autoshard.rules.local_forms.attention_ring import attend_round, gradients_round, moves_round, reach
from autoshard.rules.local_forms.attention_ulysses import attend_whole, gradients_whole, shared
from autoshard.transforms.attention_op import (
    AttentionConfig,
    attend,
    attention_backward_p,
    attention_gradients,
    attention_p,
)
from autoshard.transforms.cudnn_attention import causal_fill

SEQUENCE = "sequence"
Moves = tuple[tuple[CollectiveKind, int], ...]


def attention(query: Aval, key: Aval, value: Aval, *extras: Aval, form: AttentionConfig, **_: Any) -> Rule:
    """Widths stay whole; where queries and keys are not of one length, so do the keys."""
    passing = set(form.row_dims)
    sides = [*_operands(form, query, key, passing), *_extras(form, query, key, passing)]
    results = [_labels(x, form, query, key, passing) for x in (form.out_dims, form.row_dims, form.row_dims)]
    alone = attend_fused if form.fused else attend_few
    return _rule(sides, results, _local(form, attend, alone, _forward, (query, key, value)))


def attention_backward(query: Aval, key: Aval, value: Aval, *rest: Aval, form: AttentionConfig, **_: Any) -> Rule:
    """Beside that, what query, key and value do not have in common is summed over, and stays whole; but for queries,
    whose terms of the keys' and values' cotangents are added where the sequence is not theirs too."""
    passing = set(form.row_dims) & set(form.query_dims) & set(form.key_dims) & set(form.value_dims) | {
        form.query_position
    }
    own = [
        _labels(x, form, query, key, passing)
        for x in (form.out_dims, form.row_dims, form.row_dims, form.cotangent_dims)
    ]
    sides = [*_operands(form, query, key, passing), *own, *_extras(form, query, key, passing)]
    results = [_labels(x, form, query, key, passing) for x in form.grad_dims]
    alone = gradients_fused if form.fused else gradients_few
    return _rule(sides, results, _local(form, attention_gradients, alone, _backward, (query, key, value)))


@dataclass(frozen=True, slots=True)
class Way:
    """What a part runs, ``fun(axes, *operands)``, and the collectives in it."""

    fun: Callable[..., Any]
    moves: Moves
    slowest: float = 1.0
    """The work of the part that has most of it, over an even share."""

    def sent(self, parts: int) -> float:
        """Bytes that leave the part that sends most."""
        return sum(n if kind == COLLECTIVE_PERMUTE else n * (parts - 1) / parts for kind, n in self.moves)


@dataclass(frozen=True, slots=True)
class Split:
    """One of the parts that a sequence is split in."""

    parts: int
    sizes: Sequence[int]
    """Bytes of each operand, and then of each result."""
    wide: Sequence[int]
    """Bytes of query, key and value in the dtype of sums."""
    keys: int
    """How many."""
    heads: int
    """How many there are to trade: the product of all dimensions that are like heads."""

    @property
    def trades(self) -> bool:
        return self.heads >= self.parts and self.heads % self.parts == 0

    def traded(self, *sizes: int) -> Moves:
        return tuple((ALL_TO_ALL, n) for n in sizes)


Ways = Callable[[AttentionConfig, Split], Iterator[Way]]


def _forward(form: AttentionConfig, split: Split) -> Iterator[Way]:
    far, (q, k, v) = reach(form, split.parts, split.keys), split.sizes[:3]
    moves = moves_round(form, far, split.parts, (k, v), (), split.wide[2] // split.keys)
    yield Way(functools.partial(attend_round, form, far), moves, _slowest(form, split.parts))
    if split.trades:
        made = split.sizes[-3:] if form.cotangent_dims else split.sizes[-3:-2]  # nobody else asks for peak and total
        yield Way(functools.partial(attend_whole, form), split.traded(q, k, v, *made))


def _slowest(form: AttentionConfig, parts: int) -> float:
    """Of a kernel that leaves masked keys out the last part has all blocks, one of them by half; on average half are.

    Other forms compute what they mask, and as much was counted.
    """
    return (2 * parts - 1) / parts if form.fused and causal_fill(form) is not None else 1.0


def _backward(form: AttentionConfig, split: Split) -> Iterator[Way]:
    far, (q, k, v, out, row, _, ct) = reach(form, split.parts, split.keys), split.sizes[:7]
    dq, dk, dv = split.wide
    travelling: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = [("keys", (k, v), (dk, dv))]
    # A mask of queries would travel with them, and what came of them for a kernel that wants it.
    if not form.fused and not any(form.query_position in x for x in form.extra_dims):
        travelling.append(("queries", (q, 3 * row, ct), (dq,)))
    for what, there, back in travelling:
        moves = moves_round(form, far, split.parts, there, back, dv // split.keys)
        yield Way(functools.partial(gradients_round, form, far, what), moves, _slowest(form, split.parts))
    if split.trades:
        there = (ct, out, row) if form.fused else (ct, row, row, row)
        yield Way(functools.partial(gradients_whole, form), split.traded(q, k, v, *there, *split.sizes[-3:]))


def _local(
    form: AttentionConfig, plain: Callable[..., Any], alone: Callable[..., Any], ways: Ways, whole: Sequence[Aval]
) -> Local:
    """The form that takes the way that sends least; ``alone`` where no sequence is split.

    ``whole`` are query, key and value before they are split.
    """
    lengths, wide = form.sizes(*whole), jnp.dtype(form.accum_dtype).itemsize
    traded = math.prod([lengths[c] for c in shared(form)])
    keys = max(1, math.prod(whole[1].shape) * whole[1].dtype.itemsize)

    def least(parts: int, sizes: Sequence[int]) -> Way:
        # Beside their length, keys are split by what they share with queries and values alone.
        heads = traded * parts * sizes[1] // keys
        stretched = [n // x.dtype.itemsize * wide for n, x in zip(sizes, whole, strict=False)]
        split = Split(parts, sizes, stretched, max(1, lengths[form.key_position] // parts), heads)
        return min(ways(form, split), key=lambda way: way.sent(parts))

    def fun(axes: tuple[str, ...], *operands: Any) -> Any:
        if not axes:
            return alone(form, *operands)
        results = jax.eval_shape(functools.partial(plain, form=form), *operands)
        sizes = [math.prod(x.shape) * x.dtype.itemsize for x in (*operands, *results)]
        return least(jax.lax.axis_size(axes), sizes).fun(axes, *operands)

    return Local(
        fun,
        lambda parts, sizes: least(parts, sizes).moves if parts > 1 else (),
        used_when="always",
        imbalance=lambda parts, sizes: least(parts, [int(n) for n in sizes]).slowest if parts > 1 else 1.0,
    )


def _labels(letters: str, form: AttentionConfig, query: Aval, key: Aval, passing: set[str]) -> list[Label]:
    shared = (
        query.shape[form.query_dims.index(form.query_position)] == key.shape[form.key_dims.index(form.key_position)]
    )
    as_label = (
        {form.query_position: SEQUENCE, form.key_position: SEQUENCE}
        if shared
        else {form.query_position: form.query_position}
    )
    return [as_label.get(c, c if c in passing else None) for c in letters]


def _operands(form: AttentionConfig, query: Aval, key: Aval, passing: set[str]) -> list[list[Label]]:
    return [_labels(x, form, query, key, passing) for x in (form.query_dims, form.key_dims, form.value_dims)]


def _extras(form: AttentionConfig, query: Aval, key: Aval, passing: set[str]) -> list[list[Label]]:
    """Of masks and biases every part holds those of all keys: blocks come from everywhere."""
    return [_labels(x.replace(form.key_position, "."), form, query, key, passing) for x in form.extra_dims]


def _rule(operands: list[list[Label]], results: list[list[Label]], local: Local) -> Rule:
    kinds = {SEQUENCE: "local"} if any(SEQUENCE in side for side in operands) else {}
    kinds |= {c: "sum" for c in operands[0] if isinstance(c, str) and any(c not in side for side in results)}
    return build(operands, results, kinds, local=local)


TABLE: dict[Primitive, RuleFn] = {attention_p: attention, attention_backward_p: attention_backward}
