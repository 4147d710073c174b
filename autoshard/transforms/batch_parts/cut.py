"""How one operation computes a chunk of its result from chunks of its operands: what its rule says, read as a loop.

A rule says that an operation may be split along a factor: each part of a parallel factor is computed from the same part
of the operands, and parts of a reduced one are combined. That is as true of the iterations of a loop as of devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.errors import ChunkError
from autoshard.ir.rule import Rule, factor_names, single_factor_dims
from autoshard.ir.rule_registry import Rules, lookup_rule
from autoshard.machine.mesh import LogicalMesh


@dataclass(frozen=True)
class Cut:
    """One dimension of a value, read as [outer, chunks, inner]: chunk i is [:, i, :], of size outer * inner.

    Devices that split the dimension into as many parts as ``outer``, or a divisor of it, have a part of every chunk.
    """

    dim: int
    outer: int
    chunks: int

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the dimension of a value of this shape divides so."""
        return shape[self.dim] % (self.outer * self.chunks) == 0

    def chunk_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one chunk of a value of ``shape``."""
        return tuple(n // self.chunks if d == self.dim else n for d, n in enumerate(shape))

    def split(self, x: Any) -> Any:
        """``x`` as its chunks: [chunks, ...]."""
        shape, d = x.shape, self.dim
        x = jnp.reshape(x, (*shape[:d], self.outer, self.chunks, -1, *shape[d + 1 :]))
        return jnp.reshape(jnp.moveaxis(x, d + 1, 0), (self.chunks, *self.chunk_shape(shape)))

    def chunk(self, x: Any, i: Any) -> Any:
        """Chunk ``i`` of ``x``, which stays where it is."""
        shape, d = x.shape, self.dim
        x = jnp.reshape(x, (*shape[:d], self.outer, self.chunks, -1, *shape[d + 1 :]))
        return jnp.reshape(lax.dynamic_index_in_dim(x, i, d + 1, keepdims=False), self.chunk_shape(shape))

    def join(self, chunks: Any) -> Any:
        """The inverse of `split`."""
        d, (_, *shape) = self.dim, chunks.shape
        x = jnp.reshape(chunks, (self.chunks, *shape[:d], self.outer, -1, *shape[d + 1 :]))
        shape[d] *= self.chunks
        return jnp.reshape(jnp.moveaxis(x, 0, d + 1), shape)


@dataclass(frozen=True)
class Reduction:
    """How the chunks of a reduced dimension are combined."""

    combine: Callable[[Any, Any], Any]
    neutral: Callable[[Any], Any]
    """Of a dtype."""


def _extreme(dtype: Any, *, highest: bool) -> Any:
    """The highest or the lowest value of a dtype."""
    if dtype == np.bool_:
        return highest
    if jax.dtypes.issubdtype(dtype, np.inexact):
        return np.inf if highest else -np.inf
    return jnp.iinfo(dtype).max if highest else jnp.iinfo(dtype).min


REDUCTIONS: Mapping[str, Reduction] = {
    "and": Reduction(lax.bitwise_and, lambda dtype: True),
    "max": Reduction(lax.max, functools.partial(_extreme, highest=False)),
    "min": Reduction(lax.min, functools.partial(_extreme, highest=True)),
    "or": Reduction(lax.bitwise_or, lambda dtype: False),
    "sum": Reduction(lax.add, lambda dtype: 0),
}


@dataclass(frozen=True)
class CutEquation:
    """An equation with the cuts of its operands and results."""

    eqn: jx.JaxprEqn
    operands: tuple[Cut | None, ...]
    """None: the whole operand is read for every chunk."""
    results: tuple[Cut | None, ...]
    reduction: str = ""
    """How the results of all chunks are combined, a name in `REDUCTIONS`; empty where results are cut."""

    def run(self, operands: Sequence[Any], rules: Rules) -> list[Any]:
        """The results for chunks of the operands. Sums of few digits are returned in float32, to be added up.

        Raises:
          TypeError, ValueError: the operation's parameters state other sizes.
        """
        eqn, params = self.eqn, dict(self.eqn.params)
        avals = [jx.aval(v) for v in eqn.outvars]
        shapes = [a.shape if c is None else c.chunk_shape(a.shape) for a, c in zip(avals, self.results, strict=True)]
        resized = rules.traits(eqn.primitive).shape_param
        if resized is not None:
            params[resized] = tuple(shapes[0])
        cut = self.operands[0] if self.operands else None
        if cut is not None and eqn.primitive is _prims.slice_p:
            params["limit_indices"] = cut.chunk_shape(params["limit_indices"])
        if cut is not None and eqn.primitive is _prims.gather_p and params["slice_sizes"][cut.dim] > 1:
            params["slice_sizes"] = cut.chunk_shape(params["slice_sizes"])
        if cut is not None and eqn.primitive is _prims.dynamic_slice_p:
            params["slice_sizes"] = cut.chunk_shape(params["slice_sizes"])
        if self.reduction == "sum" and _is_short(avals[0].dtype):
            if eqn.primitive is _prims.dot_general_p:
                params["preferred_element_type"] = np.dtype(np.float32)
            elif rules.traits(eqn.primitive).reduces:
                operands = [lax.convert_element_type(x, np.float32) for x in operands]
        found = jx.bind_equation(eqn, operands, params)
        if [x.shape for x in found] != [tuple(s) for s in shapes]:
            raise ValueError(f"{eqn.primitive.name} of chunks has results of {[x.shape for x in found]}, not {shapes}")
        return found


def _is_short(dtype: Any) -> bool:
    """Whether sums of it are rounded too much to be added up chunk by chunk."""
    return jax.dtypes.issubdtype(dtype, np.floating) and jx.dtype_bits(dtype) < 32


def cut_equation(
    eqn: jx.JaxprEqn,
    known: Mapping[int, Cut],
    rules: Rules,
    mesh: LogicalMesh,
    is_zero: Callable[[jx.Atom], bool] = lambda atom: False,
) -> CutEquation:
    """How ``eqn`` is computed in chunks.

    Args:
      known: cuts of operands and results, by position: operands first.
      is_zero: whether an operand is known to be zero: what is added to it is then a sum over the chunks.

    Raises:
      ChunkError: it cannot.
    """
    name, source = eqn.primitive.name, jx.source(eqn)
    atoms, count = (*eqn.invars, *eqn.outvars), len(eqn.invars)
    fixed = eqn.effects or jx.regions(eqn) or jx.op_names(eqn) or not all(map(jx.is_array, atoms))
    traits = rules.traits(eqn.primitive)
    if fixed or traits.position_dependent or traits.runs_once:
        raise ChunkError(f"{name} is not computed in parts", source)
    if eqn.primitive is _prims.reshape_p:
        cuts = _through_reshape(eqn, known)
        return CutEquation(eqn, tuple(cuts[:count]), tuple(cuts[count:]))
    rule = _identity(len(jx.aval(atoms[0]).shape)) if traits.constrains else lookup_rule(eqn, rules, mesh)
    if rule is None:
        raise ChunkError(f"{name} has no rule", source)
    dims = (*rule.operands, *rule.results)
    found = {(dims[i][c.dim], c.outer, c.chunks) for i, c in known.items()}
    if len(found) > 1:
        raise ChunkError(f"{name} joins two dimensions of what is cut", source)
    (factors, outer, chunks) = found.pop()
    compound = any(len(d) > 1 and not {*d}.isdisjoint(factors) for ds in dims for d in ds)
    twice = any(sum(d == factors for d in ds) > 1 for ds in dims)
    if len(factors) != 1 or compound or twice:
        raise ChunkError(f"{name} takes all chunks together", source)
    cuts = [next((Cut(d, outer, chunks) for d, f in enumerate(ds) if f == factors), None) for ds in dims]
    kind = rule.kind(factors[0])
    if kind == "parallel" and None not in cuts[count:] and _is_parallel(eqn, cuts):
        return CutEquation(eqn, tuple(cuts[:count]), tuple(cuts[count:]))
    sums = eqn.primitive is _prims.dot_general_p or traits.convolution or (traits.reduces and traits.ignores_neutral)
    sums = sums or (traits.scatter_adds and kind == "sum" and is_zero(eqn.invars[0]))
    if kind in REDUCTIONS and sums and not any(cuts[count:]):
        return CutEquation(eqn, tuple(cuts[:count]), tuple(cuts[count:]), kind)
    raise ChunkError(f"{name} takes all chunks together", source)


def _is_parallel(eqn: jx.JaxprEqn, cuts: Sequence[Cut | None]) -> bool:
    """Whether a chunk is computed as a whole is, of an operation parallel by its rule: positions are the same ones."""
    if eqn.primitive is _prims.iota_p:
        return cuts[0] is not None and cuts[0].dim != eqn.params["dimension"]
    if hasattr(eqn.params.get("dimension_numbers"), "inserted_window_dims"):
        return cuts[0] is None or cuts[2] is not None
    return True


def _identity(rank: int) -> Rule:
    dims = single_factor_dims(factor_names(rank))
    return Rule((dims,), (dims,))


def _through_reshape(eqn: jx.JaxprEqn, known: Mapping[int, Cut]) -> list[Cut | None]:
    """The cuts of a reshape's operand and result: the same elements are in the same chunk."""
    shapes = [jx.aval(eqn.invars[0]).shape, jx.aval(eqn.outvars[0]).shape]
    if eqn.params["dimensions"] is not None or len(eqn.invars) != 1:
        raise ChunkError("reshape permutes the dimensions", jx.source(eqn))
    cuts: list[Cut | None] = [known.get(0), known.get(1)]
    for here, there in ((0, 1), (1, 0)):
        cut = cuts[here]
        if cut is None:
            continue
        before = math.prod(shapes[here][: cut.dim]) * cut.outer
        for d, n in enumerate(shapes[there]):
            major = math.prod(shapes[there][:d])
            moved = Cut(d, before // max(1, major), cut.chunks)
            if major and before % major == 0 and moved.fits(shapes[there]) and moved.outer and n:
                if cuts[there] not in (None, moved):
                    raise ChunkError("reshape joins two dimensions of what is cut", jx.source(eqn))
                cuts[there] = moved
                break
        else:
            raise ChunkError("reshape takes all chunks together", jx.source(eqn))
    return cuts
