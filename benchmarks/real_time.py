"""autoshard's plan beside what people write by hand, in wall-clock time on eight virtual CPU devices.

    python -m benchmarks.real_time [ROUNDS] [WORD]

The models of `benchmarks.zoo` at small sizes, those that have WORD in their name. Every contender runs in turn, ROUNDS
times (default 10), so that all meet the same disturbances; what is printed is the median of the ratios to autoshard's
time in the same round. Below 1: faster than autoshard.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import jax.numpy as jnp

import autoshard
from benchmarks.baselines import BASELINES, abstract, lowered
from benchmarks.convolutions import cnn, convnext, segmenter, unet, wide_resnet
from benchmarks.zoo import Model, decoder, translator, vision

AXES = {"data": 4, "model": 2}
SMALL = {"layers": 4, "width": 256, "heads": 8, "mlp": 1024, "vocab": 2048}
PICTURES = {"layers": 4, "width": 256, "heads": 8, "mlp": 1024}
MODELS: Mapping[str, Callable[[], Model]] = {
    "GPT-3, scanned": lambda: decoder(16, 128, **SMALL),
    "GPT-3, unrolled": lambda: decoder(16, 128, **SMALL, scan=False),
    "LLaMA-3, scanned": lambda: decoder(16, 128, **SMALL, kv_heads=2, gated=True),
    "LLaMA-3, unrolled": lambda: decoder(16, 128, **SMALL, kv_heads=2, gated=True, scan=False),
    "Mixtral": lambda: decoder(16, 128, **SMALL | {"mlp": 512}, gated=True, experts=8),
    "T5": lambda: translator(16, 64, **SMALL, gated=True),
    "ViT": lambda: vision(16, 64, 8, 128, **PICTURES),
    "Wide-ResNet": lambda: wide_resnet(16, 64, 32, (1, 1, 1, 1), 128),
    "U-Net": lambda: unet(16, 32, (64, 128, 256), 1),
    "CNN": lambda: cnn(16, 32, (32, 64)),
    "Segmenter": lambda: segmenter(16, 32, (32, 64)),
    "ConvNeXt": lambda: convnext(16, 64, (64, 128), (1, 1), 128),
}


def measure(model: Model, rounds: int) -> dict[str, float]:
    """Median of each baseline's seconds over autoshard's in the same round; one that cannot run is left out."""
    state, batch = (jax.tree.map(_filled, x) for x in abstract(model))
    planned = autoshard.jit(model.step(), mesh=AXES).lower(*abstract(model)).compile()
    mesh = autoshard.MeshConfig(axes=AXES).mesh().concrete()
    runs: dict[str, Any] = {"autoshard": planned}
    for name, baseline in BASELINES.items():
        runs[name] = lowered(model, baseline, mesh, donate=False).compile()
    placed = {n: jax.device_put((state, batch), run.input_shardings[0]) for n, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run(*placed[name]))
            times[name].append(time.perf_counter() - start)
    ours = times.pop("autoshard")[1:]
    return {n: statistics.median(t / o for t, o in zip(ts[1:], ours, strict=True)) for n, ts in times.items()}


def _filled(x: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.full(x.shape, 0.01, x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.zeros(x.shape, x.dtype)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    best: list[float] = []
    print(f"JAX {jax.__version__}, eight CPU devices as {AXES}, {rounds} rounds: seconds of each over autoshard's\n")
    print(f"| model | {' | '.join(BASELINES)} | autoshard over the best |")
    print("|---|" + "--:|" * (len(BASELINES) + 1))
    for name, make in MODELS.items():
        if all(word in name for word in sys.argv[2:]):
            found = measure(make(), rounds)
            best.append(1 / min(found.values()))
            print(f"| {name} | {' | '.join(f'{found[b]:.2f}' for b in BASELINES)} | {best[-1]:.2f} |", flush=True)
    print(f"\nGeometric mean {math.exp(statistics.fmean(map(math.log, best))):.2f}")


if __name__ == "__main__":
    main()
