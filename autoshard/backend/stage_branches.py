"""Collectives that wait for devices of other stages, inside of what a stage of a pipeline runs by itself.

What a stage runs at a tick is a branch of a conditional (`autoshard.pipelining.stage_program`), which other stages do
not take, or not then. A collective in it has to be one of devices of that stage, or it waits for ever. XLA for CPUs and
GPUs makes all devices of the program take part in every collective-permute, whatever pairs it has: both give a permute
one group of all partitions (``CollectivePermuteThunk`` in ``xla/backends/{cpu,gpu}/runtime``), and meet in it, CPUs in
each run, GPUs of one process in the first.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import numpy as np

from autoshard import jaxpr as jx
from autoshard.backend.hlo.collectives import PAIRS, listed_groups, replica_groups
from autoshard.backend.hlo.slices import of_every_slice, slice_transfer
from autoshard.backend.hlo.text import Instruction, Module, called, parse_hlo
from autoshard.backend.hlo.trip_counts import trip_count
from autoshard.errors import PACKAGE, PipelineError, PipelineWarning
from autoshard.machine.collective import COLLECTIVE_KINDS, COLLECTIVE_PERMUTE
from autoshard.machine.mesh import LogicalMesh

_GROUPS = re.compile(r"replica_groups=.*?(?=, [a-z_]+=(?!\()|$)")


@dataclass(frozen=True, slots=True)
class Stray:
    """A collective in a branch that not all of its participants take."""

    kind: str
    operation: str
    """JAX's name of it."""
    source: str
    """``file:line`` of the user's code; empty if unknown."""


def stray_collectives(text: str, mesh: LogicalMesh, axis: str) -> tuple[Stray, ...]:
    """Those of a compiled pipeline.

    Args:
      text: HLO as from `jax.stages.Compiled.as_text`.
      mesh: that the program was compiled for.
      axis: of ``mesh``, the stages.
    """
    module, pairwise = parse_hlo(text), mesh.platform == "tpu"
    stage_of = np.indices(mesh.axis_sizes)[mesh.axis_names.index(axis)].ravel()
    return tuple(
        Stray(i.opcode.removesuffix("-start"), module.operation(i), module.source_outside(i, PACKAGE))
        for i in _in_branches(module)
        if not _within_a_stage(i, stage_of, pairwise, module.partitions)
    )


def _within_a_stage(instruction: Instruction, stage_of: np.ndarray, pairwise: bool, partitions: int) -> bool:
    """Whether an instruction is no collective, or one in which only devices of one stage meet.

    Args:
      pairwise: in a permute only the two devices of a pair meet.
      partitions: of the program, as `Module` has it.
    """
    kind, devices = instruction.opcode.removesuffix("-start"), len(stage_of)
    if transfer := slice_transfer(instruction, partitions):
        groups = transfer.groups or None  # unknown: of all
    elif kind not in COLLECTIVE_KINDS:
        return True
    elif kind == COLLECTIVE_PERMUTE:
        pairs = PAIRS.search(instruction.attributes)
        groups = of_every_slice(listed_groups(pairs[1]), partitions, devices) if pairs and pairwise else None
    else:
        named = _GROUPS.search(instruction.attributes)
        groups = replica_groups(named[0], partitions or devices) if named else None
        groups = of_every_slice(groups, partitions, devices) if groups is not None else None
    return groups is not None and all(len({*stage_of[list(group)].tolist()}) == 1 for group in groups)


def _in_branches(module: Module) -> Iterator[Instruction]:
    """Every instruction that devices of one stage may run while those of another do not: what is in a branch of a
    stage's own; and, in what all run at a tick, in the branches and loops of the step itself, which go by the values
    of a micro-batch.
    """
    begin = module.entry, False, False
    todo, seen = [begin], {begin}
    while todo:
        name, in_tick, alone = todo.pop()
        computation = module.computations[name]
        for i in computation.instructions.values():
            if alone:
                yield i
            named = jx.branches_of_stages(module.operation(i)) if i.opcode == "conditional" else None
            inside, apart = in_tick or named is not None, alone or named == "apart"
            if in_tick and named is None:
                apart |= i.opcode == "conditional"
                apart |= i.opcode == "while" and not trip_count(i, computation, module).exact
            found = {(n, inside, apart) for _, n in called(i) if n in module.computations} - seen
            seen |= found
            todo += sorted(found)


def without_strays(
    name: str,
    staged: Callable[[bool], jx.Jaxpr],
    lower: Callable[[jx.Jaxpr], jax.stages.Lowered],
    compile: Callable[[jax.stages.Lowered], jax.stages.Compiled],
    mesh: LogicalMesh,
    axis: str,
) -> tuple[jx.Jaxpr, jax.stages.Lowered]:
    """The first of ``staged(together=False)`` and ``staged(together=True)`` in which no stage waits for ever for
    another, and it lowered and compiled.

    Raises:
      PipelineError: one would in both.
    """
    for together in (False, True):
        jaxpr = staged(together)
        lowered = lower(jaxpr)
        found = stray_collectives(compile(lowered).as_text() or "", mesh, axis)
        if not found:
            return jaxpr, lowered
        first = f"a {found[0].kind} of all devices stands in what a stage of the pipeline over {axis} computes"
        first += f" ({found[0].source or found[0].operation}"
        first += f", and {len(found) - 1} more)" if len(found) > 1 else ")"
        if not together:
            warnings.warn(
                f"{name}: {first}: so all stages compute what any does, and keep what is their own",
                PipelineWarning,
                skip_file_prefixes=(PACKAGE,),
            )
    raise PipelineError(
        f"{name}: {first}, inside of a branch or a loop of the step whose course its values decide: there stages would "
        "wait for each other for ever; plan without a pipeline, or without the branch"
    )
