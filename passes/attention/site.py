"""site: a product that may be one of queries and keys, what is known of it, and what follows for values of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

from autoshard import jaxpr as jx
from autoshard.errors import PassError
from autoshard.passes.attention.facts import Facts, Letters
from autoshard.passes.attention.polynomials import Term, Terms
from autoshard.transforms.attention_op import AttentionConfig, ScoreOp

SCORES, PEAK, GAP, POLYNOMIAL = "scores", "peak", "gap", "polynomial"
STRANGE = "it is combined with something that is no number and no cotangent of it, as by dropout"


@dataclass(frozen=True)
class Meaning:
    """What a variable holds."""

    site: Site
    stage: str
    letters: Letters
    steps: tuple[ScoreOp, ...] = ()
    terms: Terms = field(default_factory=dict[Term, float])


@dataclass
class Role:
    """One of the products that an attention ends in."""

    at: int
    eqn: jx.JaxprEqn
    letters: str


@dataclass(eq=False)
class Site:
    """A product that may be one of queries and keys, and what is known of it."""

    eqn: jx.JaxprEqn
    sides: tuple[str, str]
    """Letters of its operands."""
    cells: str
    """Letters of its result."""
    within: str
    width: str
    col: str = ""
    row: str = ""
    steps: tuple[ScoreOp, ...] | None = None
    """Known once the exponential is taken."""
    dtype: str = ""
    extras: list[tuple[jx.Var, str]] = field(default_factory=list[tuple[jx.Var, str]])
    value: tuple[jx.Var, str] | None = None
    cotangent: tuple[jx.Var, str] | None = None
    weights: str = ""
    mixing: list[Any] = field(default_factory=list[Any])
    """The precision of the products with values, once one is known."""
    roles: dict[str, Role] = field(default_factory=dict[str, Role])
    reason: str = ""
    where: str = ""

    @property
    def rows(self) -> str:
        return self.cells.replace(self.col, "")

    @property
    def batched(self) -> bool:
        return bool(set(self.sides[0]) & set(self.sides[1]) & set(self.cells))

    @property
    def sizes(self) -> dict[str, int]:
        """Of each letter of the scores."""
        return dict(zip(self.cells, jx.aval(self.eqn.outvars[0]).shape, strict=True))

    @property
    def bytes(self) -> int:
        """Bytes of the scores in the dtype of sums, of all devices together."""
        return 4 * math.prod(self.sizes.values())

    @property
    def query(self) -> tuple[jx.Var, str]:
        return self._side(0)

    @property
    def key(self) -> tuple[jx.Var, str]:
        return self._side(1)

    def _side(self, which: int) -> tuple[jx.Var, str]:
        n = which if self.col in self.sides[1] else 1 - which
        operand = self.eqn.invars[n]
        assert isinstance(operand, jx.Var)
        return operand, self.sides[n]

    def refuse(self, reason: str, where: str) -> None:
        self.reason, self.where = self.reason or reason, self.where or where

    def config(self) -> AttentionConfig:
        """Raises `PassError` where what was found is no whole attention."""
        if self.value is None:
            raise PassError("its values are not known")
        (_, query), (_, key), (_, value) = self.query, self.key, self.value
        free = [c for c in self.rows if c in query and c not in key + value]
        sizes = dict(zip(query, jx.aval(self.query[0]).shape, strict=True))
        length = jx.aval(self.key[0]).shape[key.index(self.col)]
        if set(key) - set(self.cells) - {self.within} or (self.row and self.row not in free) or not free:
            raise PassError("queries have no position of their own")
        row = self.row or next((c for c in reversed(free) if sizes[c] == length), free[-1])
        forward = self.roles.get("out")
        if forward is not None:
            out, result = forward.letters, str(jx.aval(forward.eqn.outvars[0]).dtype)
        elif self.cotangent is not None:
            out, result = self.cotangent[1], str(jx.aval(self.cotangent[0]).dtype)
        else:
            raise PassError("it is not multiplied by values")
        if set(out) != set(self.rows) | {self.width} or set(value) - set(self.rows) != {self.col, self.width}:
            raise PassError("its values lie otherwise than its scores")
        config = AttentionConfig(
            query,
            key,
            value,
            out,
            self.rows,
            row,
            self.col,
            self.steps or (),
            tuple(letters for _, letters in self.extras),
            str(jx.aval(self.eqn.outvars[0]).dtype),
            self.dtype,
            self.weights,
            result,
            self.eqn.params["precision"],
            self.mixing[0] if self.mixing else None,
        )
        if len(self.roles) == (forward is not None):
            return config
        if self.cotangent is None or set(self.cotangent[1]) != set(out):
            raise PassError("the cotangent lies otherwise than the result")
        own = {"dq": self.query, "dk": self.key, "dv": self.value}
        found = [
            (self.roles[n].letters, str(jx.aval(self.roles[n].eqn.outvars[0]).dtype))
            if n in self.roles
            else (letters, str(jx.aval(x).dtype))
            for n, (x, letters) in own.items()
        ]
        if any(set(to) != set(letters) for (to, _), (_, letters) in zip(found, own.values(), strict=True)):
            raise PassError("a cotangent lies otherwise than what it is of")
        grads, dtypes = zip(*found, strict=True)
        return replace(config, cotangent_dims=self.cotangent[1], grad_dims=grads, grad_dtypes=dtypes)


@dataclass
class Known:
    """What is known of the values of one jaxpr."""

    facts: Facts
    meanings: dict[jx.Var, Meaning] = field(default_factory=dict[jx.Var, Meaning])

    def meaning(self, atom: jx.Var | jx.Literal) -> Meaning | None:
        return None if isinstance(atom, jx.Literal) else self.meanings.get(atom)


Given = Sequence[Meaning | None]
"""The meanings of an equation's operands."""


def product_letters(
    sides: Sequence[Sequence[str]],
    left: Sequence[int],
    right: Sequence[int],
    left_batch: Sequence[int],
    right_batch: Sequence[int],
) -> list[str]:
    """Letters of a matrix product's result."""
    found = [sides[0][d] for d in left_batch]
    found += [c for d, c in enumerate(sides[0]) if d not in (*left, *left_batch)]
    return found + [c for d, c in enumerate(sides[1]) if d not in (*right, *right_batch)]


def is_free(eqn: jx.JaxprEqn) -> bool:
    """Whether a product's result may lie as it comes. (On axes that a planner decides, what stands there is void.)"""
    sharding = eqn.params.get("out_sharding")
    return sharding is None or all(t is AxisType.Auto for t in sharding.mesh.axis_types)


def is_float(dtype: Any) -> bool:
    """Whether numbers survive in ``dtype``, up to how they are rounded."""
    return jax.dtypes.issubdtype(dtype, np.floating) and jx.dtype_bits(dtype) >= 16
