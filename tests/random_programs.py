"""Random programs: a graph of operations over random shapes, a mesh, pins and a strategy, all drawn from one seed.

A `Recipe` prints as the Python that builds it, so that what fails can be kept as a fixed case. A program of n
operations is the beginning of the one of n + 1.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tests.random_draws import SIZES, Shape, annotated, spec
from tests.random_ops import OPS

LARGEST = 2048
"""Most elements of a value."""
MESHES = ((2,), (3,), (4,), (8,), (2, 2), (2, 3), (2, 4), (4, 2), (1, 4), (2, 1), (2, 2, 2), (2, 1, 3), (1, 2, 4))
STRATEGIES = ("auto", "replicated", "replicated", "replicated", "dp", "fsdp", "tp")


@dataclass(frozen=True)
class Call:
    """One operation: its name in `OPS`, the numbers of its operands, and what else was drawn."""

    op: str
    operands: tuple[int, ...]
    params: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """A program with its surroundings. Every value that nothing reads is a result."""

    inputs: tuple[tuple[Shape, str], ...]
    """Shape and kind, ``"f"`` or ``"i"``."""
    calls: tuple[Call, ...]
    mesh: tuple[int, ...]
    """Sizes of the axes a, b, c."""
    strategy: str = "replicated"
    in_pins: tuple[P | None, ...] | None = None
    out_pins: tuple[P | None, ...] | None = None

    @property
    def axes(self) -> dict[str, int]:
        return dict(zip("abc", self.mesh, strict=False))

    @property
    def results(self) -> tuple[int, ...]:
        read = {v for c in self.calls for v in c.operands}
        return tuple(v for v in range(len(self.inputs), len(self.inputs) + len(self.calls)) if v not in read)

    def __call__(self, *xs: Any) -> tuple[Any, ...]:
        values = list(xs)
        for c in self.calls:
            values.append(OPS[c.op].apply(c.params, *(values[v] for v in c.operands)))
        return tuple(values[v] for v in self.results)

    def arguments(self) -> list[np.ndarray]:
        rng = np.random.default_rng(len(self.calls))
        return [rng.normal(size=s) if kind == "f" else rng.integers(-4, 9, s, np.int32) for s, kind in self.inputs]


def draw(seed: int, size: int) -> Recipe:
    """The recipe of ``size`` operations that ``seed`` stands for."""
    rng = Random(seed)
    inputs = [(shape(rng), "f") for _ in range(rng.randint(1, 4))] + [(shape(rng, most=2), "i")] * rng.randint(0, 1)
    mesh, strategy = rng.choice(MESHES), rng.choice(STRATEGIES)
    axes = dict(zip("abc", mesh, strict=False))
    pins = tuple(spec(rng, s, axes) if rng.random() < 0.5 else None for s, _ in inputs)
    values = [jax.ShapeDtypeStruct(s, jnp.float64 if kind == "f" else jnp.int32) for s, kind in inputs]
    calls: list[Call] = []
    while len(calls) < size:
        op = rng.choice(list(OPS))
        picked = OPS[op].pick(rng, values) if op != "annotate" else annotated(rng, values, axes)
        if picked is None:
            continue
        call = Call(op, *picked)
        made = jax.eval_shape(functools.partial(OPS[op].apply, call.params), *(values[v] for v in call.operands))
        if made.size <= LARGEST:
            calls.append(call)
            values.append(made)
    recipe = Recipe(tuple(inputs), tuple(calls), mesh, strategy, pins)
    late = Random(seed + size)
    outs = tuple(spec(late, values[v].shape, axes) if late.random() < 0.4 else None for v in recipe.results)
    return Recipe(recipe.inputs, recipe.calls, mesh, strategy, pins, outs)


def shape(rng: Random, most: int = 4) -> Shape:
    dims: list[int] = []
    for _ in range(rng.choice([0, 1, 2, 2, 2, 3, 3, 4]) if most == 4 else rng.randint(1, most)):
        dims.append(rng.choice([n for n in SIZES if math.prod(dims) * n <= LARGEST // 4]))
    return tuple(dims)
