"""Reshards: right on simulated devices, cheapest, and a directed metric."""

from __future__ import annotations

import functools
import heapq
import itertools
import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given, settings

from autoshard.cost import reshard
from autoshard.cost.reshard_moves import FREE_MOVES, LocalBytes, ReshardGraph
from autoshard.errors import SpecError
from autoshard.ir.spec import Spec
from autoshard.machine.collective import collective_seconds
from autoshard.machine.mesh import Hardware, Link, LogicalMesh

LINKS = {"near": Link("near", 4.5e10, 1e-6), "far": Link("far", 6e9, 1e-5)}
CHIP = Hardware("chip", {"float32": 1e12}, 1e9, 1e12, LINKS, overhead=1e-6)


def mesh_of(*sizes: int, links: tuple[str, ...] = ()) -> LogicalMesh:
    return LogicalMesh(tuple("xyzw"[: len(sizes)]), sizes, CHIP, links)


@functools.cache
def specs(axes: str, rank: int, kind: str = "sum") -> tuple[Spec, ...]:
    """Every spec of ``rank`` over ``axes``: each axis unused, partial, or on a dimension."""
    found: list[Spec] = []
    for places in itertools.product(range(-2, rank), repeat=len(axes)):
        groups = [[a for a, p in zip(axes, places, strict=True) if p == d] for d in range(rank)]
        partial = tuple((a, kind) for a, p in zip(axes, places, strict=True) if p == -2)
        found.extend(Spec(d, partial) for d in itertools.product(*(itertools.permutations(g) for g in groups)))
    return tuple(found)


MESH = mesh_of(2, 4)
SHAPE = (8, 16)
SUM = (("x", "sum"),)

Shards = dict[tuple[int, ...], np.ndarray]


def tile(value: np.ndarray, spec: Spec, mesh: LogicalMesh, device: dict[str, int]) -> np.ndarray:
    """The part of ``value`` that ``spec`` gives to ``device``, its coordinates by axis."""
    for dim, axes in enumerate(spec.dims):
        index = 0
        for axis in axes:
            index = index * mesh.shape[axis] + device[axis]
        parts = mesh.axes_size(axes)
        value = np.split(value, parts, axis=dim)[index]
    return value


def devices(mesh: LogicalMesh) -> list[tuple[int, ...]]:
    return list(np.ndindex(*mesh.axis_sizes))


def named(mesh: LogicalMesh, device: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(mesh.axis_names, device, strict=True))


def place(value: np.ndarray, spec: Spec, mesh: LogicalMesh) -> Shards:
    """Shards of ``value`` under ``spec``; along partial axes, unequal integers that add up to it."""
    shards: Shards = {}
    for device in devices(mesh):
        at, shard = named(mesh, device), value
        for i, (axis, _) in enumerate(spec.partial):
            weight = 3 + i
            last = at[axis] == mesh.shape[axis] - 1
            shard = shard - weight * (mesh.shape[axis] - 1) * 7 if last else np.full_like(shard, weight * 7)
        shards[device] = tile(shard, spec, mesh, at)
    return shards


def reduced(shards: Shards, spec: Spec, mesh: LogicalMesh) -> Shards:
    """The shards after summing over every partial axis."""
    for axis, _ in spec.partial:
        shards = {d: sum(shards[e] for e in group(d, (axis,), mesh)) for d in shards}
    return shards


def group(device: tuple[int, ...], axes: tuple[str, ...], mesh: LogicalMesh) -> list[tuple[int, ...]]:
    """The devices that differ from ``device`` along ``axes`` alone, in row-major order of ``axes``."""
    found: list[tuple[int, ...]] = []
    for index in itertools.product(*(range(mesh.shape[a]) for a in axes)):
        at = named(mesh, device) | dict(zip(axes, index, strict=True))
        found.append(tuple(at[a] for a in mesh.axis_names))
    return found


