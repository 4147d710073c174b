"""Sharding by hand: names of dimensions to mesh axes, as people write it.

Every mesh here has the axes ``data`` and ``model``. A name that a table lacks is not split; neither is a dimension that
its axes do not divide, as key-value heads fewer than devices, and an axis splits one dimension of an array alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.zoo import Model, Named, is_named

type Table = Mapping[str, tuple[str, ...]]

_ALL = ("data", "model")
_TENSOR: Table = dict.fromkeys(("expert", "heads", "mlp", "vocab"), ("model",))
_SPLIT: Table = {"batch": ("data",), **_TENSOR}


@dataclass(frozen=True)
class Baseline:
    """Tables for parameters and activations; the optimizer's moments are sharded as their parameters."""

    says: str
    params: Table = field(default_factory=dict)
    acts: Table = field(default_factory=dict)
    constrained: bool = True
    """Whether the activations are held to their table; if not, XLA decides."""


BASELINES: Mapping[str, Baseline] = {
    "dp": Baseline("parameters everywhere, the batch over all devices", {}, {"batch": _ALL}),
    "fsdp": Baseline("model width of parameters and the batch over all devices", {"embed": _ALL}, {"batch": _ALL}),
    "tp": Baseline("Megatron: heads, MLPs, vocabulary, experts over `model`", _TENSOR, _SPLIT),
    "fsdp_tp": Baseline(
        "MaxText: both, with its constraints on activations",
        {"embed": ("data",), **_TENSOR},
        _SPLIT,
    ),
    "jit": Baseline(
        "`jax.jit` with the shardings of parameters and batch of fsdp_tp alone",
        {"embed": ("data",), **_TENSOR},
        {"batch": ("data",)},
        constrained=False,
    ),
    "none": Baseline("no plan: everything everywhere", constrained=False),
}  # fmt: skip


def spec(shape: Sequence[int], names: Sequence[str | None], table: Table, sizes: Mapping[str, int]) -> PartitionSpec:
    """The sharding of an array by ``table`` on a mesh of such axis sizes."""
    used: set[str] = set()
    entries: list[tuple[str, ...]] = []
    for size, name in zip(shape, names, strict=False):
        axes = tuple(a for a in table.get(name or "", ()) if a not in used)
        if size % math.prod(sizes[a] for a in axes):
            axes = ()
        used.update(axes)
        entries.append(axes)
    return PartitionSpec(*(axes or None for axes in entries))


def lowered(model: Model, baseline: Baseline, mesh: Mesh, *, donate: bool = True) -> jax.stages.Lowered:
    """A training step as ``baseline`` shards it."""
    sizes = dict(mesh.shape)

    def placed(tree: Any, table: Table) -> Any:
        return jax.tree.map(lambda x: NamedSharding(mesh, spec(x.shape, x.names, table, sizes)), tree, is_leaf=is_named)

    def at(x: jax.Array, *names: str | None) -> jax.Array:
        where = spec(x.shape, names, baseline.acts, sizes)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, where))

    state, batch = placed(model.state, baseline.params), placed(model.batch, baseline.acts)
    step = model.step(at) if baseline.constrained else model.step()
    whole = NamedSharding(mesh, PartitionSpec())
    given = 0 if donate else ()
    jitted = jax.jit(step, in_shardings=(state, batch), out_shardings=(state, whole), donate_argnums=given)
    return jitted.lower(*abstract(model))


def abstract(model: Model) -> tuple[Any, Any]:
    """The shapes of a model's state and batch."""

    def shapes(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.abstract if isinstance(x, Named) else x, tree, is_leaf=is_named)

    return shapes(model.state), shapes(model.batch)
