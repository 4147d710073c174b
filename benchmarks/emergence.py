"""Which layouts come out when nothing is said but the hardware and its memory.

    python -m benchmarks.emergence [WORD ...]

One line a case: the specs of its characteristic arguments, and what is sent. Nothing is computed or
compiled, and no device is needed. ``tests/test_emergence.py`` holds each line to the name that it has here.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import autoshard
from autoshard.jaxpr.paths import path_names
from autoshard.machine.mesh_config import MeshConfig
from autoshard.runtime.plan import Plan
from autoshard.units import size_text, time_text
from benchmarks.target_cases import StepAndShapes, decoder, experts

EIGHT = {"data": 8}
SMALL = {"layers": 4, "heads": 4, "seq": 256, "vocab": 1024}
WIDE = {"layers": 8, "d_model": 2048, "heads": 16, "d_ff": 8192, "seq": 256, "vocab": 32000, "dtype": "float32"}
LARGE = {"layers": 2, "d_model": 8192, "heads": 64, "d_ff": 28672, "seq": 2048, "vocab": 32000}
WORDY = {"layers": 2, "d_model": 1024, "heads": 8, "d_ff": 4096, "seq": 512}


def convolutions(batch: int, side: int, channels: int) -> StepAndShapes:
    """Four convolutions of 3x3, with a step of plain descent."""

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            x = batch["x"]
            for w in params:
                x = jax.nn.relu(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=_NHWC))
            return jnp.mean((x - batch["y"]) ** 2)

        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))

    w = jax.ShapeDtypeStruct((3, 3, channels, channels), jnp.float32)
    x = jax.ShapeDtypeStruct((batch, side, side, channels), jnp.float32)
    return step, [w] * 4, {"x": x, "y": x}


_NHWC = ("NHWC", "HWIO", "NHWC")


@dataclass(frozen=True)
class Case:
    """A program, the mesh, the memory of a device where it is not the chip's, and words of the characteristic paths."""

    name: str
    program: Any
    """Makes it: a function and its arguments."""
    mesh: Mapping[str, int]
    shown: tuple[str, ...]
    budget: str | None = None

    @property
    def sizes(self) -> str:
        """The arguments of the program."""
        return ", ".join(f"{k}={v}" for k, v in self.program[1].items())


_DECODER = ("params mlp up", "params mlp down", "mu mlp up", "params head")
_EXPERTS = ("params up", "batch x")
_IMAGES = ("params 1", "batch x")


def _decoder(name: str, mesh: Mapping[str, int], batch: int, budget: str | None = None, **sizes: Any) -> Case:
    return Case(name, (decoder, {"batch": batch, **sizes}), mesh, _DECODER, budget)


CASES = (
    _decoder("data parallel", EIGHT, 256, **SMALL, d_model=128, scan=False),
    _decoder("ZeRO-1/2", EIGHT, 64, **SMALL, d_model=1024),
    _decoder("ZeRO-3, wide", EIGHT, 64, **WIDE),
    _decoder("ZeRO-3, only matmul results saved", EIGHT, 64, "4.5GiB", **WIDE),
    _decoder("ZeRO-3, all rematerialized", EIGHT, 64, "2.4GiB", **WIDE),
    _decoder("Megatron with sequence parallelism, batch 2", EIGHT, 2, **LARGE),
    _decoder("Megatron for some weights, batch 4", EIGHT, 4, **LARGE),
    _decoder("FSDP (ZeRO-3), large batch", EIGHT, 64, **LARGE),
    _decoder("batch on one axis, Megatron on the other", {"data": 4, "model": 8}, 16, **LARGE),
    _decoder("vocabulary not sharded", EIGHT, 64, **WORDY, vocab=1024),
    _decoder("vocabulary sharded", EIGHT, 64, **WORDY, vocab=131072),
    Case(
        "expert parallelism",
        (experts, {"batch": 64, "seq": 512, "width": 1024, "hidden": 4096, "count": 8, "layers": 4}),
        EIGHT,
        _EXPERTS,
    ),
    Case("images by batch", (convolutions, {"batch": 64, "side": 64, "channels": 32}), EIGHT, _IMAGES),
    Case("images by channel", (convolutions, {"batch": 8, "side": 16, "channels": 1024}), EIGHT, _IMAGES),
    Case("images by row", (convolutions, {"batch": 1, "side": 2048, "channels": 16}), EIGHT, _IMAGES),
)


def planned(case: Case) -> Plan:
    """The plan of ``case`` on H100s."""
    make, sizes = case.program
    step, state, batch = make(**sizes)
    mesh = MeshConfig(axes=case.mesh, hardware="h100")
    return autoshard.jit(step, mesh=mesh, memory_budget=case.budget, donate_argnums=0).plan(state, batch)


def shown_specs(case: Case, plan: Plan) -> dict[str, str]:
    """The specs of the characteristic arguments: by words, of the first argument whose path has them."""
    found: dict[str, str] = {}
    for words in case.shown:
        for p in plan.inputs:
            if words not in found and set(words.split()) <= set(path_names(p.path)):
                found[words] = str(p.spec)
    return found


def sent(plan: Plan) -> dict[tuple[str, tuple[str, ...]], int]:
    """Bytes a device over the whole call, by kind and axes."""
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for c in plan.cost.collectives:
        found[c.kind, c.axes or ()] += c.total_bytes
    return dict(found)


def main() -> None:
    words = sys.argv[1:]
    print("| layout found | program | mesh | memory | specs | bytes sent per device | step time | memory per device |")
    print("|---|---|---|---|---|---|--:|--:|")
    for case in CASES:
        if words and not any(w in case.name for w in words):
            continue
        plan = planned(case)
        total = sum(sent(plan).values())
        specs = "; ".join(f"{words} {spec}" for words, spec in shown_specs(case, plan).items())
        moved = sorted(sent(plan).items(), key=lambda p: -p[1])
        moves = ", ".join(f"{k} over {'+'.join(a)} {size_text(n)}" for (k, a), n in moved if n >= total / 50)
        mesh = "x".join(f"{k} {n}" for k, n in case.mesh.items())
        row = case.name, f"{case.program[0].__name__} {case.sizes}", mesh, case.budget or "80 GB", specs, moves
        print(f"| {' | '.join(row)} | {time_text(plan.cost.seconds)} | {size_text(plan.memory.peak)} |", flush=True)


if __name__ == "__main__":
    main()
