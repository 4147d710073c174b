"""Program: a traced step with its mesh, pins and argument paths."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from autoshard.errors import ConfigError, nearest
from autoshard.ir.rule_registry import Rules
from autoshard.ir.spec import Spec, checked_spec
from autoshard.jaxpr import Jaxpr, dtype_bits
from autoshard.machine.mesh import LogicalMesh

TreeDef = jax.tree_util.PyTreeDef


@dataclass(frozen=True)
class Leaf:
    """One flat argument or result: where it stands, and its abstract value."""

    path: str
    """As the user would write it: ``state['params']['w1']``."""
    aval: jax.ShapeDtypeStruct
    donated: bool = False
    pin: Spec | None = None
    """What the user demanded of it; never overruled."""

    @property
    def bytes(self) -> int:
        """Size of the whole value, in bytes."""
        return -(-math.prod(self.aval.shape) * dtype_bits(self.aval.dtype) // 8)


@dataclass(frozen=True)
class Program:
    """A step as planning sees it. `jaxpr` is normalized: each variable is defined once."""

    name: str
    jaxpr: Jaxpr
    mesh: LogicalMesh
    rules: Rules = field(compare=False, repr=False)
    """Of the operations in it: what plans and rewrites it asks them how each may be split."""
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    in_tree: TreeDef
    """Of ``(args, kwargs)``, static arguments left out."""
    out_tree: TreeDef
    carries: tuple[tuple[int, int], ...] = ()
    """(input, output) pairs of flat positions that are one state before and after the step."""
    source: str = ""
    unpadded_jaxpr: Jaxpr | None = None
    """`jaxpr` without elements that mean nothing, where it has some (`autoshard.transforms.pad_uneven`)."""

    def with_jaxpr(self, jaxpr: Jaxpr) -> Program:
        """The same step with its equations rewritten."""
        return replace(self, jaxpr=jaxpr)

    def __str__(self) -> str:
        rows = [f"program {self.name} over mesh {self.mesh}, {len(self.jaxpr.eqns)} equations"]
        outs = dict(self.carries)
        for i, leaf in enumerate(self.inputs):
            notes = [f"pinned {leaf.pin}"] * (leaf.pin is not None) + ["donated"] * leaf.donated
            if i in outs:
                notes.append(f"-> {self.outputs[outs[i]].path}")
            rows.append(f"  {leaf.path}: {aval_text(leaf.aval)}{'  ' if notes else ''}{', '.join(notes)}")
        return "\n".join(rows)


def aval_text(aval: Any) -> str:
    """Short text of an abstract value: ``float32[8,16]``."""
    return f"{aval.dtype.name if hasattr(aval.dtype, 'name') else aval.dtype}[{','.join(map(str, aval.shape))}]"


def with_pins(program: Program, pins: Mapping[str, PartitionSpec], what: str, *, over: bool = False) -> Program:
    """``program`` with pins by argument-path glob; one that an argument has already wins, unless ``over``.

    Raises:
      ConfigError: a glob that matches nothing.
      SpecError: a spec that does not fit.
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
            if over or leaf.pin is None:
                inputs[i] = replace(leaf, pin=checked_spec(spec, leaf.aval.shape, program.mesh.shape, leaf.path))
    return replace(program, inputs=tuple(inputs))
