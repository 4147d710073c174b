"""settings: what a plan asks of its target's compiler beside the program, each for what was measured of it."""

from __future__ import annotations

from typing import Any

from autoshard.graph import Graph

Options = tuple[tuple[str, Any], ...]

APART = {"xla_tpu_enable_async_collective_fusion_fuse_all_gather": False}
"""Of convolutions that fill the memory. The compiler makes a weight's gather part of the convolution before it, which
hides the gather, but then some write their results anew (benchmarks/results/options.md)."""
MORE = 1.15
"""What such a program was seen to take of what was foreseen, at the most."""


def keeps_apart(graph: Graph, peak: float, budget: float) -> bool:
    """Whether gathers are to stay out of convolutions.

    Args:
      peak: bytes per device that are foreseen if they do not.
      budget: bytes per device that there are.
    """
    convolved = any(n.kind.op == "conv_general_dilated" for n in graph.nodes)
    return convolved and peak * MORE > budget and graph.program.mesh.platform == "tpu"


def settings(apart: bool, given: Options = ()) -> Options:
    """What the compiler is given: ``given``, and of ours what that does not overrule; ``apart`` as `keeps_apart`."""
    return tuple(sorted({**(APART if apart else {}), **dict(given)}.items()))


def of_the_user(options: Options) -> Options:
    """Those of a plan's options that `settings` did not add."""
    return tuple((name, x) for name, x in options if APART.get(name) != x)
