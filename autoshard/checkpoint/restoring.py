"""A state from stored leaves, whatever keeps them: matched, read into its shards, completed, reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.checkpoint.leaves import RestoreTarget, array_to_read, place_leaf, restore_leaf, restore_targets
from autoshard.checkpoint.manifest import LeafEntry
from autoshard.checkpoint.matching import Origin, Source, match_leaves, misfit_text, remedy
from autoshard.checkpoint.names import LeftOut, NamedLeaf, RestoreOptions, leaf_names, renamed_leaves
from autoshard.checkpoint.pieces import Piece, ToRead
from autoshard.errors import CheckpointError, nearest
from autoshard.jaxpr import PaddedArray
from autoshard.runtime import nnx


@dataclass(frozen=True)
class StoredLeaves:
    """Leaves that can be read."""

    where: str
    """The folder or the file, for messages."""
    leaves: Sequence[NamedLeaf]
    read: Callable[[Mapping[str, ToRead]], dict[str, Any]]


@dataclass(frozen=True)
class LeafReport:
    """Where one leaf of the restored state comes from.

    Example:
      >>> print(autoshard.checkpoint.LeafReport("w", "bfloat16[8]", "same", ("w",), cast_from="float32"))
      w bfloat16[8], cast from float32
    """

    name: str
    """The keys of its path, joined by ``/``."""
    leaf: str
    """Dtype and shape: ``float32[8,8]``."""
    origin: Origin
    saved: tuple[str, ...] = ()
    """The saved leaves that it is made of, by the names that they were saved with."""
    cast_from: str | None = None
    """The dtype that it was saved with, where it has another now."""
    rows: tuple[int, int, int] | None = None
    """Of a grown leaf the dimension that is longer, its size as saved, and its size now."""
    filled: str = ""
    """What is beyond the saved rows of a grown leaf: ``fallback`` or ``zeros``."""

    def __str__(self) -> str:
        text = f"{self.name} {self.leaf}"
        if self.origin == "new":
            return f"{text}: of the fallback"
        first, more = self.saved[0], len(self.saved) - 1
        if self.origin == "stacked":
            text += f": {more + 1} layers, {first} and on"
        elif self.origin == "unstacked":
            text += f": a layer of {first}"
        elif (first, more) != (self.name, 0):
            text += f": saved as {first}"
        if self.rows:
            dim, before, now = self.rows
            text += f", dimension {dim} from {before} to {now} with {self.filled}"
        return text + (f", cast from {self.cast_from}" if self.cast_from else "")


@dataclass(frozen=True)
class RestoreReport:
    """What a restore did.

    ``extra`` and ``fingerprint`` are what `save` was given: its ``extra``, and the fingerprint of its plan.

    Example:
      >>> folder = tempfile.mkdtemp()
      >>> saving = autoshard.checkpoint.save(folder, 3, {"w": np.ones(8)}, extra={"epoch": 1}, wait=True)
      >>> state, report = autoshard.checkpoint.restore(folder, report=True)
      >>> report.step, report.extra
      (3, {'epoch': 1})
    """

    step: int | None = None
    """None for files that have no steps."""
    leaves: tuple[LeafReport, ...] = ()
    """In the order of the restored state's leaves."""
    left_out: tuple[LeftOut, ...] = ()
    """Saved leaves that were not restored, in the order in which they were saved."""
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    fingerprint: str | None = None
    plan: str | None = None
    """The file of the plan that it was saved with, for `Plan.load`."""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of the programs that wrote it, by name."""

    def __str__(self) -> str:
        """A line for each leaf that is not what was saved under its name, and one for each that was left out."""
        plain = [
            leaf for leaf in self.leaves if leaf.origin == "saved" and leaf.saved == (leaf.name,) and not leaf.cast_from
        ]
        lines = [f"{len(plain)} of {len(self.leaves)} leaves as they were saved"]
        lines += [str(leaf) for leaf in self.leaves if leaf not in plain]
        return "\n".join([*lines, *(f"{left.name}: left out, {left.why}" for left in self.left_out)])


class CheckpointPlan(Protocol):
    """The part of a plan that checkpoints use."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def in_avals(self) -> Sequence[Any]: ...
    @property
    def in_stored(self) -> Sequence[Any]: ...
    def json_text(self) -> str: ...
    def init(self, fn: Callable[..., Any], /) -> Any: ...


def planned_state(plan: CheckpointPlan) -> Any:
    """The abstract state of a plan, its argument 0."""
    if not len(plan.in_avals):
        raise CheckpointError("the plan's step takes no argument, so it has no state")
    return plan.in_avals[0]


