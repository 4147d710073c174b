"""Roofline time of compiled instructions, for compilers that give no estimate of their own.

Each instruction that runs as a kernel takes the larger of FLOPs and bytes read and written, over what products and
memory reach by the hardware table, plus one kernel launch; in a loop, times its trip count. Kernels for attention run
at their share of the peak (`hlo.attention`).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from autoshard import jaxpr as jx
from autoshard.backend.hlo.attention import attention_seconds
from autoshard.backend.hlo.collectives import shape_bytes
from autoshard.backend.hlo.text import Computation, Instruction, Module, arrays, called, numbers, peak_dtype
from autoshard.backend.hlo.trip_counts import run_counts
from autoshard.machine.collective import COLLECTIVE_KINDS
from autoshard.machine.mesh import Hardware

_CONTRACTING = re.compile(r'"?lhs_contracting_(?:dims|dimensions)"?[=:][{\[]([\d,"]*)[}\]]')
_LABELS = re.compile(r"\bdim_labels=\w+_(\w+)->(\w+)")
_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
_NOT_ONE_PRODUCT = re.compile(r"\b(feature|batch)_group_count=|\boperand_precision=\{(?!default,default\})")
_UNIT = 256
"""Rows and columns of the largest matrix unit of any TPU."""

_FREE = {
    "after-all", "bitcast", "call", "conditional", "constant", "get-tuple-element", "opt-barrier", "parameter",
    "async-done", "copy-done", "fusion-done", "partition-id", "replica-id", "tuple", "while",
}  # fmt: skip
_COLLECTIVES = {f"{kind}{part}" for kind in COLLECTIVE_KINDS for part in ("", "-start", "-done")}
_SLICES = ("dynamic-slice", "dynamic-update-slice", "slice")
_SLICE_SIZES = re.compile(r"\bslice_sizes=\{([\d,]*)\}")
_GRANULE = 512
"""Bytes that memory gives at once, of which a gather may take one element: an estimate, a row of a tile's lanes."""
_BACKWARD_INPUT, _BACKWARD_FILTER = '"__cudnn$convBackwardInput"', '"__cudnn$convBackwardFilter"'
_NO_SWEEPS = {"custom-call", "gather", "rng-bit-generator", "scatter", "sort", "while"}
_KERNEL_BODIES = ("calls", "to_apply")
"""Attributes that name the computation inside a kernel; those of loops and conditionals are computations of their
own.
"""


def roofline_seconds(module: Module, hardware: Hardware) -> tuple[float, bool]:
    """Seconds of one call without its collectives, and whether every loop's trip count is known."""
    seconds_of, total, exact = kernel_seconds(module, hardware), 0.0, True
    for name, (times, known) in run_counts(module).items():
        computation = module.computations[name]
        seconds = sum(seconds_of(i, computation) for i in computation.instructions.values())
        total += times * seconds
        exact = exact and (known or not seconds)
    return total, exact


def kernel_seconds(module: Module, hardware: Hardware) -> Callable[[Instruction, Computation], float]:
    """The seconds of an instruction and its computation; none of what is inside a kernel, free, or a collective."""
    inner = {
        name
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode != "call"
        for key, name in called(instruction)
        if key in _KERNEL_BODIES
    }

    def seconds(instruction: Instruction, computation: Computation) -> float:
        if computation.name in inner or instruction.opcode in _FREE or instruction.opcode in _COLLECTIVES:
            return 0.0
        return instruction_seconds(instruction, computation, module, hardware)

    return seconds


def instruction_seconds(
    instruction: Instruction, computation: Computation, module: Module, hardware: Hardware
) -> float:
    """Seconds of an instruction that runs as a kernel."""
    moved = _moved_bytes(instruction, computation, module)
    convolution = _LABELS.search(instruction.attributes) is not None
    products = sum(
        flops / hardware.product_rate(dtype, convolution=convolution)
        for flops, dtype in _contraction_flops(instruction, computation, module)
    )
    products += attention_seconds(instruction, computation, module, hardware)
    return max(products, moved / hardware.memory_rate) + hardware.overhead


