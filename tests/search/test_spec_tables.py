"""Specs and reshard prices of many options at once equal those of one at a time."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.cost.overlap.node_reshards import hideable
from autoshard.cost.overlap.seconds_waited import ALL
from autoshard.cost.reshard import reshard_seconds
from autoshard.ir.spec import Spec
from autoshard.machine.hardware import load_hardware
from autoshard.machine.mesh import LogicalMesh
from autoshard.machine.mesh_config import MeshConfig
from autoshard.search.spec_tables import SpecTables, all_splits, neighbouring_splits, value_spec
from tests.programs import graph

A = (64, 64)
MESH = LogicalMesh(("a", "b"), (2, 4), load_hardware("tpu-v5p"))
OPTIONS = (all_splits((8, 6, 1), ("a", "b"), MESH), all_splits((8, 12), ("a", "b"), MESH))


def test_splits_are_all_that_divide_in_the_order_of_their_axes():
    found = [
        Spec(tuple(tuple(a for a, c in zip(("a", "b"), chosen, strict=True) if c == d) for d in range(3)))
        for chosen in itertools.product((-1, 0, 1, 2), repeat=2)
        if chosen[0] != 2 and chosen[1] not in (1, 2)  # one element cannot be split, and 6 not into 4
    ]
    assert list(OPTIONS[0]) == found


def test_a_value_is_partial_along_the_axes_of_its_partial_dimensions():
    option = Spec((("a",), ("b",)))
    assert value_spec(option, (1, -1), ((0, "sum"),)) == Spec((("b",), ()), (("a", "sum"),))
    assert value_spec(option, (1, -1), ()) == Spec((("b",), ()))


def test_the_matrix_has_the_reshard_of_each_pair_of_options():
    tables, shape = SpecTables(OPTIONS, MESH), (8, 12)
    src, dst = tables.value_specs(0, (0, -1), ((1, "sum"),)), tables.value_specs(1, (0, 1))
    table = tables.reshard_matrix(src, dst, shape, 32)
    each = [
        [reshard_seconds(value_spec(o, (0, -1), ((1, "sum"),)), p, shape, 32, MESH) for p in OPTIONS[1]]
        for o in OPTIONS[0]
    ]
    np.testing.assert_allclose(table, each, rtol=1e-12)
    same = tables.value_specs(1, (0, 1))
    assert same is dst
    assert not tables.reshard_pairs(dst, same, shape, 32).any()
    np.testing.assert_allclose(tables.reshard_pairs(src, src, shape, 32), np.zeros(len(OPTIONS[0])))
    assert tables.shard_counts(dst).tolist() == [o.num_shards(MESH.shape) for o in OPTIONS[1]]


def train(w, x):
    return w - jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)


def pairs(kind, position, src, dst, mesh=MESH):
    """`hideable` of each pair of options: shares, and by how much more rings last."""
    each = [
        [hideable(kind, position, src.distinct_specs[a], dst.distinct_specs[b], mesh) for b in dst.index]
        for a in src.index
    ]
    return np.moveaxis(np.array(each), -1, 0)


def test_what_is_hidden_in_rings_is_that_of_each_pair_of_options():
    size = (4096, 4096)
    kind = next(
        replace(n.kind, in_rings=frozenset({0, 2})) for n in graph(train, (size,) * 2, MESH).nodes if n.kind.flops
    )
    tables = SpecTables(OPTIONS, MESH)
    read, made = tables.value_specs(1, (0, 1)), tables.value_specs(0, (0, -1), ((1, "sum"),))
    for position, src, dst in ((0, read, tables.value_specs(1, (-1, 1))), (2, made, read)):
        each = pairs(kind, position, src, dst)
        np.testing.assert_array_equal(tables.hideable_matrix(src, dst, kind, position), each)
        assert np.any(each[0])
        if len(src.index) == len(dst.index):
            diagonal = np.diagonal(each, axis1=1, axis2=2)
            np.testing.assert_array_equal(tables.hideable_pairs(src, dst, kind, position), diagonal)
    assert tables.hideable_matrix(read, made, kind, 1) == ALL, "no position in a ring"


def test_shares_beside_gradients_are_those_of_each_pair_of_options():
    mesh = MeshConfig(axes={"a": 2, "b": 4}, gpu="h100", nodes=2, per_node=4).mesh()
    kind = next(replace(n.kind, on_fast_links=frozenset({2})) for n in graph(train, (A, A), mesh).nodes if n.kind.flops)
    tables = SpecTables(OPTIONS, mesh)
    src, dst = tables.value_specs(0, (0, -1), ((1, "sum"),)), tables.value_specs(1, (0, 1))
    shares, outlasts = pairs(kind, 2, src, dst, mesh)
    found = tables.hideable_matrix(src, dst, kind, 2)
    np.testing.assert_array_equal(found.share, shares)
    assert not outlasts.any()
    assert not found.outlasts
    assert {0.0, 1.0} == {*shares.flat}
    np.testing.assert_array_equal(tables.hideable_pairs(dst, dst, kind, 2).share, np.ones(len(dst.index)))
    assert tables.hideable_matrix(src, dst, kind, 0) == ALL, "another operand"


def test_equal_options_share_their_specs():
    tables = SpecTables((OPTIONS[0], list(OPTIONS[0]), OPTIONS[1]), MESH)
    assert tables.value_specs(0, (0, -1)) is tables.value_specs(1, (0, -1)) is not tables.value_specs(2, (0, -1))
    assert tables.intern([value_spec(o, (0, -1)) for o in OPTIONS[0]]) is tables.value_specs(0, (0, -1))


def test_pairs_are_the_diagonal_of_the_matrix():
    tables, shape = SpecTables(OPTIONS, MESH), (8, 12)
    src, dst = tables.value_specs(1, (0, 1)), tables.value_specs(1, (-1, 1))
    np.testing.assert_array_equal(
        tables.reshard_pairs(src, dst, shape, 32), np.diagonal(tables.reshard_matrix(src, dst, shape, 32))
    )
    assert tables.reshard_pairs(src, dst, shape, 32).any()


def test_neighbouring_splits_differ_in_what_one_axis_shards():
    def split_by(spec: Spec) -> list[int | None]:
        return [next((d for d, axes in enumerate(spec.dims) if a in axes), None) for a in ("a", "b")]

    start, sizes = Spec((("a",), ("b",), ())), (8, 12, 2)
    found = neighbouring_splits(start, sizes, ("a", "b"), MESH)
    every = all_splits(sizes, ("a", "b"), MESH)
    assert found[0] == start
    assert len(found) == len(set(found))
    assert set(found) == {s for s in every if any(x == y for x, y in zip(split_by(s), split_by(start), strict=True))}
