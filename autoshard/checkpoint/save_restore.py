"""Checkpoints of any pytree: asynchronous, atomic, and independent of the mesh they were saved on.

`autoshard.checkpoint.manifest` defines a step's directory and when it is complete, `autoshard.checkpoint.leaves` how
each leaf is stored, `autoshard.checkpoint.async_write` how a step is written.

The tree structure is not stored: at restore it is that of the plan or of ``like``, and the paths must be equal. So
named tuples, modules, None and empty containers need no support here, and nothing stored is ever executed.

One program at a time writes to a directory, in however many processes: it is locked while a step is written.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orbax.checkpoint as ocp
from etils import epath

from autoshard.checkpoint.array_store import StoredArrays, stored_spec
from autoshard.checkpoint.async_write import ArraySave, begin_save, move_damaged_aside
from autoshard.checkpoint.async_write import Saving as Saving
from autoshard.checkpoint.async_write import finish as finish
from autoshard.checkpoint.leaves import flatten_state, restore_targets
from autoshard.checkpoint.manifest import (
    LOCK,
    MAX_BYTES,
    LeafEntry,
    Manifest,
    absolute_path,
    choose_step,
    complete_steps,
    first_line,
    newest_complete_text,
    plan_files,
)
from autoshard.checkpoint.matching import match_leaves, misfit_text
from autoshard.checkpoint.names import Rename, RestoreOptions, leaf_names
from autoshard.checkpoint.orbax_folders import find_orbax
from autoshard.checkpoint.pieces import ToRead, read, uses
from autoshard.checkpoint.restoring import CheckpointPlan, RestoreReport, StoredLeaves, planned_state, restored
from autoshard.errors import CheckpointError
from autoshard.runtime import nnx
from autoshard.shared_folder import held, in_first


def save(
    dir: epath.PathLike,
    step: int,
    state: Any,
    *,
    plan: CheckpointPlan | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    wait: bool = False,
) -> Saving:
    """Writes ``state`` as ``DIR/STEP``, in the background.

    On return the state has been copied to the host: its buffers may be donated or changed. An unfinished save to the
    same directory is waited for first, so at most one such copy exists. Call `finish` before the program ends: an
    interpreter that is shutting down starts no threads, and a save needs some.

    Args:
      dir: a local directory or anything that `etils.epath` opens; created if it does not exist.
      step: 0 or more, and not yet in the directory. A damaged directory of this step is renamed.
      state: any pytree of arrays, typed PRNG keys and Python bool, int, float, str.
      plan: a plan whose argument 0 is the state; it is saved too (`RestoreReport.plan`). Of an NNX module the state is
        saved as the plan has it, so that a Variable that several modules share is written once.
      extra: strict JSON (string keys, lists, no NaN) that is restored equal.
      keep: number of complete steps to keep once this one is complete, the newest, this one included; None keeps all.
      wait: blocks until the step is complete on disk.

    Raises:
      CheckpointError: a leaf of another type, a state that is not the plan's, ``extra`` that is not JSON, a step that
        exists already, an earlier save to this directory that failed, or a directory that another process
        saves to just now. Nothing has been written then.

    Example:
      >>> folder = tempfile.mkdtemp()
      >>> autoshard.checkpoint.save(folder, 10, {"w": jnp.ones(8)}, extra={"epoch": 1}, wait=True).done
      True
      >>> autoshard.checkpoint.steps(folder)
      (10,)
    """
    root, step = absolute_path(dir), _step_number(step)
    if step < 0:
        raise CheckpointError(f"step {step}: steps are 0 or more")
    if keep is not None and keep < 1:
        raise CheckpointError(f"keep={keep} would delete the checkpoint just written; use 1 or more, or None for all")
    finish(root)
    if plan is not None:
        state = nnx.split((state,)).states[0]
    leaves, arrays = flatten_state(state)
    if plan is not None:
        _check_state_fits_plan(leaves, plan)
    manifest = Manifest.of(leaves, _check_json(extra or {}), plan.fingerprint if plan else None)
    if (size := len(manifest.model_dump_json())) > MAX_BYTES:
        raise CheckpointError(
            f"the manifest, with the leaves' paths and `extra`, has {size:,} bytes; it may have {MAX_BYTES:,}. Save "
            "arrays in the state, not in `extra`"
        )
    path = root / str(step)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"the checkpoint directory {root} cannot be created: {first_line(error)}") from error
    items: dict[str, Any] = {"manifest": ocp.args.JsonSave(manifest.model_dump())}
    if arrays:
        items["arrays"] = ArraySave(arrays)
    with contextlib.ExitStack() as kept:
        in_first(
            lambda: kept.enter_context(held(root / LOCK, "saves", "choose another directory")),
            f"{root} could not be locked",
        )
        if path.exists():
            move_damaged_aside(path)
        saving = begin_save(root, step, items, plan.json_text if plan else None, keep, kept)
    if wait:
        finish(root)
    return saving


def _check_json(extra: Mapping[str, Any]) -> dict[str, Any]:
    try:
        back = json.loads(json.dumps(extra, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"extra is not JSON: {error}") from error
    for key, value in extra.items():
        if key not in back or back[key] != value:
            raise CheckpointError(
                f"extra[{key!r}] = {value!r} would be restored as {back.get(str(key))!r}: use string keys and lists"
            )
    return back


def steps(dir: epath.PathLike) -> tuple[int, ...]:
    """The complete checkpoints in ``dir``, oldest first; waits for a save of this process.

    Example:
      >>> autoshard.checkpoint.steps(tempfile.mkdtemp())
      ()
    """
    root = absolute_path(dir)
    finish(root)
    return complete_steps(root)


def latest(dir: epath.PathLike) -> int | None:
    """The newest complete checkpoint in ``dir``, or None.

    Example:
      >>> print(autoshard.checkpoint.latest(tempfile.mkdtemp()))
      None
    """
    return max(steps(dir), default=None)


def restore(
    dir: epath.PathLike,
    step: int | None = None,
    *,
    plan: CheckpointPlan | None = None,
    like: Any = None,
    ignore: Iterable[str] = (),
    rename: Rename | None = None,
    cast: bool = False,
    missing: str = "error",
    extra: str = "error",
    fallback: Any = None,
    report: bool = False,
) -> Any:
    """Reads a checkpoint directly into shards: each device receives its shard of a leaf and nothing else.

    A replicated leaf is read once and copied to every device.

    Leaves are matched by *name*, the keys of their path joined by ``/``: ``params/layers/0/w``, whether a key is of a
    dict, an index or an attribute. Layers ``layers/0/w``, ``layers/1/w``, ... and their stack ``layers/w`` are restored
    from one another; ``layers_0`` is such a layer too.

    Args:
      dir: the directory that `save` wrote to; or one that Orbax wrote by itself, of a `StandardCheckpointer`, a
        `PyTreeCheckpointer` or a `CheckpointManager`, whose shardings are ignored.
      step: which step; None restores the newest complete one, and warns of newer incomplete ones.
      plan: gives structure, shapes and shardings of the state: its argument 0. Of an NNX module this is the module's
        state, for ``nnx.update(module, state)``. A loaded plan has stand-ins for container classes (`Plan.load`), with
        the leaves in the same order: ``jax.tree.unflatten(jax.tree.structure(like), leaves)``.
      like: instead of a plan, a pytree of `jax.ShapeDtypeStruct`, arrays and Python scalars. A leaf with a sharding
        is restored to it, a numpy array to numpy, any other to the default device, uncommitted. A saved Python number
        is restored as a 0-d array of its family if ``like`` has one, and vice versa.
        With neither, the state is a dict from name to numpy array or Python scalar, typed keys as their key data.
      ignore: names of saved leaves, or globs of them, to restore as if they had not been saved. ``*`` matches any text.
      rename: from saved names to current ones: a dict of names or globs, the text of each ``*`` in the old name taking
        the place of a ``*`` in the new one, or a function that returns the new name or None, which leaves a leaf out.
      cast: whether a leaf may have another dtype than was saved: a float for a float, an integer for an integer. A
        number that the dtype does not hold is an error.
      missing: what becomes of a leaf that was not saved. "error"; "init": it is that of ``fallback``; "keep": the same,
        and without a fallback it is that of ``like``. With the last two, a leaf that was saved shorter in one dimension
        (a vocabulary that grew) is restored too, and what it has more is of the fallback, or 0 where there is none.
      extra: what becomes of a saved leaf that is not wanted: "error", or "ignore".
      fallback: a tree with at least the leaves that are missing, or a function without arguments that makes a state:
        run by ``plan.init``, before anything is read.
      report: whether to return a `RestoreReport` too: for each leaf where it comes from, and what `save` was given as
        ``extra``.

    Returns:
      The state; with ``report`` a pair of it and the report.

    Raises:
      CheckpointError: no checkpoint, no such step, a damaged step, or a checkpoint of another state: names the leaf,
        both shapes, and the option that would help. Nothing on disk is changed.

    Example:
      >>> folder = tempfile.mkdtemp()
      >>> saving = autoshard.checkpoint.save(folder, 1, {"layers": np.ones((2, 4), np.float32)}, wait=True)
      >>> like = {"blocks": [jax.ShapeDtypeStruct((4,), jnp.float32)] * 2}
      >>> state, report = autoshard.checkpoint.restore(folder, like=like, rename={"layers": "blocks"}, report=True)
      >>> state["blocks"][1].shape, str(report.leaves[0])
      ((4,), 'blocks/0 float32[4]: a layer of layers')
    """
    options = RestoreOptions.of(ignore, rename, cast, missing, extra)
    found = open_checkpoint(dir, step)
    about = RestoreReport(
        found.step, extra=found.extra, fingerprint=found.fingerprint, plan=found.plan, versions=found.versions
    )
    return restored(found.stored, plan, like, options, fallback, about if report else None)


@dataclass(frozen=True)
class OpenCheckpoint:
    """A step that can be read."""

    stored: StoredLeaves
    step: int | None
    """None of a folder of Orbax's that has no steps."""
    extra: dict[str, Any]
    format: Literal["autoshard", "orbax"]
    """What wrote it."""
    fingerprint: str | None = None
    plan: str | None = None
    """The file of the plan that it was saved with."""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])


