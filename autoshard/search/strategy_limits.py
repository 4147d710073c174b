"""Strategy limits: how a preset restricts the options of the layout problem's variables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from autoshard.ir.spec import Axes, Spec


@dataclass(frozen=True)
class StrategyLimits:
    """Which mesh axes shard the batch and which the parameters; without batch dimensions, nothing is restricted."""

    batch_dims: frozenset[tuple[int, int]] = frozenset()
    """(value, dimension) pairs that belong to the batch."""
    batch_axes: Axes = ()
    """Axes that shard a batch dimension wherever they divide it, and no other dimension of a value that has one."""
    parameter_axes: Axes = ()
    """Axes that shard no batch dimension, and every parameter that they divide, wherever it is used."""

    frozen: frozenset[int] = frozenset()
    """Arguments that are parameters too, as value numbers, though they are not carried."""

    def allowed(self, options: Iterable[Spec], batch: Collection[int]) -> list[Spec]:
        """Those of ``options`` that are allowed where the dimensions ``batch`` belong to the batch. If none shards it
        over all batch axes, those that shard it over fewer are."""
        found = [s for s in options if not any(a in self.parameter_axes for d in batch for a in s.dims[d])]
        if not batch:
            return found
        other_dims = [[axes for d, axes in enumerate(s.dims) if d not in batch] for s in found]
        found = [
            s
            for s, rest in zip(found, other_dims, strict=True)
            if not any(a in self.batch_axes for axes in rest for a in axes)
        ]
        return [s for s in found if all(any(a in s.dims[d] for d in batch) for a in self.batch_axes)] or found

    def sharding_parameters[T](self, options: Sequence[T], axes: Callable[[T], Collection[str]]) -> Sequence[T]:
        """Those of ``options`` whose ``axes`` include all parameter axes; all options if none do."""
        return [o for o in options if set(self.parameter_axes) <= set(axes(o))] or options
