"""Whether checkpoints at rest are whole, and what can be put right without a guess.

What `checkpoint.save` wrote carries digests of every byte. Folders of Orbax and safetensors files carry none of what
their arrays hold, so that of these nothing is ever put right.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from etils import epath

from autoshard.checkpoint.async_write import finish, unfinished
from autoshard.checkpoint.folders import open_contents, read_leaf
from autoshard.checkpoint.manifest import (
    LOCK,
    TEMPORARY,
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
from autoshard.errors import CheckpointError
from autoshard.shared_folder import held


class Condition(NamedTuple):
    """How a checkpoint, or a step of one, was found."""

    where: str
    problem: str
    """Empty where there is none."""
    has_digests: bool
    """Whether it carries digests of its arrays, so that no problem means that it is whole."""

    def __str__(self) -> str:
        return f"{self.where}: {self.problem or ('whole' if self.has_digests else 'readable; it carries no digests')}"


def conditions(path: epath.PathLike, step: int | None = None) -> list[Condition]:
    """The condition of a checkpoint, or of every step of a directory. Every byte is read."""
    root = absolute_path(path)
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
        found.append(Condition(where, problem, bool(ours)))
    return found


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
            f"{root} is no directory that checkpoint.save wrote to. What others write carries no digests of its "
            "arrays, so that nothing of it can be proven; copy it again from where it came"
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