def run(move: reshard.Move, before: Spec, shards: Shards, mesh: LogicalMesh) -> Shards:
    """The shards after one move, by what the collective of that name does. Reads only shards."""
    after: Shards = {}
    for device in shards:
        peers = group(device, move.axes, mesh)
        mine = peers.index(device)
        grown = [d for d in range(before.rank) if len(move.spec.dims[d]) > len(before.dims[d])]
        shrunk = [d for d in range(before.rank) if len(move.spec.dims[d]) < len(before.dims[d])]
        held = [shards[p] for p in peers]
        match move.kind:
            case "slice":
                after[device] = np.split(shards[device], len(peers), axis=grown[0])[mine]
            case "make-partial":
                after[device] = shards[device] if mine == 0 else np.zeros_like(shards[device])
            case "all-gather":
                after[device] = np.concatenate(held, axis=shrunk[0])
            case "all-to-all":
                mine_of = [np.split(h, len(peers), axis=grown[0])[mine] for h in held]
                after[device] = np.concatenate(mine_of, axis=shrunk[0])
            case "all-reduce":
                after[device] = sum(held)
            case "reduce-scatter":
                after[device] = np.split(sum(held), len(peers), axis=grown[0])[mine]
            case kind:
                raise AssertionError(kind)
    return after


def permute(move: reshard.Move, before: Spec, shards: Shards, mesh: LogicalMesh, value: np.ndarray) -> Shards:
    """A one-to-one send that gives every device its tile, with its partial value; fails if there is none."""
    labels = np.arange(value.size).reshape(value.shape)
    waiting = dict.fromkeys(shards)
    after: Shards = {}
    for device in shards:
        expected = tile(labels, move.spec, mesh, named(mesh, device))
        for sender in waiting:
            same_partial = all(named(mesh, sender)[a] == named(mesh, device)[a] for a, _ in before.partial)
            if same_partial and np.array_equal(tile(labels, before, mesh, named(mesh, sender)), expected):
                after[device] = shards[sender]
                del waiting[sender]
                break
    assert not waiting
    return after


def check_moves(src: Spec, dst: Spec, shape: tuple[int, ...], mesh: LogicalMesh) -> list[str]:
    """Follows the path from ``src`` to ``dst`` on shards of a value: kinds of its moves."""
    value = np.arange(math.prod(shape)).reshape(shape) ** 2
    shards, spec = place(value, src, mesh), src
    path = reshard.reshard_path(src, dst, shape, 32, mesh)
    for move in path:
        sent = shards
        if move.kind == "collective-permute":
            shards = permute(move, spec, shards, mesh, value)
        else:
            shards = run(move, spec, shards, mesh)
        payload = shards if move.kind == "all-gather" else sent
        assert move.bytes == (0 if move.kind in FREE_MOVES else payload[devices(mesh)[0]].size * 4)
        spec = move.spec
    assert spec == dst, f"{src} -> {dst}"
    whole = reduced(shards, dst, mesh)
    for device, shard in whole.items():
        np.testing.assert_array_equal(
            shard, tile(value, dst, mesh, named(mesh, device)), err_msg=f"{src} -> {dst} on {device}"
        )
    return [move.kind for move in path]


@pytest.mark.parametrize("src", specs("xy", 2), ids=str)
def test_moves_produce_the_destination_s_shards(src: Spec) -> None:
    for dst in specs("xy", 2):
        check_moves(src, dst, SHAPE, MESH)


SIX_AXES = LogicalMesh(tuple("abcdef"), (2,) * 6, CHIP)
ABC, DEF = ("a", "b", "c"), ("d", "e", "f")


