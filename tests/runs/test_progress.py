"""The progress line: what it says, on a terminal and in a file."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from autoshard.runs.progress import ProgressLine


def test_lines_come_at_intervals_without_a_terminal():
    shown = io.StringIO()
    with ProgressLine(Console(file=shown, soft_wrap=True), total=7, amount=100, unit="tokens", every=3) as progress:
        for step in range(1, 8):
            progress.step(step, 2.5)
    lines = shown.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 3/7", "step 6/7", "step 7/7"]
    for line in lines:
        assert re.fullmatch(r"step ./7  loss 2\.5000  [\d,]+ tokens/s  [\d.]+ [mµn]s/step  0:00 left", line)


def test_the_rate_is_measured_anew_after_a_pause():
    shown = io.StringIO()
    with ProgressLine(Console(file=shown, soft_wrap=True), total=9, amount=100, unit="tokens", every=1) as progress:
        progress.step(1, 2.5)
        progress.step(2, 2.5)
        progress.restart()
        progress.step(3, 2.5)
    first, second, third = shown.getvalue().splitlines()
    assert "tokens/s" in second
    assert "tokens/s" not in first + third


def test_a_terminal_shows_one_line_that_is_redrawn():
    shown = io.StringIO()
    with ProgressLine(
        Console(file=shown, force_terminal=True, width=100), total=9, amount=100, unit="tokens", every=1
    ) as progress:
        assert shown.getvalue() == ""
        progress.step(1, 2.5)
        progress.step(2, 2.25)
    assert "step 2/9  loss 2.2500" in shown.getvalue()
    assert "\x1b[2K" in shown.getvalue()


def test_the_share_of_the_peak_and_the_memory_are_shown_where_they_are_known(monkeypatch: pytest.MonkeyPatch):
    shown, now = io.StringIO(), iter(range(0, 100, 2))
    device = SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 3 << 30, "bytes_limit": 16 << 30})
    monkeypatch.setattr("jax.local_devices", lambda: [device])
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))
    with ProgressLine(Console(file=shown, soft_wrap=True), total=9, amount=100, unit="examples", every=1) as progress:
        progress.measure_against(0.5)
        progress.step(1, 2.5)
        progress.step(2, None)
    wanted = "step 2/9  50 examples/s  2.00 s/step  MFU 25.0%  3.0 GiB of 16.0 GiB  0:14 left"
    assert shown.getvalue().splitlines()[1] == wanted
