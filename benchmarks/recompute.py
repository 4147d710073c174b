"""Recompute on one device, against plain `jax.jit`, interleaved in one run.

    python -m benchmarks.recompute [--large]

``--large`` is a model for an accelerator; without it the model suits a CPU.

A decoder's train step (forward, backward, AdamW) is compiled by plain `jax.jit`, and by autoshard with no recompute,
with `dots_saveable` and with `full`, scanned and unrolled. For each: the compiler's temporary bytes, the median
seconds of a step, and the largest difference of the loss from plain `jax.jit` after the same number of steps.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autoshard
from autoshard.train.models.decoder import ModelConfig, make_steps
from autoshard.train.optimizer import OptimizerConfig

ROUNDS = 12
BATCH = 8


def batches(model: ModelConfig, count: int) -> list[dict[str, Any]]:
    """Random tokens, the same for every contender."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.vocab, (count, BATCH, model.seq + 1), dtype=np.int32)
    return [{"inputs": jnp.asarray(t[:, :-1]), "targets": jnp.asarray(t[:, 1:])} for t in tokens]


def measure(model: ModelConfig) -> None:
    """Prints a row for each contender on one model."""
    steps = make_steps(model, OptimizerConfig(learning_rate=1e-4), 1000)
    given = batches(model, ROUNDS)

    def planned(*passes: str) -> Callable[..., Any]:
        return autoshard.jit(steps.train, mesh={"data": 1}, donate_argnums=0, passes=("dead_code", *passes))

    contenders = {
        "jax.jit": jax.jit(steps.train, donate_argnums=0),
        "autoshard": planned(),
        "autoshard, dots_saveable": planned("recompute:dots_saveable"),
        "autoshard, full": planned("recompute:full"),
    }
    states, rows = {}, {}
    for name, step in contenders.items():
        states[name] = jax.jit(steps.init)(jax.random.key(0))
        start = time.perf_counter()
        memory = step.lower(states[name], given[0]).compile().memory_analysis()
        rows[name] = [time.perf_counter() - start, memory.temp_size_in_bytes, [], []]
    for batch in given:
        for name, step in contenders.items():
            start = time.perf_counter()
            states[name], metrics = step(states[name], batch)
            loss = float(jax.block_until_ready(metrics["loss"]))
            rows[name][2].append(time.perf_counter() - start)
            rows[name][3].append(loss)
    base = rows["jax.jit"]
    form = "scanned" if model.scan else "unrolled"
    print(f"\n{form}, {model.layers} layers, d {model.d_model}, seq {model.seq}, batch {BATCH}, {model.dtype}")
    print(f"{'':26}{'temp GiB':>9}{'of jit':>8}{'ms':>9}{'of jit':>8}{'loss off':>10}{'compile s':>11}")
    for name, (compiled, temp, times, losses) in rows.items():
        ms, ms0 = statistics.median(times[2:]) * 1e3, statistics.median(base[2][2:]) * 1e3
        off = max(abs(a - b) for a, b in zip(losses, base[3], strict=True))
        print(f"{name:26}{temp / 2**30:9.3f}{temp / base[1]:8.2f}{ms:9.2f}{ms / ms0:8.2f}{off:10.1e}{compiled:11.1f}")


def main() -> None:
    """Measures a scanned and an unrolled decoder."""
    device = jax.devices()[0]
    print(f"jax {jax.__version__} on {device.device_kind}")
    large = {"layers": 8, "d_model": 1024, "heads": 16, "vocab": 32000, "seq": 1024, "dtype": "bfloat16"}
    small = {"layers": 4, "d_model": 128, "heads": 4, "vocab": 256, "seq": 128, "dtype": "float32"}
    for scan in (True, False):
        measure(ModelConfig(**(large if "--large" in sys.argv else small), scan=scan))


if __name__ == "__main__":
    main()
