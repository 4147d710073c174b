"""The fused attention kernels of the targets' libraries: what each computes, and what its time is worth.

A kernel never writes the scores to memory. One description says which attentions it supports and how it skips masked
blocks; the pass `attention` reads it, so do the price in a plan, the estimate of what was compiled, and the call of the
kernel. Hardware tables name the kernel of a chip and the share of the peak that it reaches (`Hardware.attention`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard import jaxpr as jx
from autoshard.transforms.attention_op import AttentionConfig

NEGLIGIBLE_SCORE = -1e6
"""A masked score at or below this has no weight beside any unmasked one. Kernels give masked keys no weight at all."""


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """Which attentions a kernel computes, and how fast."""

    label: str
    """What reports call it."""
    dtypes: tuple[str, ...]
    """Of queries, keys, values and output."""
    width_multiple: int
    max_width: int
    """Head widths are multiples of ``width_multiple`` up to this."""
    full_width: int
    """Narrower heads are priced as if they were as wide."""
    measured_length: int
    """The number of keys, or of rows of a block, at which the shares of the peak in hardware tables were measured."""
    startup: int
    """The fixed cost of a row of scores, or of a block's, in keys."""
    diagonal: int = 0
    """Keys of each query that a causal mask excludes and the kernel computes nevertheless, or as much in other costs;
    where ``max_block`` is given, the blocks say it."""
    any_size: bool = False
    """Whether it is used for attentions whose scores would fit in on-chip memory too."""
    windows: bool = False
    """Whether it takes masks with two limits, beside the causal one."""
    causal_windows: bool = False
    """Whether of those it takes what is both: each query sees so many keys up to its own."""
    segments: bool = False
    """Whether it takes segment ids, of which queries see the keys with their own."""
    soft_cap: bool = False
    """Whether it takes ``cap * tanh(scores / cap)``."""
    value_width: bool = False
    """Whether values may have another width than queries and keys."""
    default_precision: bool = False
    """Whether its products are at JAX's default precision whatever precision was asked for."""
    length_multiple: int = 1
    """Sequences are multiples of this, and blocks too."""
    min_length: int = 1
    """Shorter sequences are computed faster by XLA."""
    max_block: int = 0
    """Rows and columns of the largest block of scores; 0: blocks are too small to matter."""
    max_gradient_keys: int = 0
    """The same of columns in the backward part."""
    max_fused_blocks: int = 0
    """Up to so many blocks of keys the gradient is one kernel that computes the scores once; above, two kernels compute
    them twice. 0: always one."""
    shared_keys: bool = False
    """Whether of keys and values that repeat a head for several of the queries' it is given each head once."""
    interpreted: bool = False
    """Whether it is run as plain operations: on any platform, slowly, for tests."""

    def block(self, queries: int, keys: int, *, backward: bool) -> tuple[int, int]:
        """Rows and columns of a block of scores."""
        return self._largest(queries, self.max_block), self._largest(
            keys, self.max_gradient_keys if backward else self.max_block
        )

    def _largest(self, length: int, most: int) -> int:
        sizes = range(self.length_multiple, min(most, length) + 1, self.length_multiple)
        return next((n for n in reversed(sizes) if length % n == 0), length)

    def gradient_is_one_kernel(self, keys: int) -> bool:
        """Whether scores are computed once in the backward part."""
        return not self.max_fused_blocks or keys // self._largest(keys, self.max_gradient_keys) <= self.max_fused_blocks


