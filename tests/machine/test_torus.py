"""Rates over a torus are held against links that are counted: every byte of every device, hop by hop."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import mesh_utils

from autoshard import MeshConfig
from autoshard.cost.reshard import reshard_seconds
from autoshard.cost.reshard_tables import reshard_seconds_table
from autoshard.errors import MeshError
from autoshard.ir.program import PipelineRequest
from autoshard.ir.spec import Spec
from autoshard.machine.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COLLECTIVE_PERMUTE,
    REDUCE_SCATTER,
    collective_seconds,
)
from autoshard.machine.hardware import load_hardware
from autoshard.machine.mesh import LogicalMesh
from autoshard.machine.target import crosses, device_array
from autoshard.machine.torus import Span, chips, device_spans, spans, torus_rates
from autoshard.machine.tpu_slice import TPUS, TpuSlice, slice_of

SLICES = [
    ("v5e:4x4", (4, 4)),
    ("v5e:4x4", (2, 8)),
    ("v5e:4x8", (8, 4)),
    ("v5e:16x16", (32, 8)),
    ("v5e:16x16", (16, 16)),
    ("v5e:16x16", (64, 4)),
    ("v6e:8x8", (2, 32)),
    ("v5p:4x4x4", (16, 4)),
    ("v5p:4x4x4", (64,)),
    ("v5p:4x4x8", (32, 4)),
    ("v4:2x2x4", (4, 4)),
]


def place(number: tuple[int, ...], axes: tuple[tuple[Span, ...], ...]) -> dict[int, int]:
    """Where the device of these numbers along the axes is."""
    at: dict[int, int] = {}
    for n, along in zip(number, axes, strict=True):
        for span in reversed(along):
            n, own = divmod(n, span.devices)
            at[span.dim] = at.get(span.dim, 0) + own * span.stride
    return at


def way(source: dict[int, int], to: dict[int, int], sides: dict[int, tuple[int, bool]]):
    """The links (place, dimension, direction) of the shortest way, one dimension after the other; both ways round a
    ring where they are as long, with half of the bytes each."""
    at = dict(source)
    for dim, (side, wraps) in sides.items():
        forward = to[dim] - at[dim]
        ways = [(forward, 1.0)]
        if wraps:
            forward %= side
            ways = [(forward, 1.0)] if 2 * forward < side else [(forward - side, 1.0)]
            ways = [(forward, 0.5), (forward - side, 0.5)] if 2 * forward == side else ways
        for hops, share in ways:
            step = 1 if hops > 0 else -1
            for i in range(abs(hops)):
                here = {**at, dim: (at[dim] + step * i) % side if wraps else at[dim] + step * i}
                yield (tuple(here.items()), dim, step), share
        at[dim] = to[dim]


def busiest(target: TpuSlice, sizes: tuple[int, ...], over: tuple[int, ...], sent) -> float:
    """The most that crosses a link one way, where ``sent`` says what a device of a group sends to another of it."""
    axes = spans(target, sizes)
    sides: dict[int, tuple[int, bool]] = {}
    for span in itertools.chain(*axes):
        side = math.prod(s.devices for s in itertools.chain(*axes) if s.dim == span.dim)
        sides[span.dim] = side, target.wraps(span.dim)
    loads: Counter = Counter()
    for number in itertools.product(*map(range, sizes)):
        for other in itertools.product(*[range(sizes[i]) if i in over else [number[i]] for i in range(len(sizes))]):
            share = sent([number[i] for i in over], [other[i] for i in over])
            if share and number != other:
                for link, part in way(place(number, axes), place(other, axes), sides):
                    loads[link] += share * part
    return max(loads.values())


@pytest.mark.parametrize(
    ("topology", "sizes", "over"),
    [(t, sizes, over) for t, sizes in SLICES for over in ((0,), (0, 1)[: len(sizes)]) if math.prod(sizes) <= 128],
)
def test_an_all_to_all_takes_what_its_busiest_link_takes(topology, sizes, over):
    target, n = TpuSlice(topology), math.prod(sizes[i] for i in over)
    found = torus_rates(tuple(spans(target, sizes)[i] for i in over))
    load = busiest(target, sizes, over, lambda a, b: 1 / n)
    if len(found) == 1:
        assert (n - 1) / n / found[0].exchange == pytest.approx(load)
    else:  # an axis with gaps in one dimension: one part after the other takes longer
        assert sum((r.devices - 1) / r.devices / r.exchange for r in found) >= load


@pytest.mark.parametrize(("topology", "sizes"), [(t, sizes) for t, sizes in SLICES if math.prod(sizes) <= 128])
def test_a_permute_takes_what_its_busiest_link_takes(topology, sizes):
    target, n = TpuSlice(topology), sizes[0]
    load = busiest(target, sizes, (0,), lambda a, b: float(b[0] == a[0] + 1 < n))
    assert 1 / torus_rates((spans(target, sizes)[0],))[0].shift == pytest.approx(load, rel=0.5)
    assert 1 / torus_rates((spans(target, sizes)[0],))[0].shift >= load - 1e-9


def test_axes_run_along_dimensions_of_the_grid():
    assert spans(TpuSlice("v5p:4x4x4"), (16, 4)) == (
        (Span(1, 4, 1, True), Span(2, 4, 1, True)),
        (Span(0, 4, 1, True),),
    )
    assert spans(TpuSlice("v5e:4x4"), (4, 4)) == ((Span(1, 4, 1, False),), (Span(0, 4, 1, False),))
    halves, ring = spans(TpuSlice("v5e:16x16"), (32, 8))
    assert halves == (Span(0, 2, 8, True), Span(1, 16, 1, True))
    assert ring == (Span(0, 8, 1, False),)


def test_across_slices_an_axis_runs_along_none():
    first, second = spans(TpuSlice("v5e:4x4", 2), (8, 4))
    assert first == ()
    assert second == spans(TpuSlice("v5e:4x4"), (4, 4))[1]


def test_an_axis_that_is_no_block_of_the_grid_is_a_ring_of_one_link():
    assert spans(TpuSlice("v5p:2x2x2"), (4, 2)) == ((), ())
    mesh = MeshConfig(axes={"a": 4, "b": 2}, tpu="v5p:2x2x2").mesh()
    bare = MeshConfig(axes={"a": 4, "b": 2}, devices=8, hardware="tpu-v5p").mesh()
    assert collective_seconds(ALL_GATHER, ("a",), 2**20, mesh) == collective_seconds(ALL_GATHER, ("a",), 2**20, bare)


@pytest.mark.parametrize(
    ("topology", "wraps"),
    [
        ("v5e:8x16", (False, True)),
        ("v5p:4x4x8", (True, True, True)),
        ("v5p:2x4x4", (False,) * 3),
        ("v4:2x2x1", (0,) * 3),
    ],
)
def test_which_ends_are_joined(topology, wraps):
    target = TpuSlice(topology)
    assert tuple(map(target.wraps, range(len(wraps)))) == wraps
    assert not target.wraps(len(wraps))


def test_two_axes_at_once_use_the_links_of_both():
    mesh = MeshConfig(axes={"data": 16, "model": 4}, tpu="v5p:4x4x4").mesh()
    size, link = 2**34, mesh.hardware.links["ici"].bandwidth

    def rate(kind, *axes):
        n = mesh.axes_size(axes)
        rounds = {ALL_REDUCE: 2, COLLECTIVE_PERMUTE: n / (n - 1)}.get(kind, 1)
        return rounds * (n - 1) / n * size / collective_seconds(kind, axes, size, mesh) / link

    assert rate(ALL_GATHER, "data") == pytest.approx(2, rel=1e-3)
    assert rate(ALL_GATHER, "model") == pytest.approx(2, rel=1e-3)
    assert rate(ALL_REDUCE, "data") == pytest.approx(4, rel=1e-3)
    assert rate(ALL_REDUCE, "data", "model") == pytest.approx(4, rel=1e-3)  # no less than a reduce-scatter takes
    assert rate(ALL_TO_ALL, "data", "model") == pytest.approx(63 / 32, rel=1e-3)
    assert rate(COLLECTIVE_PERMUTE, "data") == pytest.approx(1, rel=1e-3)


def test_a_link_that_is_given_counts_as_it_is():
    given = MeshConfig(axes={"data": 16, "model": 4}, tpu="v5p:4x4x4", links={"data": "ici"}).mesh()
    bare = MeshConfig(axes={"data": 16, "model": 4}, devices=64, hardware="tpu-v5p").mesh()
    assert given.torus[0] == ()
    seconds = [collective_seconds(ALL_REDUCE, ("data",), 2**30, mesh) for mesh in (given, bare)]
    assert seconds[0] == seconds[1]


def test_every_chip_of_one_device_has_a_place_in_its_grid():
    for name, chip in TPUS.items():
        grid = "x".join("4" * chip.grid_rank)
        target = TpuSlice(f"{name}:{grid}")
        assert any(spans(target, (target.size // 4, 4))) == (chip.devices_per_chip == 1)


@pytest.mark.parametrize(
    ("topology", "axes"),
    [("v5p:4x4x4", (16, 4)), ("v5p:4x4x4", (64, 1)), ("v5e:4x4", (4, 4)), ("v5e:16x16", (32, 8)), ("v5e:4x4", (2, 8))],
)
def test_a_reduce_scatter_takes_no_longer_than_an_all_reduce_of_which_a_part_is_kept(topology, axes):
    mesh = MeshConfig(axes={"a": axes[0], "b": axes[1]}, tpu=topology).mesh()
    size = 2**34
    both, first, second = (mesh.axis_names, mesh.axis_names[:1], mesh.axis_names[1:])
    scatter = collective_seconds(REDUCE_SCATTER, both, size, mesh)
    assert scatter <= 1.001 * collective_seconds(ALL_REDUCE, both, size, mesh)
    by_axis = collective_seconds(REDUCE_SCATTER, first, size, mesh)
    by_axis += collective_seconds(REDUCE_SCATTER, second, size / axes[0], mesh)
    assert scatter <= 1.001 * by_axis


@pytest.mark.parametrize(
    ("along", "says"),
    [
        ((Span(0, 2, 1, False),), "of another size"),
        ((Span(0, 4, 0, False),), "no dimensions"),
        ((Span(7, 4, 1, False),), "no dimensions"),
        ((Span(0, 4, 1, False), Span(1, 1, 1, False)), "no dimensions"),
    ],
)
def test_a_place_that_cannot_be_is_refused(along, says):
    with pytest.raises(MeshError, match=says):
        LogicalMesh(("data",), (4,), load_hardware("tpu-v5e"), torus=(along,))


def test_what_a_reshard_costs_is_the_least_there_is():
    """By the shortest path as by the tables of all specs."""
    mesh = MeshConfig(axes={"data": 16, "model": 4}, tpu="v5p:4x4x4").mesh()
    src, dst = Spec(((), ()), (("data", "sum"), ("model", "sum"))), Spec((("data", "model"), ()))
    table = reshard_seconds_table([src], [dst], (4096, 4096), 32, mesh)
    assert table[0][0] == pytest.approx(reshard_seconds(src, dst, (4096, 4096), 32, mesh), rel=1e-6)


@pytest.mark.parametrize(("topology", "sizes"), SLICES)
def test_devices_that_are_there_are_a_slice(topology, sizes):
    target = TpuSlice(topology)
    there = list(chips(target))
    assert slice_of(there) == target
    placed = mesh_utils.create_device_mesh(sizes, there, allow_split_physical_axes=True)
    assert device_spans(placed, crosses(placed)) == spans(target, sizes)


def two_slices(topology: str) -> list[Any]:
    return [
        replace(chip, id=chip.id + 1000 * number, slice_index=number)
        for number in (0, 1)
        for chip in chips(TpuSlice(topology))
    ]


@pytest.mark.parametrize("axes", [{"data": 4, "model": 8}, {"data": 2, "fsdp": 4, "model": 4}])
def test_several_slices_that_are_there_are_as_a_config_describes_them(monkeypatch, axes):
    there, described = two_slices("v5e:4x4"), MeshConfig(axes=axes, tpu="v5e:4x4", slices=2).mesh()
    assert slice_of(there) == TpuSlice("v5e:4x4", 2)
    monkeypatch.setattr(jax, "devices", lambda: there)
    mesh = MeshConfig(axes=axes).mesh()
    assert mesh == described
    assert mesh.torus == described.torus
    placed = device_array(TpuSlice("v5e:4x4", 2), [*axes.values()])
    assert device_spans(placed, crosses(placed)) == mesh.torus
    assert [mesh.slowest_link((a,)).name for a in axes] == ["dcn", *["ici"] * (len(axes) - 1)]
    with pytest.raises(MeshError, match="a mesh of 1x32 does not fit 2 x TPU v5e:4x4, .* 2 must divide the first axis"):
        MeshConfig(axes={"data": 1, "model": 32}).mesh()
    assert slice_of(there[:-1]) is slice_of([*there[:16], *two_slices("v5e:4x2")[8:]]) is None


def test_devices_that_are_no_whole_slice_are_rings_of_one_link():
    some = list(chips(TpuSlice("v5e:4x4")))[2:]
    assert slice_of(some) is None
    assert device_spans(np.array(some).reshape(7, 2), (False, False)) == ((), ())
    assert slice_of(jax.devices()) is None


def test_one_stage_of_a_pipeline_runs_along_no_dimension_of_the_others():
    mesh = MeshConfig(axes={"stage": 2, "data": 4, "model": 2}, tpu="v5e:4x4").mesh()
    stage = PipelineRequest(mesh, "stage").stage_mesh
    assert stage.torus == ((), *mesh.torus[1:])
    assert all(stage.torus[1:])


@pytest.mark.parametrize(
    ("topology", "axes", "sparse_cores", "is_all_reduce"),
    [
        ("v5e:4x4", (16, 1), False, True),
        ("v5e:16x16", (256, 1), False, True),
        ("v6e:8x8", (64, 1), False, True),
        ("v6e:8x8", (64, 1), True, False),
        ("v5p:2x2x4", (16, 1), False, True),
        ("v5p:2x2x4", (16, 1), True, False),
        ("v5e:2x2", (4, 1), False, False),
        ("v5e:4x8", (32, 1), False, False),
        ("v5e:16x16", (32, 8), False, False),
    ],
)
def test_a_reduce_scatter_over_a_whole_slice_takes_what_an_all_reduce_does(topology, axes, sparse_cores, is_all_reduce):
    """As compiled with libtpu 0.0.50: XLA makes an all-reduce of it, unless SparseCores run it."""
    found = MeshConfig(axes={"a": axes[0], "b": axes[1]}, tpu=topology).mesh()
    mesh = replace(found, hardware=replace(found.hardware, sparse_core_collectives=sparse_cores))
    scatter, whole = (collective_seconds(kind, ("a",), 2**34, mesh) for kind in (REDUCE_SCATTER, ALL_REDUCE))
    assert (scatter == whole) == is_all_reduce


def test_so_it_is_over_each_of_several_slices_and_not_over_one_stage_s_part():
    slices = MeshConfig(axes={"slice": 2, "data": 16}, tpu="v5e:4x4", slices=2).mesh()
    whole = MeshConfig(axes={"stage": 2, "data": 16}, tpu="v5p:4x4x2").mesh()
    bare = replace(whole, hardware=replace(whole.hardware, sparse_core_collectives=False))
    stage = PipelineRequest(bare, "stage").stage_mesh
    for mesh, is_all_reduce in ((slices, True), (stage, False)):
        scatter, reduced = (collective_seconds(kind, ("data",), 2**34, mesh) for kind in (REDUCE_SCATTER, ALL_REDUCE))
        assert (scatter == reduced) == is_all_reduce
