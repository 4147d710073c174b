"""Attention over a sequence in parts: blocks travel from part to part until every query has met its keys.

As a ring, each block goes all the way round (ring attention, arXiv:2310.01889). Where a mask lets queries see only
keys before them, or near them, blocks travel as two chains instead, no further than they are seen, and not round.
Of a mask that fills with a number, all keys count in rows that see none: those out of reach count together, by
the sum of their values.

In the backward part it is the keys and values that travel, or the queries and what belongs to them. In a ring the
cotangents of a block travel with it, one hop behind, and come home with the last; in a chain they are sent home from
where they arise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from autoshard.ir.halo import permute_shards
from autoshard.machine.collective import ALL_GATHER, COLLECTIVE_PERMUTE, CollectiveKind
from autoshard.rules.local_forms.attention_cudnn import attend_fused, gradients_fused
from autoshard.transforms.attention_op import (
    AttentionConfig,
    block_gradients,
    finalize_gradients,
    logits,
    out_dot_cotangent,
)

Axes = tuple[str, ...]
Moves = tuple[tuple[CollectiveKind, int], ...]
Pairs = list[tuple[int, int]]
Sums = tuple[Any, Any, Any]
"""Of each row, over the keys so far: mixed values, the largest score, the sum of exponentials of what others lack."""


@dataclass(frozen=True, slots=True)
class Reach:
    """From how many parts before its own, and behind, a part needs the keys; ``ring`` if from all, in one round."""

    before: int
    behind: int
    ring: bool


def reach(form: AttentionConfig, parts: int, length: int) -> Reach:
    """Which of ``parts``, each of ``length`` positions, must meet."""
    most, bands = parts - 1, [s for s in form.score_ops if s.kind == "band"]
    if not bands or unseen(form) is None:
        return Reach(most, 0, ring=True)
    low = max([s.low for s in bands if s.low is not None], default=-parts * length)
    high = min([s.high for s in bands if s.high is not None], default=parts * length)
    before, behind = (min(most, max(0, (length - 1 + n) // length)) for n in (-low, high))
    ring = before == behind == most
    return Reach(before, 0 if ring else behind, ring)


def unseen(form: AttentionConfig) -> float | None:
    """The score of every key that some band masks: a number, or minus infinity; None where it is not the same."""
    found: set[float] = set()
    lone = sum(s.kind == "band" for s in form.score_ops) == 1
    for step in form.score_ops:
        if step.kind == "band":
            found = {step.constant} if lone else found | {step.constant}
        elif step.kind == "mask":
            found |= {step.constant}
        elif step.kind == "bias" and found - {-math.inf}:
            return None
        elif step.kind != "bias":
            found = {x * step.constant if step.kind == "scale" else x + step.constant for x in found}
    (score,) = found if len(found) == 1 else (math.nan,)
    return score if score < math.inf else None


def beyond(form: AttentionConfig, far: Reach) -> float | None:
    """The score of keys out of reach, where it may count; None where no key is, or they count nothing."""
    score = None if far.ring or form.fused else unseen(form)  # a kernel never counts them
    return None if score == -math.inf else score


def nothing(form: AttentionConfig, query: Any, key: Any, value: Any) -> Sums:
    """The sums over no keys."""
    sizes = form.sizes(query, key, value)
    rows = tuple(sizes[c] for c in form.row_dims)
    return (
        jnp.zeros((*rows, sizes[form.value_width]), form.accum_dtype),
        jnp.full(rows, -jnp.inf, form.accum_dtype),
        jnp.zeros(rows, form.accum_dtype),
    )


def met(form: AttentionConfig, sums: Sums, scores: Any, value: Any, times: Any = 1) -> Sums:
    """``sums`` and those over further keys, each of which counts ``times``."""
    mixed, peak, total = sums
    highest = jnp.maximum(peak, jnp.max(scores, -1))
    base = jnp.where(highest == -jnp.inf, 0, highest)  # of nothing but masked scores: their exponentials are 0
    e, before = jnp.exp(scores - base[..., None]), jnp.exp(peak - base)
    text = f"{form.row_dims}{form.key_position},{form.value_dims}->{form.row_dims}{form.value_width}"
    added = jnp.einsum(
        text,
        e.astype(form.weight_dtype),
        value,
        precision=form.value_precision,
        preferred_element_type=form.accum_dtype,
    )
    return mixed * before[..., None] + added, highest, total * before + jnp.sum(e, -1) * times


def joined(form: AttentionConfig, sums: Sums, further: tuple[Any, Any, Any]) -> Sums:
    """``sums`` and those over further keys, of which `attention_p` has made its results."""
    (mixed, peak, total), (out, high, count) = sums, further
    highest = jnp.maximum(peak, high)
    before, after = jnp.exp(peak - highest), jnp.exp(high - highest) * count
    out = jnp.transpose(out, [form.out_dims.index(c) for c in form.row_dims + form.value_width]).astype(
        form.accum_dtype
    )
    return mixed * before[..., None] + out * after[..., None], highest, total * before + after


def open_(form: AttentionConfig) -> AttentionConfig:
    """``form`` for keys that all its queries see."""
    return replace(form, steps=tuple(s for s in form.score_ops if s.kind != "band"))


def results(form: AttentionConfig, sums: Sums) -> tuple[Any, Any, Any]:
    """The results of `attention_p`."""
    mixed, peak, total = sums
    order = [(form.row_dims + form.value_width).index(c) for c in form.out_dims]
    return jnp.transpose(mixed / total[..., None], order).astype(form.out_dtype), peak, total


def attend_round(
    form: AttentionConfig, far: Reach, axes: Axes, query: Any, key: Any, value: Any, *extras: Any
) -> tuple[Any, Any, Any]:
    """The results of `attention_p` for one part."""
    parts, me = lax.axis_size(axes), lax.axis_index(axes)
    rows, cols = (
        query.shape[form.query_dims.index(form.query_position)],
        key.shape[form.key_dims.index(form.key_position)],
    )

    def meet(sums: Sums, k: Any, v: Any, source: Any) -> Sums:
        if form.fused:  # of a causal mask, blocks that come by are seen whole
            return joined(form, sums, attend_fused(open_(form), query, k, v))
        return met(form, sums, logits(form, query, k, extras, me * rows, source * cols), v)

    sums = nothing(form, query, key, value)
    if form.fused:
        sums = joined(form, sums, attend_fused(form, query, key, value))
    else:
        sums = meet(sums, key, value, me)
    for step, turns in ((1, far.before), (-1, far.behind)):

        def arrive(sums: Sums, blocks: Any, turn: Any, step: int = step) -> Sums:
            source = me - step * turn
            k, v = blocks
            if far.ring:
                return meet(sums, k, v, source % parts)
            inside = (source >= 0) & (source < parts)
            return lax.cond(inside, meet, lambda sums, *_: sums, sums, k, v, source)

        sums = _walk(axes, far, step, turns, (key, value), sums, arrive)
    score = beyond(form, far)
    if score is not None:
        values = jnp.sum(value, form.value_dims.index(form.key_position), form.accum_dtype, keepdims=True)
        away = _away(far, me, parts)
        count = jnp.sum(away) * cols
        alike = jnp.full((*sums[1].shape, 1), jnp.where(count > 0, score, -jnp.inf), form.accum_dtype)
        values = jnp.tensordot(away.astype(form.accum_dtype), lax.all_gather(values, axes), 1)
        sums = met(form, sums, alike, values, count)
    return results(form, sums)


def gradients_round(
    form: AttentionConfig,
    far: Reach,
    travels: str,
    axes: Axes,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    peak: Any,
    total: Any,
    cotangent: Any,
    *extras: Any,
) -> tuple[Any, ...]:
    """The results of `attention_backward_p` for one part; ``keys`` travel, or ``queries``."""
    parts, me, queries = lax.axis_size(axes), lax.axis_index(axes), travels == "queries"
    rows, cols = (
        query.shape[form.query_dims.index(form.query_position)],
        key.shape[form.key_dims.index(form.key_position)],
    )
    stats = (out, peak, total) if form.fused else jnp.stack([peak, total, out_dot_cotangent(form, out, cotangent)])
    ours, theirs = (query, stats, cotangent), (key, value)
    # XLA would otherwise keep all that has come in the forward part.
    ours, theirs = lax.optimization_barrier((ours, theirs))
    own = ours if queries else theirs

    def meet(blocks: Any, source: Any) -> tuple[Any, Any]:
        """What a block adds to its own cotangents, and to those of what stays."""
        (q, stats, ct), (k, v) = (blocks, theirs) if queries else (ours, blocks)
        if form.fused:
            return fused(open_(form), q, stats, ct, k, v)
        row, col = (source * rows, me * cols) if queries else (me * rows, source * cols)
        dq, *both = block_gradients(form, q, k, v, stats[0], stats[1], ct, stats[2], extras, row, col)
        return ([dq], both) if queries else (both, [dq])

    def fused(seen: AttentionConfig, q: Any, stats: Any, ct: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """The same by the kernel; it is the keys that travel."""
        lies = replace(
            seen, grads=(form.query_dims, form.key_dims, form.value_dims), dtypes=(str(form.accum_dtype),) * 3
        )
        out, peak, total = stats
        dq, *both = gradients_fused(lies, q, k, v, out, peak, total, ct)
        return both, [dq]

    went, stayed = fused(form, *ours, *own) if form.fused else meet(own, me)
    for step, turns in ((1, far.before), (-1, far.behind)):
        toward = -step if queries else step

        def arrive(sums: Any, blocks: Any, turn: Any, step: int = toward) -> Any:
            back, stayed = sums
            source = me - step * turn
            if far.ring:
                away, here = meet(blocks, source % parts)
                back = [
                    permute_shards(x + y, axes, _pairs(step, 1, parts, True)) for x, y in zip(back, away, strict=True)
                ]
            else:
                none = jax.tree.map(jnp.zeros_like, (back, stayed))
                away, here = lax.cond((source >= 0) & (source < parts), meet, lambda *_: none, blocks, source)
                home = [(p, p - step * turn) for p in range(parts) if 0 <= p - step * turn < parts]
                back = [x + permute_shards(y, axes, home) for x, y in zip(back, away, strict=True)]
            return back, jax.tree.map(jnp.add, stayed, here)

        start = jax.tree.map(jnp.zeros_like, went), stayed
        back, stayed = _walk(axes, far, toward, turns, own, start, arrive)
        went = jax.tree.map(jnp.add, went, back)
    dq, dk, dv = (*went, *stayed) if queries else (*stayed, *went)
    score = beyond(form, far)
    if score is not None:
        text = f"{form.row_dims},{form.cotangent_dims}->{form.value_dims.replace(form.key_position, '')}"
        p = (jnp.exp(score - peak) / total).astype(form.weight_dtype)
        mixed = jnp.einsum(text, p, cotangent, precision=form.value_precision, preferred_element_type=form.accum_dtype)
        away = jax.vmap(lambda part: _away(far, part, parts)[me])(jnp.arange(parts))
        dv = dv + jnp.expand_dims(
            jnp.tensordot(away.astype(form.accum_dtype), lax.all_gather(mixed, axes), 1),
            form.value_dims.index(form.key_position),
        )
    return finalize_gradients(form, (dq, dk, dv))


def _walk(
    axes: Axes, far: Reach, step: int, turns: int, own: Any, sums: Any, arrive: Callable[[Any, Any, Any], Any]
) -> Any:
    """``sums`` after ``arrive(sums, blocks, turn)`` of all blocks that come by; each is sent on before it is used."""
    parts = lax.axis_size(axes)

    def send(blocks: Any, turn: int) -> Any:
        return jax.tree.map(lambda x: permute_shards(x, axes, _pairs(step, turn, parts, far.ring)), blocks)

    def turned(carry: tuple[Any, Any], turn: Any) -> tuple[tuple[Any, Any], None]:
        blocks, sums = carry
        # In a chain, no hop is made before the last but one has been used, lest all blocks pile up.
        return lax.optimization_barrier((send(blocks, turn + 1), arrive(sums, blocks, turn))), None

    if turns == 0:
        return sums
    carry = send(own, 1), sums
    if far.ring:
        carry, _ = lax.scan(turned, carry, jnp.arange(1, turns))
    else:
        for turn in range(1, turns):
            carry, _ = turned(carry, turn)
    return arrive(carry[1], carry[0], turns)


def _pairs(step: int, turn: Any, parts: int, ring: bool) -> Pairs:
    """Which part sends to which: all, or in a chain those that a block has come to."""
    if ring:
        return [(p, (p + step) % parts) for p in range(parts)]
    begun = range(turn - 1, parts - 1) if step > 0 else range(1, parts - turn + 1)
    return [(p, p + step) for p in begun]


def _away(far: Reach, me: Any, parts: int) -> Any:
    """[parts]: which of them are out of reach."""
    place = jnp.arange(parts)
    return (place < me - far.before) | (place > me + far.behind)


def moves_round(
    form: AttentionConfig, far: Reach, parts: int, there: Sequence[int], back: Sequence[int], values: int
) -> Moves:
    """What a part sends: at each hop ``there`` and ``back``, in bytes; ``values`` are those of a sum of values."""
    hop: Moves = tuple((COLLECTIVE_PERMUTE, n) for n in (*there, *back))
    hops = hop * (far.before + far.behind)
    return hops if beyond(form, far) is None else (*hops, (ALL_GATHER, values * parts))
