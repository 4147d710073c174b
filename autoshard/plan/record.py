"""PlanRecord: what was decided and its predicted cost, as frozen data that can be compared and stored as JSON."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autoshard.cost.cost import Cost
from autoshard.cost.memory import Memory
from autoshard.cost.profile import StepProfile
from autoshard.errors import PlanError
from autoshard.ir.graph import Diagnostic
from autoshard.ir.program import TreeDef
from autoshard.ir.spec import Axes
from autoshard.jaxpr import as_stored, dtype_from_name, true_sharding
from autoshard.machine.mesh import LogicalMesh
from autoshard.plan.decisions import (
    Alternative,
    BatchDim,
    Constraint,
    DimSplit,
    HeldValue,
    Island,
    PipelinePlan,
    Place,
    Trial,
)
from autoshard.plan.grouping import bytes_per_device
from autoshard.plan.treedef import treedef_to_json
from autoshard.transforms.pipeline import PassReport
from autoshard.units import size_text, time_text


@dataclass(frozen=True, repr=False)
class PlanRecord:
    """The specs of a step's arguments, results and constrained intermediates, with their predicted cost.

    The pytrees `in_specs`, `out_specs`, `in_shardings` and `out_shardings` have the shape of the positional
    arguments (a tuple of them, static ones left out) and of the result.
    """

    name: str
    mesh: LogicalMesh
    strategy: str
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]
    intermediates: tuple[Constraint, ...]
    cost: Cost
    memory: Memory
    fingerprint: str
    """Digest of operations, shapes, argument paths and mesh axes: a plan serves programs with the same."""
    islands: tuple[Island, ...] = ()
    """Equations that run in their local form."""
    dim_splits: tuple[DimSplit, ...] = ()
    """Dimension classes and the axes that split them, the largest class first."""
    batch: tuple[BatchDim, ...] = ()
    """The dimensions of arguments that presets take for the batch; empty where none qualifies."""
    storage_axes: Axes = ()
    """Axes that shard carried state in storage, beside those that shard it in use (ZeRO)."""
    zero_stage: int = 0
    """0: none; 1, 2: the optimizer's state is sharded over `storage_axes`; 3: the parameters too."""
    alternatives: tuple[Alternative, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()
    passes: tuple[PassReport, ...] = ()
    memory_budget: float | None = None
    """Bytes per device."""
    considered: int = 1
    """Layouts that were priced."""
    bound: float = 0.0
    """Lower bound, in seconds, of the cost model over all layouts of the search space; 0 where none was computed."""
    compiler_options: tuple[tuple[str, bool | int | float | str], ...] = ()
    residuals: tuple[HeldValue, ...] = ()
    """What is held for the backward part and what is made again there, by name, in order of execution; empty where
    nothing is differentiated."""
    refined: tuple[Trial, ...] = ()
    """The layouts that were compiled to choose from, the predicted best first; empty without ``refine``."""
    profile: StepProfile | None = field(default=None, compare=False, repr=False)
    """The predicted step as it is drawn: what runs when, what is in memory then, and for which line."""
    pipeline: PipelinePlan | None = None
    """How the chain of layers runs as a pipeline; None without one."""
    in_tree: TreeDef | None = field(default=None, compare=False, repr=False)
    out_tree: TreeDef | None = field(default=None, compare=False, repr=False)

    def __eq__(self, other: object) -> bool:
        """Whether both decide the same for the same arguments; a loaded plan equals the one that was saved."""
        if not isinstance(other, PlanRecord):
            return NotImplemented
        equal = all(getattr(self, f.name) == getattr(other, f.name) for f in fields(self) if f.compare)
        return equal and self._structures == other._structures

    def __repr__(self) -> str:
        sent = f"{size_text(self.memory.peak)} per device"
        return f"<{type(self).__name__} of {self.name} over {self.mesh}: {time_text(self.cost.seconds)}, {sent}>"

    def __hash__(self) -> int:
        return hash((self.name, self.fingerprint, self.inputs))

    @functools.cached_property
    def _structures(self) -> list[Any]:
        return [None if tree is None else [treedef_to_json(tree)] for tree in (self.in_tree, self.out_tree)]

    @property
    def work(self) -> StepProfile | None:
        """What the step does: its profile, or of a pipeline that of one stage's devices if they ran all layers."""
        return self.profile if self.pipeline is None else self.pipeline.profile

    @functools.cached_property
    def loaded(self) -> tuple[Place, ...]:
        """The arguments that come from the host at each call: those with a dimension of the batch, but what a result
        replaces, and what stays in the host's memory."""
        of_batch, replaced = {b.path for b in self.batch}, {p.replaces for p in self.outputs}
        return tuple(p for p in self.inputs if p.path in of_batch - replaced and p.memory_kind is None)

    @property
    def loading(self) -> float:
        """Seconds that the `loaded` arguments of a call take over the host's link; 0 where the hardware table has none.

        Not part of ``cost``: with the next call's arguments loaded ahead, a call takes the longer of the two.
        """
        bandwidth = self.mesh.hardware.host_bandwidth
        return bytes_per_device(self.loaded, self.mesh.shape) / bandwidth if bandwidth else 0.0

    @property
    def in_specs(self) -> Any:
        """`PartitionSpec`s of the positional arguments."""
        return self._args([p.spec.partition_spec() for p in self.inputs])

    @property
    def out_specs(self) -> Any:
        """`PartitionSpec`s of the result."""
        return self._tree(self.out_tree).unflatten([p.spec.partition_spec() for p in self.outputs])

    @property
    def in_shardings(self) -> Any:
        """`NamedSharding`s of the positional arguments. Needs the mesh's devices.

        Of an argument that is stored with padding it is that of its values outside of the step, as JAX has no array of
        uneven shards: dimensions with padding are whole. `put` and `init` place it with padding.
        """
        return self._args(self._true_shardings(self.inputs, self.flat_in_shardings))

    @property
    def out_shardings(self) -> Any:
        """`NamedSharding`s of the result, as those of the arguments. Needs the mesh's devices."""
        return self._tree(self.out_tree).unflatten(self._true_shardings(self.outputs, self.flat_out_shardings))

    @property
    def in_avals(self) -> Any:
        """`jax.ShapeDtypeStruct`s of the positional arguments."""
        return self._args([jax.ShapeDtypeStruct(p.shape, dtype_from_name(p.dtype)) for p in self.inputs])

    @property
    def in_stored(self) -> Any:
        """`jax.ShapeDtypeStruct`s with shardings of the positional arguments as they are stored. Needs the mesh's
        devices."""
        pairs = zip(self.inputs, self.flat_in_shardings, strict=True)
        return self._args(
            [jax.ShapeDtypeStruct(p.stored_shape, dtype_from_name(p.dtype), sharding=s) for p, s in pairs]
        )

    @functools.cached_property
    def jax_mesh(self) -> jax.sharding.Mesh:
        """The mesh over this machine's devices."""
        return self.mesh.concrete()

    @functools.cached_property
    def flat_in_shardings(self) -> list[NamedSharding]:
        """Those of the flat arguments as they are stored, keyword arguments included."""
        return self._shardings(self.inputs)

    @functools.cached_property
    def flat_out_shardings(self) -> list[NamedSharding]:
        """Those of the flat results as they are stored."""
        return self._shardings(self.outputs)

    def stored(self, leaves: Sequence[Any]) -> list[Any]:
        """The first flat arguments, ``leaves``, those with padding as they are stored; others as they are."""
        found = zip(leaves, self.inputs, self.flat_in_shardings, strict=False)
        return [x if p.stored in (None, np.shape(x)) else as_stored(x, p.stored or (), s) for x, p, s in found]

    def _shardings(self, places: Sequence[Place]) -> list[NamedSharding]:
        mesh = self.jax_mesh
        return [NamedSharding(mesh, p.spec.partition_spec(), memory_kind=p.memory_kind) for p in places]

    def _true_shardings(self, places: Sequence[Place], shardings: Sequence[NamedSharding]) -> list[NamedSharding]:
        pairs = zip(places, shardings, strict=True)
        return [s if p.stored is None else true_sharding(s, p.stored, p.shape) for p, s in pairs]

    def _args(self, leaves: Sequence[Any]) -> Any:
        return self._tree(self.in_tree).unflatten(leaves)[0]

    def _tree(self, tree: TreeDef | None) -> TreeDef:
        if tree is None:
            raise PlanError("this plan has no argument structure")
        return tree
