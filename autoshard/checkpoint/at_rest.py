"""Whether checkpoints at rest are whole, and what can be put right without a guess.

What `checkpoint.save` wrote carries digests of every byte, and so do safetensors files that were written here. Those of
others, and folders of Orbax, carry none of what their arrays hold; of all that others read nothing is ever put right.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from etils import epath

from autoshard.checkpoint.async_write import finish, unfinished
from autoshard.checkpoint.folders import has_tensors, open_contents, read_leaf
from autoshard.checkpoint.manifest import (
    LOCK,
    TEMPORARY,
    abbreviated,
    absolute_path,
    first_line,
    incompleteness,
    inventory_text,
    plan_file_name,
    plan_files,
    read_inventory,
    read_manifest,
    step_directories,
)
from autoshard.checkpoint.save_restore import stored_step
from autoshard.checkpoint.tensor_files.digests import verify
from autoshard.checkpoint.tensor_files.headers import open_tensors
from autoshard.errors import CheckpointError
from autoshard.shared_folder import held

_UNPROVEN = "nothing says whether its numbers are those that were written"


class Condition(NamedTuple):
    """How a checkpoint, or a step of one, was found."""

    where: str
    problem: str
    """Empty where there is none."""
    unproven: str = ""
    """What of it carries no digests, so that no problem does not mean that it is whole; empty where all does."""

    def __str__(self) -> str:
        found = self.problem or self.unproven or "whole"
        return found if found.startswith(self.where) else f"{self.where}: {found}"


def conditions(path: epath.PathLike, step: int | None = None) -> list[Condition]:
    """The condition of a checkpoint, or of every step of a directory. Every byte is read."""
    root = absolute_path(path)
    if has_tensors(root):
        return [_of_tensors(root, step)]
    steps = [step] if step is not None else step_directories(root) if root.is_dir() else []
    ours = _own_steps(root, steps)
    found: list[Condition] = []
    for number in steps if ours else [step]:
        where = str(root if number is None else root / str(number))
        problem = (number in ours and incompleteness(root / str(number))) or ""
        try:
            if not problem:
                for leaf in open_contents(root, number).leaves:
                    leaf.read()
        except CheckpointError as error:
            problem = str(error)
        found.append(
            Condition(where, problem, "" if ours else f"every array can be read; it has no digests, so {_UNPROVEN}")
        )
    return found


def _of_tensors(root: epath.Path, step: int | None) -> Condition:
    try:
        open_contents(root, step)
        found = open_tensors(Path(root))
        damaged, without = verify(found)
    except CheckpointError as error:
        return Condition(str(root), str(error))
    unproven = f"whole but for {abbreviated(without)}, which can be read and have no digests" if without else ""
    if len(without) == len(found.tensors) > 0:
        unproven = "its headers fit its files, and every byte can be read; it has no digests, so " + _UNPROVEN
    return Condition(str(root), damaged, unproven)


class Repair(NamedTuple):
    """What was done about something, or why nothing was."""

    where: str
    done: str
    """Empty where nothing was."""
    refused: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.done or f'not repaired: {self.refused}'}"


def repair(path: epath.PathLike) -> list[Repair]:
    """Puts right in a directory of `checkpoint.save` what can be without a guess, and names what cannot.

    A step that a killed program had written, and not yet given its name, gets it where all of it is whole by its
    digests; what else such programs left, which nobody could restore, is deleted. An inventory that is lost or damaged
    is made again of a step whose manifest, plan and arrays are whole by their digests. Nothing else is touched.

    Raises:
      CheckpointError: another process saves to the directory, or it is none that `checkpoint.save` wrote to.
    """
    root = absolute_path(path)
    finish(root)
    left = unfinished(root) if root.is_dir() else []
    steps = _own_steps(root, step_directories(root))
    if not left and not steps:
        raise CheckpointError(
            f"{root} is no directory that checkpoint.save wrote to. Of what others read there is one copy alone, and "
            "digests do not say what bytes were; copy it again from where it came"
        )
    with held(root / LOCK, "saves", "repair it later"):
        found: list[Repair] = []
        for folder in left:
            step = root / folder.name.removesuffix(TEMPORARY)
            if step != folder and not step.exists() and not (incompleteness(folder) or _unproven(root, folder.name)):
                folder.rename(step)
                found.append(Repair(str(step), "put in place: a program was killed when it had written all of it"))
                continue
            folder.rmtree()
            found.append(Repair(str(folder), "removed: a program was killed while it wrote or removed this step"))
        return [*found, *_inventories(root, steps)]


def _own_steps(root: epath.Path, steps: list[int]) -> list[int]:
    return [n for n in steps if any((root / str(n) / name).exists() for name in ("inventory.json", "manifest"))]


def _inventories(root: epath.Path, steps: list[int]) -> Iterator[Repair]:
    for number in steps:
        folder = root / str(number)
        problem = incompleteness(folder)
        if problem is None:
            continue
        if why := _sound_inventory(folder) or _unproven(root, folder.name):
            yield Repair(str(folder), "", f"{problem}; {why}")
            continue
        draft = folder / "inventory.json.partial"
        draft.write_text(inventory_text(folder))
        draft.replace(folder / "inventory.json")
        yield Repair(str(folder), f"its inventory is made again ({problem}); all that it lists is whole by its digests")


def _sound_inventory(folder: epath.Path) -> str:
    try:
        read_inventory(folder)
    except (OSError, ValueError):
        return ""
    return "its inventory is whole, so what it lists is damaged"


def _unproven(root: epath.Path, name: str) -> str:
    """What in the directory of a step is not whole by its digests, beside the inventory; empty where all is."""
    try:
        manifest = read_manifest(root / name)
        if manifest.digest is None:
            return f"a manifest of version {manifest.version} has no digest, so that it may be damaged too"
        stored = stored_step(root, name, manifest)
        for leaf in stored.leaves:
            read_leaf(stored, leaf.leaf, leaf.leaf)
        for plan in plan_files(root / name):
            if plan_file_name(plan.read_text()) != plan.name:
                return f"{plan.name} has changed since it was written"
    except (CheckpointError, OSError, ValueError) as error:
        return first_line(error)
    return ""
