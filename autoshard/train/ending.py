"""How a run ends, also by an error: what it was saving is complete on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from etils import epath

from autoshard import checkpoint
from autoshard.errors import CheckpointError
from autoshard.train.processes.peer_errors import may_be_of_peer


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
                error.add_note(str(failed))
        raise
    if folder is not None:
        checkpoint.finish(folder)
