"""Seconds of the products of ragged groups in HLO for TPU: custom calls, of which the compiler estimates no time.

The kernel goes through tiles of rows, as many as have some: the bound of its grid is a result of another kernel, which
is computed of the groups' sizes. Its name may say how many rows there are with an even load
(`autoshard.transforms.grouped_rows.evenly_filled`); so may that of any other kernel with the same bound, since XLA
drops the names of those whose matrices it transposes. Otherwise all places count as filled.
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
    if filled := _filled(instruction, computation, module):
        flops *= int(filled[1]) / int(filled[2])
    return max(flops / hardware.peak_flops(peak_dtype(found[0][0])), moved / hardware.bandwidth) + hardware.overhead


def _filled(kernel: Instruction, computation: Computation, module: Module) -> re.Match[str] | None:
    """How many rows of how many places the name of a kernel with the bound of this one says that there are."""
    bound, body = _bound(kernel, computation, module), computation.instructions.values()
    alike = [i for i in body if bound is not None and _bound(i, computation, module) == bound]
    names = (_FILLED.search(module.operation(i)) for i in (kernel, *alike))
    return next((found for found in names if found), None)


def _bound(instruction: Instruction, computation: Computation, module: Module) -> str | None:
    """The kernel that makes the bound of a product's grid, its first operand; None of any other instruction."""
    if instruction.opcode != "custom-call" or not instruction.names:
        return None
    first = computation.instructions.get(instruction.names[0])
    if first is None or first.opcode != "get-tuple-element":
        return None
    made_by = computation.instructions[first.names[0]]
    return made_by.name if module.operation(made_by).rpartition("/")[2] == _TABLES else None