def restored(
    stored: StoredLeaves,
    plan: CheckpointPlan | None,
    like: Any,
    options: RestoreOptions,
    fallback: Any,
    about: RestoreReport | None,
) -> Any:
    """What a reader gives: a state, and where ``about`` says what else is known of it, a pair of it and its report.

    Raises:
      CheckpointError: a plan and ``like``; stored leaves of another state, in what the options do not forgive.
    """
    if plan is not None and like is not None:
        raise CheckpointError("give a plan or `like`, not both: each says structure and shardings")
    state, leaves, left_out = restore_from(stored, plan, like, options, fallback)
    return state if about is None else (state, replace(about, leaves=tuple(leaves), left_out=tuple(left_out)))


def restore_from(
    stored: StoredLeaves, plan: CheckpointPlan | None, like: Any, options: RestoreOptions, fallback: Any
) -> tuple[Any, Sequence[LeafReport], Sequence[LeftOut]]:
    """The state that ``plan`` or ``like`` describe, or a dict by name without either; see `checkpoint.restore`."""
    if plan is None and like is None:
        return restore_as_dict(stored, options)
    if plan is None:
        targets, treedef = restore_targets(like)
        kept = like if fallback is None and options.missing == "keep" else fallback
    else:
        targets, treedef = restore_targets(planned_state(plan), plan.in_stored[0])
        kept = fallback

    def make() -> Any:
        if not callable(kept) or nnx.is_module(kept) or not jax.tree_util.all_leaves([kept]):
            return kept
        return kept() if plan is None else plan.init(kept)

    return restore_tree(stored, targets, treedef, options, None if kept is None else make)


def restore_as_dict(
    stored: StoredLeaves, options: RestoreOptions
) -> tuple[dict[str, Any], list[LeafReport], list[LeftOut]]:
    """The leaves as numpy arrays and Python scalars, by name; typed keys as their key data."""
    named, left_out = renamed_leaves(stored.leaves, options)
    targets = {name: RestoreTarget(leaf.leaf, as_numpy=True) for name, leaf in named.items()}
    arrays = stored.read(
        {
            name: array_to_read(
                t.leaf, t, [Piece.of(t.leaf.path, t.leaf.shape, t.leaf.dtype)] if t.leaf.kind == "array" else []
            )
            for name, t in targets.items()
            if t.leaf.in_array_store
        }
    )
    state = {name: restore_leaf(t.leaf, arrays.pop(name, None), t, raw=True) for name, t in targets.items()}
    report = [LeafReport(name, str(leaf.leaf), "saved", (leaf.name,)) for name, leaf in named.items()]
    return state, report, left_out


def misfit_of(stored: StoredLeaves, like: Any) -> str:
    """How the stored leaves differ from those of the pytree ``like``, in a sentence; the empty string if they can be
    restored as they are. Nothing is read.
    """
    wanted = leaf_names([target.leaf for target in restore_targets(like)[0]])
    matching = match_leaves(stored.leaves, wanted, RestoreOptions())
    return misfit_text(matching, len(stored.leaves), len(wanted), "checkpoint")


