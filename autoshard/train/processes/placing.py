"""Batches on the mesh of a plan: each process copies to its devices the rows that they hold."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autoshard.backend.process_local import local_dim
from autoshard.errors import ArgumentError
from autoshard.jaxpr import dtype_from_name
from autoshard.plan.decisions import Place
from autoshard.runtime.plan import Plan
from autoshard.train.sources import ChosenRows, arrays_only


class BatchPlacer:
    """Puts batches on the mesh of a plan, as its argument 1: a process copies to its devices the rows that they hold.

    A process brings a whole batch, or, of several processes, only the rows that `Plan.local_rows` names, of each array
    its own, along the first dimension that is split between processes. Whole batches
    are the same in every process: their digest is kept to compare.
    """

    def __init__(self, plan: Plan) -> None:
        start, end = (jax.tree.structure(plan.in_avals[:n]).num_leaves for n in (1, 2))
        self._plan, self._tree = plan, jax.tree.structure(plan.in_avals[1])
        self._places = plan.inputs[start:end]
        self._shardings = plan.flat_in_shardings[start:end]
        self._stored = any(place.stored is not None for place in self._places)
        self.digest = 0
        """Of all whole batches placed so far, below 2^32; 0 where there is one process."""
        self.parted = False
        """Whether a process has brought only rows of its own."""

    def __call__(self, batch: Any) -> Any:
        """``batch`` on the mesh.

        Raises:
          ArgumentError: it is not what the planned step takes; names the first array that differs.
        """
        leaves, tree = jax.tree.flatten(arrays_only(batch))
        if tree != self._tree:
            raise ArgumentError(
                f"the batch has the structure {tree}, and {self._plan.name} was planned for {self._tree}"
            )
        pairs = zip(leaves, self._places, self._shardings, strict=True)
        placed = [self._placed(x, place, sharding) for x, place, sharding in pairs]
        return self._tree.unflatten(placed)

    def _placed(self, x: Any, place: Place, sharding: NamedSharding) -> Any:
        several, dtype, dim = jax.process_count() > 1, dtype_from_name(place.dtype), 0
        x = x if isinstance(x, ChosenRows | jax.Array) else np.asarray(x)
        if jax.dtypes.canonicalize_dtype(x.dtype) != dtype:
            raise ArgumentError(f"{place.path} of {self._plan.name} is {place.dtype}, and a batch has {x.dtype}")
        whole = x.shape == place.shape
        part = None
        if several and place.shape and not whole:
            dim = local_dim(sharding, place.stored_shape)
            part = (*place.shape[:dim], len(self._plan.local_rows(place.path, dim)), *place.shape[dim + 1 :])
        if not whole and x.shape != part:
            named = "" if part is None else f"{place.path!r}{f', {dim}' if dim else ''}"
            brought = "" if part is None else f"; or {list(part)} of it, of the rows of plan.local_rows({named})"
            raise ArgumentError(
                f"{place.path} of {self._plan.name} is {list(place.shape)}{brought}, and a batch has {list(x.shape)}: "
                "batches of other sizes need a step planned for them, or padding to this one (`pad` in a "
                "configuration, `autoshard.train.Padding` in Python)"
            )
        if isinstance(x, jax.Array) and not (several and x.is_fully_addressable):
            return x if self._stored else jax.device_put(x, sharding)
        if self._stored:
            return np.asarray(x, dtype)  # the step pads it
        if part is not None:
            self.parted = True
            return jax.make_array_from_process_local_data(sharding, np.asarray(x, dtype), place.shape)
        if several and not isinstance(x, ChosenRows):
            self.digest = zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8), self.digest)

        def block(index: Any) -> np.ndarray:
            return np.asarray(x[index], dtype)

        return jax.make_array_from_callback(place.shape, sharding, block)


class SizedPlacer:
    """Puts batches of one size, or of a few, on the mesh, each by the plan for its size.

    Args:
      plan: for the first size.
      plan_for: plans for batches of another size, `jax.ShapeDtypeStruct`s; None where there is no other.
    """

    def __init__(self, plan: Plan, plan_for: Callable[[Any], Plan] | None = None) -> None:
        self._first, self._plan_for = BatchPlacer(plan), plan_for
        self._placers = {_shapes(plan.in_avals[1]): self._first}
        self.digest = 0
        """As `BatchPlacer.digest`, of batches of all sizes."""
        self.parted = False
        """As `BatchPlacer.parted`, of batches of any size."""

    def knows(self, batch: Any) -> bool:
        """Whether there is a plan for the size of ``batch``."""
        return self._plan_for is None or _shapes(arrays_only(batch)) in self._placers

    def __call__(self, batch: Any) -> Any:
        """``batch`` on the mesh; as `BatchPlacer`."""
        placer = self._first
        if self._plan_for is not None:
            arrays = arrays_only(batch)
            shapes = _shapes(arrays)
            if shapes not in self._placers:
                self._placers[shapes] = BatchPlacer(self._plan_for(jax.tree.map(abstract, arrays)))
            placer = self._placers[shapes]
        placer.digest = self.digest
        placed = placer(batch)
        self.digest, self.parted = placer.digest, self.parted or placer.parted
        return placed


def _shapes(batch: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(np.shape(x)) for x in jax.tree.leaves(batch))


def abstract(x: Any) -> jax.ShapeDtypeStruct:
    """An array of a batch as `jax.ShapeDtypeStruct`, without reading it."""
    x = x if isinstance(x, ChosenRows | jax.Array) else np.asarray(x)
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