def open_checkpoint(dir: epath.PathLike, step: int | None) -> OpenCheckpoint:
    """A step that `save` wrote, by default the newest complete one, or one that Orbax wrote by itself.

    Raises:
      CheckpointError: there is none, or it is damaged.
    """
    root = absolute_path(dir)
    finish(root)
    number = step if step is None else _step_number(step)
    if (theirs := find_orbax(root, number)) is not None:
        return OpenCheckpoint(theirs.leaves(), theirs.step, theirs.extra(), "orbax")
    number, manifest = choose_step(root, number)
    plan = next((os.fspath(file) for file in plan_files(root / str(number))), None)
    stored = stored_step(root, str(number), manifest)
    return OpenCheckpoint(stored, number, manifest.extra, "autoshard", manifest.fingerprint, plan, manifest.versions)


def stored_step(root: epath.Path, name: str, manifest: Manifest) -> StoredLeaves:
    """The leaves of the step in the directory of this name, whether or not it is complete."""
    return StoredLeaves(str(root / name), leaf_names(manifest.leaves), functools.partial(_read_arrays, root, name))


def _step_number(step: Any) -> int:
    try:
        return operator.index(step)
    except TypeError:
        raise CheckpointError(f"step {step!r} is a {type(step).__name__}; steps are whole numbers, 0 or more") from None


def _check_state_fits_plan(leaves: Sequence[LeafEntry], plan: CheckpointPlan) -> None:
    wanted = leaf_names([target.leaf for target in restore_targets(planned_state(plan))[0]])
    matching = match_leaves(wanted, leaf_names(leaves), RestoreOptions(), restack=False)
    if misfit := misfit_text(matching, len(wanted), len(leaves), "plan"):
        raise CheckpointError(
            f"the state is not argument 0 of the plan: {misfit}. Save the state that the planned step takes, or omit "
            "`plan`; nothing was written"
        )


def _read_arrays(root: epath.Path, name: str, wanted: Mapping[str, ToRead]) -> dict[str, Any]:
    try:
        return read(StoredArrays(functools.partial(stored_spec, root / name / "arrays"), uses(wanted)), wanted)
    except CheckpointError as error:
        others = [n for n in steps(root) if str(n) != name]
        hint = f"; restore that with step={max(others)}" if others else ""
        raise CheckpointError(
            f"the arrays of step {name} in {root} cannot be read: {error}. {newest_complete_text(others)}{hint}"
        ) from error