def restore_tree(
    stored: StoredLeaves,
    targets: Sequence[RestoreTarget],
    treedef: Any,
    options: RestoreOptions,
    fallback: Callable[[], Any] | None,
) -> tuple[Any, list[LeafReport], Sequence[LeftOut]]:
    """The state whose leaves are ``targets``.

    Args:
      fallback: makes the tree that has what the stored leaves do not; called where something is missing.

    Raises:
      CheckpointError: the stored leaves are of another state, in what the options do not forgive.
    """
    wanted = leaf_names([target.leaf for target in targets])
    matching = match_leaves(stored.leaves, wanted, options)
    if matching.misfits:
        text = misfit_text(matching, len(stored.leaves), len(wanted), "checkpoint")
        raise CheckpointError(f"{stored.where} has another state: {text}. {remedy(matching.misfits)}")
    sources = [source for source in matching.sources if source is not None]
    new = [leaf.name for leaf, source in zip(wanted, sources, strict=True) if source.origin == "new"]
    if new and fallback is None:
        raise CheckpointError(
            f"{stored.where} has another state: {new[0]} is not in the checkpoint, nor are {len(new) - 1} more of "
            f"{len(wanted)} leaves. missing={options.missing!r} takes them from fallback=, a tree that has them or the "
            "function that makes one"
        )
    partial = any(source.origin in ("new", "grown") for source in sources)
    kept = _Fallback(fallback(), options) if partial and fallback is not None else None
    made = [_as_read(source, target) for source, target in zip(sources, targets, strict=True)]
    asked = {
        name: array_to_read(leaf, target, [p for p in source.pieces if 0 not in p.shape])
        for (name, _), leaf, source, target in zip(wanted, made, sources, targets, strict=True)
        if source.leaves and leaf.in_array_store and any(x.leaf.in_array_store for x in source.leaves)
    }
    prepared = {
        name: kept.leaf(name, target)
        for (name, _), source, target in zip(wanted, sources, targets, strict=True)
        if kept is not None and source.origin in ("new", "grown")
    }
    try:
        arrays = stored.read(asked)
    except ValueError as error:
        raise CheckpointError(f"{stored.where} cannot be cast: {error}. Restore that leaf in its own dtype") from error
    values: list[Any] = []
    report: list[LeafReport] = []
    for (name, _), leaf, source, target in zip(wanted, made, sources, targets, strict=True):
        if source.origin == "new":
            values.append(prepared[name])
        else:
            value = restore_leaf(leaf, arrays.pop(name, None), target, raw=False)
            values.append(_completed(value, prepared[name], source) if name in prepared else value)
        report.append(_reported(name, target.leaf, source, filled="fallback" if kept else "zeros"))
    return jax.tree.unflatten(treedef, values), report, matching.left_out


def _as_read(source: Source, target: RestoreTarget) -> LeafEntry:
    """The leaf that is read for ``target``: itself, or what was saved where one of them is no array."""
    saved = source.leaves[0].leaf if source.leaves else target.leaf
    return target.leaf if saved.kind == target.leaf.kind == "array" else saved


class _Fallback:
    """A tree that has what a checkpoint does not."""

    def __init__(self, tree: Any, options: RestoreOptions) -> None:
        tree = nnx.split((tree,)).states[0]
        targets, _ = restore_targets(tree)
        named = leaf_names([target.leaf for target in targets])
        self._values = {name: (leaf, value) for (name, leaf), value in zip(named, jax.tree.leaves(tree), strict=True)}
        self._options = options

    def leaf(self, name: str, target: RestoreTarget) -> Any:
        """The leaf of a name, placed as ``target`` is."""
        if name not in self._values:
            raise CheckpointError(
                f"the fallback has no {name}, which the checkpoint lacks too{nearest(name, self._values)}"
            )
        leaf, value = self._values[name]
        misfits = match_leaves(
            [NamedLeaf(name, leaf)], [NamedLeaf(name, target.leaf)], RestoreOptions(cast=self._options.cast)
        ).misfits
        if misfits:
            raise CheckpointError(f"{name} is {leaf} in the fallback and {target.leaf} here")
        if isinstance(value, jax.ShapeDtypeStruct):
            raise CheckpointError(f"{name} of the fallback is a ShapeDtypeStruct, which has no values")
        return place_leaf(leaf, value, target)


def _completed(restored: Any, kept: Any, source: Source) -> Any:
    """``restored`` where it was saved, ``kept`` elsewhere."""
    saved = source.leaves[0].leaf.shape
    if isinstance(restored, np.ndarray):
        kept[tuple(slice(n) for n in saved)] = restored[tuple(slice(n) for n in saved)]
        return kept

    def chosen(new: Any, old: Any) -> Any:
        inside = jnp.ones(new.shape, bool)
        for dim, size in enumerate(saved):
            inside &= jax.lax.broadcasted_iota(jnp.int32, new.shape, dim) < size
        return jnp.where(inside, new, old)

    held = [x.stored if isinstance(x, PaddedArray) else x for x in (restored, kept)]
    made = jax.jit(chosen, out_shardings=held[0].sharding)(*held)
    return PaddedArray(made, restored.shape) if isinstance(restored, PaddedArray) else made


def _reported(name: str, leaf: LeafEntry, source: Source, filled: str) -> LeafReport:
    saved = [x.leaf for x in source.leaves]
    arrays = bool(saved) and saved[0].kind == leaf.kind == "array"
    cast = next((x.dtype for x in saved if arrays and x.dtype != leaf.dtype), None)
    rows = None
    if source.origin == "grown":
        rows = next((d, a, b) for d, (a, b) in enumerate(zip(saved[0].shape, leaf.shape, strict=True)) if a < b)
    names = tuple(x.name for x in source.leaves)
    return LeafReport(name, str(leaf), source.origin, names, cast, rows, filled if rows else "")
