"""Attention by one kernel of the target's own library: operands are laid out as `autoshard.transforms.cudnn_attention` wants them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax import numpy as jnp

from autoshard.transforms.attention_op import Form, settled
from autoshard.transforms.cudnn_attention import fused_backward_p, fused_p, masked


@dataclass(frozen=True)
class _Lay:
    """Which letters are the batch, and which the heads: of those that all share, these that come after the queries."""

    form: Form
    sizes: Mapping[str, int]
    batch: str
    heads: str
    groups: str

    @classmethod
    def of(cls, form: Form, query: Any, key: Any, value: Any) -> _Lay:
        at = form.query.index(form.row)
        shared = [(d, c) for d, c in enumerate(form.query) if c in form.key and c in form.value]
        return cls(
            form,
            form.sizes(query, key, value),
            "".join(c for d, c in shared if d < at),
            "".join(c for d, c in shared if d > at),
            "".join(c for c in form.query if c in form.rows and c not in form.key and c != form.row),
        )

    @property
    def params(self) -> dict[str, Any]:
        scale = math.prod(s.number for s in self.form.steps if s.kind == "scale")
        return {"scale": float(scale), "causal": masked(self.form) is not None}

    def query(self, width: str) -> tuple[str, ...]:
        return self.batch, self.form.row, self.heads + self.groups, width

    def key(self, width: str) -> tuple[str, ...]:
        return self.batch, self.form.col, self.heads, width

    @property
    def rows(self) -> tuple[str, ...]:
        return self.batch, self.heads + self.groups, self.form.row

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
            self.merged(query, form.query, self.query(form.within)),
            self.merged(key, form.key, self.key(form.within)),
            self.merged(value, form.value, self.key(form.width)),
        )


def attend_fused(form: Form, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """The results of `attention_p` for one part: of each row, the sums' logarithm is the peak, and the total is 1."""
    lay = _Lay.of(form, query, key, value)
    out, logsum = fused_p.bind(*lay.operands(query, key, value), **lay.params)
    peak = lay.apart(logsum, lay.rows, form.rows)
    return lay.apart(out, lay.query(form.width), form.out), peak, jnp.ones_like(peak)


def gradients_fused(
    form: Form, query: Any, key: Any, value: Any, out: Any, peak: Any, total: Any, cotangent: Any
) -> tuple[Any, Any, Any]:
    """The results of `attention_backward_p` for one part."""
    lay = _Lay.of(form, query, key, value)
    ours = lay.operands(query, key, value)
    came = lay.merged(out, form.out, lay.query(form.width))
    logsum = lay.merged(peak + jnp.log(total), form.rows, lay.rows)
    ct = lay.merged(cotangent, form.cotangent, lay.query(form.width)).astype(came.dtype)
    dq, dk, dv = fused_backward_p.bind(*ours, came, logsum, ct, **lay.params)
    found = (
        lay.apart(dq, lay.query(form.within), form.query),
        lay.apart(dk, lay.key(form.within), form.key),
        lay.apart(dv, lay.key(form.width), form.value),
    )
    return settled(form, found)