@pytest.mark.parametrize(
    ("src", "dst", "kinds"),
    [
        (Spec((ABC, DEF)), Spec((DEF, ABC)), ["collective-permute"]),
        (Spec(((*ABC, *DEF), ())), Spec(((), (*ABC, *DEF))), ["all-to-all"]),
        (Spec((ABC, DEF)), Spec((DEF, ())), None),
        (Spec((ABC, ()), (("d", "sum"), ("e", "sum"), ("f", "sum"))), Spec((DEF, ())), None),
        (Spec((("a", "c", "e"), ("b", "d", "f"))), Spec((("f", "c", "b"), ("e", "a", "d"))), ["all-gather"] * 2),
        (
            Spec((("a", "c"), ("b",)), (("d", "sum"), ("e", "sum"), ("f", "sum"))),
            Spec((("f", "b", "e"), ("c", "d", "a"))),
            ["all-reduce", "all-gather", "all-gather"],
        ),
    ],
    ids=str,
)
def test_more_axes_than_are_searched_over(src: Spec, dst: Spec, kinds: list[str] | None) -> None:
    found = check_moves(src, dst, (64, 64), SIX_AXES)
    assert kinds is None or [kind for kind in found if kind not in FREE_MOVES] == kinds


def test_axes_that_stand_together_move_as_one_axis_of_their_size_does() -> None:
    one = LogicalMesh(("x", "y"), (8, 8), CHIP)
    for src, dst in itertools.permutations([Spec((("x",), ("y",))), Spec((("y",), ())), Spec(((), ("x", "y")))], 2):
        many = [Spec(tuple(tuple(a for x in d for a in {"x": ABC, "y": DEF}[x]) for d in s.dims)) for s in (src, dst)]
        path = reshard.reshard_path(*many, (64, 64), 32, SIX_AXES)
        expected = reshard.reshard_path(src, dst, (64, 64), 32, one)
        assert [(m.kind, m.bytes) for m in path] == [(m.kind, m.bytes) for m in expected]


def exhaustive(src: Spec, dst: Spec, shape: tuple[int, ...], mesh: LogicalMesh) -> float:
    """Plain Dijkstra over the axes that either spec uses: no common prefix left out, no heuristic, no shortcut."""
    used = tuple(a for a in mesh.axis_names if a in {*src.axes, *dst.axes})
    graph = ReshardGraph([(a,) for a in used], src.rank, dst.partial, mesh)
    sizes = LocalBytes((src.dims, src.partial), (dst.dims, dst.partial), shape, 32, graph.sizes)
    best, queue = {(src.dims, src.partial): 0.0}, [(0.0, (src.dims, src.partial))]
    while queue:
        cost, state = heapq.heappop(queue)
        if state == (dst.dims, dst.partial):
            return cost
        if cost > best[state]:
            continue
        for edge in graph.edges_from(state):
            size = sizes(edge.after if edge.kind == "all-gather" else state)
            if size is None or sizes(edge.after) is None:
                continue
            total = cost + edge.fixed_seconds + edge.seconds_per_byte * size
            if total < best.get(edge.after, math.inf):
                best[edge.after] = total
                heapq.heappush(queue, (total, edge.after))
    raise AssertionError("unreachable")


ELEMENTS = st.sampled_from([(8, 8, 8), (64, 64, 64), (1024, 512, 64)])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(specs("xyz", 3)), st.sampled_from(specs("xyz", 3)), ELEMENTS)
def test_no_path_is_cheaper(src: Spec, dst: Spec, shape: tuple[int, ...]) -> None:
    mesh = mesh_of(2, 2, 4)
    assert reshard.reshard_seconds(src, dst, shape, 32, mesh) == pytest.approx(
        exhaustive(src, dst, shape, mesh), rel=1e-6
    )


@settings(max_examples=150, deadline=None)
@given(*(st.sampled_from(specs("xyz", 2)),) * 3, st.sampled_from([(8, 8), (64, 32), (4096, 4096)]))
def test_triangle_inequality(a: Spec, b: Spec, c: Spec, shape: tuple[int, ...]) -> None:
    assume({*b.axes} <= {*a.axes, *c.axes})
    mesh = mesh_of(2, 2, 4)
    cost = functools.partial(reshard.reshard_seconds, shape=shape, itemsize_bits=16, mesh=mesh)
    assert cost(a, c) <= (cost(a, b) + cost(b, c)) * (1 + 1e-9) + 1e-11


