"""Programs, meshes and plans that are compiled by the real compilers for TPUs and GPUs and held against what was
predicted.

No chip need be here: the extras ``tpu`` and ``gpu`` bring the compilers, which run on any machine. Their answers are
kept on disk under a digest of all that they were given, so that a second run compiles only what has changed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen

import autoshard
from autoshard.runtime.plan import Plan
from autoshard.train.models.decoder import ModelConfig, make_steps
from autoshard.train.optimizer import OptimizerConfig
from benchmarks.answers import Answer, answer, asked

MIB = 2**20
MACHINES: Mapping[str, Mapping[str, Any]] = {
    "v5e": {"tpu": "v5e:4x4"},
    "v5p": {"tpu": "v5p:2x2x4"},
    "v6e": {"tpu": "v6e:4x4"},
    "h100": {"gpu": "h100"},
}
"""By the names of their chips."""
MESHES = {
    name: ((2, 4), (8, 1), (4, 2)) if "gpu" in where else ((4, 4), (16, 1), (2, 8)) for name, where in MACHINES.items()
}
"""Sizes of ``data`` and ``model``: the mesh that every program has, one of data alone, and another of both."""

StepAndShapes = tuple[Callable[..., Any], Any, Any]
"""A step, and the shapes of its state and batch."""


def decoder(batch: int, **sizes: Any) -> StepAndShapes:
    """A decoder-only transformer with AdamW, in bfloat16."""
    model = ModelConfig(**{"dtype": "bfloat16", **sizes})
    steps = make_steps(model, OptimizerConfig(), 1000)
    tokens = jax.ShapeDtypeStruct((batch, model.seq), jnp.int32)
    return steps.train, jax.eval_shape(steps.init, jax.random.key(0)), {"inputs": tokens, "targets": tokens}


def trained(loss: Callable[[Any, Any], Any], params: Any, batch: Any) -> StepAndShapes:
    """A step of Adam on a loss of parameters and batch."""
    adam = optax.adam(1e-3)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = adam.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    state = jax.eval_shape(lambda p: {"params": p, "opt": adam.init(p)}, params)
    return step, state, batch


def mlp(batch: int, width: int, hidden: int, layers: int) -> StepAndShapes:
    """Residual blocks of two products, unrolled, in float32."""

    def loss(params: Any, batch: Any) -> Any:
        h = batch["x"]
        for p in params:
            h = h + jax.nn.gelu(h @ p["up"]) @ p["down"]
        return jnp.mean((h - batch["y"]) ** 2)

    up, down = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((width, hidden), (hidden, width)))
    x = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    return trained(loss, [{"up": up, "down": down}] * layers, {"x": x, "y": x})


def experts(batch: int, seq: int, width: int, hidden: int, count: int, layers: int) -> StepAndShapes:
    """A mixture of experts, each token to the best of them as far as its capacity allows, scanned, in bfloat16."""
    capacity = 2 * seq // count

    def layer(h: Any, w: Any) -> tuple[Any, None]:
        gates = jax.nn.softmax((h @ w["gate"].astype(h.dtype)).astype(jnp.float32))
        chosen = jax.nn.one_hot(gates.argmax(-1), count)
        place = jnp.cumsum(chosen, axis=1) * chosen - 1
        slots = jax.nn.one_hot(place.astype(jnp.int32), capacity, dtype=h.dtype)  # [group, token, expert, slot]
        inside = jnp.einsum("gtes,gtd->egsd", slots, h)
        inside = jax.nn.gelu(jnp.einsum("egsd,edf->egsf", inside, w["up"].astype(h.dtype)))
        outside = jnp.einsum("egsf,efd->egsd", inside, w["down"].astype(h.dtype))
        weighed = slots * (gates * chosen)[..., None].astype(h.dtype)
        return h + jnp.einsum("gtes,egsd->gtd", weighed, outside), None

    def loss(params: Any, batch: Any) -> Any:
        h, _ = jax.lax.scan(layer, batch["x"], params)
        return jnp.mean((h - batch["y"]).astype(jnp.float32) ** 2)

    shapes = {"gate": (width, count), "up": (count, width, hidden), "down": (count, hidden, width)}
    params = {k: jax.ShapeDtypeStruct((layers, *s), jnp.float32) for k, s in shapes.items()}
    x = jax.ShapeDtypeStruct((batch, seq, width), jnp.bfloat16)
    return trained(loss, params, {"x": x, "y": x})


class _Residual(linen.Module):
    """Convolutions of 3x3 with group norm around skip connections: [batch, y, x, 3] to [batch, class]."""

    widths: Sequence[int]

    @linen.compact
    def __call__(self, x: Any) -> Any:
        for i, width in enumerate(self.widths):
            x = linen.Conv(width, (3, 3), strides=(2, 2) if i else (1, 1), dtype=jnp.bfloat16)(x)
            y = linen.silu(linen.GroupNorm(8, dtype=jnp.bfloat16)(x))
            x = x + linen.Conv(width, (3, 3), dtype=jnp.bfloat16)(y)
        return linen.Dense(128)(x.mean((1, 2)).astype(jnp.float32))


def conv(batch: int, size: int, widths: Sequence[int]) -> StepAndShapes:
    """A residual convolutional network."""
    net = _Residual(tuple(widths))

    def loss(params: Any, batch: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(net.apply(params, batch["x"]), batch["y"]).mean()

    params = jax.eval_shape(net.init, jax.random.key(0), jax.ShapeDtypeStruct((1, size, size, 3), jnp.bfloat16))
    x = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.bfloat16)
    return trained(loss, params, {"x": x, "y": jax.ShapeDtypeStruct((batch,), jnp.int32)})


PROGRAMS: Mapping[str, Callable[[], StepAndShapes]] = {
    "decoder-scanned": lambda: decoder(64, layers=4, d_model=1024, heads=8, d_ff=4096, vocab=16384, seq=1024),
    "decoder-unrolled": lambda: decoder(64, layers=2, d_model=768, heads=6, vocab=8192, seq=1024, scan=False),
    "decoder-gelu": lambda: decoder(
        128, layers=2, d_model=1024, heads=16, kv_heads=4, mlp="gelu", vocab=4096, seq=512, tied=True, scan=False
    ),
    "experts": lambda: experts(batch=64, seq=512, width=1024, hidden=4096, count=8, layers=4),
    "conv": lambda: conv(batch=2048, size=64, widths=(128, 256)),
    "mlp": lambda: mlp(batch=65536, width=2048, hidden=8192, layers=3),
}


def mesh(machine: str, sizes: tuple[int, int]) -> autoshard.MeshConfig:
    """One of `MACHINES` as a mesh with these sizes of ``data`` and ``model``."""
    data, model = sizes
    return autoshard.MeshConfig(axes={"data": data, "model": model}, **MACHINES[machine])


@dataclass(frozen=True)
class Case:
    """A program with a plan for it."""

    program: str
    sizes: tuple[int, int]
    """Of the mesh axes ``data`` and ``model``."""
    strategy: str
    recompute: str = ""
    machine: str = "v5e"

    @property
    def mesh(self) -> str:
        """As text: ``4x4``."""
        return "x".join(map(str, self.sizes))

    def __str__(self) -> str:
        return " ".join(filter(None, (self.program, self.recompute)))


_ALL = ("dp", "fsdp", "tp", "fsdp_tp", "auto")


def cases(machine: str) -> Iterator[Case]:
    """The cases of a machine: fewer of those that have another's compiler."""
    first, flat, other = MESHES[machine]
    if machine in ("v5p", "v6e"):
        yield from (Case(p, first, s, machine=machine) for p in PROGRAMS for s in ("fsdp_tp", "auto"))
        return
    kept = ("tp", "fsdp_tp", "auto")
    yield from (Case(p, first, s, machine=machine) for p in PROGRAMS for s in _ALL)
    yield from (Case(p, m, s, machine=machine) for p in ("decoder-scanned", "mlp") for m in (flat, other) for s in kept)
    yield from (Case(p, other, s, machine=machine) for p in ("decoder-unrolled", "experts", "conv") for s in kept)
    for policy, strategies in (("full", ("dp", "fsdp", "fsdp_tp")), ("dots_saveable", ("fsdp",))):
        yield from (
            Case(p, first, s, policy, machine) for p in ("decoder-scanned", "decoder-unrolled") for s in strategies
        )


