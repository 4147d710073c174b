"""settings: what a plan asks of its target's compiler beside the program, each for what was measured of it."""

from __future__ import annotations

from typing import Any

from autoshard.ir.graph import Graph

CompilerOptions = tuple[tuple[str, Any], ...]

NO_ALL_GATHER_FUSION = {"xla_tpu_enable_async_collective_fusion_fuse_all_gather": False}
"""Of convolutions that fill the memory. The compiler makes a weight's gather part of the convolution before it, which
hides the gather, but then some write their results anew (benchmarks/results/options.md)."""
PEAK_MARGIN = 1.15
"""What such a program was seen to take of what was foreseen, at the most."""


def should_disable_all_gather_fusion(graph: Graph, peak: float, budget: float, given: CompilerOptions = ()) -> bool:
    """Whether gathers are to stay out of convolutions.

    Args:
      peak: bytes per device that are foreseen if they do not.
      budget: bytes per device that there are.
      given: what the user says, which goes before it.
    """
    if peak * PEAK_MARGIN <= budget or graph.program.mesh.platform != "tpu" or conflicting_options(given):
        return False
    return any(n.kind.traits.convolution for n in graph.nodes)


def conflicting_options(given: CompilerOptions) -> dict[str, Any]:
    """What the user says otherwise than `settings` would."""
    return {name: x for name, x in given if NO_ALL_GATHER_FUSION.get(name, x) != x}


def effective_options(apart: bool, given: CompilerOptions = ()) -> CompilerOptions:
    """What the compiler is given: ``given``, and of ours what that does not overrule; ``apart`` as `keeps_apart`."""
    return tuple(sorted({**(NO_ALL_GATHER_FUSION if apart else {}), **dict(given)}.items()))


def user_options(options: CompilerOptions) -> CompilerOptions:
    """Those of a plan's options that `settings` did not add."""
    return tuple((name, x) for name, x in options if NO_ALL_GATHER_FUSION.get(name) != x)
