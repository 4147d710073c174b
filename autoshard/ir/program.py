"""Program: a traced step with its mesh, its flat arguments and results, their pins, and its rules."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec

from autoshard.errors import ConfigError, nearest
from autoshard.ir.rule_registry import Rules
from autoshard.ir.spec import Spec, checked_spec
from autoshard.jaxpr import Jaxpr, dtype_bits
from autoshard.machine.mesh import LogicalMesh
from autoshard.schedule.schedule import Schedule

TreeDef = jax.tree_util.PyTreeDef
MemoryKind = Literal["pinned_host", "unpinned_host"] | None
"""JAX's name of the memory that an array is in; None is the devices' own."""


@dataclass(frozen=True)
class Leaf:
    """One flat argument or result."""

    path: str
    """Its path in the arguments or the result: ``state['params']['w1']``."""
    aval: jax.ShapeDtypeStruct
    donated: bool = False
    pin: Spec | None = None
    """The spec that the user demands; never overruled."""
    whole_pin: Spec | None = None
    """Of a pipeline, ``pin`` over the whole mesh; ``pin`` is then without the axis of the stages."""
    memory_kind: MemoryKind = None
    """The memory that it is in: as the user demands, else as its type says."""
    memory_pinned: bool = False
    """Whether the user demands it: a `NamedSharding` says so, a `PartitionSpec` does not."""
    offloaded: bool = False
    """Whether the plan keeps it in the host's memory, and the step's function takes and returns it on the device."""
    placed: bool = False
    """Whether ``pin`` is no demand of the user but where the argument is already."""
    padded_from: tuple[int, ...] | None = None
    """Its true shape, where it is stored with padding (`autoshard.transforms.pad_state`); ``aval`` is with it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape as the user's function has it: without padding."""
        return tuple(self.aval.shape) if self.padded_from is None else self.padded_from

    @property
    def true_aval(self) -> jax.ShapeDtypeStruct:
        """Its abstract value without padding."""
        return self.aval if self.padded_from is None else self.aval.update(shape=self.padded_from)

    @property
    def stored_shape(self) -> tuple[int, ...] | None:
        """Its shape with padding, where it is stored so."""
        return None if self.padded_from is None else tuple(self.aval.shape)

    @property
    def bytes(self) -> int:
        """Size of the unsharded value in bytes."""
        return -(-math.prod(self.aval.shape) * dtype_bits(self.aval.dtype) // 8)


@dataclass(frozen=True)
class PipelineRequest:
    """A pipeline that the user asks for."""

    mesh: LogicalMesh
    """The whole mesh."""
    axis: str
    """The mesh axis of the stages."""
    schedule: str | Schedule | None = None
    """None leaves it to the planner."""

    @property
    def stages(self) -> int:
        return self.mesh.shape[self.axis]

    @property
    def stage_mesh(self) -> LogicalMesh:
        """The mesh of one stage: one device along the axis of the stages."""
        sizes = tuple(1 if a == self.axis else n for a, n in self.mesh.shape.items())
        torus = tuple(along if n > 1 else () for along, n in zip(self.mesh.torus, sizes, strict=False))
        return replace(self.mesh, axis_sizes=sizes, torus=torus)


@dataclass(frozen=True)
class Program:
    """A step to plan. `jaxpr` is normalized: each variable is defined once."""

    name: str
    jaxpr: Jaxpr
    mesh: LogicalMesh
    rules: Rules = field(compare=False, repr=False)
    """The sharding rules of its operations, for planning and for rewrites."""
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    in_tree: TreeDef
    """Of ``(args, kwargs)`` without static arguments."""
    out_tree: TreeDef
    carries: tuple[tuple[int, int], ...] = ()
    """Carried state: (argument, result) pairs of flat positions, where the result replaces the argument in the next
    call."""
    source: str = ""
    pipeline: PipelineRequest | None = None
    """The pipeline that its chain of layers is to run as; ``mesh`` is then that of one stage."""
    unpadded_jaxpr: Jaxpr | None = None
    """`jaxpr` before dimensions were padded, where some were (`autoshard.passes.pad_uneven`)."""

    @property
    def whole_mesh(self) -> LogicalMesh:
        """The mesh that it runs on."""
        return self.mesh if self.pipeline is None else self.pipeline.mesh

    def with_jaxpr(self, jaxpr: Jaxpr) -> Program:
        """The same step with another jaxpr."""
        return replace(self, jaxpr=jaxpr)

    def __str__(self) -> str:
        rows = [f"program {self.name} over mesh {self.mesh}, {len(self.jaxpr.eqns)} equations"]
        outs = dict(self.carries)
        for i, leaf in enumerate(self.inputs):
            notes = [f"pinned {leaf.pin}"] * (leaf.pin is not None) + ["donated"] * leaf.donated
            notes += [f"in {leaf.memory_kind}"] if leaf.memory_kind else []
            if i in outs:
                notes.append(f"-> {self.outputs[outs[i]].path}")
            rows.append(f"  {leaf.path}: {aval_text(leaf.aval)}{'  ' if notes else ''}{', '.join(notes)}")
        return "\n".join(rows)


def pinned(leaf: Leaf, spec: Spec | None, pipeline: PipelineRequest | None) -> Leaf:
    """``leaf`` pinned to ``spec``, over the mesh that the step runs on."""
    if spec is None or pipeline is None:
        return replace(leaf, pin=spec, whole_pin=spec)
    return replace(leaf, pin=spec.without((pipeline.axis,)), whole_pin=spec)


def aval_text(aval: Any) -> str:
    """Short text of an abstract value: ``float32[8,16]``."""
    return f"{aval.dtype.name if hasattr(aval.dtype, 'name') else aval.dtype}[{','.join(map(str, aval.shape))}]"


def with_pins(program: Program, pins: Mapping[str, PartitionSpec], what: str, *, overwrite: bool = False) -> Program:
    """``program`` with ``pins``, specs by argument-path glob; arguments that are pinned stay so unless ``overwrite``.

    Raises:
      ConfigError: a glob that matches no argument; ``what`` names the glob in the message.
      SpecError: a spec that does not fit its argument or the mesh.
    """
    inputs = list(program.inputs)
    for pattern, spec in pins.items():
        hits = [i for i, leaf in enumerate(inputs) if fnmatch.fnmatchcase(leaf.path, pattern.replace("[", "[[]"))]
        if not hits:
            raise ConfigError(
                f"{what} {pattern!r} matches no argument of {program.name}"
                f"{nearest(pattern, [leaf.path for leaf in inputs])}"
            )
        for i in hits:
            leaf = inputs[i]
            if overwrite or leaf.pin is None:
                pin = checked_spec(spec, leaf.aval.shape, program.whole_mesh.shape, leaf.path)
                inputs[i] = replace(pinned(leaf, pin, program.pipeline), placed=False)
    return replace(program, inputs=tuple(inputs))