def decorated(case: Case) -> tuple[autoshard.Step, Any, Any]:
    """The step of a case, to be planned, and the shapes of its state and batch."""
    step, state, batch = PROGRAMS[case.program]()
    recompute = f"recompute:{case.recompute}"
    passes = ("dead_code", "one_hot", "transposed_products", recompute, "sum_products", "pad_uneven")
    jitted = autoshard.jit(
        step,
        mesh=mesh(case.machine, case.sizes),
        strategy=case.strategy,
        donate_argnums=0,
        passes=passes if case.recompute else None,
    )
    return jitted, state, batch


def planned(case: Case) -> tuple[Plan, jax.stages.Lowered, float]:
    """The plan of a case, the step lowered, and the seconds that planning took."""
    jitted, state, batch = decorated(case)
    start = time.perf_counter()
    plan = jitted.plan(state, batch)
    return plan, jitted.lower(state, batch), time.perf_counter() - start


@dataclass(frozen=True)
class Options:
    """One of `MACHINES`, ``--cache DIR``, ``--kept`` for the cases alone whose answer is there, and the word that
    cases to run contain."""

    machine: str
    cache: Path | None
    kept: bool
    word: str

    def cases(self) -> Iterator[Case]:
        """The cases to run."""
        return (c for c in cases(self.machine) if self.word in f"{c} {c.mesh} {c.strategy}")


def answers(chosen: Options) -> Iterator[tuple[Case, Plan, Answer, float]]:
    """Every case to run with its plan, the compiler's answer, and the seconds that planning took.

    Raises:
      SystemExit: there is none.
    """
    if not (wanted := [*chosen.cases()]):
        raise SystemExit(
            f"no case on {chosen.machine} has {chosen.word!r} in its name; machines: {', '.join(MACHINES)}"
        )
    for case in wanted:
        plan, lowered, seconds = planned(case)
        found = answer(lowered, plan.mesh, chosen.cache, kept=chosen.kept)
        if found is not None:
            yield case, plan, found, seconds


def options(argv: Sequence[str] = tuple(sys.argv[1:])) -> Options:
    """What the command line says; ``v5e`` where it names no machine."""
    cache, kept, words = asked(argv, "--kept")
    machine = words.pop(0) if words and words[0] in MACHINES else "v5e"
    return Options(machine, cache, kept, " ".join(words))
