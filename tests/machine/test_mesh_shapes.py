"""Candidate mesh shapes: all devices, and whole dimensions of the chip grid on one axis."""

from __future__ import annotations

import math

import pytest

from autoshard.machine.mesh_shapes import mesh_shapes


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((1,), [{"data": 1}]),
        ((7,), [{"data": 7}]),
        ((8,), [{"data": 8}, {"data": 4, "model": 2}, {"data": 2, "model": 4}]),
        ((16, 2), [{"pod": 2, "data": 8}, {"pod": 2, "data": 4, "model": 2}, {"pod": 2, "data": 2, "model": 4}]),
        ((16, 1, (4, 4)), [{"data": 16}, {"data": 4, "model": 4}]),
        ((32, 1, (4, 8)), [{"data": 32}, {"data": 8, "model": 4}, {"data": 4, "model": 8}]),
        ((64, 1, (4, 4, 4)), [{"data": 64}, {"data": 16, "model": 4}, {"data": 4, "model": 16}]),
        ((8, 1, (2, 2, 1)), [{"data": 8}, {"data": 4, "model": 2}, {"data": 2, "model": 4}]),
    ],
    ids=str,
)
def test_mesh_shapes(given, expected):
    found = mesh_shapes(*given)
    assert found == expected
    assert all(math.prod(s.values()) == given[0] for s in found)


@pytest.mark.parametrize("devices", [1, 2, 12, 97, 720_720, 2**20])
def test_every_divisor_is_an_axis_once(devices):
    inner = [shape.get("model", 1) for shape in mesh_shapes(devices)]
    assert inner == [n for n in range(1, max(devices, 2)) if devices % n == 0]
