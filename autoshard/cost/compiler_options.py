"""settings: what a plan asks of its target's compiler beside the program, each for what was measured of it."""

from __future__ import annotations

from typing import Any

from autoshard.ir.graph import Graph

Options = tuple[tuple[str, Any], ...]

APART = {"xla_tpu_enable_async_collective_fusion_fuse_all_gather": False}
"""Of convolutions that fill the memory. The compiler makes a weight's gather part of the convolution before it, which
hides the gather, but then some write their results anew (benchmarks/results/options.md)."""
MORE = 1.15
"""What such a program was seen to take of what was foreseen, at the most."""


def keeps_apart(graph: Graph, peak: float, budget: float, given: Options = ()) -> bool:
    """Whether gathers are to stay out of convolutions.

    Args:
      peak: bytes per device that are foreseen if they do not.
      budget: bytes per device that there are.
      given: what the user says, which goes before it.
    """
    if peak * MORE <= budget or graph.program.mesh.platform != "tpu" or overruled(given):
        return False
    return any(n.kind.op == "conv_general_dilated" for n in graph.nodes)


def overruled(given: Options) -> dict[str, Any]:
    """What the user says otherwise than `settings` would."""
    return {name: x for name, x in given if APART.get(name, x) != x}


def settings(apart: bool, given: Options = ()) -> Options:
    """What the compiler is given: ``given``, and of ours what that does not overrule; ``apart`` as `keeps_apart`."""
    return tuple(sorted({**(APART if apart else {}), **dict(given)}.items()))


def of_the_user(options: Options) -> Options:
    """Those of a plan's options that `settings` did not add."""
    return tuple((name, x) for name, x in options if APART.get(name) != x)
