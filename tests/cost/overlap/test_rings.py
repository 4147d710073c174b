"""Which reshards of a product go in rings, and what that saves."""

from __future__ import annotations

from typing import Any

import pytest

from autoshard.cost.overlap.node_reshards import hideable
from autoshard.cost.overlap.rings import MIN_PRODUCT, RING_GAIN, gathered_axis, ring_reshards
from autoshard.cost.overlap.seconds_waited import Hideable
from autoshard.ir.graph import OpKind
from autoshard.ir.spec import Spec
from autoshard.machine.collective import collective_seconds
from autoshard.machine.mesh_config import MeshConfig
from tests.scanned_layers import HIDDEN, LARGE, WAITING, on, products


def rings_of(kind: OpKind) -> list[Hideable]:
    """Of an operand gathered by rows and by columns, and whole."""
    whole, rows, columns = Spec(((), ())), Spec((("data",), ())), Spec(((), ("data",)))
    return [hideable(kind, 0, a, b, on()) for a, b in ((rows, whole), (columns, whole), (whole, rows))]


def test_an_operand_is_gathered_in_a_ring_of_whose_parts_each_makes_a_large_part_of_the_result() -> None:
    """Of what is summed over, where the result is no larger than it: each part makes a summand."""
    wide = next(k for k in products(WAITING, LARGE) if k.shapes[-1] == (LARGE, HIDDEN))
    narrow = next(k for k in products(WAITING, LARGE) if k.shapes[:1] == ((LARGE, HIDDEN),))
    few = next(k for k in products(WAITING, LARGE // 64) if k.shapes[-1] == (LARGE // 64, HIDDEN))
    assert [r.share > 0 for r in rings_of(wide)] == [True, False, False]
    assert [r.share > 0 for r in rings_of(narrow)] == [True, True, False]
    assert [r.share > 0 for r in rings_of(few)] == [False, False, False]


def test_a_sum_is_scattered_over_one_axis_in_a_ring_of_few_devices() -> None:
    both, made = on(data=4, model=2), 64 * MIN_PRODUCT
    summed = Spec(((), ()), (("data", "sum"), ("model", "sum")))
    found = ring_reshards(summed, None, made, both)
    assert Spec(((), ())) not in found  # an all-reduce
    first = found[Spec((("data",), ("model",)))].share
    assert first == found[Spec((("data", "model"), ()))].share == pytest.approx(0.75 * RING_GAIN)
    assert found[Spec((("model",), ("data",)))].share == pytest.approx(0.5 * RING_GAIN)
    alone = Spec(((), ()), (("data", "sum"),))
    assert ring_reshards(alone, None, made, on(data=16)) == {}
    assert ring_reshards(Spec((("data",), ())), (0,), made, on(data=16)) == {}
    assert ring_reshards(alone, None, made, both)[Spec(((), ("data",)))].share == RING_GAIN
    assert ring_reshards(alone, None, 2 * MIN_PRODUCT, both) == {}
    assert ring_reshards(Spec(((), ()), (("data", "max"),)), None, made, both) == {}
    mixed = ring_reshards(summed, None, 1024 * MIN_PRODUCT, on(data=16, model=8))
    assert mixed[Spec((("data", "model"), ()))].share == pytest.approx(7 / 8 * RING_GAIN), "the axis of few goes first"


def test_a_ring_along_one_axis_may_outlast_the_collective_that_uses_all_links() -> None:
    """Of a slice of 16 x 16 chips a permute uses one link of a chip's four."""
    slice_ = MeshConfig(axes={"data": 32, "model": 8}, tpu="v5e:16x16").mesh()
    summed = Spec(((), ()), (("data", "sum"), ("model", "sum")))
    found = ring_reshards(summed, None, 1024 * MIN_PRODUCT, slice_)[Spec((("data", "model"), ()))]
    over_all = collective_seconds("reduce-scatter", ("data", "model"), 1 << 40, slice_)
    hops = 7 / 8 * collective_seconds("collective-permute", ("model",), 1 << 40, slice_)
    assert found.outlasts == pytest.approx(hops / over_all - 7 / 8, rel=1e-2)
    assert found.outlasts > 0.3


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ((("a", "b"), ()), (("a",), ()), (0, "b")),
        (((), ("a",)), ((), ()), (1, "a")),
        ((("a", "b"), ()), ((), ()), None),
        ((("a", "b"), ()), (("b",), ()), None),
        ((("a",), ("b",)), ((), ()), None),
        (((), ()), (("a",), ()), None),
    ],
    ids=["the minor axis", "an axis alone", "two axes", "the major axis", "two dimensions", "a slice"],
)
def test_a_gather_over_one_axis(before: Any, after: Any, found: tuple[int, str] | None) -> None:
    assert gathered_axis(Spec(before), Spec(after)) == found
