"""Seconds in reshard tables equal those of single reshards."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from autoshard.cost.reshard import reshard_seconds
from autoshard.cost.reshard_tables import reshard_seconds_pairwise, reshard_seconds_table
from autoshard.ir.spec import Spec
from autoshard.machine.mesh import Link, LogicalMesh
from autoshard.search.spec_tables import all_splits
from tests.programs import CHIP, mesh


@pytest.mark.parametrize(
    ("axes", "shape"),
    [({"a": 8}, (4, 8)), ({"a": 2, "b": 4}, (8, 1, 16)), ({"a": 2, "b": 3}, (12, 6)), ({"a": 2, "b": 2}, (4, 8, 2, 6))],
    ids=str,
)
def test_table_equals_single_reshards(axes: dict[str, int], shape: tuple[int, ...]) -> None:
    on = mesh(**axes)
    dsts = all_splits(shape, tuple(axes), on)
    srcs = [
        Spec(d.dims, tuple((a, kind) for a in partial))
        for d in dsts
        for n in range(len(axes) + 1)
        for partial in itertools.combinations([a for a in axes if a not in d.axes], n)
        for kind in ("sum", "max")
    ]
    table = reshard_seconds_table(srcs, dsts, shape, 16, on)
    for (i, s), (j, d) in itertools.product(enumerate(srcs), enumerate(dsts)):
        assert table[i, j] == pytest.approx(reshard_seconds(s, d, shape, 16, on), rel=1e-9, abs=1e-15), f"{s} -> {d}"


def test_table_equals_single_reshards_on_unequal_links() -> None:
    """One link has low bandwidth, the other high latency."""
    links = {"a": Link("a", 1e6, 1e-8), "b": Link("b", 1e9, 1e-5)}
    on = LogicalMesh(("a", "b"), (2, 2), replace(CHIP, links=links), ("a", "b"))
    dsts = all_splits((24, 8), ("a", "b"), on)
    table = reshard_seconds_table(dsts, dsts, (24, 8), 32, on)
    for (i, s), (j, d) in itertools.product(enumerate(dsts), enumerate(dsts)):
        assert table[i, j] == pytest.approx(reshard_seconds(s, d, (24, 8), 32, on), rel=1e-9, abs=1e-15), f"{s} -> {d}"


def test_table_is_close_to_single_reshards_on_three_axes() -> None:
    on = mesh(a=2, b=2, c=4)
    dsts = all_splits((64, 128, 16), ("a", "b", "c"), on)
    table = reshard_seconds_table(dsts, dsts, (64, 128, 16), 32, on)
    for (i, s), (j, d) in itertools.product(enumerate(dsts), enumerate(dsts)):
        one = reshard_seconds(s, d, (64, 128, 16), 32, on)
        assert table[i, j] == pytest.approx(one, rel=0.2, abs=1e-15)
        assert (table[i, j] == 0) == (one == 0)


def test_pairwise_is_the_diagonal_of_the_table() -> None:
    on = mesh(a=2, b=4)
    dsts = all_splits((8, 12), ("a", "b"), on)
    srcs = [*dsts[1:], dsts[0]]
    table = reshard_seconds_table(srcs, dsts, (8, 12), 32, on)
    assert reshard_seconds_pairwise(srcs, dsts, (8, 12), 32, on).tolist() == table.diagonal().tolist()
    assert not reshard_seconds_pairwise(dsts, dsts, (8, 12), 32, on).any()


def test_tables_do_not_depend_on_what_other_meshes_call_their_axes() -> None:
    """Meshes that differ in names, sizes or order of axes share graphs of states."""
    shape, meshes = (8, 16), [mesh(a=2, b=4), mesh(a=4, b=2), mesh(b=2, a=4), mesh(b=4, a=2), mesh(b=2, c=4, a=1)]
    for on in meshes:
        specs = all_splits(shape, on.nontrivial_axes, on)
        table = reshard_seconds_table(specs, specs, shape, 16, on)
        single = [[reshard_seconds(s, d, shape, 16, on) for d in specs] for s in specs]
        assert table.tolist() == [pytest.approx(row, rel=1e-9, abs=1e-15) for row in single], str(on)