def free(src: Spec, dst: Spec) -> bool:
    sliced = all(b[: len(a)] == a for a, b in zip(src.dims, dst.dims, strict=True))
    return sliced and set(src.partial) <= set(dst.partial)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(specs("xyz", 2)), st.sampled_from(specs("xyz", 2)))
def test_seconds_are_zero_exactly_without_collectives(src: Spec, dst: Spec) -> None:
    mesh = mesh_of(2, 2, 4)
    cost = reshard.reshard_seconds(src, dst, (64, 32), 32, mesh)
    assert (cost == 0.0) == free(src, dst)
    assert (cost == 0.0) == (reshard.reshard_collectives(src, dst, (64, 32), 32, mesh) == ())


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(specs("xy", 2)), st.sampled_from(specs("xy", 2)), st.integers(1, 6), st.integers(1, 6))
def test_seconds_are_monotone_in_bytes(src: Spec, dst: Spec, small: int, extra: int) -> None:
    low, high = (8 * small, 16), (8 * (small + extra), 16)
    assert reshard.reshard_seconds(src, dst, low, 32, MESH) <= reshard.reshard_seconds(src, dst, high, 32, MESH) + 1e-11
    assert reshard.reshard_seconds(src, dst, low, 8, MESH) <= reshard.reshard_seconds(src, dst, low, 32, MESH) + 1e-11


def described(src: Spec, dst: Spec, shape: tuple[int, ...] = (64, 64), mesh: LogicalMesh = MESH) -> list[str]:
    return [
        f"{c.kind} {'+'.join(c.axes or ())} {c.bytes}" for c in reshard.reshard_collectives(src, dst, shape, 32, mesh)
    ]


X, Y, XY, YX, N = ("x",), ("y",), ("x", "y"), ("y", "x"), ()
SUM_X, SUM_XY = (("x", "sum"),), (("x", "sum"), ("y", "sum"))


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        (Spec((N, N)), Spec((X, Y)), []),
        (Spec((N, N)), Spec((N, N), SUM_X), []),
        (Spec((X, N)), Spec((N, N)), ["all-gather x 16384"]),
        (Spec((XY, N)), Spec((N, N)), ["all-gather x+y 16384"]),
        (Spec((XY, N)), Spec((X, N)), ["all-gather y 8192"]),
        (Spec((X, N)), Spec((N, X)), ["all-to-all x 8192"]),
        (Spec((XY, N)), Spec((N, XY)), ["all-to-all x+y 2048"]),
        (Spec((N, N), SUM_X), Spec((N, N)), ["all-reduce x 16384"]),
        (Spec((N, N), SUM_XY), Spec((N, N)), ["all-reduce x+y 16384"]),
        (Spec((N, N), SUM_X), Spec((X, N)), ["reduce-scatter x 16384"]),
        (Spec((Y, N), SUM_X), Spec((YX, N)), ["reduce-scatter x 4096"]),
        (Spec((N, N), SUM_XY), Spec((N, XY)), ["reduce-scatter x+y 16384"]),
        (Spec((N, N), SUM_X), Spec((N, Y)), ["all-reduce x 4096"]),
        (Spec((XY, N)), Spec((YX, N)), ["collective-permute x+y 2048"]),
    ],
    ids=lambda v: str(v) if isinstance(v, Spec) else None,
)
def test_collectives(src: Spec, dst: Spec, expected: list[str]) -> None:
    assert described(src, dst) == expected


@pytest.mark.parametrize(
    ("src", "dst", "left"),
    [
        (Spec(((), ()), SUM), Spec((("x",), ())), (("x",), ())),
        (Spec(((), ()), SUM), Spec(((), ())), ((), ())),
        (Spec(((), ()), (("x", "sum"), ("y", "sum"))), Spec((("x", "y"), ())), (("x", "y"), ())),
        (Spec((("y",), ()), SUM), Spec((("x", "y"), ())), (("y", "x"), ())),
        (Spec(((), ("y",)), SUM), Spec((("x",), ())), (("x",), ("y",))),
        (Spec(((), ()), (("x", "max"),)), Spec((("x",), ())), ((), ())),
    ],
    ids=["scattered", "reduced", "over both", "before a permute", "before a gather", "no sum"],
)
def test_spec_after_reduction(src: Spec, dst: Spec, left: tuple[tuple[str, ...], ...]) -> None:
    assert reshard.spec_after_reduction(src, dst, (64, 64), 32, MESH) == Spec(left)


