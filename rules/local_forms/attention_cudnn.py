"""Attention by one kernel of the target's own library: operands are laid out as `autoshard.transforms.cudnn_attention` wants them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax import numpy as jnp

from autoshard.transforms.attention_op import AttentionConfig, finalize_gradients
from autoshard.transforms.cudnn_attention import attention_kernel_backward_p, attention_kernel_p, causal_fill


@dataclass(frozen=True)
class _Lay:
    """Which letters are the batch, and which the heads: of those that all share, these that come after the queries."""

    form: AttentionConfig
    sizes: Mapping[str, int]
    batch: str
    heads: str
    groups: str

    @classmethod
    def of(cls, form: AttentionConfig, query: Any, key: Any, value: Any) -> _Lay:
        at = form.query_dims.index(form.query_position)
        shared = [(d, c) for d, c in enumerate(form.query_dims) if c in form.key_dims and c in form.value_dims]
        return cls(
            form,
            form.sizes(query, key, value),
            "".join(c for d, c in shared if d < at),
            "".join(c for d, c in shared if d > at),
            "".join(
                c for c in form.query_dims if c in form.row_dims and c not in form.key_dims and c != form.query_position
            ),
        )

    @property
    def params(self) -> dict[str, Any]:
        scale = math.prod(s.constant for s in self.form.score_ops if s.kind == "scale")
        return {"scale": float(scale), "causal": causal_fill(self.form) is not None}

    def query(self, width: str) -> tuple[str, ...]:
        return self.batch, self.form.query_position, self.heads + self.groups, width

    def key(self, width: str) -> tuple[str, ...]:
        return self.batch, self.form.key_position, self.heads, width

    @property
    def rows(self) -> tuple[str, ...]:
        return self.batch, self.heads + self.groups, self.form.query_position

    def merged(self, x: Any, letters: str, to: Sequence[str]) -> Any:
        """``x`` with a dimension for each of ``to``."""
        x = jnp.transpose(x, [letters.index(c) for c in "".join(to)])
        return x.reshape([math.prod(self.sizes[c] for c in part) for part in to])

    def apart(self, x: Any, given: Sequence[str], letters: str) -> Any:
        """What `merged` has done is undone."""
        whole = "".join(given)
        x = x.reshape([self.sizes[c] for c in whole])
        return jnp.transpose(x, [whole.index(c) for c in letters])

    def operands(self, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        form = self.form
        return (
            self.merged(query, form.query_dims, self.query(form.head_width)),
            self.merged(key, form.key_dims, self.key(form.head_width)),
            self.merged(value, form.value_dims, self.key(form.value_width)),
        )


def attend_fused(form: AttentionConfig, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """The results of `attention_p` for one part: of each row, the sums' logarithm is the peak, and the total is 1."""
    lay = _Lay.of(form, query, key, value)
    out, logsum = attention_kernel_p.bind(*lay.operands(query, key, value), **lay.params)
    peak = lay.apart(logsum, lay.rows, form.row_dims)
    return lay.apart(out, lay.query(form.value_width), form.out_dims), peak, jnp.ones_like(peak)


def gradients_fused(
    form: AttentionConfig, query: Any, key: Any, value: Any, out: Any, peak: Any, total: Any, cotangent: Any
) -> tuple[Any, Any, Any]:
    """The results of `attention_backward_p` for one part."""
    lay = _Lay.of(form, query, key, value)
    ours = lay.operands(query, key, value)
    came = lay.merged(out, form.out_dims, lay.query(form.value_width))
    logsum = lay.merged(peak + jnp.log(total), form.row_dims, lay.rows)
    ct = lay.merged(cotangent, form.cotangent_dims, lay.query(form.value_width)).astype(came.dtype)
    dq, dk, dv = attention_kernel_backward_p.bind(*ours, came, logsum, ct, **lay.params)
    found = (
        lay.apart(dq, lay.query(form.head_width), form.query_dims),
        lay.apart(dk, lay.key(form.head_width), form.key_dims),
        lay.apart(dv, lay.key(form.value_width), form.value_dims),
    )
    return finalize_gradients(form, found)
