"""Which saved leaf, or which part of one, each leaf of a state comes from.

Leaves have *names*: the keys of their paths joined by ``/``. A leaf comes from the saved one of its name after
`RestoreOptions.rename`; from saved layers ``h/0/w``, ``h/1/w``, ... where it is their stack ``h/w``; from a row of a
saved stack where it is a layer; from a saved one that is shorter in one dimension; or from a fallback. What fits none
of these is a `Misfit`. Nothing is read here.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp

from autoshard.checkpoint.manifest import LeafEntry, abbreviated
from autoshard.checkpoint.names import LeftOut, NamedLeaf, RestoreOptions, renamed_leaves
from autoshard.checkpoint.pieces import Piece

Origin = Literal["saved", "stacked", "unstacked", "grown", "new"]
"""The saved leaf; layers put on one another; a layer of a stack; a shorter leaf, completed; a fallback."""

_LAYER = re.compile(r"(|.*?[^\d_])_?(\d+)")
"""A key with a layer's number: ``3``, ``layers_3``, ``layers3``."""


@dataclass(frozen=True)
class Source:
    """Where one leaf comes from."""

    origin: Origin
    leaves: tuple[NamedLeaf, ...] = ()
    """The saved leaves that it is made of, under the names that they were saved with."""
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Misfit:
    """A leaf that does not come from anywhere, or a saved one that goes nowhere."""

    name: str
    saved: LeafEntry | None
    wanted: LeafEntry | None
    remedy: str


@dataclass(frozen=True)
class Matching:
    """A source for each leaf of a state, or what stands against it."""

    sources: tuple[Source | None, ...]
    """In the order of the leaves; None where there is a misfit."""
    left_out: tuple[LeftOut, ...]
    misfits: tuple[Misfit, ...]


def match_leaves(
    saved: Sequence[NamedLeaf], wanted: Sequence[NamedLeaf], options: RestoreOptions, *, restack: bool = True
) -> Matching:
    """A source for each of ``wanted``.

    Args:
      restack: layers may be stacked, and stacks taken apart.

    Raises:
      CheckpointError: a rename that names no saved leaf, or that gives two of them one name.
    """
    free, left_out = renamed_leaves(saved, options)
    names = {leaf.name for leaf in wanted}
    rest = {name: leaf for name, leaf in free.items() if name not in names}
    layers, stacks = _layers(rest), _layers({leaf.name: leaf for leaf in wanted if leaf.name not in free})
    used: set[str] = set()
    sources: list[Source | None] = []
    misfits: list[Misfit] = []
    for leaf in wanted:
        found: Source | Misfit | None = None
        if leaf.name in free:
            used.add(leaf.name)
            found = _whole_or_grown(free[leaf.name], leaf, options)
        elif restack and leaf.leaf.kind == "array":
            found, names_used = _stacked(layers, leaf, options)
            if found is None:
                found, names_used = _unstacked(rest, stacks, leaf, options)
            used.update(names_used)
        if found is None and options.missing != "error":
            found = Source("new")
        if isinstance(found, Source):
            sources.append(found)
            continue
        sources.append(None)
        misfits.append(found or Misfit(leaf.name, None, leaf.leaf, ""))
    unused = [leaf for name, leaf in free.items() if name not in used]
    if options.extra == "error":
        misfits += [Misfit(leaf.name, leaf.leaf, None, "") for leaf in unused]
    else:
        left_out += [LeftOut(leaf.name, "extra") for leaf in unused]
    order = {leaf.name: number for number, leaf in enumerate(saved)}
    left_out.sort(key=lambda left: order[left.name])
    return Matching(tuple(sources), tuple(left_out), tuple(misfits))


def misfit_text(matching: Matching, saved: int, wanted: int, there: str) -> str:
    """What stands against a matching, in a sentence; the empty string if nothing does.

    Args:
      saved, wanted: numbers of leaves.
      there: "checkpoint" or "plan".
    """
    differ = [m for m in matching.misfits if m.saved is not None and m.wanted is not None]
    missing = [m for m in matching.misfits if m.saved is None]
    unused = [m for m in matching.misfits if m.wanted is None]
    if not matching.misfits:
        return ""
    first = _foremost(matching.misfits)
    if first.saved and first.wanted:
        text = f"{first.name} is {first.saved} in the {there} and {first.wanted} here"
    elif first.wanted:
        text = f"{first.name} ({first.wanted}) is not in the {there}"
    else:
        text = f"{first.name} ({first.saved}) is in the {there} and not here"
    ends = f"; only here: {abbreviated([m.name for m in missing])}" if missing else ""
    ends += f"; only in the {there}: {abbreviated([m.name for m in unused])}" if unused else ""
    return (
        f"{text}. Of {wanted} leaves here and {saved} there, {len(differ)} differ in shape or dtype, {len(missing)} "
        f"are only here, {len(unused)} only there{ends}"
    )


