"""Time per token of cached decoding, planned and sharded by hand, interleaved in one run.

    python -m benchmarks.decode [rounds]

A small decoder of the shape of Llama on all devices (on a CPU, eight virtual ones, unless JAX_NUM_CPU_DEVICES says
otherwise). By hand: `jax.jit` of the same step with the batch, or heads and MLPs as is usual for tensors in parallel,
split over all devices, the cache donated. Each round makes a token with each in turn, in alternating order. `ratio` is
the median over the rounds of the planned token's time by that of the faster one by hand; it may be 1.1.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.decoding import models
from autoshard.train.models.decoder import ModelConfig, make_steps
from autoshard.train.optimizer import OptimizerConfig

ROUNDS = 200
BAR = 1.1
CONFIG = ModelConfig(layers=4, d_model=256, heads=8, kv_heads=8, d_ff=704, vocab=1024, seq=512)
ROWS, PROMPT, COUNT = 8, 128, 128

HEADS: dict[str, P] = {
    "wq": P(None, None, "x"), "wk": P(None, None, "x"), "wv": P(None, None, "x"), "wo": P(None, "x"),
    "gate": P(None, None, "x"), "up": P(None, None, "x"), "down": P(None, "x"), "head": P(None, "x"),
}  # fmt: skip
"""Heads, the inner values of MLPs and the vocabulary split; what else there is is whole."""

Turn = Callable[[], Any]
"""Makes a token, and gives what to wait for."""


def by_hand(split: str, params: Any, prompt: Any) -> Turn:
    """The same step under `jax.jit`; ``split`` is ``batch`` or ``heads``."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    model = models.of_config(CONFIG)
    batch = P("x") if split == "batch" else P()
    cached = P(None, "x") if split == "batch" else P(None, None, None, "x")

    def sharding(path: Any, _: Any) -> NamedSharding:
        return NamedSharding(mesh, P() if split == "batch" else HEADS.get(str(path[-1].key), P()))

    def step(params: Any, cache: Any, tokens: Any, position: Any) -> Any:
        logits, cache = model.step(params, cache, tokens, position)
        return cache, jnp.argmax(logits, -1).astype(jnp.int32)[:, None], jnp.int32(position + tokens.shape[1])

    placed = jax.device_put(params, jax.tree_util.tree_map_with_path(sharding, params))
    cache = jax.device_put(model.new_cache(params, ROWS, PROMPT + COUNT), NamedSharding(mesh, cached))
    outs = tuple(NamedSharding(mesh, spec) for spec in (cached, batch, P()))
    state = jax.jit(lambda *args: step(*args, 0), donate_argnums=1, out_shardings=outs)(placed, cache, prompt)
    decode = jax.jit(step, donate_argnums=1, out_shardings=outs)
    return _turns(lambda state: decode(placed, *state), state)


def planned(params: Any, prompt: Any) -> Turn:
    """`autoshard.generate`'s steps."""
    generator = autoshard.generate(*models.of_config(CONFIG), mesh={"x": jax.device_count()})
    prepared = generator.prepare(params, prompt, COUNT)
    print(f"planned: {prepared.decode_plan.in_specs[1]}")
    cache = models.of_config(CONFIG).new_cache(params, ROWS, PROMPT + COUNT)
    params, cache, prompt, key = prepared.prefill_plan.put(params, cache, prompt, np.zeros(2, np.uint32))
    return _turns(lambda state: prepared.decode(params, *state, key), prepared.prefill(params, cache, prompt, key))


def _turns(step: Callable[[Any], Any], start: Any) -> Turn:
    """Goes on from token to token; after the last the cache is filled anew from its end, which costs as much."""
    state, made = start, 0

    def turn() -> Any:
        nonlocal state, made
        state, made = step(state), made + 1
        if made % (COUNT - 1) == 0:
            state = (*state[:2], state[2] - (COUNT - 1))
        return state[1]

    return turn


def main() -> None:
    """Prints the time per token of each, and the ratio."""
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", 8)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    params = jax.device_get(make_steps(CONFIG, OptimizerConfig(), 1).init(jax.random.key(0))["params"])
    prompt = np.random.default_rng(0).integers(0, CONFIG.vocab, (ROWS, PROMPT)).astype(np.int32)
    turns = {"planned": planned(params, prompt)}
    turns |= {f"by hand, {split}": by_hand(split, params, prompt) for split in ("batch", "heads")}
    took: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 5):
        for name in list(turns)[:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            jax.block_until_ready(turns[name]())
            if number >= 5:
                took[name].append(time.perf_counter() - start)
    best = min((n for n in took if n != "planned"), key=lambda n: statistics.median(took[n]))
    ratio = statistics.median(a / b for a, b in zip(took["planned"], took[best], strict=True))
    print(f"{jax.device_count()} devices of kind {jax.devices()[0].device_kind}, {rounds} rounds")
    for name, seconds in took.items():
        print(f"  {name:16} {statistics.median(seconds) * 1e3:8.3f} ms a token")
    print(f"  ratio to {best}: {ratio:.3f}, {'within' if ratio <= BAR else 'BEYOND'} {BAR}")


if __name__ == "__main__":
    main()