CUDNN = AttentionKernel(
    "cuDNN",
    ("bfloat16", "float16"),
    width_multiple=8,
    max_width=128,  # on every GPU, forward and backward
    full_width=85,  # this, startup and diagonal: fitted to the kernels of 15 attentions on an H100, all within 15 %
    measured_length=1024,
    startup=507,
    diagonal=246,
    causal_windows=True,
    length_multiple=2,  # for gradients JAX refuses odd ones: 257 patches of a ViT
    any_size=True,
)
SPLASH = AttentionKernel(
    "splash attention",
    ("bfloat16", "float32"),
    width_multiple=8,
    max_width=256,
    full_width=128,
    measured_length=2048,
    startup=128,  # estimate: 0.85 of the speed with blocks of 512
    windows=True,
    segments=True,
    soft_cap=True,
    value_width=True,
    default_precision=True,
    length_multiple=128,
    min_length=512,  # a ViT of 256 tokens on v5e: 983 ms by the kernel, 939 without, compiled by libtpu 0.0.50
    max_block=1024,  # larger ones of the forward part do not compile within the VMEM that v5e and v5p allow by default
    max_gradient_keys=2048,
    max_fused_blocks=4,
    shared_keys=True,
)
KERNELS: Mapping[str, AttentionKernel] = {
    "cudnn": CUDNN,
    "splash": SPLASH,
    "splash_interpreted": replace(
        SPLASH,
        interpreted=True,
        any_size=True,
        min_length=1,
        max_block=128,
        max_gradient_keys=256,
        max_fused_blocks=1,
    ),
}
"""By the name in hardware tables: `jax.nn.dot_product_attention` by cuDNN for NVIDIA GPUs, and
`jax.experimental.pallas.ops.tpu.splash_attention` for TPUs."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """The static parameters of one call: scores are ``soft_cap * tanh(scale * query . key / soft_cap)``, or without a
    soft cap ``scale * query . key``, where key position minus query position is in [low, high]."""

    kernel: str
    """A name in `KERNELS`."""
    scale: float
    soft_cap: float | None = None
    low: int | None = None
    high: int | None = None
    scales_keys: bool = False
    """Whether keys are scaled where the kernel does not scale, and not queries: where they are fewer."""

    def shifted(self, distance: int, queries: int, keys: int) -> KernelCall:
        """The call for keys that begin ``distance`` positions before the queries; no limit that excludes none."""
        low = None if self.low is None else self.low + distance
        high = None if self.high is None else self.high + distance
        return replace(
            self,
            low=None if low is None or low <= 1 - queries else low,
            high=None if high is None or high >= keys - 1 else high,
        )

    def some_rows_empty(self, queries: int, keys: int) -> bool:
        """Whether some query sees none of the keys."""
        first = self.high is not None and self.high < 0
        last = self.low is not None and queries - 1 + self.low > keys - 1
        return first or last

    def computed_blocks(self, queries: int, keys: int, *, backward: bool = False) -> np.ndarray:
        """Which blocks of scores hold an unmasked one: [blocks of queries, blocks of keys] booleans."""
        rows, columns = KERNELS[self.kernel].block(queries, keys, backward=backward)
        first = np.arange(0, keys, columns)[None, :] - np.arange(0, queries, rows)[:, None]
        least, most = first - (rows - 1), first + columns - 1
        return (most >= (least.min() if self.low is None else self.low)) & (
            least <= (most.max() if self.high is None else self.high)
        )

    def computed_share(self, queries: int, keys: int, *, backward: bool = False) -> float:
        """The part of all scores that is computed."""
        if KERNELS[self.kernel].max_block:
            return float(self.computed_blocks(queries, keys, backward=backward).mean())
        if self.low is None and self.high is None:
            return 1.0
        if self.high is not None and self.high <= -queries:
            return 0.0
        return causal_share(self.kernel, queries, math.inf if self.low is None else 1 - self.low)


def kernel_call(config: AttentionConfig, kernel: str) -> KernelCall:
    """The call that computes ``config``, which the kernel supports."""
    scales = [op.constant for op in config.score_ops if op.kind == "scale"]
    caps = [i for i, op in enumerate(config.score_ops) if op.kind == "tanh"]
    soft_cap = math.prod(op.constant for i in caps for op in config.score_ops[i:] if op.kind == "scale")
    bands = [op for op in config.score_ops if op.kind == "band"]
    return KernelCall(
        kernel,
        math.prod(scales),
        soft_cap if caps else None,
        max([op.low for op in bands if op.low is not None], default=None),
        min([op.high for op in bands if op.high is not None], default=None),
        config.head_repeats > 1,
    )


def unsupported_reason(config: AttentionConfig, query: Any, key: Any, value: Any, name: str) -> str:
    """Why the kernel ``name`` does not support an attention over operands of these shapes and dtypes; "" where it
    does."""
    kernel = KERNELS[name]
    dtypes = {str(x.dtype) for x in (query, key, value)}
    sizes = config.sizes(query, key, value)
    kinds = [op.kind for op in config.score_ops]
    queries, keys = sizes[config.query_position], sizes[config.key_position]
    bands = {(op.low, op.high) for op in config.score_ops if op.kind == "band"}
    fill = masked_fill(config)
    segments = {op.extra for op in config.score_ops if op.kind == "segments"}
    masks = "the causal mask and windows" if kernel.windows else "the causal mask and causal windows"
    masks += ", and segment ids that are one array for queries and keys" if kernel.segments else ""
    mask_kinds = {"band", "segments"} if kernel.segments else {"band"}
    taken = not bands or kernel.windows or (kernel.causal_windows and kernel_call(config, name).high == 0)
    if len(dtypes) > 1 or not dtypes <= set(kernel.dtypes):
        return f"{kernel.label} takes queries, keys and values of {' or '.join(kernel.dtypes)}, not {_list(dtypes)}"
    if other := next(
        (k for k in kinds if k not in {"scale", *mask_kinds} and (k != "tanh" or not kernel.soft_cap)), ""
    ):
        return f"of masks and biases {kernel.label} is used for {masks} ({other})"
    if kinds.count("tanh") > 1 or ("tanh" in kinds and mask_kinds & {*kinds[: kinds.index("tanh")]}):
        return f"{kernel.label} takes one soft cap of the scores, before their mask"
    if not taken:
        return f"of masks and biases {kernel.label} is used for {masks} (window)"
    if fill is not None and fill > NEGLIGIBLE_SCORE:
        return f"{kernel.label} gives masked keys no weight, and these have one by their score of {fill:g}"
    if bands and queries != keys:
        return f"a mask of positions in {kernel.label} needs as many queries as keys, not {queries} and {keys}"
    if any((low or 0) > 0 or (high or 0) < 0 for low, high in bands):
        return f"{kernel.label} needs masks that leave each query its own key"
    if len(segments) > 1:
        return f"{kernel.label} takes one array of segment ids, not {len(segments)}"
    shared = {*config.query_dims} & {*config.key_dims} & {*config.value_dims} | {config.key_position, "."}
    if any({*config.extra_dims[i]} - shared for i in segments):
        return f"{kernel.label} takes segment ids that are the same for the query heads of a key head"
    own_key_dims = set(config.key_dims) ^ set(config.value_dims)
    if set(config.query_dims) != {*config.row_dims, config.head_width} or own_key_dims != {
        config.head_width,
        config.value_width,
    }:
        return f"{kernel.label} takes keys and values of the same heads, and no key head without a query head"
    if config.out_dtype not in dtypes:
        return f"the output of {kernel.label} has the dtype of its operands, {_list(dtypes)}, not {config.out_dtype}"
    precisions = {config.score_precision, config.value_precision}
    if kernel.default_precision and "float32" in dtypes and precisions - jx.DEFAULT_PRECISIONS:
        return f"{kernel.label} computes products at the default precision"
    head, value_head = sizes[config.head_width], sizes[config.value_width]
    if head % kernel.width_multiple or value_head % kernel.width_multiple or max(head, value_head) > kernel.max_width:
        return (
            f"{kernel.label} takes head widths that are a multiple of {kernel.width_multiple} and at most "
            f"{kernel.max_width}, not {head}" + (f" and {value_head}" if value_head != head else "")
        )
    if value_head != head and not kernel.value_width:
        return f"{kernel.label} takes values as wide as queries, not {value_head} beside {head}"
    if min(queries, keys) < kernel.min_length:
        return (
            f"{kernel.label} is used from {kernel.min_length} queries and keys on, and these are {queries} and {keys}"
        )
    return unsupported_lengths(name, queries, keys)


def in_rings(config: AttentionConfig) -> bool:
    """Whether the kernel of ``config`` takes the masks of blocks of keys that begin before or after the queries."""
    kernel = KERNELS[config.kernel]
    return kernel.windows or kernel_call(config, config.kernel).low is None


def unsupported_lengths(name: str, queries: int, keys: int) -> str:
    """Why the kernel ``name`` does not support sequences of so many queries and keys; "" where it does."""
    kernel = KERNELS[name]
    if queries % kernel.length_multiple or keys % kernel.length_multiple:
        return f"{kernel.label} takes sequences that are a multiple of {kernel.length_multiple}, not {queries}" + (
            f" and {keys}" if keys != queries else ""
        )
    return ""


def masked_fill(config: AttentionConfig) -> float | None:
    """The score of masked keys after all score ops, of those that are scales, soft caps, bands and segments; None
    without one of these two."""
    score = None
    for op in config.score_ops:
        if op.is_mask:
            score = op.constant if score is None else max(score, op.constant)
        elif op.kind == "scale" and score is not None:
            score *= op.constant
        elif op.kind == "tanh" and score is not None:
            score = math.tanh(score)
    return score


def kernel_flops_at_peak(
    config: AttentionConfig, query: Any, key: Any, value: Any, share: float, *, backward: bool = False
) -> float:
    """The time of the kernel that ``config`` names, in FLOPs at the chip's peak.

    Args:
      share: FLOP/s of the kernel over the peak, as `Hardware.attention` states it.
    """
    sizes = config.sizes(query, key, value)
    queries, keys = sizes[config.query_position], sizes[config.key_position]
    flops = config.flops(query, key, value, backward=backward) * _times_computed(config.kernel, keys, backward)
    width = min(sizes[config.head_width], sizes[config.value_width])
    computed = kernel_call(config, config.kernel).computed_share(queries, keys, backward=backward)
    length = KERNELS[config.kernel].block(queries, keys, backward=backward)[1]
    return flops_at_peak(config.kernel, flops, width, length, share, computed)


def relative_flops(call: KernelCall, queries: int, keys: int, *, backward: bool) -> float:
    """What `kernel_flops_at_peak` multiplies the FLOPs of all scores by, as far as lengths and mask decide it: calls of
    one kernel on sequences of several lengths are compared by it."""
    kernel = KERNELS[call.kernel]
    length = kernel.block(queries, keys, backward=backward)[1]
    computed = call.computed_share(queries, keys, backward=backward)
    return computed * _times_computed(call.kernel, keys, backward) / peak_share(call.kernel, 1.0, length)


def _times_computed(name: str, keys: int, backward: bool) -> float:
    """FLOPs over those of products that are computed once: two kernels of the gradient compute the scores twice."""
    return 7 / 5 if backward and not KERNELS[name].gradient_is_one_kernel(keys) else 1.0


def causal_share(name: str, queries: int, window: float = math.inf) -> float:
    """The part of all scores that the kernel ``name`` computes under a causal mask, of a ``window`` of keys or all."""
    diagonal = KERNELS[name].diagonal
    return min(1.0, 0.5 * (1 + diagonal / queries), (window + diagonal) / queries)


def flops_at_peak(name: str, flops: float, width: int, length: int, share: float, computed: float) -> float:
    """The time of the kernel ``name`` in FLOPs at the chip's peak: masked blocks cost nothing, and a narrow head what a
    wide one does.

    Args:
      flops: of the products without a mask: two forward, five backward, seven where the gradient is two kernels.
      width: of a head.
      length: the number of keys, or of a block's.
      share: FLOP/s of the kernel over the peak, as `Hardware.attention` states it.
      computed: the part of the scores that is computed.
    """
    kernel = KERNELS[name]
    wide = max(1.0, kernel.full_width / width)
    return flops * computed * wide / peak_share(name, share, length)


def peak_share(name: str, share: float, length: int) -> float:
    """FLOP/s of the kernel ``name`` over the peak with ``length`` keys (or rows of a block), where it is ``share`` with
    as many as were measured."""
    kernel = KERNELS[name]
    return share * (1 + kernel.startup / kernel.measured_length) / (1 + kernel.startup / length)


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names))
