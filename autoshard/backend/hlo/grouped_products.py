"""Seconds of the products of ragged groups in HLO for TPU: custom calls, of which the compiler estimates no time.

The kernel goes through tiles of rows, as many as have some: the bound of its grid is a result of another kernel, which
is computed of the groups' sizes. Its name may say how many rows there are with an even load
(`autoshard.transforms.grouped_rows.evenly_filled`); otherwise all places count as filled.
"""

from __future__ import annotations

import math
import re

from autoshard.backend.hlo.text import Computation, Instruction, Module, arrays, element_bits, peak_dtype
from autoshard.machine.mesh import Hardware

_KERNEL = "ragged-dot"
_TABLES = "ragged-dot-metadata"
_FILLED = re.compile(r"\brows_(\d+)_of_(\d+)/")


def grouped_product_seconds(
    instruction: Instruction, computation: Computation, module: Module, hardware: Hardware
) -> float:
    """Seconds of the kernel of a product of ragged groups, by the roofline; 0 for any other instruction."""
    operation = module.operation(instruction)
    name = operation.rpartition("/")[2]
    if instruction.opcode != "custom-call" or not name.startswith(_KERNEL) or name == _TABLES:
        return 0.0
    shapes = [computation.instructions[operand].shape for operand in instruction.names] + [instruction.shape]
    found = [array for shape in shapes for array in arrays(shape) if len(array[1]) > 1]
    # Rows [m, k] with matrices [groups, k, n], or with rows [m, n]: two of the three arrays have m, as k and as n.
    flops = 2 * math.isqrt(math.prod(math.prod(shape[-2:]) for _, shape in found))
    moved = sum(math.prod(shape) * element_bits(dtype) for dtype, shape in found) / 8
    if filled := _FILLED.search(operation):
        flops *= int(filled[1]) / int(filled[2])
    return max(flops / hardware.peak_flops(peak_dtype(found[0][0])), moved / hardware.bandwidth) + hardware.overhead
