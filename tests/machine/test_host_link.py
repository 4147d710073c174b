"""What copies to the host's memory and back take beside products."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoshard.machine.host_link import copies_beside_products, hides_copies, seconds_waited_for_copies
from autoshard.machine.mesh_config import MeshConfig
from autoshard.machine.tpu_slice import TpuSlice


def mesh(hardware: str):
    return MeshConfig(axes={"data": 8}, hardware=hardware).mesh()


def test_only_what_takes_longer_than_the_products_is_waited_for():
    tpus = mesh("tpu-v5e")
    link, memory = tpus.hardware.host_bandwidth, tpus.hardware.memory_rate
    assert seconds_waited_for_copies(link, 2.0, tpus) == pytest.approx(2 * link / memory)
    assert seconds_waited_for_copies(link, 0.25, tpus) == pytest.approx(0.75 + 2 * link / memory)
    both = seconds_waited_for_copies(np.array([0.0, link]), 0.25, tpus)
    assert list(both) == [0.0, pytest.approx(0.75 + 2 * link / memory)]


def test_where_they_run_beside_products():
    """Where XLA for TPU compiles, and host and device have memories of their own; hidden, where the table says so."""
    tpus = replace(mesh("tpu-v5e"), target=TpuSlice("v5e:2x4"))
    assert copies_beside_products(tpus)
    assert not copies_beside_products(mesh("tpu-v5e"))
    assert hides_copies(tpus)
    late = replace(tpus, hardware=mesh("tpu-v4").hardware)
    assert copies_beside_products(late)
    assert not hides_copies(late)
    assert not copies_beside_products(replace(tpus, hardware=mesh("cpu").hardware))