def test_the_slow_axis_is_gathered_first() -> None:
    mesh = mesh_of(2, 4, links=("near", "far"))
    assert described(Spec((X, Y)), Spec((N, N)), mesh=mesh) == ["all-gather y 8192", "all-gather x 16384"]
    swapped = mesh_of(2, 4, links=("far", "near"))
    assert described(Spec((X, Y)), Spec((N, N)), mesh=swapped) == ["all-gather x 4096", "all-gather y 16384"]


def test_of_equally_fast_sequences_the_one_without_a_reduce_scatter_is_taken() -> None:
    mesh = mesh_of(2, 4, links=("far", "near"))
    assert described(Spec((Y, N), SUM_X), Spec((N, N)), mesh=mesh) == ["all-reduce x 4096", "all-gather y 16384"]


def test_sub_byte_elements_are_counted_in_bits() -> None:
    (gather,) = reshard.reshard_collectives(Spec((X,)), Spec((N,)), (64,), 4, MESH)
    assert gather.bytes == 32


def test_source_and_destination_may_be_uneven() -> None:
    assert described(Spec((Y, N)), Spec((N, N)), shape=(6, 5)) == ["all-gather y 120"]
    assert described(Spec((Y, N)), Spec((N, Y)), shape=(6, 8)) == ["all-to-all y 64"]


def test_axes_of_size_1_are_ignored() -> None:
    mesh = mesh_of(1, 8)
    assert reshard.reshard_collectives(Spec((X, N), ()), Spec((N, N)), (64, 64), 32, mesh) == ()
    assert reshard.reshard_seconds(Spec((N, N), SUM_X), Spec((N, N)), (64, 64), 32, mesh) == 0.0


def test_collective_seconds_follow_the_documented_formulas() -> None:
    mesh, b, o = mesh_of(2, 4, links=("near", "far")), 1e6, CHIP.overhead
    near, far = LINKS["near"], LINKS["far"]
    ring = 1 / 2 * b / near.bandwidth + near.latency
    assert collective_seconds("all-gather", X, b, mesh) == pytest.approx(ring + o)
    assert collective_seconds("all-reduce", X, b, mesh) == pytest.approx(2 * ring + o)
    tiers = ring + 3 / 4 * b / 2 / far.bandwidth + 3 * far.latency
    assert collective_seconds("reduce-scatter", XY, b, mesh) == pytest.approx(tiers + o)
    exchange = 3 / 4 * b / far.bandwidth + 3 * far.latency + 1 / 2 * b / 4 / near.bandwidth + near.latency
    assert collective_seconds("all-to-all", XY, b, mesh) == pytest.approx(exchange + o)
    assert collective_seconds("collective-permute", XY, b, mesh) == pytest.approx(b / far.bandwidth + far.latency + o)
    flat = mesh_of(2, 4)
    assert collective_seconds("all-gather", XY, b, flat) == pytest.approx(7 / 8 * b / near.bandwidth + 4e-6 + o)


def test_invalid_specs_are_named_in_the_error() -> None:
    with pytest.raises(SpecError, match="has 1 dimensions and the value has 2"):
        reshard.reshard_seconds(Spec((X,)), Spec((N, N)), SHAPE, 32, MESH)
    with pytest.raises(SpecError, match="'q'"):
        reshard.reshard_seconds(Spec((("q",), N)), Spec((N, N)), SHAPE, 32, MESH)
    with pytest.raises(SpecError, match="twice"):
        reshard.reshard_collectives(Spec((X, X)), Spec((N, N)), SHAPE, 32, MESH)
