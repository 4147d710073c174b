"""What of the time between steps a host is late by, with a clock that the test sets."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from autoshard.runs.host_times import HostTimes


class Running:
    """A number that devices still compute."""

    def is_ready(self) -> bool:
        return False


@pytest.fixture
def at() -> list[float]:
    return [0.0]


def test_a_host_is_late_by_what_it_does_itself_while_its_devices_wait(at: list[float], monkeypatch: pytest.MonkeyPatch):
    host = HostTimes(lambda: at[0])

    def step(took: float, results: object) -> None:
        with host.starting(results):
            at[0] += took

    step(9.0, [])  # nothing is before the first
    at[0] += 0.5
    with host.aside():
        at[0] += 3.0  # it waits for others
    step(0.25, jnp.ones(()).block_until_ready())
    monkeypatch.setattr("autoshard.runs.host_times.jax.Array", Running)
    at[0] += 2.0
    step(0.25, [Running()])  # its devices had enough to do
    assert host.take() == [0.0, 0.5, 0.0]
    at[0] += 1.0
    step(0.25, [])
    assert host.take() == [1.0]
