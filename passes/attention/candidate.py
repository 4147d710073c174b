"""A matrix product that may be the scores of an attention, and the symbolic values of what is computed from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType

from autoshard import jaxpr as jx
from autoshard.errors import PassError
from autoshard.passes.attention.facts import Facts
from autoshard.passes.attention.masks import Band, Letters, Segments
from autoshard.passes.attention.polynomials import Monomial, Polynomial
from autoshard.transforms.attention_op import AttentionConfig, ScoreOp

Stage = Literal["scores", "row max", "shifted scores", "polynomial"]
SCORES: Stage = "scores"
"""The product of queries and keys after some score ops."""
ROW_MAX: Stage = "row max"
"""The maximum of such scores along the keys."""
SHIFTED_SCORES: Stage = "shifted scores"
"""Such scores minus their row maximum."""
POLYNOMIAL: Stage = "polynomial"
"""A polynomial in the quantities that `finder` defines."""
UNKNOWN_FACTOR = "its weights are combined with something that is no number and no cotangent of them, as by dropout"


@dataclass(frozen=True)
class UnorientedMask:
    """A mask of positions or segments, applied before it is known which of its two dimensions the keys' is."""

    mask: Band | Segments
    constant: float


@dataclass(frozen=True)
class SymbolicValue:
    """What a variable holds, as a function of the scores of a candidate."""

    candidate: AttentionCandidate
    stage: Stage
    letters: Letters
    score_ops: tuple[ScoreOp | UnorientedMask, ...] = ()
    """Before the exponential: what was applied to the scores so far."""
    polynomial: Polynomial = field(default_factory=dict[Monomial, float])
    """From the exponential on."""


@dataclass
class FinalProduct:
    """One of the products that an attention ends in: its output, or the gradient of query, key or value."""

    at: int
    """Index of its equation in the jaxpr."""
    eqn: jx.JaxprEqn
    letters: str


