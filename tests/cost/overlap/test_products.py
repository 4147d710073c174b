"""Whose code runs a product."""

from __future__ import annotations

from typing import Any

from jax import lax

from autoshard.cost.overlap.products import is_kernel, is_of_xla
from tests.programs import graph, mesh


def test_a_convolution_s_local_form_is_no_kernel() -> None:
    """XLA gathers beside convolutions as beside its own products, also where the rule has a form on shards."""

    def convolved(x: Any, w: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, w, (2, 2), "VALID", dimension_numbers=numbers)

    (kind,) = (n.kind for n in graph(convolved, ((16, 8, 8, 16), (2, 2, 16, 64)), mesh(a=8)).nodes if n.kind.flops)
    assert kind.convolution is not None
    assert kind.rule.local is not None
    assert not is_kernel(kind)
    assert not is_of_xla(kind)