def memory_bound_seconds(
    instruction: Instruction, computation: Computation, module: Module, hardware: Hardware
) -> float | None:
    """Seconds in which fusions reach the bytes of an instruction, its kernel's start included; None of one that reads
    and writes otherwise than in one sweep, and of products unless they are matrix products in a fusion that take less
    than its bytes even so."""
    inside = _fused_computation(instruction, module)
    within = [instruction] if inside is None else inside.instructions.values()
    opcodes = {i.opcode for i in within if not _is_empty_buffer(i)}
    if not opcodes.isdisjoint(_NO_SWEEPS):
        return None
    moved = _moved_bytes(instruction, computation, module) / hardware.memory_rate
    if contractions := [*_contraction_flops(instruction, computation, module)]:
        products = [s for i in within if inside and (s := _tiled_seconds(i, inside, hardware)) is not None]
        if len(products) < len(contractions) or sum(products) > moved:
            return None
    return moved + hardware.overhead


def _tiled_seconds(product: Instruction, computation: Computation, hardware: Hardware) -> float | None:
    """Seconds of a matrix product, which the TPU compiler writes as a convolution with a window of one element, at the
    peak on whole tiles of `_UNIT`; None of anything else, of groups, and at a higher precision than the default."""
    labels, window = _LABELS.search(product.attributes), _WINDOW.search(product.attributes)
    shapes = [computation.instructions[n].shape for n in product.names if n in computation.instructions]
    if labels is None or len(shapes) != 2 or _NOT_ONE_PRODUCT.search(product.attributes):
        return None
    if window and not re.fullmatch(r"size=1(x1)*", window[1]):
        return None
    (dtype, _), (_, kernel) = (arrays(shape)[0] for shape in shapes)
    (_, result) = arrays(product.shape)[0]
    depth, made = kernel[labels[1].index("i")], result[labels[2].index("f")]
    tiles = [-(-n // _UNIT) * _UNIT for n in (math.prod(result) // max(made, 1), made, depth)]
    return 2.0 * math.prod(tiles) / hardware.peak_flops(peak_dtype(dtype))


def _is_empty_buffer(instruction: Instruction) -> bool:
    """Whether it allocates memory that nothing has been written to (`jax.lax.empty`)."""
    return instruction.opcode == "custom-call" and 'custom_call_target="AllocateBuffer"' in instruction.attributes


def _moved_bytes(instruction: Instruction, computation: Computation, module: Module) -> int:
    inside = _fused_computation(instruction, module)
    return _unfused_bytes(instruction, computation) if inside is None else _fusion_bytes(inside)


def _fused_computation(instruction: Instruction, module: Module) -> Computation | None:
    """The computation of a fusion; None for any other instruction. An async fusion is called through a computation
    that has the fusion alone."""
    found = next((module.computations.get(name) for key, name in called(instruction) if key == "calls"), None)
    if found is None or found.instructions[found.root].opcode != "fusion":
        return found
    return _fused_computation(found.instructions[found.root], module)


def _fusion_bytes(fusion: Computation) -> int:
    """Bytes that a fusion reads and writes; of an operand of which it reads slices only, the bytes of the slices."""
    body = fusion.instructions
    users: dict[str, list[Instruction]] = defaultdict(list)
    for instruction in body.values():
        for name in dict.fromkeys(instruction.names):
            users[name].append(instruction)
    read = sum(_bytes_read(name, users, fusion) for name, i in body.items() if i.opcode == "parameter")
    return read + _bytes_written(body[fusion.root], fusion)


def _unfused_bytes(instruction: Instruction, computation: Computation) -> int:
    """Bytes that an instruction outside of fusions reads and writes."""
    read = sum(_bytes_read(name, {name: [instruction]}, computation) for name in instruction.names)
    return read + _bytes_written(instruction, computation)


def _bytes_read(name: str, users: Mapping[str, list[Instruction]], computation: Computation) -> int:
    """Bytes that ``users`` read of ``name``; none where a dynamic-update-slice writes into it."""
    whole = shape_bytes(computation.instructions[name].shape) if name in computation.instructions else 0
    found = 0 if users.get(name) else whole
    for user in users.get(name, ()):
        if user.opcode == "bitcast":
            found += _bytes_read(user.name, users, computation)
        elif user.opcode == "gather" and user.names[0] == name:
            found += _gathered_bytes(user)
        elif user.opcode not in _SLICES or user.names[0] != name:
            found += whole
        elif user.opcode != "dynamic-update-slice":
            found += shape_bytes(user.shape)
    return min(found, whole)


def _gathered_bytes(gather: Instruction) -> int:
    """Bytes that a gather reads of what it takes slices of."""
    sizes, made = _SLICE_SIZES.search(gather.attributes), shape_bytes(gather.shape)
    _, elements = arrays(gather.shape)[0]
    count = math.prod(elements) // max(1, math.prod(numbers(sizes[1]) if sizes else elements))
    return max(made, count * _GRANULE)


def _bytes_written(instruction: Instruction, computation: Computation) -> int:
    body = computation.instructions
    if instruction.opcode == "tuple":
        return sum(_bytes_written(body[name], computation) for name in instruction.names if name in body)
    while instruction.opcode == "bitcast" and instruction.names[0] in body:
        instruction = body[instruction.names[0]]
    update = instruction.opcode == "dynamic-update-slice" and body.get(instruction.names[1])
    return shape_bytes(update.shape if update else instruction.shape)


def _contraction_flops(
    instruction: Instruction, computation: Computation, module: Module
) -> Iterator[tuple[float, str]]:
    """FLOPs and operand dtype of each dot, convolution and GEMM call in an instruction and the computations inside."""
    for key, name in called(instruction):
        inside = module.computations.get(name)
        if key in _KERNEL_BODIES and inside is not None:
            for part in inside.instructions.values():
                yield from _contraction_flops(part, inside, module)
    shapes = [computation.instructions[n].shape for n in instruction.names[:2] if n in computation.instructions]
    if len(shapes) < 2 or instruction.opcode not in ("dot", "convolution", "custom-call"):
        return
    found = [array for shape in (instruction.shape, *shapes) for array in arrays(shape)[:1]]
    if len(found) < 3:
        return
    (_, result), (dtype, left), (_, right) = found
    if labels := _LABELS.search(instruction.attributes):
        # cuDNN's gradient calls have the dim_labels of the forward convolution: its output and kernel give the FLOPs.
        output, kernel = result, right
        if _BACKWARD_INPUT in instruction.attributes:
            output = left
        elif _BACKWARD_FILTER in instruction.attributes:
            output, kernel = right, result
        result, depth = output, math.prod(n for n, label in zip(kernel, labels[1], strict=True) if label != "o")
        depth *= _share_read(instruction.attributes, dict(zip(labels[2], output, strict=False)))
    elif contracting := _CONTRACTING.search(instruction.attributes):
        depth = math.prod(left[d] for d in numbers(contracting[1].replace('"', "")))
    else:
        return
    yield 2.0 * math.prod(result) * depth, peak_dtype(dtype)


def _share_read(attributes: str, output: Mapping[str, int]) -> float:
    """The share of a convolution's windows that is no hole of its dilated operand; ``output``: its sizes by label."""
    window = dict(part.split("=") for part in found[1].split()) if (found := _WINDOW.search(attributes)) else {}
    if "lhs_dilate" not in window:
        return 1.0
    sizes = [int(n) for n in window["size"].split("x")]
    outputs = [output[str(d)] for d in range(len(sizes))]
    ones = "x".join("1" * len(sizes))
    dilations = (window.get(key, ones).split("x") for key in ("stride", "lhs_dilate", "rhs_dilate"))
    low = [pad.split("_")[0] for pad in window.get("pad", "x".join("0" * len(sizes))).split("x")]
    reads = [
        jx.window_reads(n, size, int(stride), int(first), int(base), int(dilation))
        for n, size, first, stride, base, dilation in zip(outputs, sizes, low, *dilations, strict=True)
    ]
    return math.prod(reads) / math.prod((*outputs, *sizes))
