"""A plan depends on its program, mesh and options alone: not on what was planned before in the process.

Every pair of a program and a setting is planned with all caches empty, as in a process of its own, and again in random
orders, where caches are warm from meshes with axes of the same names and other sizes, other hardware, links, dtypes and
rules.
"""

from __future__ import annotations

import ast
import json
import multiprocessing
import random
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import jax
import jax.numpy as jnp
import pytest

import autoshard
import docs.packages
from autoshard.machine.mesh import Hardware, Link, LogicalMesh
from autoshard.machine.mesh_config import MeshConfig

W, X = jax.ShapeDtypeStruct((32, 64), jnp.float32), jax.ShapeDtypeStruct((16, 32), jnp.float32)


def train(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


def chain(w, x):
    return w, jnp.tanh(x @ w) @ w.T


def loop(w, x):
    return w, jax.lax.scan(lambda h, _: (jnp.tanh(h @ w @ w.T), None), x, None, 4)[0]


def sums(w, x):
    """Operations with local forms."""
    return w, jnp.cumsum(x, 0), jnp.sort(w, 1), jnp.pad(x, ((8, 8), (0, 0)))


def doubles(w, x):
    """Of float64 where that is enabled."""
    return w, jnp.arange(16.0)[:, None] * x


PROGRAMS = [train, chain, loop, sums, doubles]


def over(**axes: int) -> dict[str, Any]:
    return {"mesh": axes}


def chips(order: tuple[str, ...], **axes: int) -> LogicalMesh:
    """A mesh of chips with two links, the first of which is the default."""
    links = {"near": Link("near", 1e11, 1e-9), "far": Link("far", 1e9, 1e-8)}
    hardware = Hardware("chip", {"float32": 1e9}, 16e9, 1e9, {name: links[name] for name in order})
    return LogicalMesh(tuple(axes), tuple(axes.values()), hardware)


WHOLE = {"tanh": "ab -> ab {a: whole}"}
SETTINGS: dict[str, dict[str, Any]] = {
    "4x2": over(data=4, model=2),
    "2x4": over(data=2, model=4),
    "renamed": over(model=4, data=2),
    "near": {"mesh": chips(("near", "far"), data=2, model=4)},
    "far": {"mesh": chips(("far", "near"), data=2, model=4)},
    "slow data": {"mesh": MeshConfig(axes={"data": 4, "model": 2}, hardware="h100", links={"data": "infiniband"})},
    "slow model": {"mesh": MeshConfig(axes={"data": 4, "model": 2}, hardware="h100", links={"model": "infiniband"})},
    "rows first": {**over(data=4, model=2), "strategy": "fsdp_tp"},
    "float64": {**over(data=2, model=4), "strategy": "fsdp_tp", "x64": True},
    "recomputed": {**over(data=2, model=4), "strategy": "tp", "passes": ["recompute:full"]},
}
CASES = [
    *((fun, name) for fun in (chain, loop) for name in SETTINGS),
    *((sums, name) for name in ("4x2", "2x4")),
    *((train, name) for name in ("slow data", "near", "far", "rows first", "recomputed")),
    *((doubles, name) for name in ("2x4", "float64")),
    *((fun, "2x4 tanh whole") for fun in (chain, loop)),
]


def plan(case: int) -> str:
    """The plan as JSON."""
    fun, name = CASES[case]
    setting, _, whole = name.partition(" tanh ")
    options: dict[str, Any] = {**SETTINGS[setting], **({"rules": WHOLE} if whole else {})}
    with jax.enable_x64(options.pop("x64", False)):
        return json.dumps(autoshard.jit(fun, donate_argnums=0, **options).plan(W, X).to_json())


def modules() -> list[ModuleType]:
    return [m for name, m in sys.modules.items() if name.partition(".")[0] == "autoshard"]


def caches() -> dict[str, Any]:
    """Every cached function of the package, by name."""
    found = {
        f"{f.__module__}.{f.__name__}": f for m in modules() for f in vars(m).values() if hasattr(f, "cache_clear")
    }
    return {name: f for name, f in found.items() if name.startswith("autoshard.")}


def containers() -> dict[str, int]:
    """The size of every mapping, list and set that belongs to a module or a class of the package."""
    owners = {f"{m.__name__}.{n}": c for m in modules() for n, c in vars(m).items() if isinstance(c, type)}
    owners = {n: c for n, c in owners.items() if c.__module__.startswith("autoshard.")}
    owners |= {m.__name__: m for m in modules()}
    sized = (dict, list, set, WeakKeyDictionary, WeakValueDictionary)
    return {f"{o}.{n}": len(x) for o, owner in owners.items() for n, x in vars(owner).items() if isinstance(x, sized)}


@pytest.fixture(scope="module")
def alone() -> list[str]:
    """Each plan with all caches empty."""
    found: list[str] = []
    for k in range(len(CASES)):
        for cache in caches().values():
            cache.cache_clear()
        found.append(plan(k))
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_plans_are_equal_in_any_order(alone: list[str], seed: int) -> None:
    order = list(range(len(CASES)))
    random.Random(seed).shuffle(order)
    assert [CASES[k] for k in order if plan(k) != alone[k]] == []


def test_a_process_of_its_own_makes_the_same_plans(alone: list[str]) -> None:
    """In forks of a process that has only imported this file: so caches are all that plans could be passed by."""
    sample = random.Random(0).sample(range(len(CASES)), 4)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with context.Pool(1, maxtasksperchild=1) as pool:
        found = pool.map(plan, sample, chunksize=1)
    assert [CASES[k] for k, made in zip(sample, found, strict=True) if made != alone[k]] == []


def outer_functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Functions and methods; not those within functions, whose caches end with the call that they serve."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node
        else:
            yield from outer_functions(node)


def test_every_cache_is_emptied_above() -> None:
    """What is cached is cached in functions at the top of a module, and nothing else grows by planning."""
    written = [
        f"{name}.{f.name}"
        for name, text in docs.packages.modules().items()
        for f in outer_functions(ast.parse(text))
        if any(re.match(r"functools\.(lru_)?cache\b", ast.unparse(d)) for d in f.decorator_list)
    ]
    assert sorted(f"autoshard.{name}" for name in written) == sorted(caches())
    plan(0)
    before = containers()
    for k in range(1, len(CASES), 4):
        plan(k)
    assert containers() == before
