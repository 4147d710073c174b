"""Which layers of a chain are on which stage, and values with one row a layer brought into that order and back."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

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

    @functools.cached_property
    def in_order(self) -> bool:
        """Whether each stage runs the layers that it stores."""
        rows = self.rows[self.places].ravel()
        return self.splits_layers and rows.size == sum(self.layers) and bool((rows == np.arange(rows.size)).all())

    @property
    def splits_layers(self) -> bool:
        """Whether values with a row for each layer are split over the stages outside of the loop."""
        return self.stored and sum(self.layers) % self.schedule.stages == 0

    def own_rows(self, x: Any) -> Any:
        """On a stage: [layer, ...], those that it stores or all, -> [chunk, row, ...], those that it runs."""
        if self.in_order:
            return x.reshape(self.schedule.chunks, -1, *x.shape[1:])
        whole = lax.all_gather(x, self.axis, tiled=True) if self.splits_layers else x
        return jnp.take(whole, jnp.asarray(self.rows[self.places])[lax.axis_index(self.axis)], axis=0)

    def by_layer(self, x: Any) -> Any:
        """On a stage: [chunk, row, ...], those that it runs, -> [layer, ...], those that it stores where `in_order`, or
        else all."""
        if self.in_order:
            return x.reshape(-1, *x.shape[2:])
        whole = lax.all_gather(x, self.axis).reshape(-1, *x.shape[2:])
        places = self.places.ravel()
        at = [int(np.argmax(places == p)) * x.shape[1] + row for p, n in enumerate(self.layers) for row in range(n)]
        return jnp.take(whole, np.array(at), axis=0)
