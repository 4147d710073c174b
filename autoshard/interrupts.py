"""Ctrl-C while the command starts: importing JAX takes seconds, in which Python would answer it with a traceback.

`autoshard` imports this before anything else. Runs handle signals themselves from their start to their end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import PurePath


def end_quietly(*_: object) -> None:
    """Ends the process with 130, as shells have it after Ctrl-C, with what it printed; leaves a killed one's files."""
    with contextlib.suppress(Exception):  # that of a line which is being printed
        sys.stdout.flush()
    os._exit(128 + signal.SIGINT)


def is_command(arguments: list[str]) -> bool:
    """Whether a process started by ``arguments``, as in `sys.orig_argv`, is the command ``autoshard``, by its name or
    as ``python -m autoshard``.
    """
    given = arguments[1:]
    while given and given[0].startswith("-") and given[0] not in ("-m", "-c"):
        given = given[2:] if given[0] in ("-W", "-X") else given[1:]
    return given[:2] == ["-m", "autoshard"] or PurePath(*given[:1]).stem == "autoshard"


if is_command(sys.orig_argv) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end_quietly)
