"""What of a reshard's seconds a device waits for, by how long products run beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.cost.overlap.beside_products import with_hidden_transfers
from autoshard.cost.overlap.seconds_waited import Hideable, seconds_waited
from tests.programs import graph
from tests.scanned_layers import LARGE, WAITING, WEIGHTS, WIDTH, on, products, train


def test_the_share_of_the_chip_is_hidden_as_far_as_products_last() -> None:
    node = next(n for n in with_hidden_transfers(graph(train, (WEIGHTS, (512, WIDTH)), on())).nodes if n.kind.beside)
    kind = replace(node.kind, beside=(0.0, 3e-3, 0.0))
    waited = [seconds_waited(seconds, kind, 1, on()) for seconds in (1e-3, 4e-3, 1e-2)]
    assert waited == pytest.approx([0.25e-3, 1e-3, 7e-3])
    assert [seconds_waited(1e-3, kind, i, on()) for i in (0, 2)] == [1e-3, 1e-3]


def test_what_goes_in_a_ring_is_waited_for_where_it_takes_longer_than_the_product() -> None:
    kind = replace(products(WAITING, LARGE)[0], beside=(2e-3, 0.0, 2e-3))
    chip = on(WAITING)
    waited = [seconds_waited(seconds, kind, 0, chip, Hideable(0.5)) for seconds in (1e-3, 5e-3)]
    assert waited == pytest.approx([(1 - 0.9 * 0.5) * 1e-3, (1 - 0.4) * 5e-3])
    assert seconds_waited(4e-3, kind, 0, chip, Hideable(1.0, 0.25)) == pytest.approx(3e-3)  # 5 ms in the ring
    assert seconds_waited(4e-3, kind, 0, chip, Hideable(1.0, 1.0)) == 4e-3
    assert seconds_waited(4e-3, kind, 1, chip, Hideable(1.0)) == 4e-3
