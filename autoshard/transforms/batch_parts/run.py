"""Computes one part of a region: its equations on chunks of what has the batch, and on the whole of all else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.transforms.batch_parts.cut import REDUCTIONS, Cut, CutEquation
from autoshard.transforms.batch_parts.region import BatchRegion
from autoshard.transforms.batch_parts.shares import Nested, Share, Shares, Sliced


def run_part(region: BatchRegion, values: Mapping[jx.Var, Any], part: Any) -> dict[jx.Var, Any]:
    """What part number ``part`` has of each result of ``region``: a chunk or a term.

    Args:
      values: of `BatchRegion.inputs`, whole.

    Raises:
      TypeError, ValueError: an operation's parameters state other sizes.
    """
    env = _Part(region.shares, part, dict(values), whole=set(values))
    wide = {v for v, _ in region.totals}
    for eqn in region.equations:
        env.run(eqn, wide)
    return {v: env.values[v] for v in region.results}


def total_dtype(var: jx.Var, kind: str) -> Any:
    """The dtype in which the terms of a total are added up: sums of few digits in float32."""
    dtype = jx.aval(var).dtype
    short = kind == "sum" and jax.dtypes.issubdtype(dtype, np.floating) and jx.dtype_bits(dtype) < 32
    return np.dtype(np.float32) if short else dtype


def start_of(var: jx.Var, kind: str) -> Any:
    """What a total is before the first part."""
    dtype = total_dtype(var, kind)
    return jnp.full(jx.aval(var).shape, REDUCTIONS[kind].neutral(dtype), dtype)


class _Part:
    """One jaxpr's values for one part."""

    def __init__(self, shares: Shares, part: Any, values: dict[jx.Var, Any], whole: set[jx.Var]) -> None:
        self.shares, self.part, self.values = shares, part, values
        self.whole = whole
        """Values that are whole here though a part has a chunk of them."""
        self.chunks: dict[tuple[jx.Var, Cut], Any] = {}

    def read(self, atom: jx.Atom, share: Share | None) -> Any:
        """The value of ``atom``, or this part's chunk of it."""
        if isinstance(atom, jx.Literal):
            return atom.val
        found = self.values[atom]
        has = None if atom in self.whole else self.shares.of.get(atom)
        if not isinstance(share, Cut) or has is not None:
            return found
        if (atom, share) not in self.chunks:
            self.chunks[atom, share] = share.chunk(found, self.part)
        return self.chunks[atom, share]

    def run(self, eqn: jx.JaxprEqn, wide: set[jx.Var] | frozenset[jx.Var] = frozenset()) -> None:
        """Computes the results of ``eqn``; sums in ``wide`` may have more digits than their dtype."""
        plan = self.shares.plans.get(eqn)
        if isinstance(plan, CutEquation):
            operands = [self.read(a, c) for a, c in zip(eqn.invars, plan.operands, strict=True)]
            found = plan.run(operands, self.shares.rules)
        elif isinstance(plan, Nested):
            operands = [self.read(a, s) for a, s in zip(eqn.invars, plan.operands, strict=True)]
            found = self.run_nested(eqn, plan, operands)
        else:
            found = jx.bind_equation(eqn, [self.read(a, None) for a in eqn.invars], eqn.params)
        if isinstance(plan, Sliced):
            found = [x if c is None else c.chunk(x, self.part) for x, c in zip(found, plan.results, strict=True)]
        for v, x in zip(eqn.outvars, found, strict=True):
            self.values[v] = x if v in wide else _as_declared(x, v)

    def run_nested(self, eqn: jx.JaxprEqn, plan: Nested, operands: Sequence[Any]) -> list[Any]:
        """The results of a loop, branch or call."""
        regions = jx.regions(eqn)
        if jx.calls_one_body(eqn) and eqn.primitive is not _prims.remat_p:
            return self.run_body(regions[0].body, plan.results, self.part, operands)
        bodies: list[jx.Jaxpr] = []
        for r in regions:
            results: list[Share | None] = [self.shares.share(a) for a in r.body.outvars]
            for w in r.outputs:
                share = plan.results[w.outside]
                if w.stacked and isinstance(share, Cut):
                    share = replace(share, dim=share.dim - 1)
                results[w.inside] = share
            for end, start in r.carries:
                results[end] = self.shares.share(r.body.invars[start])
            shapes = [_type_of(v, self.shares.share(v)) for v in r.body.invars]
            staged = jax.make_jaxpr(lambda part, *xs, r=r, results=results: self.run_body(r.body, results, part, xs))
            bodies.append(jx.normalize(staged(jax.ShapeDtypeStruct((), np.int32), *shapes)))
        new = jx.bodies_with_operand(eqn, bodies)
        return jx.bind_equation(new, jx.operands_with(eqn, self.part, operands), new.params)

    def run_body(
        self, body: jx.Jaxpr, results: Sequence[Share | None], part: Any, operands: Sequence[Any]
    ) -> list[Any]:
        """The results of ``body``, with the shares ``results``."""
        inner = _Part(self.shares, part, dict(zip(body.invars, operands, strict=True)), set())
        inner.values.update(zip(body.constvars, body.consts, strict=True))
        for e in body.eqns:
            inner.run(e)
        return [
            _as_declared(inner.read(a, s), a) if jx.is_array(a) else inner.read(a, s)
            for a, s in zip(body.outvars, results, strict=True)
        ]


def _type_of(var: jx.Var, share: Share | None) -> jax.ShapeDtypeStruct:
    """The type of what a part has of ``var``."""
    aval = jx.aval(var)
    return jax.ShapeDtypeStruct(share.chunk_shape(aval.shape) if isinstance(share, Cut) else aval.shape, aval.dtype)


def _as_declared(x: Any, atom: jx.Atom) -> Any:
    """``x`` in the dtype of ``atom``."""
    return lax.convert_element_type(x, jx.aval(atom).dtype) if jx.is_array(atom) else x
