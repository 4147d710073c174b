"""The state of an online softmax: attention over some of the keys, to which further keys are added block by block."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import numpy as jnp

from autoshard.transforms.attention_op import AttentionConfig


class SoftmaxState(NamedTuple):
    """The online softmax over the keys seen so far (Milakov and Gimelshein, arXiv:1805.02867), in ``accum_dtype``."""

    weighted_values: Any
    """The sum of ``exp(score - row_max) * value``: [*row_dims, value_width]."""
    row_max: Any
    """The largest score: [*row_dims]."""
    row_sum: Any
    """The sum of ``exp(score - row_max)``: [*row_dims]."""


def empty_state(config: AttentionConfig, query: Any, key: Any, value: Any) -> SoftmaxState:
    """The state before any key."""
    sizes = config.sizes(query, key, value)
    rows = tuple(sizes[c] for c in config.row_dims)
    return SoftmaxState(
        jnp.zeros((*rows, sizes[config.value_width]), config.accum_dtype),
        jnp.full(rows, -jnp.inf, config.accum_dtype),
        jnp.zeros(rows, config.accum_dtype),
    )


def online_softmax_update(
    config: AttentionConfig, state: SoftmaxState, scores: Any, value: Any, copies: Any = 1
) -> SoftmaxState:
    """``state`` after further keys.

    Args:
      scores: of these keys: [*row_dims, key_position].
      value: the sum of values that each score weighs.
      copies: how many keys each score stands for.
    """
    weighted_values, row_max, row_sum = state
    new_max = jnp.maximum(row_max, jnp.max(scores, -1))
    base = jnp.where(new_max == -jnp.inf, 0, new_max)  # where all scores are -inf, so that exp gives 0 and not NaN
    e, rescale = jnp.exp(scores - base[..., None]), jnp.exp(row_max - base)
    text = f"{config.row_dims}{config.key_position},{config.value_dims}->{config.row_dims}{config.value_width}"
    added = jnp.einsum(
        text,
        e.astype(config.weight_dtype),
        value,
        precision=config.value_precision,
        preferred_element_type=config.accum_dtype,
    )
    weighted_values = weighted_values * rescale[..., None] + added
    return SoftmaxState(weighted_values, new_max, row_sum * rescale + jnp.sum(e, -1) * copies)


def merge_softmax_states(config: AttentionConfig, state: SoftmaxState, results: tuple[Any, Any, Any]) -> SoftmaxState:
    """``state`` after further keys, given the ``results`` of `attention_p` over these keys alone."""
    (weighted_values, row_max, row_sum), (out, further_max, further_sum) = state, results
    new_max = jnp.maximum(row_max, further_max)
    rescale, further = jnp.exp(row_max - new_max), jnp.exp(further_max - new_max) * further_sum
    order = [config.out_dims.index(c) for c in config.row_dims + config.value_width]
    out = jnp.transpose(out, order).astype(config.accum_dtype)
    weighted_values = weighted_values * rescale[..., None] + out * further[..., None]
    return SoftmaxState(weighted_values, new_max, row_sum * rescale + further)


def results_of_state(config: AttentionConfig, state: SoftmaxState) -> tuple[Any, Any, Any]:
    """The results of `attention_p` over all keys that ``state`` has seen."""
    order = [(config.row_dims + config.value_width).index(c) for c in config.out_dims]
    out = jnp.transpose(state.weighted_values / state.row_sum[..., None], order).astype(config.out_dtype)
    return out, state.row_max, state.row_sum
