"""Compiler options that a plan sets for its target: today one, which trades hidden all-gathers for memory.

XLA for TPU fuses the asynchronous all-gather of a weight into the convolution before it. That hides the all-gather, but
such a convolution cannot be overwritten by its elementwise consumer, which then needs a buffer of its own. Where the
memory budget is tight the plan disables the fusion. Measured in benchmarks/results/options.md.
"""

from __future__ import annotations

from typing import Any

from autoshard.ir.graph import Graph

CompilerOptions = tuple[tuple[str, Any], ...]

NO_ALL_GATHER_FUSION = {"xla_tpu_enable_async_collective_fusion_fuse_all_gather": False}
"""The option that disables the fusion."""
PEAK_MARGIN = 1.15
"""Largest measured ratio of reported to predicted peak memory of a program with fused all-gathers."""


def should_disable_all_gather_fusion(graph: Graph, peak: float, budget: float, given: CompilerOptions = ()) -> bool:
    """Whether a plan disables the fusion: on TPU, for a program with convolutions that may not fit otherwise.

    Args:
      graph: the program.
      peak: predicted peak with the fusion, in bytes per device.
      budget: memory budget, in bytes per device.
      given: the user's compiler options; where they enable the fusion, it stays.
    """
    if peak * PEAK_MARGIN <= budget or graph.program.mesh.platform != "tpu" or conflicting_options(given):
        return False
    return any(n.kind.traits.convolution for n in graph.nodes)


def conflicting_options(given: CompilerOptions) -> dict[str, Any]:
    """The options in ``given`` that contradict the one that a plan sets."""
    return {name: x for name, x in given if NO_ALL_GATHER_FUSION.get(name, x) != x}


def effective_options(disable_fusion: bool, given: CompilerOptions = ()) -> CompilerOptions:
    """The options that the program is compiled with, sorted: ``given`` override the plan's own."""
    return tuple(sorted({**(NO_ALL_GATHER_FUSION if disable_fusion else {}), **dict(given)}.items()))


def user_options(options: CompilerOptions) -> CompilerOptions:
    """``options`` of a plan without those that `effective_options` added."""
    return tuple((name, x) for name, x in options if NO_ALL_GATHER_FUSION.get(name) != x)
