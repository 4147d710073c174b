"""Attention on one device by the target's kernel: arrays are transposed to the kernel's layout and back.

The kernel is a primitive of `autoshard.transforms.kernel_op`: queries [batch, length, heads, width], keys and values
likewise, and segment ids [batch, length].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax
from jax import numpy as jnp

from autoshard.transforms.attention_kernels import KernelCall, kernel_call
from autoshard.transforms.attention_op import AttentionConfig, finalize_gradients
from autoshard.transforms.kernel_op import attention_kernel_backward_p, attention_kernel_p


@dataclass(frozen=True)
class _KernelLayout:
    """Which letters of an attention make up each dimension of the kernel."""

    config: AttentionConfig
    sizes: Mapping[str, int]
    batch: str
    """Dimensions that query, key and value share, before the queries' sequence dimension; those of segment ids, where
    there are any, for the kernel takes one row of them for all heads."""
    heads: str
    """The others that query, key and value share: the key heads. Repeated heads are the last."""
    groups: str
    """Dimensions of the queries only: the query heads of each key head."""

    @classmethod
    def of(cls, config: AttentionConfig, query: Any, key: Any, value: Any) -> _KernelLayout:
        sequence = config.query_dims.index(config.query_position)
        shared = [(d, c) for d, c in enumerate(config.query_dims) if c in config.key_dims and c in config.value_dims]
        segments = None if config.segments is None else config.extra_dims[config.segments]
        in_batch = {c for d, c in shared if (d < sequence if segments is None else c in segments)}
        # Local forms may have dropped the dimension, where there is one head here, or merged it with others (Ulysses).
        repeated = config.repeated_head if config.repeated_head in config.query_dims else ""
        return cls(
            config,
            config.sizes(query, key, value),
            "".join(c for _, c in shared if c in in_batch and c != repeated),
            "".join(c for _, c in shared if c not in in_batch and c != repeated) + repeated,
            "".join(
                c
                for c in config.query_dims
                if c in config.row_dims and c not in config.key_dims and c != config.query_position
            ),
        )

    def call(self, distance: int) -> KernelCall:
        """The kernel's call, for keys that begin ``distance`` positions before the queries."""
        queries, keys = self.sizes[self.config.query_position], self.sizes[self.config.key_position]
        return kernel_call(self.config, self.config.kernel).shifted(distance, queries, keys)

    def query_like(self, width: str) -> tuple[str, ...]:
        """The letters of each kernel dimension of a query, output or cotangent."""
        return self.batch, self.config.query_position, self.heads + self.groups, width

    def key_like(self, width: str) -> tuple[str, ...]:
        """The letters of each kernel dimension of a key or value."""
        return self.batch, self.config.key_position, self.heads, width

    @property
    def rows(self) -> tuple[str, ...]:
        """The letters of each kernel dimension of a row statistic."""
        return self.batch, self.heads + self.groups, self.config.query_position

    def to_kernel(self, x: Any, letters: str, kernel_dims: Sequence[str]) -> Any:
        """``x``, whose subscripts are ``letters``, with one dimension for each of ``kernel_dims``."""
        x = jnp.transpose(x, [letters.index(c) for c in "".join(kernel_dims)])
        return x.reshape([math.prod(self.sizes[c] for c in dim) for dim in kernel_dims])

    def from_kernel(self, x: Any, kernel_dims: Sequence[str], letters: str) -> Any:
        """The inverse of `to_kernel`."""
        order = "".join(kernel_dims)
        x = x.reshape([self.sizes[c] for c in order])
        return jnp.transpose(x, [order.index(c) for c in letters])

    def operands(self, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """Query, key and value in the kernel's layout."""
        config = self.config
        return (
            self.to_kernel(query, config.query_dims, self.query_like(config.head_width)),
            self._once(self.to_kernel(key, config.key_dims, self.key_like(config.head_width))),
            self._once(self.to_kernel(value, config.value_dims, self.key_like(config.value_width))),
        )

    def segments(self, extras: Sequence[Any], query_start: Any, key_start: Any) -> tuple[Any, ...]:
        """Segment ids for the kernel, [batch, length]: those of the queries and those of the keys; nothing without any.

        Args:
          extras: of `attention_p`: the ids of all positions.
          query_start, key_start: the positions of the first query and of the first key.
        """
        config = self.config
        if config.segments is None:
            return ()
        ids, letters = extras[config.segments], config.extra_dims[config.segments]
        ids = lax.squeeze(ids, [d for d, c in enumerate(letters) if c == "."]).astype("int32")
        order = [letters.replace(".", "").index(c) for c in self.batch + config.key_position]
        ids = jnp.transpose(ids, order).reshape(-1, ids.shape[order[-1]])
        starts = ((config.query_position, query_start), (config.key_position, key_start))
        return tuple(
            ids if self.sizes[c] == ids.shape[1] else lax.dynamic_slice_in_dim(ids, start, self.sizes[c], 1)
            for c, start in starts
        )

    @property
    def _repeats(self) -> int:
        """How many heads of keys and values in a row are the same on this device: of 4, two where it has six heads."""
        return math.gcd(self.config.head_repeats, self.sizes.get(self.config.repeated_head, 1))

    def _once(self, x: Any) -> Any:
        """Each head of ``x``, keys or values in the kernel's layout, once."""
        batch, length, _, width = x.shape
        return x.reshape(batch, length, -1, self._repeats, width)[:, :, :, 0] if self._repeats > 1 else x

    def key_gradient(self, x: Any, width: str, letters: str) -> Any:
        """The gradient of keys or values from the kernel's; of heads that are the same the first has all of it, and
        the others zeros."""
        if self._repeats > 1:
            x = jnp.pad(x[:, :, :, None], [(0, 0)] * 3 + [(0, self._repeats - 1), (0, 0)])
            x = x.reshape(*x.shape[:2], -1, x.shape[-1])
        return self.from_kernel(x, self.key_like(width), letters)


def attend_fused(
    config: AttentionConfig,
    query: Any,
    key: Any,
    value: Any,
    *extras: Any,
    distance: int = 0,
    query_start: Any = 0,
    key_start: Any = 0,
) -> tuple[Any, Any, Any]:
    """The results of `attention_p` on one device: ``row_max`` is each row's log-sum-exp, and ``row_sum`` is 1.

    Args:
      distance: how many positions the first key is before the first query, where a mask depends on it.
      query_start, key_start: the positions of these among those of segment ids.
    """
    layout = _KernelLayout.of(config, query, key, value)
    operands = (*layout.operands(query, key, value), *layout.segments(extras, query_start, key_start))
    out, logsumexp = attention_kernel_p.bind(*operands, call=layout.call(distance))
    row_max = layout.from_kernel(logsumexp, layout.rows, config.row_dims)
    out = layout.from_kernel(out, layout.query_like(config.value_width), config.out_dims)
    return out, row_max, jnp.ones_like(row_max)


def gradients_fused(
    config: AttentionConfig,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    row_max: Any,
    row_sum: Any,
    cotangent: Any,
    *extras: Any,
    distance: int = 0,
    query_start: Any = 0,
    key_start: Any = 0,
) -> tuple[Any, Any, Any]:
    """The results of `attention_backward_p` on one device; positions as of `attend_fused`."""
    layout = _KernelLayout.of(config, query, key, value)
    operands, segments = layout.operands(query, key, value), layout.segments(extras, query_start, key_start)
    out = layout.to_kernel(out, config.out_dims, layout.query_like(config.value_width))
    logsumexp = layout.to_kernel(row_max + jnp.log(row_sum), config.row_dims, layout.rows)
    ct = layout.to_kernel(cotangent, config.cotangent_dims, layout.query_like(config.value_width)).astype(out.dtype)
    call = layout.call(distance)
    dq, dk, dv = attention_kernel_backward_p.bind(*operands, out, logsumexp, ct, *segments, call=call)
    grads = (
        layout.from_kernel(dq, layout.query_like(config.head_width), config.query_dims),
        layout.key_gradient(dk, config.head_width, config.key_dims),
        layout.key_gradient(dv, config.value_width, config.value_dims),
    )
    return finalize_gradients(config, grads)