def _foremost(misfits: Sequence[Misfit]) -> Misfit:
    """The one that a message is about: one that differs before one that is missing or not wanted, and among those a
    parameter before what an optimizer keeps of it.
    """
    groups = ([m for m in misfits if m.saved and m.wanted], [m for m in misfits if m.saved is None], misfits)
    found = next(group for group in groups if group)
    return next((m for m in found if m.name.startswith("params/")), found[0])


def remedy(misfits: Sequence[Misfit]) -> str:
    """The option that would help with the misfit that `misfit_text` names first, as a sentence."""
    missing = [m for m in misfits if m.saved is None]
    unused = [m for m in misfits if m.wanted is None]
    first = _foremost(misfits)
    if first.saved and first.wanted:
        return first.remedy
    equal = [(m, o) for m in missing for o in unused if _equal(m.wanted, o.saved) and first in (m, o)]
    if equal:
        closest = difflib.get_close_matches(
            first.name, [(o if first is m else m).name for m, o in equal], n=1, cutoff=0.0
        )[0]
        old, new = (closest, first.name) if first.saved is None else (first.name, closest)
        other = 'missing="init" makes it' if first.saved is None else 'extra="ignore" leaves it out'
        return f"rename={{{old!r}: {new!r}}} if that is the same leaf; {other}"
    if first.saved is None:
        return f'missing="init" takes it from fallback=, a tree or the function that makes one{_near(first, unused)}'
    return f'extra="ignore", or ignore=[{first.name!r}], leaves it out'


def _near(first: Misfit, unused: Sequence[Misfit]) -> str:
    close = difflib.get_close_matches(first.name, [m.name for m in unused], n=1, cutoff=0.8)
    return f"; {close[0]} in the checkpoint is {next(m.saved for m in unused if m.name == close[0])}" if close else ""


def _equal(a: LeafEntry | None, b: LeafEntry | None) -> bool:
    return a is not None and b is not None and (a.shape, a.dtype) == (b.shape, b.dtype)


def _whole_or_grown(saved: NamedLeaf, wanted: NamedLeaf, options: RestoreOptions) -> Source | Misfit:
    """``saved`` as ``wanted``."""
    a, b = saved.leaf, wanted.leaf
    pieces = (Piece.of(a.path, a.shape, a.dtype),) if a.kind == "array" else ()
    if interchangeable(a, b):
        return Source("saved", (saved,), pieces)
    same_family, option = dtype_family(a) == dtype_family(b) and "key" not in (a.kind, b.kind), ""
    grown = a.kind == b.kind == "array" and _longer_dims(a.shape, b.shape) == 1
    if same_family and (a.shape == b.shape or grown):
        needs = [option for option, lacks in (
            ("cast=True converts its dtype", a.dtype != b.dtype and not options.cast),
            ('missing="init" restores it and fills what it has more from fallback=, or with zeros',
             grown and options.missing == "error"),
        ) if lacks]  # fmt: skip
        if not needs:
            return Source("grown" if grown else "saved", (saved,), pieces)
        option = ", ".join(needs)
    else:
        option = f'ignore=[{saved.name!r}] with missing="init" leaves it out and takes that of fallback= in its place'
    return Misfit(_both_names(saved.name, wanted.name), a, b, option)


def _both_names(saved: str, wanted: str) -> str:
    return wanted if saved == wanted else f"{wanted} (saved as {saved})"


def _longer_dims(saved: Sequence[int], wanted: Sequence[int]) -> int:
    """In how many dimensions ``wanted`` is longer; 0 where it is shorter in one, or has more of them."""
    pairs = list(zip(saved, wanted, strict=False))
    return sum(a < b for a, b in pairs) if len(saved) == len(wanted) and all(a <= b for a, b in pairs) else 0


Layers = dict[str, list[tuple[int, NamedLeaf, str]]]
"""By the name without the number: the number of a layer, its leaf, and the name that this has now."""


def _layers(leaves: Mapping[str, NamedLeaf]) -> Layers:
    """Every leaf that could be a layer of a stack, once for each number in its name."""
    found: Layers = defaultdict(list)
    for name, leaf in leaves.items():
        for number, stack in _without_number(name):
            found[stack].append((number, leaf, name))
    return found


