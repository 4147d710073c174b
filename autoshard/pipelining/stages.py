"""Which layers of a chain are on which stage, and values with one row a layer brought into that order and back."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.pipelining.rings import split_as
from autoshard.schedule.row_moves import RowMoves, Table, row_moves
from autoshard.schedule.schedule import Schedule


@dataclass(frozen=True)
class Stages:
    """How a chain runs: the mesh axis, the order, and the layers of each part of the model, counted from its input."""

    axis: str
    schedule: Schedule
    layers: tuple[int, ...]
    """Number of layers of each part."""
    stored: bool = True
    """Whether arguments have a row for each layer, and a stage stores its own; else all stages store all layers."""
    together: bool = False
    """Whether all stages run what any of them does at a tick, and each keeps what is its own: where devices of several
    stages meet in it."""
    turned: bool = False
    """Whether the input goes into the last layer (`Chain.turned`)."""

    @functools.cached_property
    def rows(self) -> np.ndarray[Any, Any]:
        """[part, row]: the layer; parts with fewer layers than others have rows of the last layer, which do not run."""
        ends = np.cumsum(self.layers)
        starts = sum(self.layers) - ends if self.turned else ends - self.layers
        rows = starts[:, None] + np.arange(max(self.layers))
        return np.minimum(rows, sum(self.layers) - 1)

    @functools.cached_property
    def places(self) -> np.ndarray[Any, Any]:
        """[stage, chunk]: the part of the model."""
        return np.array(self.schedule.placement).T

    @functools.cached_property
    def in_order(self) -> bool:
        """Whether each stage runs the layers that it stores."""
        rows = self.rows[self.places].ravel()
        return self.splits_layers and rows.size == sum(self.layers) and bool((rows == np.arange(rows.size)).all())

    @property
    def splits_layers(self) -> bool:
        """Whether values with a row for each layer are split over the stages outside of the loop."""
        return self.stored and sum(self.layers) % self.schedule.stages == 0

    @property
    def moves_layers(self) -> bool:
        """Whether stages store some layers and run others."""
        return self.splits_layers and not self.in_order

    @functools.cached_property
    def before(self) -> RowMoves:
        """From the rows that stages store to those that they run."""
        return row_moves(self._stored, self._run)

    @functools.cached_property
    def after(self) -> RowMoves:
        """From the rows that stages run to those that they store."""
        return row_moves(self._run, self._stored)

    @property
    def _stored(self) -> Table:
        return np.arange(sum(self.layers)).reshape(self.schedule.stages, -1)

    @property
    def _run(self) -> Table:
        """-1 of rows that do not run."""
        runs = np.arange(max(self.layers)) < np.array(self.layers)[:, None]
        return np.where(runs, self.rows, -1)[self.places].reshape(self.schedule.stages, -1)

    def own_rows(self, x: Any, spec: PartitionSpec | None) -> Any:
        """On a stage: [layer, ...], those that it stores or all, -> [chunk, row, ...], those that it runs.

        Args:
          spec: as the plan splits ``x``, if it says so.
        """
        if not self.splits_layers:
            return jnp.take(x, jnp.asarray(self.rows[self.places])[lax.axis_index(self.axis)], axis=0)
        mine = self._moved(x, self.before, spec) if self.moves_layers else x
        return mine.reshape(self.schedule.chunks, -1, *x.shape[1:])

    def rows_to_store(self, x: Any, spec: PartitionSpec | None) -> Any:
        """On a stage: [row, ...], those that it runs of all chunks, -> [layer, ...], those that it stores; ``x``, where
        stages store all.

        Args:
          spec: as the plan splits ``x``, if it says so.
        """
        return self._moved(x, self.after, spec) if self.moves_layers else x

    def _moved(self, x: Any, moves: RowMoves, spec: PartitionSpec | None) -> Any:
        """[row, ...] after ``moves``. Some rows XLA may split otherwise than all, and would exchange them."""

        def split(x: Any) -> Any:
            return split_as(x, spec, 1, 1)

        x = split(x)
        arrived = [split(lax.ppermute(split(self._rows(x, r.rows)), self.axis, r.pairs)) for r in moves.rounds]
        return split(self._rows(split(jnp.concatenate([x, *arrived])), moves.taken))

    def _rows(self, x: Any, of: Table) -> Any:
        """Those of ``x`` that this stage has in ``of``, in slices of as many as follow each other on every stage: where
        several other axes are automatic, XLA's partitioner (JAX 0.12) aborts on a gather."""
        ends, stage = 1 + np.flatnonzero((np.diff(of) != 1).any(0)), lax.axis_index(self.axis)
        begins = [(jnp.asarray(run[:, 0])[stage], run.shape[1]) for run in np.split(of, ends, axis=1)]
        return jnp.concatenate([lax.dynamic_slice_in_dim(x, begin, size) for begin, size in begins])

    def by_layer(self, x: Any) -> Any:
        """What stages have of `rows_to_store`, one behind the other, -> [layer, ...].

        Where stages store all, they gather them here, outside of the `jax.shard_map`: in it, XLA's partitioner (JAX
        0.12) gathers over the automatic axes too.
        """
        if self.splits_layers:
            return x
        here, most = PartitionSpec(None, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)), self.rows.shape[1]
        whole = lax.with_sharding_constraint(x, NamedSharding(jax.sharding.get_abstract_mesh(), here))
        begins = (most * int(np.argmax(self.places.ravel() == part)) for part in range(self.places.size))
        parts = [whole[begin : begin + n] for begin, n in zip(begins, self.layers, strict=True)]
        return jnp.concatenate(parts[::-1] if self.turned else parts)
