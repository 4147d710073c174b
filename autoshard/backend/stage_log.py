"""Times of the stages from a traced step to its executable, in the log of ``autoshard`` at level DEBUG."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Generator

from autoshard.units import time_text

LOGGER = logging.getLogger("autoshard")


@contextlib.contextmanager
def stage(name: str, step: str) -> Generator[None]:
    """Logs how long the ``with`` block took, as ``train: search took 12.3 ms``."""
    start = time.perf_counter()
    yield
    if LOGGER.isEnabledFor(logging.DEBUG):
        LOGGER.debug("%s: %s took %s", step, name, time_text(time.perf_counter() - start))
