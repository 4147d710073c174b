"""How much more a convolution computes on a device than asked: its dimensions are rounded up to whole tiles.

A matrix unit multiplies whole tiles. The features read are rounded up to a row of lanes at each place of the window,
and of batch and features made one is rounded up to lanes and the other to sublanes, whichever pads less; in groups, to
sublanes of packed elements. Two cases read less: the gradient of a kernel sums over all places of images and batch at
once, and the few channels of an image are packed place by place. Fitted to the cycles that XLA for TPU v5e (libtpu
0.0.50) estimates for 30 shapes and six of depthwise convolutions, forward and both gradients;
`tests/cost/test_convolution.py` has some.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoshard.jaxpr import Convolution
from autoshard.machine.mesh import Hardware

IMAGE_CHANNELS = 4
"""The most features read that are packed."""


def tile_padding(dims: Convolution, shapes: Sequence[Sequence[int]], features_read: int, hardware: Hardware) -> float:
    """FLOPs on whole tiles over FLOPs asked for; 1 where the hardware has no tiles.

    Args:
      shapes: of one device's parts of image, kernel and result.
      features_read: by each group, unsharded.
    """
    sublanes, lanes = hardware.tile
    if lanes == 1 or not all(map(math.prod, shapes)):
        return 1.0
    _, kernel, result = shapes
    batch, made, read = result[dims.out[0]], result[dims.out[1]], kernel[dims.rhs[1]]
    window, places = (math.prod(x[d] for d in ds[2:]) for x, ds in ((kernel, dims.rhs), (result, dims.out)))
    if window > places and not dims.grouped:
        depth = _round_up(window * read, lanes)
    elif features_read <= IMAGE_CHANNELS and not dims.grouped:
        depth = _round_up(window * IMAGE_CHANNELS, lanes)
    else:
        depth = window * _round_up(read, lanes)
    packed = sublanes * 32 // hardware.operand_bits
    rows = packed if dims.grouped else sublanes
    area = min(_round_up(made, lanes) * _round_up(batch, rows), _round_up(batch, lanes) * _round_up(made, packed))
    return depth * area / (window * read * batch * made)


def _round_up(size: int, tile: int) -> int:
    return -(-size // tile) * tile
