"""Seconds of the attention kernels in compiled HLO: custom calls, of which no compiler estimates the time.

They run at the share of the peak that the hardware table gives, and skip what their mask does
(`autoshard.transforms.attention_kernels`), as plans count them.
"""

from __future__ import annotations

import math
import re

from autoshard.backend.hlo.text import Computation, Instruction, Module, arrays, numbers, peak_dtype
from autoshard.machine.mesh import Hardware
from autoshard.transforms.attention_kernels import KERNELS, causal_share, flops_at_peak

_CUDNN = re.compile(r'custom_call_target="__cudnn\$fmha(\w+)"')
_CUDNN_SCORES = re.compile(r'"intermediate_tensor_shape": ?\{[^{}]*?"dimensions": ?\[([\d, "]*)\]')
_CUDNN_CAUSAL = re.compile(r'"mask_type": ?"\w*CAUSAL"')
_CUDNN_WINDOW = re.compile(r'"sliding_window_length": ?([1-9]\d*)')
_SPLASH = re.compile(r"\bsplash_blocks_(\d+)_of_(\d+)/(?:[^\"]*/)?splash_m\wa_(fwd|dq|dkv)")
_SPLASH_PRODUCTS = {"fwd": (1, 1), "dq": (2, 1), "dkv": (2, 2), "dq and dkv": (3, 2)}
"""Products over heads as wide as queries and as wide as values, of each kernel."""


def attention_seconds(instruction: Instruction, computation: Computation, module: Module, hardware: Hardware) -> float:
    """Seconds of the products of an attention kernel; 0 for any other instruction."""
    if instruction.opcode != "custom-call":
        return 0.0
    if kernel := _CUDNN.search(instruction.attributes):
        return _cudnn_seconds(instruction, computation, hardware, backward="Backward" in kernel[1])
    if kernel := _SPLASH.search(module.operation(instruction)):
        return _splash_seconds(instruction, computation, hardware, kernel)
    return 0.0


def _cudnn_seconds(instruction: Instruction, computation: Computation, hardware: Hardware, *, backward: bool) -> float:
    scores = _CUDNN_SCORES.search(instruction.attributes)
    query = arrays(computation.instructions[instruction.names[0]].shape)
    if not scores or not query:
        raise ValueError(f"{instruction.name}: a cuDNN attention kernel whose HLO has no shape of the scores")
    batch, heads, rows, cols = numbers(scores[1].replace('"', ""))
    width = math.prod(query[0][1]) // (batch * heads * rows)
    flops = 2.0 * batch * heads * rows * cols * width * (5 if backward else 2)
    window = _CUDNN_WINDOW.search(instruction.attributes)
    keys = int(window[1]) if window else math.inf
    computed = causal_share("cudnn", rows, keys) if _CUDNN_CAUSAL.search(instruction.attributes) else 1.0
    share = _share(hardware, "cudnn", backward=backward)
    return flops_at_peak("cudnn", flops, width, cols, share, computed) / hardware.peak_flops(peak_dtype(query[0][0]))


def _splash_seconds(
    instruction: Instruction, computation: Computation, hardware: Hardware, kernel: re.Match[str]
) -> float:
    """Its operands are block tables of integers, and then queries, keys and values: [*batch, heads, length, width]."""
    operands = [array for name in instruction.names for array in arrays(computation.instructions[name].shape)[:1]]
    floats = [(dtype, shape) for dtype, shape in operands if not dtype.startswith(("s", "u", "pred"))]
    (dtype, (*heads, rows, width)), (_, (*_, cols, _)), (_, (*_, value_width)) = floats[:3]
    phase = kernel[3]
    if phase == "dkv" and len(arrays(instruction.shape)) > 2:
        phase = "dq and dkv"
    own, values = _SPLASH_PRODUCTS[phase]
    flops = 2.0 * math.prod(heads) * rows * cols * (own * width + values * value_width)
    share = _share(hardware, "splash", backward=phase != "fwd")
    computed = int(kernel[1]) / int(kernel[2])
    length = KERNELS["splash"].block(rows, cols, backward=phase in {"dkv", "dq and dkv"})[1]
    at_peak = flops_at_peak("splash", flops, min(width, value_width), length, share, computed)
    return at_peak / hardware.peak_flops(peak_dtype(dtype))


def _share(hardware: Hardware, kernel: str, *, backward: bool) -> float:
    """The kernel's share of the peak; 1 where the table has none of this library."""
    rates = hardware.attention
    if rates is None or KERNELS[rates.kernel].label != KERNELS[kernel].label:
        return 1.0
    return rates.backward if backward else rates.forward
