"""Signals as requests to stop: an interrupt arrives, wherever the signal found the process."""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from autoshard.train.stop_signals import SIGNALS, StopSignals


class StoppedAfter(StopSignals):
    """A signal that comes while so many steps are taken; before the first and after each it is asked."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps

    @property
    def requested(self) -> bool:
        self._left -= 1
        return self._left < 0


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """A process that was asked to stop keeps its handlers to its end, which here is the next test."""
    handlers = {each: signal.getsignal(each) for each in (*SIGNALS, signal.SIGALRM)}
    hook = sys.unraisablehook
    yield
    sys.unraisablehook = hook
    for each, handler in handlers.items():
        signal.signal(each, handler)


def collect_and_wait() -> None:
    gc.collect()
    time.sleep(10)
    pytest.fail("the interrupt was lost")


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_interrupts(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), StopSignals() as stop:
        signal.raise_signal(number)
    assert stop.requested
    assert stop.exit_code == 128 + number


def test_a_signal_in_a_callback_of_the_garbage_collector_interrupts_what_comes_after_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Python ignores what is raised there, but for a message."""

    def callback(*_: object) -> None:
        if not stop.requested:
            signal.raise_signal(signal.SIGINT)

    gc.callbacks.append(callback)
    stop = StopSignals()
    try:
        with pytest.raises(KeyboardInterrupt), stop:
            collect_and_wait()
    finally:
        gc.callbacks.remove(callback)
    assert stop.requested
    assert capsys.readouterr().err == ""


def test_a_signal_that_is_deferred_only_asks(capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals() as stop:
        with stop.deferred():
            with stop.deferred():
                pass
            signal.raise_signal(signal.SIGTERM)
        assert stop.requested
    assert capfd.readouterr().err == "SIGTERM: stopping; the next signal stops at once\n"


@pytest.mark.parametrize(
    ("number", "ends", "stays"),
    [(signal.SIGINT, False, False), (signal.SIGINT, True, True), (signal.SIGTERM, False, True)],
)
def test_after_ctrl_c_the_next_one_is_not_the_end_of_a_process_that_goes_on(
    number: signal.Signals, ends: bool, stays: bool
) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), StopSignals(ends_process=ends):
        signal.raise_signal(number)
    assert (signal.getsignal(signal.SIGINT) != before) is stays


def test_without_a_signal_all_is_as_before() -> None:
    before = [signal.getsignal(each) for each in (*SIGNALS, signal.SIGALRM)], sys.unraisablehook
    with StopSignals() as stop:
        assert not stop.requested
    assert ([signal.getsignal(each) for each in (*SIGNALS, signal.SIGALRM)], sys.unraisablehook) == before
