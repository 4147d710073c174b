"""What convolutions cost by their local sizes: against what a compiler says, and against what neighbours add.

`CYCLES` is what XLA for TPU v5e (libtpu 0.0.50.1, 2026-11-23) estimates for one convolution and its two gradients
compiled alone for one chip, in bfloat16, with layouts left to the compiler: the sum of `estimated_cycles`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.cost.convolution import tile_padding
from autoshard.cost.node_strategy import node_strategy
from autoshard.jaxpr import Convolution
from autoshard.machine.collective import COLLECTIVE_PERMUTE, collective_seconds
from autoshard.machine.hardware import load_hardware
from tests.programs import CHIP, graph, mesh

TILED = replace(CHIP, tile=(8, 128), operand_bits=16)
V5E = load_hardware("tpu-v5e")
FITTED, OTHERS = "fitted", "others"

CYCLES = {
    # batch, rows and columns, features read and made, window, stride: forward, gradient of the image, of the kernel
    FITTED: {
        (64, 16, 128, 128, 3, 1): (44848, 44848, 45593),
        (64, 16, 64, 64, 3, 1): (38160, 44848, 30761),
        (64, 16, 16, 16, 3, 1): (11780, 14860, 14623),
        (64, 16, 32, 2, 3, 1): (8558, 16897, 8814),
        (64, 32, 8, 64, 3, 1): (119048, 42311, 18338),
        (16, 16, 256, 32, 1, 1): (10500, 16897, 6599),
        (256, 16, 8, 8, 3, 1): (10756, 14860, 14498),
        (16, 7, 512, 512, 3, 1): (35138, 32272, 44304),
        (32, 8, 2048, 512, 1, 1): (38215, 66820, 41656),
        (8, 64, 16, 64, 3, 1): (62487, 83972, 44894),
    },
    OTHERS: {
        (64, 14, 32, 64, 3, 1): (28148, 20776, 16079),
        (16, 32, 192, 320, 3, 1): (195013, 230278, 180627),
        (16, 32, 24, 40, 3, 2): (10500, 34050, 10468),
        (128, 16, 32, 16, 3, 1): (14860, 18696, 14506),
        (64, 7, 256, 8, 3, 1): (6196, 13418, 7812),
        (128, 28, 64, 64, 1, 1): (88948, 88948, 38619),
        (128, 28, 128, 128, 3, 2): (65637, 178424, 65720),
    },
}
DIMS = Convolution((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2), False)
DEPTHWISE = {
    # batch, rows and columns, features, window: forward, gradient of the kernel (2026-11-28)
    (64, 56, 96, 7): (2888211, 732883),
    (64, 28, 192, 7): (1243965, 321674),
    (64, 14, 384, 7): (469877, 113717),
    (16, 56, 96, 7): (732309, 192133),
    (32, 16, 512, 3): (161021, 51824),
}


def estimates(sizes, *, padded=True):
    """Cycles of the forward convolution, the gradient of its image and of its kernel; without tiles if not padded."""
    batch, size, read, made, window, stride = sizes
    after = -(-size // stride)
    image, kernel, result = (batch, size, size, read), (window, window, read, made), (batch, after, after, made)
    flops = 2 * math.prod(result) * window * window * read
    moved = sum(2 * math.prod(x) for x in (image, kernel, result)) / V5E.bandwidth
    back = [(batch, size, size, made), (window, window, made, read), (batch, size, size, read)]
    whole = [(read, size, size, batch), (after, after, batch, made), (read, window, window, made)]
    for shapes in ((image, kernel, result), back, whole):
        more = tile_padding(DIMS, shapes, shapes[1][2], V5E) if padded else 1.0
        yield max(more * flops / V5E.peak_flops("bfloat16"), moved, V5E.overhead) * V5E.clock


def errors(table, *, padded=True):
    """For each figure, the factor that the estimate is off by, in either direction."""
    pairs = (
        (a, b)
        for sizes, found in CYCLES[table].items()
        for a, b in zip(estimates(sizes, padded=padded), found, strict=True)
    )
    return np.exp([abs(math.log(a / b)) for a, b in pairs])


@pytest.mark.parametrize(("table", "typical", "worst"), [(FITTED, 1.7, 8.5), (OTHERS, 1.7, 5.1)])
def test_small_parts_cost_what_the_compiler_says(table, typical, worst):
    found = errors(table)
    assert np.exp(np.log(found).mean()) < typical
    assert found.max() < worst
    bare = errors(table, padded=False)
    assert np.exp(np.log(bare).mean()) > 1.6 * np.exp(np.log(found).mean())


def test_depthwise_convolutions_cost_what_the_compiler_says():
    found = []
    for (batch, size, features, window), (forward, backward) in DEPTHWISE.items():
        image, kernel = (batch, size, size, features), (window, window, 1, features)
        gradient = Convolution((3, 0, 1, 2), (3, 0, 1, 2), (2, 3, 0, 1), True)
        cycles = 2 * batch * size**2 * features * window**2 / V5E.peak_flops("bfloat16") * V5E.clock
        found += [
            tile_padding(DIMS._replace(grouped=True), (image, kernel, image), 1, V5E) * cycles / forward,
            tile_padding(gradient, (image, image, kernel), batch, V5E) * cycles / backward,
        ]
    off = np.abs(np.log(found))
    assert np.exp(off.mean()) < 1.4
    assert np.exp(off.max()) < 3.3


@pytest.mark.parametrize("hardware", [CHIP, load_hardware("h100")])
def test_without_tiles_nothing_is_rounded_up(hardware):
    assert tile_padding(DIMS, ((2, 8, 8, 3), (3, 3, 3, 5), (2, 8, 8, 5)), 3, hardware) == 1


def test_full_tiles_are_not_rounded_up():
    assert tile_padding(DIMS, ((128, 8, 8, 128), (3, 3, 128, 256), (128, 8, 8, 256)), 128, TILED) == 1


def test_splitting_what_fills_a_tile_saves_nothing():
    """Channels below a row of lanes take as long as the whole row; the channels of a whole image are packed."""
    whole, part = (((64, 8, 8, n), (3, 3, n, 128), (64, 8, 8, 128)) for n in (128, 8))
    assert tile_padding(DIMS, part, 128, TILED) == 16 * tile_padding(DIMS, whole, 128, TILED)
    image = ((64, 8, 8, 3), (3, 3, 3, 128), (64, 8, 8, 128))
    assert tile_padding(DIMS, image, 3, TILED) < tile_padding(DIMS, image, 48, TILED) / 5


def test_channels_of_depthwise_convolutions_share_tiles():
    grouped = DIMS._replace(grouped=True)
    few, many = (((8, 14, 14, n), (7, 7, 1, n), (8, 14, 14, n)) for n in (32, 128))
    assert tile_padding(grouped, few, 1, TILED) == 4 * tile_padding(grouped, many, 1, TILED)


def conv_kind(on):
    def fun(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    g = graph(fun, ((64, 16, 16, 64), (3, 3, 64, 64)), on)
    return next(n.kind for n in g.nodes if n.kind.flops)


def test_the_channels_of_a_strategy_are_priced_by_tiles():
    on = replace(mesh(data=8), hardware=replace(TILED, bandwidth=1e15, overhead=0.0))
    kind = conv_kind(on)
    (batch, *_, made) = kind.rule.results[0]
    by_batch, by_channels = (node_strategy(kind, {f[0]: ("data",)}, on).compute_seconds for f in (batch, made))
    assert by_channels == 2 * by_batch  # eight channels take a packed row of 16; a batch of 8 is 8 rows


def test_halos_cost_a_copy_of_the_operand_beside_what_is_sent():
    on = mesh(data=4)
    kind = conv_kind(on)
    free = replace(on, hardware=replace(CHIP, bandwidth=1e18, overhead=0.0))
    split = {kind.rule.halo_factor(kind.rule.halos[0]): ("data",)}
    found, bare = (node_strategy(kind, split, m) for m in (on, free))
    local, row = 4 * 64 * 4 * 16 * 64, 4 * 64 * 16 * 64
    rows = node_strategy(kind, {kind.rule.results[0][0][0]: ("data",)}, on).compute_seconds
    assert found.compute_seconds - rows == pytest.approx(2 * local / CHIP.bandwidth + 2 * CHIP.overhead)
    assert found.collectives == bare.collectives
    sent = collective_seconds(COLLECTIVE_PERMUTE, ("data",), row, on)
    assert found.seconds(on) - found.compute_seconds == pytest.approx(2 * sent)


def test_each_dimension_with_halos_costs_a_copy_of_what_the_one_before_has_made():
    on = mesh(data=2, model=2)
    kind = conv_kind(on)
    first, second = (kind.rule.halo_factor(halo) for halo in kind.rule.halos)
    found = node_strategy(kind, {first: ("data",), second: ("model",)}, on).compute_seconds
    batch = kind.rule.results[0][0][0]
    bare = node_strategy(kind, {batch: ("data", "model")}, on).compute_seconds
    local = 4 * 64 * 8 * 8 * 64  # eight rows, and ten with those of both neighbours
    copies = 2 * local * (1 + 10 / 8) / CHIP.bandwidth + 4 * CHIP.overhead
    assert found - bare == pytest.approx(copies)


def test_windows_that_need_no_neighbour_copy_nothing():
    on = mesh(data=4)
    g = graph(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"), ((8, 16, 16, 64),), on
    )
    kind = next(n.kind for n in g.nodes if n.kind.op == "reduce_window_max")
    by_rows, by_batch = (node_strategy(kind, {kind.rule.operands[0][d][0]: ("data",)}, on) for d in (1, 0))
    assert by_rows.compute_seconds == by_batch.compute_seconds
    assert by_rows.in_specs != by_batch.in_specs
