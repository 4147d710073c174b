"""Which layers of a chain are on which stage, and values with one row a layer brought into that order and back."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import numpy as jnp

from autoshard.schedule.schedule import Schedule


@dataclass(frozen=True)
class Stages:
    """How a chain runs: the mesh axis, the order, and the layers of each part of the model, counted from its input."""

    axis: str
    schedule: Schedule
    layers: tuple[int, ...]
    """Number of layers of each part."""

    @functools.cached_property
    def rows(self) -> np.ndarray[Any, Any]:
        """[part, row]: the layer; parts with fewer layers than others have rows of the last layer, which do not run."""
        starts = np.cumsum([0, *self.layers[:-1]])
        rows = starts[:, None] + np.arange(max(self.layers))
        return np.minimum(rows, sum(self.layers) - 1)

    @functools.cached_property
    def places(self) -> np.ndarray[Any, Any]:
        """[stage, chunk]: the part of the model."""
        return np.array(self.schedule.placement).T

    def by_part(self, x: Any) -> Any:
        """[layer, ...] -> [stage and chunk, row, ...]."""
        rows = self.rows[self.places].reshape(-1, self.rows.shape[1])
        if rows.size == x.shape[0] and (rows.ravel() == np.arange(rows.size)).all():
            return x.reshape(*rows.shape, *x.shape[1:])
        return jnp.take(x, rows.ravel(), axis=0).reshape(*rows.shape, *x.shape[1:])

    def by_layer(self, x: Any) -> Any:
        """[stage and chunk, row, ...] -> [layer, ...]."""
        places = self.places.ravel()
        flat, width = x.reshape(-1, *x.shape[2:]), x.shape[1]
        at = [int(np.argmax(places == p)) * width + row for p, n in enumerate(self.layers) for row in range(n)]
        return flat if at == [*range(len(flat))] else jnp.take(flat, np.array(at), axis=0)