def _without_number(name: str) -> Iterator[tuple[int, str]]:
    """Each number in ``name`` that could be a layer's, and the name of the stack."""
    keys = name.split("/")
    for at, key in enumerate(keys):
        if (match := _LAYER.fullmatch(key)) and len(match[2]) < 8:
            yield int(match[2]), "/".join([*keys[:at], *([match[1]] if match[1] else []), *keys[at + 1 :]])


def _stacked(layers: Layers, wanted: NamedLeaf, options: RestoreOptions) -> tuple[Source | Misfit | None, list[str]]:
    """``wanted`` as the stack of saved layers, and the names of these."""
    group = sorted(layers.get(wanted.name, ()), key=lambda item: item[0])
    if not group or [number for number, *_ in group] != list(range(len(group))):
        return None, []
    goal, names = wanted.leaf, [name for *_, name in group]
    each = [leaf.leaf for _, leaf, _ in group]
    dtypes = {leaf.dtype for leaf in each}
    fits = all(leaf.kind == "array" and goal.shape == [len(each), *leaf.shape] for leaf in each)
    if not fits or not all(_cast_ok(leaf, goal, options) for leaf in each):
        odd = next((x for x in each if x.shape != each[0].shape or not _cast_ok(x, goal, options)), each[0])
        shape = [len(each), *odd.shape]
        made = goal.model_copy(update={"shape": shape, "dtype": odd.dtype})
        option = "no option changes the number or the shape of layers"
        if fits and all(_cast_ok(leaf, goal, RestoreOptions(cast=True)) for leaf in each) and dtypes:
            option = "cast=True converts its dtype"
        return Misfit(f"{wanted.name} (saved as {names[0]} and {len(names) - 1} more)", made, goal, option), names
    pieces = tuple(
        Piece(
            leaf.path,
            tuple(leaf.shape),
            jnp.dtype(leaf.dtype),
            tuple((0, n) for n in leaf.shape),
            ((number, number + 1), *((0, n) for n in leaf.shape)),
            (None, *range(len(leaf.shape))),
        )
        for number, leaf in enumerate(each)
    )
    return Source("stacked", tuple(leaf for _, leaf, _ in group), pieces), names


def _unstacked(
    saved: Mapping[str, NamedLeaf], wanted_layers: Layers, wanted: NamedLeaf, options: RestoreOptions
) -> tuple[Source | Misfit | None, list[str]]:
    """``wanted`` as a layer of a saved stack, and the name of that."""
    for number, name in _without_number(wanted.name):
        stack = saved.get(name)
        if stack is None or stack.leaf.kind != "array" or not stack.leaf.shape:
            continue
        a, b = stack.leaf, wanted.leaf
        numbers = {n for n, *_ in wanted_layers[name]}
        count = len(numbers)
        if numbers != set(range(count)):
            continue
        if a.shape == [count, *b.shape] and _cast_ok(a, b, options):
            box = ((number, number + 1), *((0, n) for n in b.shape))
            dims = tuple(range(1, len(a.shape)))
            piece = Piece(a.path, tuple(a.shape), jnp.dtype(a.dtype), box, box[1:], dims)
            return Source("unstacked", (stack,), (piece,)), [name]
        option = "no option changes the number or the shape of layers"
        if a.shape == [count, *b.shape]:
            option = "cast=True converts its dtype"
        goal = b.model_copy(update={"shape": [count, *b.shape]})
        return Misfit(f"{wanted.name}, one of {count} layers (saved as {stack.name})", a, goal, option), [name]
    return None, []


def _cast_ok(saved: LeafEntry, wanted: LeafEntry, options: RestoreOptions) -> bool:
    return saved.dtype == wanted.dtype or (options.cast and dtype_family(saved) == dtype_family(wanted))


def interchangeable(saved: LeafEntry, wanted: LeafEntry) -> bool:
    """Whether shape and dtype are equal, or one is a Python number and the other a 0-d array of its family."""
    if saved.shape == wanted.shape and saved.dtype == wanted.dtype:
        return True
    scalar = saved.shape == wanted.shape == [] and "key" not in (saved.kind, wanted.kind)
    python = saved.kind != "array" or wanted.kind != "array"
    return scalar and python and dtype_family(saved) == dtype_family(wanted)


def dtype_family(leaf: LeafEntry) -> str:
    """Within which dtypes may be cast: "bool", "float", "int", "complex", "str", "key"."""
    if leaf.kind != "array":
        return leaf.kind
    dtype: Any = jnp.dtype(leaf.dtype)
    families = {"bool": jnp.bool_, "float": jnp.floating, "int": jnp.integer, "complex": jnp.complexfloating}
    return next(name for name, family in families.items() if jnp.issubdtype(dtype, family))
