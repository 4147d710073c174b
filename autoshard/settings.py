"""settings: what a plan asks of its target's compiler beside the program, each for what was measured of it."""

from __future__ import annotations

from typing import Any

from autoshard.graph import Graph

Options = tuple[tuple[str, Any], ...]

APART = {"xla_tpu_enable_async_collective_fusion_fuse_all_gather": False}
"""Of convolutions that fill the memory. The compiler makes a weight's gather part of the convolution before it, which
hides the gather, but then some write their results anew (benchmarks/results/options.md)."""
MORE = 4 / 3
"""What such a program was seen to take of what it takes without, at the most."""


def settings(graph: Graph, peak: float, budget: float, given: Options = ()) -> Options:
    """What the compiler of the graph's mesh is given: ``given``, and of ours what that does not overrule.

    Args:
      peak: bytes per device that the plan foresees.
      budget: bytes per device that there are.
    """
    convolved = any(n.kind.op == "conv_general_dilated" for n in graph.nodes)
    ours = APART if convolved and peak * MORE > budget and graph.program.mesh.platform == "tpu" else {}
    return tuple(sorted({**ours, **dict(given)}.items()))


def of_the_user(options: Options) -> Options:
    """Those of a plan's options that `settings` did not add."""
    return tuple((name, x) for name, x in options if APART.get(name) != x)
