"""Whether the processes that share a mesh made the same plan, and compiled it to collectives in the same order; where
they did not, in what it differs.

Digests are compared; only where they differ do the processes send one another what their plans say.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

from autoshard.backend.hlo.text import parse_hlo
from autoshard.backend.process_local import gather
from autoshard.errors import PlanError
from autoshard.machine.collective import COLLECTIVE_KINDS
from autoshard.plan.record import PlanRecord
from autoshard.strict_files import cut

NAMED = 3
"""Most differences that an error spells out."""

type Summary = Mapping[str, str]
"""What a plan says, in a few words each, by what that is about; causes before what follows from them."""


def plan_summary(plan: PlanRecord) -> Summary:
    """What ``plan`` was made for, and the specs of its arguments, each by the argument's path."""
    pipeline = plan.pipeline
    stages = "none" if pipeline is None else f"{pipeline.stages} stages and {pipeline.microbatches} micro-batches"
    return {
        "mesh": str(plan.mesh),
        "strategy": plan.strategy,
        "pipeline": stages,
        "passes": ", ".join(report.written for report in plan.passes) or "none",
        "compiler options": ", ".join(f"{name}={value}" for name, value in plan.compiler_options) or "none",
        "memory budget": "none" if plan.memory_budget is None else f"{plan.memory_budget:.0f} bytes",
        **{place.path: f"{place.dtype}{list(place.shape)}" for place in plan.inputs},
        **{f"the spec of {place.path}": place.where for place in plan.inputs},
    }


SAME_ARGUMENTS = "The function, its options and the shapes of its arguments must be the same in every process"
SAME_COMPILER = (
    "Each process compiles the step for itself, and XLA for GPUs chooses kernels by timing them: run one version of XLA"
    " on chips of one kind, and leave --xla_gpu_shard_autotuning on"
)


def check_agreement(
    mesh: Mesh, text: str, what: str, summary: Callable[[], Summary], remedy: str = SAME_ARGUMENTS
) -> None:
    """Every process that has devices of ``mesh`` must call this, with the same ``text``.

    Args:
      summary: of what ``text`` is of; only asked for where texts differ.

    Raises:
      PlanError: in every process, if ``what`` the text describes differs; names the first differences.
    """
    devices = sorted(mesh.devices.flat, key=lambda d: d.id)  # the order of the axes is a part of what may differ
    digest = np.full((len(devices), 1), zlib.crc32(text.encode()), np.uint32)
    found = gather(Mesh(np.asarray(devices, dtype=object), ("devices",)), digest)[:, 0]
    other = next((d for d, one in zip(devices, found, strict=True) if one != found[0]), None)
    if other is None:
        return
    firsts = {d.process_index: d for d in reversed(devices)}  # one device of each process
    of_processes = Mesh(np.asarray([firsts[p] for p in sorted(firsts)], dtype=object), ("processes",))
    summaries = dict(zip(sorted(firsts), _of_all(of_processes, summary()), strict=True))
    raise PlanError(
        f"{what} is not the same in processes {devices[0].process_index} and {other.process_index}, which share "
        f"the mesh: {differences(summaries)}. {remedy}"
    )


def collective_order(text: str) -> Summary:
    """The collectives of a compiled program in the order in which it starts them, by their number in it.

    Args:
      text: HLO.
    """
    instructions = (i for c in parse_hlo(text).computations.values() for i in c.instructions.values())
    found = [i for i in instructions if i.opcode.removesuffix("-start") in COLLECTIVE_KINDS]
    return {f"collective {n}": f"{i.opcode} of {i.shape}" for n, i in enumerate(found, 1)}


def differences(summaries: Mapping[int, Summary]) -> str:
    """The first differences between the summaries of several processes, by process, in words: each between the first
    process and the next one that says something else."""
    (first, own), *others = summaries.items()
    names = dict.fromkeys(name for summary in summaries.values() for name in summary)
    found: list[str] = []
    for name in names:
        here = own.get(name, "absent")
        there = next(((p, said) for p, each in others if (said := each.get(name, "absent")) != here), None)
        if there is not None:
            found.append(f"{name}: {cut(here, 160)} in process {first}, {cut(there[1], 160)} in process {there[0]}")
    if not found:
        return (
            "mesh, strategy, passes, compiler options and arguments are, so that the function itself differs, or the "
            "specs of values inside it"
        )
    rest = [f"{len(found) - NAMED} more"] if len(found) > NAMED else []
    return "; ".join([*found[:NAMED], *rest])


def _of_all(mesh: Mesh, own: Summary) -> Sequence[Summary]:
    """The summaries of all processes, of each of which ``mesh`` has one device, in their order there."""
    sent = np.frombuffer(json.dumps(own).encode(), np.uint8)
    sizes = gather(mesh, np.full((mesh.size, 1), len(sent), np.uint32))[:, 0]
    rows = np.zeros((mesh.size, int(sizes.max())), np.uint8)
    rows[:, : len(sent)] = sent
    return [json.loads(row[:size].tobytes()) for row, size in zip(gather(mesh, rows), sizes, strict=True)]
