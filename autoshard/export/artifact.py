"""The artifact of an exported step.

    what jax.export serializes | JSON: `Contents` | bytes of the JSON (8) | CRC-32 of all before it (4) | `MAGIC` (8)

`jax.export.deserialize` reads the first part and takes no notice of what follows, so that a process with JAX alone runs
the artifact as it is. There the containers of arguments and results are tuples, lists and dicts: of any other class
(a named tuple, a dataclass, a module's state) a tuple of the children, with the leaves in the same order.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from autoshard.errors import ExportError, PlanError
from autoshard.ir.program import TreeDef
from autoshard.plan.record import PlanRecord
from autoshard.plan.serialize import plan_from_json, plan_to_json
from autoshard.plan.treedef import treedef_from_json, treedef_to_json
from autoshard.strict_files import parse_json

MAGIC = b"ASHRDEX1"
_FOOTER = struct.Struct("<QI8s")
MAX_JSON = 2**26
"""Bytes of the JSON, at most."""


class Contents(BaseModel):
    """What stands in an artifact beside the program."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    version: Literal[1] = 1
    name: str
    plan: dict[str, Any]
    in_tree: Any
    """The structure of ``(args, kwargs)``, as `treedef_to_json` has it."""
    out_tree: Any
    donated: list[NonNegativeInt]
    """Positions of donated arguments among the leaves of ``(args, kwargs)``."""


@dataclass(frozen=True)
class Artifact:
    """A step that was exported, read."""

    name: str
    exported: jax.export.Exported
    plan: PlanRecord
    in_tree: TreeDef
    """The structure of ``(args, kwargs)``, with stand-ins for classes that are not stored."""
    out_tree: TreeDef
    donated: tuple[int, ...]


def export_step(exported: jax.export.Exported, plan: PlanRecord, donated: Sequence[int]) -> bytes:
    """The artifact of an exported step.

    Args:
      plan: what it was planned with.
      donated: positions of donated arguments among the leaves of ``(args, kwargs)``.

    Raises:
      ExportError: the library that `jax.export` writes with is missing, or an argument has a dtype that it has not.
    """

    trees = exported.in_tree, exported.out_tree
    plain = dataclasses.replace(exported, in_tree=_plain(trees[0]), out_tree=_plain(trees[1]))
    try:
        program = bytes(plain.serialize())
    except ImportError as error:
        raise ExportError(f"{plan.name} cannot be exported: jax.export needs flatbuffers ({error})") from error
    except (KeyError, RuntimeError, ValueError) as error:
        raise ExportError(f"{plan.name} cannot be exported: {type(error).__name__}: {error}") from error
    contents = Contents(
        name=plan.name,
        plan=plan_to_json(plan),
        in_tree=treedef_to_json(trees[0]),
        out_tree=treedef_to_json(trees[1]),
        donated=list(donated),
    )
    text = json.dumps(contents.model_dump()).encode()
    size = struct.pack("<Q", len(text))
    return program + text + _FOOTER.pack(len(text), zlib.crc32(program + text + size), MAGIC)


def read_artifact(content: bytes) -> Artifact:
    """The step in ``content``.

    Raises:
      ExportError: it is no artifact, a damaged one, or one that this version of JAX does not read.
    """
    if len(content) < _FOOTER.size or content[-8:] != MAGIC:
        raise ExportError(f"these {len(content):,} bytes are not an exported step")
    size, digest, _ = _FOOTER.unpack(content[-_FOOTER.size :])
    if zlib.crc32(content[: len(content) - 12]) != digest or size > min(MAX_JSON, len(content) - _FOOTER.size):
        raise ExportError("the exported step has changed since it was written: its checksum differs")
    end = len(content) - _FOOTER.size
    try:
        contents = Contents.model_validate(parse_json(content[end - size : end].decode(), non_finite=True))
        plan = plan_from_json(contents.plan)
        trees = [treedef_from_json(tree) for tree in (contents.in_tree, contents.out_tree)]
    except ValidationError as error:
        first = error.errors()[0]
        raise ExportError(
            f"the exported step cannot be read: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from error
    except (PlanError, ValueError) as error:
        raise ExportError(f"the exported step cannot be read: {error}") from error
    try:
        exported = jax.export.deserialize(bytearray(content[: end - size]))
    except ImportError as error:
        raise ExportError(f"{contents.name} cannot be loaded: jax.export needs flatbuffers ({error})") from error
    except (KeyError, RuntimeError, ValueError) as error:
        raise ExportError(f"JAX {jax.__version__} cannot load {contents.name}: {error}") from error
    counts = [tree.num_leaves for tree in (exported.in_tree, exported.out_tree)]
    if counts != [tree.num_leaves for tree in trees] or any(at >= counts[0] for at in contents.donated):
        raise ExportError(
            f"the exported step cannot be read: its program has {counts[0]} arguments and {counts[1]} results"
        )
    return Artifact(contents.name, exported, plan, trees[0], trees[1], tuple(contents.donated))


def _plain(tree: TreeDef) -> TreeDef:
    """``tree`` of tuples, lists, dicts with text for keys, and None alone."""
    slot = object()

    def made(x: Any) -> Any:
        if x is slot or x is None:
            return x
        children = jax.tree.leaves(x, is_leaf=lambda y: y is not x)
        if type(x) is dict and all(type(key) is str for key in x):
            return dict(zip(sorted(x), map(made, children), strict=True))
        return (list if type(x) is list else tuple)(map(made, children))

    return jax.tree.structure(made(tree.unflatten([slot] * tree.num_leaves)))
