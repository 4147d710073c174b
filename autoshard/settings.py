"""settings: what a plan asks of its target's compiler beside the program, each for what was measured of it."""

from __future__ import annotations

from typing import Any

from autoshard.graph import Graph

Options = tuple[tuple[str, Any], ...]

CONVOLVED = {"xla_tpu_enable_async_collective_fusion_fuse_all_gather": False}
"""Of programs with convolutions. The gather of a weight, where it is made part of the convolution before it, makes that
write its result anew (benchmarks/results/options.md)."""


def settings(graph: Graph, given: Options = ()) -> Options:
    """What the compiler of the graph's mesh is given: ``given``, and of ours what that does not overrule."""
    convolved = any(n.kind.op == "conv_general_dilated" for n in graph.nodes)
    ours = CONVOLVED if convolved and graph.program.mesh.platform == "tpu" else {}
    return tuple(sorted({**ours, **dict(given)}.items()))


def of_the_user(options: Options) -> Options:
    """Those of a plan's options that `settings` did not add."""
    return tuple((name, x) for name, x in options if CONVOLVED.get(name) != x)
