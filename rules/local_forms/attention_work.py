"""How much the busiest device computes of an attention whose sequence is sharded, over what the attention is priced at.

A kernel is priced for the blocks of scores that its mask leaves, XLA's own code for all scores. What a device computes
in a ring is counted likewise: one call for each block of keys that it receives and its queries see some of.
"""

from __future__ import annotations

import functools

from autoshard.rules.local_forms.attention_ring import Reach
from autoshard.transforms.attention_kernels import KernelCall, kernel_call, relative_flops
from autoshard.transforms.attention_op import AttentionConfig


@functools.lru_cache(maxsize=1024)
def chain_work(config: AttentionConfig, reach: Reach, parts: int, keys: int, backward: bool) -> float:
    """The work of the busiest device of a ring or chain over a ``parts``-th of the attention's.

    In a causal ring the last device computes with the keys of all, the average device with half of them.

    Args:
      keys: of each sequence on one device.
    """
    received = min(parts, 1 + reach.before + reach.behind)
    if not config.kernel:
        return received / parts
    call = kernel_call(config, config.kernel)
    hops = range(-reach.behind, reach.before + 1)
    flops = {hop: _flops(call.shifted(hop * keys, keys, keys), keys, backward) for hop in hops}
    if reach.ring:
        return parts * flops[0] * parts / _flops(call, parts * keys, backward)
    of_device = (sum(flops[hop] for hop in hops if 0 <= me - hop < parts) for me in range(parts))
    return max(of_device) * parts / _flops(call, parts * keys, backward)


@functools.lru_cache(maxsize=1024)
def balanced_work(config: AttentionConfig, parts: int, keys: int, backward: bool) -> float:
    """`chain_work` of a balanced ring: two blocks of scores in each hop, of half as many queries and keys as a device
    has, and at first one and two on the diagonal."""
    if not config.kernel:
        return (2 * (parts - 1) + 3) / (4 * parts)
    call, half = kernel_call(config, config.kernel), keys // 2
    seen, diagonal = (_flops(call.shifted(distance, half, half), half, backward) for distance in (half, 0))
    return ((2 * (parts - 1) + 1) * seen + 2 * diagonal) * parts / _flops(call, parts * keys, backward)


def _flops(call: KernelCall, length: int, backward: bool) -> float:
    """What a call of so many queries and keys takes, per head and per element of its width."""
    return length * length * relative_flops(call, length, length, backward=backward)
