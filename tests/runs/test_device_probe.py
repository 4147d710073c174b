"""Devices are measured by a product that each computes by itself."""

from __future__ import annotations

from autoshard.runs.device_probe import device_seconds


def test_devices_are_measured():
    assert 0 < device_seconds() < 60
