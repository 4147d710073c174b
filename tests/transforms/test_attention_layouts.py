"""Attention's operands are laid out where that has been seen to pay on the chip, and for steps like this one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest
from jax import numpy as jnp

from autoshard.machine.mesh import Hardware, Link, LogicalMesh
from autoshard.transforms.attention_layouts import lays_out_attention
from tests.programs import program

LINKS = {"link": Link("link", 1e9, 1e-6)}
PLAIN = Hardware("cpu", {"float32": 1e11}, 8e9, 1e12, LINKS, 1e-6)
LAID_OUT = replace(PLAIN, attention_layouts=True)
DELAYED = replace(LAID_OUT, layouts_delay_host_copies=True)


def layers(x: Any, ws: Any, *, where: str) -> Any:
    def layer(h: Any, w: Any) -> tuple[Any, None]:
        if where == "host":
            h = jax.device_put(jax.device_put(h, jax.memory.Space.Host), jax.memory.Space.Device)
        return jnp.sin(h), None

    return jax.lax.scan(layer, x, ws)[0]


@pytest.mark.parametrize(
    ("hardware", "where", "expected"),
    [
        (PLAIN, "device", False),
        (LAID_OUT, "device", True),
        (LAID_OUT, "host", True),
        (DELAYED, "device", True),
        (DELAYED, "host", False),
    ],
)
def test_not_beside_copies_to_the_host_that_xla_would_then_fetch_too_late(
    hardware: Hardware, where: str, expected: bool
) -> None:
    args = jnp.zeros((8, 8)), jnp.zeros((3, 8))
    traced = program(lambda x, ws: layers(x, ws, where=where), args, LogicalMesh(("x",), (1,), hardware))
    assert lays_out_attention(traced) is expected