@dataclass(eq=False)
class AttentionCandidate:
    """A product that may be the scores of an attention, and what has been found of that attention so far.

    The fields named as those of `AttentionConfig` mean the same; "" or None where not known yet.
    """

    eqn: jx.JaxprEqn
    operand_dims: tuple[str, str]
    """Letters of its operands, the first of which may be the keys."""
    score_dims: str
    """Letters of its result."""
    head_width: str
    value_width: str
    key_position: str = ""
    query_position: str = ""
    score_ops: tuple[ScoreOp, ...] | None = None
    """Known once the exponential is taken."""
    softmax_dtype: str = ""
    extras: list[tuple[jx.Var, str]] = field(default_factory=list[tuple[jx.Var, str]])
    """Masks, biases and segment ids with their letters."""
    value: tuple[jx.Var, str] | None = None
    cotangent: tuple[jx.Var, str] | None = None
    weight_dtype: str = ""
    value_precision: list[Any] = field(default_factory=list[Any])
    """The one precision of the products with values; empty until one is found."""
    products: dict[str, FinalProduct] = field(default_factory=dict[str, FinalProduct])
    """By what they are: "out", "dq", "dk", "dv"."""
    reason: str = ""
    """Why this is no attention that can be replaced; "" as long as nothing speaks against it."""
    where: str = ""
    """The source line of what speaks against it."""

    @property
    def row_dims(self) -> str:
        """Letters of the scores without the keys'."""
        return self.score_dims.replace(self.key_position, "")

    @property
    def has_batch(self) -> bool:
        """Whether the product has batch dimensions."""
        return bool(set(self.operand_dims[0]) & set(self.operand_dims[1]) & set(self.score_dims))

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each letter of the scores."""
        return dict(zip(self.score_dims, jx.aval(self.eqn.outvars[0]).shape, strict=True))

    @property
    def bytes(self) -> int:
        """Bytes of the scores in float32, over all devices."""
        return 4 * math.prod(self.sizes.values())

    @property
    def query(self) -> tuple[jx.Var, str]:
        """The queries and their letters, once ``key_position`` is known."""
        return self._operand(0)

    def extra_index(self, extra: tuple[jx.Var, str]) -> int:
        """The index of a mask, bias or array of segment ids among the extras; it is added where it is new."""
        if extra not in self.extras:
            self.extras.append(extra)
        return self.extras.index(extra)

    @property
    def key(self) -> tuple[jx.Var, str]:
        """The keys and their letters, once ``key_position`` is known."""
        return self._operand(1)

    def _operand(self, which: int) -> tuple[jx.Var, str]:
        n = which if self.key_position in self.operand_dims[1] else 1 - which
        operand = self.eqn.invars[n]
        assert isinstance(operand, jx.Var)
        return operand, self.operand_dims[n]

    def reject(self, reason: str, where: str) -> None:
        """Notes why it is left as it is; the first reason stays."""
        self.reason, self.where = self.reason or reason, self.where or where

    def config(self) -> AttentionConfig:
        """The configuration of the attention found.

        Raises:
          PassError: what was found is no complete attention.
        """
        if self.value is None:
            raise PassError("its weights are not multiplied by values")
        (_, query), (_, key), (_, value) = self.query, self.key, self.value
        free = [c for c in self.row_dims if c in query and c not in key + value]
        sizes = dict(zip(query, jx.aval(self.query[0]).shape, strict=True))
        length = jx.aval(self.key[0]).shape[key.index(self.key_position)]
        masked_along = {self.query_position} - {""}
        if set(key) - set(self.score_dims) - {self.head_width} or masked_along - set(free) or not free:
            raise PassError("its queries have no sequence dimension of their own")
        query_position = self.query_position or next((c for c in reversed(free) if sizes[c] == length), free[-1])
        forward = self.products.get("out")
        if forward is not None:
            out, result = forward.letters, str(jx.aval(forward.eqn.outvars[0]).dtype)
        elif self.cotangent is not None:
            out, result = self.cotangent[1], str(jx.aval(self.cotangent[0]).dtype)
        else:
            raise PassError("its weights are not multiplied by values")
        own_value_dims = set(value) - set(self.row_dims)
        if set(out) != {*self.row_dims, self.value_width} or own_value_dims != {self.key_position, self.value_width}:
            raise PassError("its values do not have the dimensions of its scores")
        config = AttentionConfig(
            query,
            key,
            value,
            out,
            self.row_dims,
            query_position,
            self.key_position,
            self.score_ops or (),
            tuple(letters for _, letters in self.extras),
            str(jx.aval(self.eqn.outvars[0]).dtype),
            self.softmax_dtype,
            self.weight_dtype,
            result,
            self.eqn.params["precision"],
            self.value_precision[0] if self.value_precision else None,
        )
        if len(self.products) == (forward is not None):
            return config
        if self.cotangent is None or set(self.cotangent[1]) != set(out):
            raise PassError("the cotangent does not have the dimensions of the output")
        own = {"dq": self.query, "dk": self.key, "dv": self.value}
        found = [
            (self.products[n].letters, str(jx.aval(self.products[n].eqn.outvars[0]).dtype))
            if n in self.products
            else (letters, str(jx.aval(x).dtype))
            for n, (x, letters) in own.items()
        ]
        if any(set(to) != set(letters) for (to, _), (_, letters) in zip(found, own.values(), strict=True)):
            raise PassError("a gradient does not have the dimensions of its operand")
        grads, dtypes = zip(*found, strict=True)
        return replace(config, cotangent_dims=self.cotangent[1], grad_dims=grads, grad_dtypes=dtypes)


@dataclass
class Env:
    """The symbolic values of one jaxpr's variables, of those that are computed from a candidate's scores."""

    facts: Facts
    segments: bool
    """Whether masks of segment ids are noted as such, for a kernel that takes them."""
    values: dict[jx.Var, SymbolicValue] = field(default_factory=dict[jx.Var, SymbolicValue])

    def read(self, atom: jx.Var | jx.Literal) -> SymbolicValue | None:
        """The symbolic value of ``atom``; None where it does not depend on a candidate."""
        return None if isinstance(atom, jx.Literal) else self.values.get(atom)


OperandValues = Sequence[SymbolicValue | None]
"""The symbolic value of each operand of an equation."""


def product_dims(
    operand_dims: Sequence[Sequence[str]],
    left: Sequence[int],
    right: Sequence[int],
    left_batch: Sequence[int],
    right_batch: Sequence[int],
) -> list[str]:
    """Letters of the result of a `dot_general` with these contracted and batch dimensions."""
    found = [operand_dims[0][d] for d in left_batch]
    found += [c for d, c in enumerate(operand_dims[0]) if d not in (*left, *left_batch)]
    return found + [c for d, c in enumerate(operand_dims[1]) if d not in (*right, *right_batch)]


def is_unconstrained(eqn: jx.JaxprEqn) -> bool:
    """Whether a product's ``out_sharding`` constrains nothing; it does not on Auto axes, which the planner decides."""
    sharding = eqn.params.get("out_sharding")
    return sharding is None or all(t is AxisType.Auto for t in sharding.mesh.axis_types)


def is_wide_float(dtype: Any) -> bool:
    """Whether ``dtype`` is a floating-point type of 16 bits or more, so that a cast to it only rounds."""
    return jax.dtypes.issubdtype(dtype, np.floating) and jx.dtype_bits(dtype) >= 16
