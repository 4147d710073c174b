"""What calling a planned step costs beyond calling the bare compiled function, interleaved in one run.

    python -m benchmarks.call_overhead [rounds]

Steps that compute next to nothing over many arrays, nothing donated, on one device and on all (on a CPU, eight virtual
ones, unless JAX_NUM_CPU_DEVICES says otherwise). Each round calls both functions in turn, in alternating order. `more`
is the median over the rounds of what the planned call took beyond the other; it may be 20 microseconds or 5 %,
whichever is larger. Steps on Flax NNX modules are held against `nnx.jit`.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import autoshard

ROUNDS = 2000
ALLOWED_SECONDS, ALLOWED_SHARE = 20e-6, 0.05

Calls = list[tuple[Callable[..., Any], tuple[Any, ...]]]
"""Functions and their arguments, called in turn."""


@dataclass(frozen=True)
class Case:
    """One way of calling a step, and the same calls without autoshard."""

    name: str
    bare: Calls
    planned: Calls


def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], Any]:
    """Computes next to nothing over many arrays."""
    return {k: v + 1 for k, v in state.items()}, batch.sum()


def state(arrays: int) -> dict[str, Any]:
    """A state of so many small arrays."""
    return {f"w{i}": jnp.ones((8, 8)) for i in range(arrays)}


def bare(planned: Any, *args: Any) -> Any:
    """The program that ``planned`` runs for these arguments, under `jax.jit` alone."""
    executable, plan = planned.executable(*args), planned.plan(*args)
    return jax.jit(
        lambda *given: executable.eval_jaxpr(jax.tree.leaves(given)),
        in_shardings=plan.in_shardings,
        out_shardings=plan.out_shardings,
    )


def case(name: str, mesh: dict[str, int], arrays: int, batches: list[tuple[int, bool]]) -> Case:
    """Calls with batches of these sizes in turn, each on the host or placed as planned."""
    planned = autoshard.jit(step, mesh=mesh, strategy="dp")
    mine, theirs = Case(name, [], []), {n: bare(planned, state(arrays), jnp.ones((n, 4))) for n, _ in batches}
    for n, host in batches:
        batch = np.ones((n, 4), np.float32)
        placed = planned.plan(state(arrays), batch).put(state(arrays), batch)
        args = (placed[0], batch if host else placed[1])
        mine.planned.append((planned, args))
        mine.bare.append((theirs[n], args))
    return mine


def host_first(name: str, mesh: dict[str, int], arrays: int) -> Case:
    """The first call comes with a batch from the host, all later ones with placed ones."""
    found = case(name, mesh, arrays, [(8, True), (8, False)])
    for calls in (found.bare, found.planned):
        f, args = calls.pop(0)
        f(*args)
    return found


class Net(nnx.Module):
    """A few small layers."""

    def __init__(self, layers: int) -> None:
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def modules(name: str, mesh: dict[str, int], layers: int) -> Case:
    """A train step that changes its model and optimizer in place."""

    def train(model: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    planned, theirs, both = autoshard.jit(train, mesh=mesh, strategy="dp"), nnx.jit(train), Case(name, [], [])
    for f, calls in ((theirs, both.bare), (planned, both.planned)):
        model = Net(layers)
        optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
        x = planned.plan(model, optimizer, jnp.ones((8, 8))).put(
            nnx.state(model), nnx.state(optimizer), jnp.ones((8, 8))
        )
        planned(model, optimizer, x[2])  # places what the modules hold
        calls.append((f, (model, optimizer, x[2])))
    return both


def cases(mesh: dict[str, int]) -> list[Case]:
    """Every way of calling that is measured."""
    return [
        *(case(f"{n} arrays", mesh, n, [(8, False)]) for n in (4, 40, 200)),
        *(case(f"{n} arrays, two shapes in turn", mesh, n, [(8, False), (16, False)]) for n in (4, 40, 200)),
        host_first("40 arrays, batch from the host at first", mesh, 40),
        case("40 arrays, batch now from the host, now placed", mesh, 40, [(8, True), (8, False)]),
        modules("NNX: 6 layers with AdamW, against nnx.jit", mesh, 6),
    ]


def measure(one: Case, rounds: int) -> tuple[float, float]:
    """Median seconds of a bare call, and of what a planned one takes beyond it."""
    for calls in (one.bare, one.planned):
        for f, args in calls * 3:
            jax.block_until_ready(f(*args))
    took: dict[str, list[float]] = {"bare": [], "planned": []}
    pairs = list(zip(one.bare, one.planned, strict=True))
    for i in range(rounds):
        b, p = pairs[i % len(pairs)]
        turn = (("bare", b), ("planned", p))
        for who, (f, args) in turn if (i // len(pairs)) % 2 else turn[::-1]:
            start = time.perf_counter()
            out = f(*args)
            took[who].append(time.perf_counter() - start)
            jax.block_until_ready(out)
    return (
        statistics.median(took["bare"]),
        statistics.median(p - b for b, p in zip(took["bare"], took["planned"], strict=True)),
    )


def main() -> None:
    """Prints a row for each way of calling, on one device and on all."""
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", 8)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    for mesh in ({"data": 1}, {"data": jax.device_count()}):
        print(f"{mesh['data']} device(s) of kind {jax.devices()[0].device_kind}, {rounds} rounds")
        print(f"  {'':48} {'bare (us)':>10} {'more (us)':>10} {'more (%)':>9}  allowed")
        for one in cases(mesh):
            bare, more = measure(one, rounds)
            kept = "yes" if more <= max(ALLOWED_SECONDS, ALLOWED_SHARE * bare) else "NO"
            print(f"  {one.name:48} {bare * 1e6:10.1f} {more * 1e6:10.1f} {more / bare * 100:9.1f}  {kept}")


if __name__ == "__main__":
    main()
