"""How a run ends, also by an error: what it was saving is complete on disk, and its log says that it failed."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from etils import epath

from autoshard import checkpoint
from autoshard.call_errors import ALSO
from autoshard.checkpoint.manifest import first_line
from autoshard.errors import CheckpointError
from autoshard.runs.report import EndEvent
from autoshard.runs.run_folder import RunFolder
from autoshard.train.processes.agreement import is_first
from autoshard.train.processes.peer_errors import may_be_of_peer
from autoshard.train.stop_signals import StopSignals


@contextlib.contextmanager
def saves_finished(folder: epath.Path | None) -> Generator[None]:
    """Waits in the end for what is being saved to ``folder``. Where an error ends this, that stays the error, and that
    a save failed too is a note below it; where the error may be that another process is lost, nothing is waited for,
    since a save may wait for that process for ever.

    Raises:
      CheckpointError: a save failed, and nothing else did.
    """
    try:
        yield
    except BaseException as error:
        if folder is not None and not may_be_of_peer(error):
            try:
                checkpoint.finish(folder)
            except CheckpointError as failed:
                error.add_note(f"{ALSO}{failed}")
        raise
    if folder is not None:
        checkpoint.finish(folder)


@contextlib.contextmanager
def failure_logged(folder: RunFolder, stop: StopSignals) -> Generator[None]:
    """Adds to the log, in the first process, that an error ended the run; not one that may be that another process is
    lost, or what became of a signal to stop: the run is to go on.
    """
    try:
        yield
    except Exception as error:
        if is_first() and not may_be_of_peer(error) and not stop.turned_into(error):
            with contextlib.suppress(OSError):  # the error may be that nothing can be written
                step = max((event.step for event in folder.events()), default=0)
                text = f"{type(error).__name__}: {first_line(error)}"
                folder.append([EndEvent(step=step, how="failed", error=text)])
        raise
