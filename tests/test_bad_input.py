"""Bad input gets one error, of the right class, that names what is wrong, the sizes and what to do; and loses nothing.

After each error the same step, with the same donated state, still works.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import (
    ArgumentError,
    AutoshardError,
    ConfigError,
    MemoryBudgetError,
    MeshError,
    PassError,
    PlanError,
    RuleError,
    SpecError,
)
from autoshard.machine.mesh_config import MeshConfig

MESH = {"data": 4, "model": 2}


def update(state: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        return ((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state["params"])
    return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, value


def state() -> Any:
    return {"params": {"w": jnp.ones((16, 32)), "v": jnp.ones((32, 8))}}


def batch(size: int = 16, width: int = 16) -> Any:
    return {"x": np.ones((size, width), np.float32), "y": np.ones((size, 8), np.float32)}


def says(error: type[AutoshardError], call: Callable[[], Any], *parts: str) -> str:
    """``call`` raises ``error`` itself, with every one of ``parts`` in one message of one paragraph."""
    with pytest.raises(AutoshardError) as caught:
        call()
    assert type(caught.value) is error, f"{type(caught.value).__name__}: {caught.value}"
    message = str(caught.value)
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"
    assert "\n\n" not in message
    return message


def refuses(error: type[AutoshardError], args: tuple[Any, ...], *parts: str, **options: Any) -> None:
    """A step with ``options`` refuses ``args``, before and after it has run, and donated state outlives that."""
    step = autoshard.jit(update, mesh=MESH, donate_argnums=0, **options)
    says(error, lambda: step(*args), *parts)
    says(error, lambda: step.plan(*args), *parts)
    kept, _ = step(state(), batch())
    says(error, lambda: step(kept, *args[1:]), *parts)
    kept, value = step(kept, batch())
    want = update(update(state(), batch())[0], batch())
    np.testing.assert_allclose(value, want[1], rtol=1e-5)
    np.testing.assert_allclose(kept["params"]["w"], want[0]["params"]["w"], rtol=1e-5)


def never_runs(error: type[AutoshardError], *parts: str, mesh: Any = None, fun: Any = update, **options: Any) -> None:
    """A step with ``options`` cannot run at all; the donated state outlives the attempt."""
    given = state()

    def attempt() -> Any:
        return autoshard.jit(fun, mesh=mesh or MESH, donate_argnums=0, **options)(given, batch())

    says(error, attempt, *parts)
    assert not any(x.is_deleted() for x in jax.tree.leaves(given))


# --- arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "parts"), [("dp", 8), ("zero2", 8), ("fsdp", 8), ("fsdp_tp", 4)])
def test_a_batch_that_does_not_divide(strategy: str, parts: int):
    refuses(SpecError, (state(), batch(17)), strategy, "batch['x']", "17", f"{parts} parts", "pad", strategy=strategy)


def test_auto_takes_any_batch():
    step = autoshard.jit(update, mesh=MESH)
    np.testing.assert_allclose(step(state(), batch(17))[1], update(state(), batch(17))[1], rtol=1e-5)


def test_a_batch_that_does_not_divide_under_a_pin():
    refuses(
        SpecError,
        (state(), batch(18)),
        "batch['x']",
        "dimension 0",
        "18",
        "8 parts",
        "pad it to 24",
        in_shardings=(None, P(("data", "model"))),
    )


@pytest.mark.parametrize("wrong", ["text", object(), np.array(["text"])], ids=["string", "object", "array"])
def test_an_argument_that_is_not_an_array(wrong: Any):
    refuses(
        ArgumentError, (state(), {**batch(), "name": wrong}), "batch['name']", type(wrong).__name__, "static_argnames"
    )


def test_a_reference_is_not_an_array():
    step = autoshard.jit(lambda r: r[...] + 1, mesh=MESH)
    says(ArgumentError, lambda: step(jax.new_ref(jnp.ones(8))), "r is a Ref")


def test_a_static_argument_that_is_not_hashable():
    step = autoshard.jit(lambda x, sizes: x * sizes[0], mesh=MESH, static_argnames="sizes")
    says(ArgumentError, lambda: step(jnp.ones(8), [2]), "sizes", "list", "tuple")
    says(ArgumentError, lambda: step(jnp.ones(8), sizes=[2]), "sizes", "list", "tuple")
    np.testing.assert_array_equal(step(jnp.ones(8), (2,)), np.full(8, 2))


def test_a_static_name_that_is_not_an_argument():
    says(ArgumentError, lambda: autoshard.jit(update, static_argnames="bach"), "bach", "did you mean 'batch'?")
    says(ArgumentError, lambda: autoshard.jit(update, donate_argnames="stat"), "stat", "did you mean 'state'?")


def test_wrong_shapes_are_the_functions_own_error():
    step = autoshard.jit(update, mesh=MESH, donate_argnums=0)
    kept, _ = step(state(), batch())
    with pytest.raises(TypeError, match="dot_general"):
        step(kept, batch(width=15))
    step(kept, batch())


# --- shardings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        (P("modle"), ["'modle'", "did you mean 'model'?", "batch['x']"]),
        (P("data", None, "model"), ["2 dimensions", "(16, 16)", "3 entries", "batch['x']"]),
        (P("data", "data"), ["'data'", "dimensions 0 and 1", "batch['x']"]),
        (P(("data", "data")), ["'data'", "batch['x']"]),
        (P(3), ["3", "axis"]),
    ],
    ids=["axis", "rank", "twice", "twice on one", "entry"],
)
def test_impossible_pins(spec: P, parts: list[str]):
    never_runs(SpecError, *parts, in_shardings=(None, {"x": spec, "y": None}))


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        (P("modle"), ["'modle'", "did you mean 'model'?"]),
        (P("data", None, "model"), ["3 entries"]),
        (P("data", "data"), ["'data'", "0 and 1"]),
    ],
    ids=["axis", "rank", "twice"],
)
def test_impossible_pins_of_results_and_inside(spec: P, parts: list[str]):
    never_runs(SpecError, *parts, "result[0]['params']['w']", out_shardings=({"params": {"w": spec, "v": None}}, None))

    def annotated(state: Any, batch: Any) -> Any:
        return update(state, {**batch, "x": autoshard.annotate(batch["x"], spec)})

    never_runs(SpecError, *parts, *([__file__] if spec != P("data", None, "model") else []), fun=annotated)


def test_shardings_of_another_structure():
    never_runs(ArgumentError, "in_shardings[1] has ['z']", "['x'], ['y']", in_shardings=(None, {"z": P("data")}))
    never_runs(ArgumentError, "in_shardings has [0], [1], [2]", "[0], [1]", in_shardings=(None, None, None))
    never_runs(ArgumentError, "out_shardings has [0], [1], [2]", out_shardings=(None, None, P()))
    never_runs(ArgumentError, "in_shardings[0]['params'] is a list", "dict", in_shardings=({"params": [P()]}, None))
    never_runs(ArgumentError, "in_shardings", "'data'", "PartitionSpec", in_shardings=(None, {"x": "data", "y": None}))


def test_a_sharding_over_another_mesh():
    other = NamedSharding(jax.make_mesh((8,), ("data",)), P("data"))
    never_runs(SpecError, "batch['x']", "{'data': 8}", "{'data': 4, 'model': 2}", in_shardings=(None, other))


# --- meshes and configurations -----------------------------------------------------------------------------------


def test_a_mesh_larger_than_the_machine():
    step = autoshard.jit(update, mesh={"data": 8, "model": 4}, donate_argnums=0)
    given = state()
    assert step.plan(given, batch(32)).mesh.size == 32  # planning needs no devices
    for _ in range(2):
        says(
            MeshError,
            lambda: step(given, batch(32)),
            "data=8, model=4",
            "32 devices",
            "has 8",
            "JAX_NUM_CPU_DEVICES=32",
        )
    assert not any(x.is_deleted() for x in jax.tree.leaves(given))
    says(MeshError, lambda: autoshard.jit(update, mesh=AbstractMesh((32,), ("data",)))(given, batch(32)), "32", "8")


@pytest.mark.parametrize(
    ("mesh", "parts"),
    [
        ({"data": -1, "model": -1}, ["'data'", "'model'", "-1"]),
        ({"data": 0}, ["'data'", "0"]),
        ({"data": -1, "model": 3}, ["model=3", "8"]),
        (8, ["int"]),
    ],
    ids=["two open", "zero", "odd", "number"],
)
def test_impossible_meshes(mesh: Any, parts: list[str]):
    given = state()
    says(MeshError, lambda: autoshard.jit(update, mesh=mesh)(given, batch()), *parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("axes: {data: 4, model: 2}\nhardwear: cpu\n", ["hardwear", "did you mean 'hardware'?"]),
        ("axes: {data: 4, model: 2}\ndevices: 6\n", ["8", "6"]),
        ('axes: {data: 4, model: 2}\npins: {"batch*": [modle]}\n', ["modle", "did you mean 'model'?"]),
        ("axes: {data: four}\n", ["data"]),
        ("axes: [data\n", [":2:"]),
    ],
    ids=["key", "devices", "pin", "size", "syntax"],
)
def test_a_config_with_a_mistake(text: str, parts: list[str], tmp_path: pathlib.Path):
    path = tmp_path / "mesh.yaml"
    path.write_text(text)
    says(ConfigError, lambda: autoshard.jit(update, mesh=path), "mesh.yaml", *parts)


def test_a_missing_config():
    says(ConfigError, lambda: autoshard.jit(update, mesh="cpu-9"), "cpu-9", "did you mean 'cpu-8'?")
    says(ConfigError, lambda: autoshard.jit(update, mesh="no/such.yaml"), "no/such.yaml")


def test_a_configs_pin_that_matches_nothing():
    mesh = MeshConfig(axes=MESH, pins={"batch['z']": ("data",)})
    never_runs(ConfigError, "batch['z']", "did you mean", mesh=mesh)


# --- options -----------------------------------------------------------------------------------------------------


def test_unknown_names_of_strategies_passes_and_primitives():
    says(ArgumentError, lambda: autoshard.jit(update, strategy="fdsp"), "'fdsp'", "did you mean 'fsdp'?")
    says(ArgumentError, lambda: autoshard.jit(update, strategy=3), "strategy 3", "'fsdp'")
    says(PassError, lambda: autoshard.jit(update, passes=["dead_cod"]), "dead_cod", "did you mean 'dead_code'?")
    says(ArgumentError, lambda: autoshard.jit(update, memory_budget="4 bananas"), "memory_budget", "bananas")


@pytest.mark.parametrize("budget", [1, "1KiB"])
def test_a_memory_budget_too_small(budget: Any):
    never_runs(MemoryBudgetError, "layouts", "the smallest needs", "raise memory_budget", memory_budget=budget)


def test_strict_refuses_an_operation_without_a_rule():
    def calls_back(state: Any, batch: Any) -> Any:
        jax.debug.callback(lambda v: None, batch["x"])
        return update(state, batch)

    never_runs(RuleError, "debug_callback", __file__, "strict", fun=calls_back, strict=True)


# --- plans -------------------------------------------------------------------------------------------------------


def test_a_plan_for_something_else(tmp_path: pathlib.Path):
    plan = autoshard.jit(update, mesh=MESH, donate_argnums=0).plan(state(), batch())
    plan.save(tmp_path / "plan.json")
    plan = autoshard.Plan.load(tmp_path / "plan.json")
    step = autoshard.jit(update, strategy=plan, donate_argnums=0)
    given = state()
    says(PlanError, lambda: step(given, batch(32)), "batch['x']", "[16, 16]", "[32, 16]", "plan again")
    kept, _ = step(given, batch())
    says(PlanError, lambda: step(kept, batch(32)), "batch['x']")
    step(kept, batch())

    def other(state: Any, batch: Any) -> Any:
        return update(state, {**batch, "x": batch["x"] * 2})

    says(PlanError, lambda: autoshard.jit(other, strategy=plan, donate_argnums=0)(state(), batch()), "another program")
    says(
        PlanError,
        lambda: autoshard.jit(update, mesh={"data": 8}, strategy=plan, donate_argnums=0)(state(), batch()),
        "data=4",
        "data=8",
    )


def test_init_and_put_of_something_else():
    plan = autoshard.jit(update, mesh=MESH).plan(state(), batch())
    says(
        ArgumentError,
        lambda: plan.init(lambda: {"params": {"v": jnp.ones((32, 8)), "w": jnp.ones((16, 31))}}),
        "['params']['w']",
        "[16, 32]",
        "[16, 31]",
    )
    says(ArgumentError, lambda: plan.put(state(), batch(8)), "batch['x']", "[8, 16]", "[16, 16]")
    says(ArgumentError, lambda: plan.put({"params": {}}), "structure")


def test_an_error_at_the_top_of_a_program_ends_with_its_message(tmp_path: pathlib.Path):
    program = tmp_path / "program.py"
    program.write_text(
        "import autoshard, jax.numpy as jnp\n"
        "autoshard.jit(lambda x: x, mesh={'data': 8}, in_shardings=jax.P('dat')"
        ")(jnp.ones(8))\n".replace("jax.P", "__import__('jax').P")
    )
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 1
    assert re.search(r"SpecError: x: spec P\('dat',\) names mesh axis 'dat'.*did you mean 'data'\?", done.stderr)
    assert "During handling of the above" not in done.stderr
