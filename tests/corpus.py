"""One program of the corpus that JAX ships, sharded by `autoshard.jit`, against plain `jax.jit`.

On a (2, 4) mesh of eight CPU devices, a program has one dimension of one argument or result pinned over as many axes as
it takes; on a (2, 2, 2) mesh, every dimension of every argument and result over an axis of its own, as far as they go.
A dimension takes axes where they divide it and an operation that reads or makes the array lets it be split. Where none
does, the program is *whole* and has its reason; what would divide is pinned all the same, and has to be gathered.
It is *sharded* when the executable and its results, asked afterwards, hold each pinned array in parts.
"""

from __future__ import annotations

import itertools
import math
import os
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import numpy as np
from jax._src.internal_test_util import test_harnesses  # noqa: TID251 (the corpus is nowhere else)
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.ir.graph import Graph, OpKind
from autoshard.runtime.verify import compare_arrays

MESHES = ({"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2})
TOLERANCE = 1e-5
"""Of a result's largest entry, in float32; `autoshard.verify` says what of narrower types. Integers are equal."""
NO_ARRAY, EMPTY, INDIVISIBLE = "no array has a dimension", "an empty dimension", "no dimension divides"
UNREAD = "no operation reads or makes it"
STATUSES = ("sharded", "whole", "skipped", "failed")


@dataclass(frozen=True)
class Outcome:
    """What became of one program on one mesh."""

    index: int
    group: str
    name: str
    mesh: str
    status: str
    """One of `STATUSES`; the first two are equal to plain JAX."""
    note: str = ""
    """Why it is whole, skipped or failed."""
    off: float = 0.0
    """The largest difference from plain JAX, as a share of the result's largest entry."""


@dataclass(frozen=True)
class Split:
    """Pins of the flat arguments and of the flat results; and why no operation lets them be, where none does."""

    arguments: tuple[P | None, ...]
    results: tuple[P | None, ...]
    reason: str = ""


def harnesses() -> list[Any]:
    """The corpus, in its own order."""
    return list(test_harnesses.all_harnesses)


def sample(corpus: Sequence[Any], every: int) -> list[int]:
    """The indices of each ``every``-th program of each group, the first included: no group is left out."""
    groups: dict[str, list[int]] = defaultdict(list)
    for i, harness in enumerate(corpus):
        groups[harness.group_name].append(i)
    return sorted(i for members in groups.values() for i in members[::every])


def run(index: int, harness: Any, meshes: Sequence[Mapping[str, int]] = MESHES) -> Iterator[Outcome]:
    """Runs one program on each of ``meshes``, some of `MESHES`."""
    fun, args = harness.dyn_fun, harness.dyn_args_maker(np.random.RandomState(0))
    what = (index, harness.group_name, harness.fullname)
    try:
        expected = jax.block_until_ready(jax.jit(fun)(*args))
    except Exception as e:
        yield from (Outcome(*what, mesh_name(axes), "skipped", f"plain JAX: {spoken(e)}") for axes in meshes)
        return
    for axes in meshes:
        yield Outcome(*what, mesh_name(axes), *attempt(fun, axes, args, expected))


def attempt(fun: Any, axes: Mapping[str, int], args: Sequence[Any], expected: Any) -> tuple[str, str, float]:
    """Runs ``fun`` on one mesh: the status, the note and the difference of its outcome."""
    try:
        graph = autoshard.jit(fun, mesh=axes, strategy="replicated").executable(*args).graph
        split = pins(graph, axes, one=axes is MESHES[0])
        wrong, off = sharded(fun, axes, split, args, expected)
    except Exception as e:
        at = traceback.extract_tb(e.__traceback__)[-1]
        return "failed", f"{spoken(e)} ({Path(at.filename).name}:{at.lineno})", math.inf
    return ("failed", wrong, off) if wrong else ("whole" if split.reason else "sharded", split.reason, off)


def mesh_name(axes: Mapping[str, int]) -> str:
    """A mesh by its sizes."""
    return "x".join(map(str, axes.values()))


def spoken(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def sharded(fun: Any, axes: Mapping[str, int], split: Split, args: Sequence[Any], expected: Any) -> tuple[str, float]:
    """Runs ``fun`` pinned: what is wrong with how its arrays are sharded or what they hold, and how far it is off."""
    ins, outs = (
        jax.tree.unflatten(jax.tree.structure(tree), list(given)) if any(given) else None
        for tree, given in ((tuple(args), split.arguments), (expected, split.results))
    )
    step = autoshard.jit(fun, mesh=axes, strategy="replicated", in_shardings=ins, out_shardings=outs)
    got = step(*args)
    taken = jax.tree.leaves(step.executable(*args).compiled.input_shardings[0], is_leaf=lambda x: x is None)
    made = [x.sharding for x in jax.tree.leaves(got)]
    arrays = jax.tree.leaves((tuple(args), expected))
    for i, (pin, sharding, x) in enumerate(zip(split.arguments + split.results, taken + made, arrays, strict=True)):
        if pin is not None and (sharding is None or sharding.shard_shape(x.shape) != part(pin, x.shape, axes)):
            return f"array {i}, pinned to {pin}, is sharded as {sharding}", math.inf
    return difference(expected, got)


def part(pin: P, shape: Sequence[int], axes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of one device's part of an array."""
    parts = [math.prod(axes[a] for a in entry or ()) for entry in pin]
    return tuple(n // k for n, k in zip(shape, parts, strict=True))


def pins(graph: Graph, axes: Mapping[str, int], one: bool) -> Split:
    """One dimension of one array over as many axes as it takes, or each of every array over the next free axis."""
    reasons = {
        (v, d, over): obstacle(graph, v, d, math.prod(axes[a] for a in over))
        for v in dict.fromkeys((*graph.inputs, *graph.outputs))
        for d in range(len(graph.values[v].shape))
        for over in choices(axes, one)
    }
    impossible = (EMPTY, INDIVISIBLE, UNREAD)
    legal = specs(graph, axes, one, lambda *at: not reasons[at])
    if any(legal):
        return Split(legal[: len(graph.inputs)], legal[len(graph.inputs) :])
    forced = specs(graph, axes, one, lambda *at: reasons[at] not in impossible)
    first = next((r for r in reasons.values() if r not in impossible), None)
    reason = first or next((r for r in reversed(impossible) if r in reasons.values()), NO_ARRAY)
    return Split(forced[: len(graph.inputs)], forced[len(graph.inputs) :], reason)


def specs(
    graph: Graph, axes: Mapping[str, int], one: bool, may: Callable[[int, int, tuple[str, ...]], bool]
) -> tuple[P | None, ...]:
    """A pin for each argument and result, of what ``may`` be split: value, dimension, axes."""
    found: list[P | None] = []
    for v in (*graph.inputs, *graph.outputs):
        free = {} if one and any(found) else dict(axes)
        entries: list[tuple[str, ...] | None] = []
        for d in range(len(graph.values[v].shape)):
            taken = next((over for over in choices(free, one) if may(v, d, over)), None)
            free = {a: n for a, n in free.items() if not taken or (not one and a not in taken)}
            entries.append(taken)
        found.append(P(*entries) if any(entries) else None)
    return tuple(found)


def choices(axes: Mapping[str, int], several: bool) -> list[tuple[str, ...]]:
    """Every axis, or every set of them, the most parts first."""
    sets = [s for n in range(1, len(axes) + 1 if several else 2) for s in itertools.combinations(axes, n)]
    return sorted(sets, key=lambda s: -math.prod(axes[a] for a in s))


def obstacle(graph: Graph, v: int, d: int, parts: int) -> str:
    """Why dimension ``d`` of value ``v`` is not split into ``parts``; empty when some operation lets it be."""
    size = graph.values[v].shape[d]
    if size == 0:
        return EMPTY
    if size % parts:
        return INDIVISIBLE
    reason, todo, seen = UNREAD, [(v, d)], {(v, d)}
    for value, at in todo:  # grows: through the borders of loops and branches to what happens inside
        for node in map(graph.nodes.__getitem__, graph.uses[value]):
            places = [(i, dim) for i, e, dim in node.kind.factored_dims if node.values[i] == value and e == at]
            if node.tie:
                more = [
                    (node.values[i], e) for i, e, dim in node.kind.factored_dims if any(dim == own for _, own in places)
                ]
                todo += [m for m in more if m not in seen]
                seen.update(more)
                continue
            if any(splits(node.kind, dim, parts) for _, dim in places):
                return ""
            reason = rules_word(node.kind, [dim for _, dim in places], parts) if reason == UNREAD else reason
    reached = {value for value, _ in todo}
    return reason if reached.isdisjoint(graph.inputs) or reached.isdisjoint(graph.outputs) else ""


def splits(kind: OpKind, dim: Sequence[str], parts: int) -> bool:
    """Whether a dimension made of the factors ``dim`` may be split into ``parts``."""
    sizes = dict(kind.factor_sizes)
    for f in dim:
        if kind.rule.kind(f) == "whole":
            return False
        if sizes[f] % parts == 0:
            return True
        if parts % sizes[f]:
            return False
        parts //= sizes[f]
    return False


def rules_word(kind: OpKind, dims: Sequence[Sequence[str]], parts: int) -> str:
    """What in the rule of an operation keeps a dimension whole."""
    if kind.rule.reason:
        return f"{kind.op}: {kind.rule.reason}"
    if not dims or kind.rule.kind(dims[0][0]) == "whole":
        return f"{kind.op}: kept whole by {str(kind.rule).partition(' | ')[0]}"
    return f"{kind.op}: the outer factor, of {dict(kind.factor_sizes)[dims[0][0]]}, does not divide into {parts}"


def difference(expected: Any, got: Any) -> tuple[str, float]:
    """How two results differ, or the empty string; and how far they are apart."""
    if jax.tree.structure(expected) != jax.tree.structure(got):
        return f"structure {jax.tree.structure(got)} for {jax.tree.structure(expected)}", math.inf
    off = 0.0
    for i, (a, b) in enumerate(zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"result {i}: {b.dtype}{b.shape} for {a.dtype}{a.shape}", math.inf
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        d = compare_arrays(f"result {i}", np.asarray(a), np.asarray(b), TOLERANCE)
        if not d.equal:
            return str(d), d.relative
        off = max(off, d.relative)
    return "", off
