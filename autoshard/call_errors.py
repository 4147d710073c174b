"""What a person is shown of an error in a function that their configuration calls: its entry, and their own lines."""

from __future__ import annotations

import contextlib
import sysconfig
import traceback
from collections.abc import Generator

from autoshard.errors import AutoshardError
from autoshard.jaxpr.origin import PACKAGE
from autoshard.strict_files import cut

TRACEBACK_VARIABLE = "AUTOSHARD_TRACEBACK"
"""Environment variable with which the command line shows the whole traceback of an error too."""
MAX_FRAMES = 20
"""Of the person's own lines, the innermost."""
MAX_MESSAGE = 4000
"""Letters of the error's own message."""

ALSO = "also: "
"""What begins a note of what went wrong after the error."""

_HINT = "hint: "
"""What begins a note of what may explain the error."""
_RAISED = " raised this, or what it gave"
_LIBRARIES = (PACKAGE, "<", *{sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")})
"""What the names of files begin with that are not the person's own."""


def note_entry(error: Exception, entry: str) -> None:
    """Notes that ``error`` was raised by what a configuration names at ``entry``; the innermost entry stays."""
    if entry and _entry(error) is None:
        error.add_note(f"{entry}{_RAISED}")


@contextlib.contextmanager
def noted(entry: str) -> Generator[None]:
    """Notes errors that are raised inside, but for those of autoshard, which say themselves what they are about."""
    try:
        yield
    except AutoshardError:
        raise
    except Exception as error:
        note_entry(error, entry)
        raise


@contextlib.contextmanager
def hinted(hint: str) -> Generator[None]:
    """Notes ``hint``, what may explain them, with errors that are raised inside; the empty string notes nothing."""
    try:
        yield
    except Exception as error:
        if hint:
            error.add_note(f"{_HINT}{hint}")
        raise


def shown_error(error: BaseException) -> str | None:
    """The entry that raised ``error``, its class and message, the lines of the person's own files on the way to
    where it was raised, and what may explain it; None where no function of a configuration raised it.
    """
    if (entry := _entry(error)) is None:
        return None
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames[-1:]
    lines = [f"  {f.filename}:{f.lineno} in {f.name}: {f.line}" for f in own[-MAX_FRAMES:]]
    message = cut(str(error), MAX_MESSAGE)
    head = f"{entry} raised {type(error).__name__}{f': {message}' if message else ''}"
    return "\n".join(
        [
            head,
            *lines,
            *_hints(error),
            *also(error),
            f"{TRACEBACK_VARIABLE}=1 in the environment shows the whole traceback",
        ]
    )


def also(error: BaseException) -> list[str]:
    """What went wrong after ``error``."""
    return [note for note in getattr(error, "__notes__", ()) if note.startswith(ALSO)]


def _hints(error: BaseException) -> list[str]:
    return [note for note in getattr(error, "__notes__", ()) if note.startswith(_HINT)]


def _entry(error: BaseException) -> str | None:
    notes: list[str] = getattr(error, "__notes__", [])
    return next((note.removesuffix(_RAISED) for note in notes if note.endswith(_RAISED)), None)
