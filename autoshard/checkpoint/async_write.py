"""Writes checkpoints in the background, and removes old and damaged ones."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from autoshard.checkpoint import array_store
from autoshard.checkpoint.manifest import (
    TEMPORARY,
    absolute_path,
    first_line,
    incompleteness,
    inventory_text,
    plan_file_name,
    step_directories,
)
from autoshard.errors import CheckpointError

_DELETED = ".deleted"


@dataclass(frozen=True)
class Saving:
    """A checkpoint that is being written.

    Example:
      >>> saving = autoshard.checkpoint.save(tempfile.mkdtemp(), 1, {"w": np.ones(8)})
      >>> saving.wait()
      >>> saving.done, saving.step
      (True, 1)
    """

    step: int
    path: epath.Path
    future: concurrent.futures.Future[None]

    @property
    def done(self) -> bool:
        """Whether the write has ended, with or without an error."""
        return self.future.done()

    def wait(self) -> None:
        """Blocks until the checkpoint is complete on disk; raises `CheckpointError` if it could not be written."""
        try:
            self.future.result()
        except Exception as error:
            raise CheckpointError(
                f"step {self.step} could not be written to {self.path}: {first_line(error)}; other steps are unchanged"
            ) from error


# The one process-wide value: a write outlives the call that began it, and must be waited for before the directory is
# read or the program ends.
_in_flight: dict[str, Saving] = {}


class _ArrayHandler(ocp.AsyncCheckpointHandler):
    """Writes arrays with `autoshard.checkpoint.array_store`."""

    async def async_save(self, directory: epath.Path, args: ArraySave) -> list[Any]:
        executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="arrays")
        written = executor.submit(array_store.write, directory, array_store.on_host(args.arrays))
        executor.shutdown(wait=False)
        return [written]

    def save(self, directory: epath.Path, args: ArraySave) -> None:
        array_store.write(directory, array_store.on_host(args.arrays))

    def restore(self, directory: epath.Path, *args: Any, **kwargs: Any) -> Any:
        raise CheckpointError(f"{directory} is read by autoshard.checkpoint.restore")

    def finalize(self, directory: epath.Path) -> None:
        array_store.merge(directory)


@ocp.args.register_with_handler(_ArrayHandler, for_save=True, for_restore=True)
@dataclass
class ArraySave(ocp.args.CheckpointArgs):
    """Arrays to write, by name."""

    arrays: dict[str, Any]


class _Handler(ocp.CompositeCheckpointHandler):
    """Orbax's composite handler; writes the plan and the inventory just before the step's directory is renamed into
    place."""

    plan: Callable[[], str] | None = None
    """Makes the plan's JSON: in the background, since that takes a while."""

    def finalize(self, directory: epath.Path) -> None:
        super().finalize(directory)
        if self.plan is not None:
            text = self.plan()
            (directory / plan_file_name(text)).write_text(text)
        (directory / "inventory.json").write_text(inventory_text(directory))


@ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)
class _Items(ocp.args.Composite):
    """Arguments of `_Handler`."""


def begin_save(
    root: epath.Path,
    step: int,
    items: dict[str, Any],
    plan: Callable[[], str] | None,
    keep: int | None,
    kept: contextlib.ExitStack,
) -> Saving:
    """Writes ``items`` as step ``step`` of ``root`` in the background, and then removes all but ``keep`` complete
    steps.

    Args:
      plan: makes the JSON of the plan that is written beside them.
      kept: what is to be let go when all is done; it is the caller's again where this fails.

    Raises:
      CheckpointError: the write could not begin.
    """
    path = root / str(step)
    # If directories were created in the background, writers would wait 20 minutes for them when the program ends.
    options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    handler = _Handler(composite_options=ocp.CompositeOptions(async_options=options))
    handler.plan = plan
    checkpointer: Any = ocp.AsyncCheckpointer(handler, async_options=options)
    try:
        checkpointer.save(path, args=_Items(**items))
    except Exception as error:
        raise CheckpointError(f"step {step} could not be written to {path}: {first_line(error)}") from error

    kept = kept.pop_all()

    def commit() -> None:
        with kept:
            checkpointer.wait_until_finished()
            checkpointer.close()
            if jax.process_index() == 0:
                _prune(root, step, keep)

    executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    saving = Saving(step, path, executor.submit(commit))
    executor.shutdown(wait=False)
    _in_flight[str(root)] = saving
    return saving


def finish(dir: epath.PathLike | None = None) -> None:
    """Blocks until all that this process is saving to ``dir`` (None: to any directory) is complete on disk.

    Raises:
      CheckpointError: a checkpoint could not be written. Raised once; all writes have ended by then.

    Example:
      >>> saving = autoshard.checkpoint.save(tempfile.mkdtemp(), 1, {"w": np.ones(8)})
      >>> autoshard.checkpoint.finish()
      >>> saving.done
      True
    """
    roots = list(_in_flight) if dir is None else [str(absolute_path(dir))]
    ended = [saving for root in roots if (saving := _in_flight.pop(root, None))]
    concurrent.futures.wait([saving.future for saving in ended])
    for saving in ended:
        saving.wait()


@atexit.register
def _report_at_exit() -> None:
    # Too late to finish: an interpreter that is shutting down starts no threads, and Orbax needs some.
    for saving in _in_flight.values():
        if saving.future.done() and saving.future.exception() is not None:
            print(
                f"autoshard: step {saving.step} is not in {saving.path.parent}: the program ended before it was "
                "written. Call autoshard.checkpoint.finish() before the program ends; earlier steps are unchanged",
                file=sys.stderr,
            )


def move_damaged_aside(path: epath.Path) -> None:
    """Renames a damaged step's directory, with a warning.

    Raises:
      CheckpointError: the step is complete.
    """
    problem = incompleteness(path)
    if problem is None:
        raise CheckpointError(
            f"step {path.name} is already in {path.parent}; save another step, or remove {path} first"
        )
    aside = next(p for n in range(1, 10_000) if not (p := path.parent / f"{path.name}.damaged-{n}").exists())
    if jax.process_index() == 0:
        path.rename(aside)
    warnings.warn(f"step {path.name} in {path.parent} is damaged ({problem}); renamed to {aside}", stacklevel=3)


def unfinished(root: epath.Path) -> list[epath.Path]:
    """What killed programs left in ``root``: steps that they were writing or removing."""
    return sorted(path for path in root.iterdir() if path.name.endswith((TEMPORARY, _DELETED)))


def _prune(root: epath.Path, step: int, keep: int | None) -> None:
    """Removes what killed writers left, and all but the newest ``keep`` complete steps; never ``step`` itself."""
    for path in unfinished(root):
        path.rmtree()
    if keep is None:
        return
    others = [
        n for n in sorted(step_directories(root), reverse=True) if n != step and incompleteness(root / str(n)) is None
    ]
    for old in others[keep - 1 :]:
        gone = root / f"{old}{_DELETED}"
        (root / str(old)).rename(gone)
        gone.rmtree()
