"""Where memory is short: what the planner adds so that a step fits."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autoshard
from autoshard import api
from autoshard.cost.compiler_options import user_options
from autoshard.errors import ArgumentError, MemoryBudgetError, SpecError
from autoshard.ir.program import Program
from autoshard.machine.mesh import Hardware, Link, LogicalMesh
from autoshard.machine.tpu_slice import TpuSlice
from autoshard.passes.recompute import Recompute
from autoshard.plan.decisions import Alternative
from autoshard.plan.planner import PlanRequest, budget_of
from autoshard.runtime import stages
from autoshard.runtime.fit_memory import in_parts, on_host, within_budget
from autoshard.runtime.fit_memory.time_bounds import TimeBounds
from autoshard.runtime.stages import Planned
from autoshard.train.models.decoder import ModelConfig, make_steps
from autoshard.train.optimizer import OptimizerConfig
from autoshard.transforms.pipeline import Pass

HARDWARE = Hardware("chip", {"float32": 1e12}, 8e9, 1e12, {"link": Link("link", 1e11, 1e-7)}, 1e-8)
MESH = LogicalMesh(("data",), (8,), HARDWARE)
BATCH, WIDTH, LAYERS = 8192, 64, 8


def train(state: Any, x: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.sin(jnp.tanh(h @ w)) + h, None

        return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)

    return state - 0.1 * jax.grad(loss)(state)


ARGUMENTS = (
    jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32),
    jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32),
)


def plan(**options: Any) -> Any:
    return autoshard.jit(train, mesh=MESH, donate_argnums=0, **options).plan(*ARGUMENTS)


def test_micro_batches_take_less_memory():
    whole, half, quarter = (plan(microbatches=n).memory.peak for n in (1, 2, 4))
    assert half < 0.6 * whole
    assert quarter < 0.6 * half


def test_what_fits_only_in_micro_batches_is_planned_so_without_being_asked():
    least = plan(passes=["recompute:full"]).memory.peak
    budget = int(0.5 * least)
    with pytest.raises(MemoryBudgetError):
        plan(microbatches=1, memory_budget=budget)
    found = plan(memory_budget=budget)
    assert found.passes[0].name == "microbatch"
    assert found.memory.peak <= budget
    (note,) = [str(d) for d in found.diagnostics if "microbatch" in str(d)]
    assert "was added: without it, none of" in note
    again = autoshard.jit(train, mesh=MESH, donate_argnums=0, strategy=found).plan(*ARGUMENTS)
    assert again.passes == found.passes
    assert again.in_specs == found.in_specs


def test_micro_batches_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds say how many it takes, so that fewer are not searched; what was planned to find out is not again."""
    real, planned = stages.plan_program, list[tuple[str, ...]]()

    def plan_program(traced: Program, passes: tuple[Pass, ...], request: PlanRequest, *args: Any, **rest: Any) -> Any:
        found = real(traced, passes, request, *args, **rest)
        planned.append((*(p.written for p in request.passes), *map(str, passes)))
        return found

    for module in (within_budget, in_parts):
        monkeypatch.setattr(module, "plan_program", plan_program)
    found = plan(memory_budget=int(0.2 * plan(passes=["recompute:full"]).memory.peak))
    assert len(planned) == len({*planned})
    most = [p[0] for p in planned if p[0].startswith("microbatch") and "recompute:full" in p]
    assert found.passes[0].written == most[-1]
    assert len({*most}) <= 2


WIDE, DEEP = 256, 6


def wide_step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    def loss(params: Any) -> jax.Array:
        def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
            return h + jnp.tanh(jnp.sin(h @ p["up"]) @ p["mid"]) @ p["down"], None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def wide_shapes(batch: int) -> tuple[Any, jax.ShapeDtypeStruct]:
    sizes = {"up": (WIDE, 2 * WIDE), "mid": (2 * WIDE, WIDE), "down": (WIDE, WIDE)}
    state = {name: jax.ShapeDtypeStruct((DEEP, *shape), jnp.float32) for name, shape in sizes.items()}
    return state, jax.ShapeDtypeStruct((batch, WIDE), jnp.float32)


def wide(**options: Any) -> Any:
    options = {"microbatches": 1, **options}
    return autoshard.jit(wide_step, mesh=MESH, donate_argnums=0, **options).plan(*wide_shapes(65536))


def test_memory_that_is_left_holds_values_of_some_layers() -> None:
    """Never slower than what saves a number of products; nothing is recomputed that need not be."""
    most, least = (wide(passes=["dead_code", f"recompute:{p}"]).memory.peak for p in ("*=0", "full"))
    before = 0.0
    for share in (0.7, 0.1):
        budget = int(least + share * (most - least))
        found = wide(memory_budget=budget)
        products = [wide(passes=["dead_code", f"recompute:products:{n}"]) for n in range(4)]
        fitting = [p.cost.seconds for p in products if p.memory.peak <= budget]
        assert found.memory.peak <= budget
        assert found.cost.seconds <= min(fitting)
        assert before <= found.cost.seconds
        before = found.cost.seconds
        (partly,) = [r for r in found.residuals if 0 < r.again < r.layers]
        assert partly.held + partly.again == DEEP
        assert f"{partly.name}={partly.again}" in str([p.written for p in found.passes])
        assert "made again in" in found.explain()
    again = autoshard.jit(wide_step, mesh=MESH, donate_argnums=0, strategy=found)
    assert again.plan(*wide_shapes(65536)).passes == found.passes


def test_what_cannot_fit_is_searched_for_only_to_name_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    real, gave_up = within_budget.plan_program, list[bool]()

    def plan_program(*args: Any, gives_up: bool) -> Planned:
        gave_up.append(gives_up)
        return real(*args, gives_up=gives_up)

    monkeypatch.setattr(within_budget, "plan_program", plan_program)
    least = wide(passes=["dead_code", "recompute:full"]).memory.peak
    gave_up.clear()
    with pytest.raises(
        MemoryBudgetError, match=r"none of \d+ layouts .*: the smallest needs .*with recompute:full"
    ) as e:
        wide(memory_budget=1_000_000)
    assert [gave_up[0], all(gave_up[1:-1]), gave_up[-1]] == [False, True, False]
    assert e.value.least <= least


def test_plans_are_those_of_searches_that_never_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    most, least = (wide(passes=["dead_code", f"recompute:{p}"]).memory.peak for p in ("*=0", "full"))
    budgets = [int(least + share * (most - least)) for share in (-0.5, -0.1, 0.0, 0.1, 0.4, 0.7, 1.0)]

    def found() -> list[tuple[Any, ...] | str]:
        plans = list[Any]()
        for budget, microbatches in [*itertools.product(budgets, (1,)), (budgets[0], None), (budgets[3], None)]:
            try:
                p = wide(memory_budget=budget, microbatches=microbatches)
                plans.append((p.cost.seconds, p.memory.peak, p.in_specs, [q.written for q in p.passes]))
            except MemoryBudgetError as e:
                plans.append(str(e))
        return plans

    ended, real = list[bool](), within_budget.plan_program

    def plan_program(
        traced: Program, passes: Any, request: PlanRequest, to_beat: float = math.inf, *, gives_up: bool
    ) -> Planned:
        ended.append(gives_up or math.isfinite(to_beat))
        return real(traced, passes, request)

    quick = found()
    for module in (within_budget, in_parts, on_host):
        monkeypatch.setattr(module, "plan_program", plan_program)
    assert found() == quick
    assert any(ended)


def test_on_tpus_layers_that_differ_leave_a_tenth_of_the_memory() -> None:
    most, least = (wide(passes=["dead_code", f"recompute:{p}"]).memory.peak for p in ("*=0", "full"))
    chip = replace(HARDWARE, memory=least + 0.7 * (most - least))

    def planned(target: TpuSlice | None) -> Any:
        mesh = LogicalMesh(("data",), (8,), chip, target=target)
        return autoshard.jit(wide_step, mesh=mesh, donate_argnums=0, microbatches=1).plan(*wide_shapes(65536))

    here, there = planned(None), planned(TpuSlice("v5e:2x4"))
    for found in (here, there):
        assert any(0 < r.again < r.layers for r in found.residuals)
        assert found.memory_budget == chip.memory
    assert there.memory.peak <= 0.9 * chip.memory < here.memory.peak <= chip.memory
    assert here.cost.seconds < there.cost.seconds


def test_on_tpus_values_wait_in_the_host_s_memory_where_that_hides_behind_the_layers() -> None:
    """Unasked; not over a slow link, nor where no compiler is known to hide it, nor where everything fits, nor where
    the host has too little."""
    most, least = (wide(passes=["dead_code", f"recompute:{p}"]).memory.peak for p in ("*=0", "full"))
    chip = replace(HARDWARE, memory=least + 0.6 * (most - least))

    def planned(
        target: TpuSlice | None,
        bandwidth: float,
        memory: float = chip.memory,
        host: float = 1e12,
        hidden: bool = True,
    ) -> Any:
        hardware = replace(chip, memory=memory, host_bandwidth=bandwidth, host_memory=host, hidden_host_copies=hidden)
        mesh = LogicalMesh(("data",), (8,), hardware, target=target)
        return autoshard.jit(wide_step, mesh=mesh, donate_argnums=0, microbatches=1).plan(*wide_shapes(65536))

    found, without = planned(TpuSlice("v5e:2x4"), 1e10), planned(TpuSlice("v5e:2x4"), 0.0)
    sent = {r.name: r.on_host for r in found.residuals if r.on_host}
    assert sent
    assert found.memory.host == sum(r.on_host * r.bytes for r in found.residuals)
    assert found.memory.peak <= 0.9 * chip.memory
    assert found.cost.seconds < 0.97 * without.cost.seconds
    assert 0 < found.cost.host < 0.2 * 2 * found.memory.host / 1e10, "of the way there and back"
    (written,) = (p.written for p in found.passes if p.name == "recompute")
    assert all(f"{name}=host" in written for name, n in sent.items() if n == DEEP)
    share = 100 * found.memory.host / chip.memory
    limit = dict(found.compiler_options)["xla_tpu_scheduler_percent_shared_memory_limit"]
    assert share <= limit - 115 < share + 10
    assert not user_options(found.compiler_options, found.mesh)
    assert "on the host" in found.explain()
    for other in (
        planned(TpuSlice("v5e:2x4"), 1e8),
        planned(None, 1e10),
        planned(TpuSlice("v5e:2x4"), 1e10, hidden=False),
        planned(TpuSlice("v5e:2x4"), 1e10, 2 * most),
        planned(TpuSlice("v5e:2x4"), 1e10, host=min(r.on_host * r.bytes for r in found.residuals if r.on_host)),
        without,
    ):
        assert not any(r.on_host for r in other.residuals)
        assert not other.memory.host


def test_what_a_loss_in_chunks_saves_holds_what_takes_longer_to_make_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the layers recomputed as without chunks, the step would take longer with them."""
    model = ModelConfig(layers=12, d_model=2048, heads=16, d_ff=5632, vocab=32768, seq=2048, dtype="bfloat16")
    steps = make_steps(model, OptimizerConfig(), 1000)
    tokens = jax.ShapeDtypeStruct((256, 2048), jnp.int32)
    args = jax.eval_shape(steps.init, jax.random.key(0)), {"inputs": tokens, "targets": tokens}
    mesh = autoshard.MeshConfig(axes={"data": 4, "model": 4}, tpu="v5e:4x4")

    def planned(**options: Any) -> Any:
        step = autoshard.jit(steps.train, mesh=mesh, donate_argnums=0, memory_budget="14.9GiB", **options)
        return step.plan(*args)

    found = planned(microbatches=1)
    ran = [p.written for p in found.passes]
    monkeypatch.setattr(api, "OPTIONAL_PASSES", tuple(p for p in api.OPTIONAL_PASSES if p != "losses"))
    without = planned(microbatches=1)
    assert any(p.startswith("losses") for p in ran)
    assert found.cost.seconds < 0.99 * without.cost.seconds
    usual = [p.written for p in without.passes]
    assert planned(passes=[ran[0], *usual]).cost.seconds > without.cost.seconds


def test_layers_that_differ_give_the_numbers_of_the_plain_step() -> None:
    options: dict[str, Any] = {"mesh": {"data": 4, "model": 2}, "donate_argnums": 0, "strategy": "fsdp_tp"}
    step = autoshard.jit(wide_step, recompute={"up": "2+host:3", "mid": 4, "down": "all"}, **options)
    keys = jax.random.split(jax.random.key(0), 4)
    state, x = wide_shapes(64)
    state = {n: jax.random.normal(k, s.shape) / 16 for (n, s), k in zip(state.items(), keys, strict=False)}
    batch = jax.random.normal(keys[3], x.shape)
    plain = jax.jit(wide_step)(state, batch)
    plan = step.plan(state, batch)
    became = {r.name: (r.held, r.on_host, r.again) for r in plan.residuals}
    assert became == {"up": (1, 3, 2), "mid": (2, 0, 4), "down": (0, 0, 0)}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), plain, step(state, batch))
    with pytest.raises(ArgumentError, match="recompute= and passes="):
        autoshard.jit(wide_step, recompute={"up": 2}, passes=["dead_code"])


def test_what_saves_less_is_tried_in_other_layouts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout that is slower, as memory rules out the fastest, may have room for what more than the least would save
    leaves: so from the fastest that fits, it goes on while it gets faster."""
    seconds = {"full": 9.0, "products:1": 8.0, "products:2": 6.0}
    real, tried = within_budget.plan_program, list[str]()

    def plan_program(traced: Program, passes: tuple[Pass, ...], request: PlanRequest, *_: Any, **__: Any) -> Planned:
        tried.append(next((str(p).partition(":")[2] for p in passes if str(p).startswith("recompute")), ""))
        if tried[-1] not in seconds:
            raise MemoryBudgetError("too large", 10e9)
        found = real(traced, (), replace(request, memory_budget=math.inf))
        cost = replace(found.plan.cost, seconds=seconds[tried[-1]])
        larger = Alternative("another layout", cost.seconds / 2, 10_000_000_000)
        return found._replace(plan=replace(found.plan, cost=cost, alternatives=(larger,), memory_budget=9e9))

    monkeypatch.setattr(within_budget, "plan_program", plan_program)
    found = wide(memory_budget=9_000_000_000)
    assert found.cost.seconds == 6.0
    assert tried == ["", "products:1", "full", "products:2"]


def test_a_layout_that_leaves_no_memory_for_values_is_planned_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds values of some layers may fill less of a TPU than what holds none: of a plan that fills more nothing
    can be held, and it is planned again to leave some."""
    mesh = autoshard.MeshConfig(axes={"a": 8}, tpu="v5e:2x4")
    memory = mesh.mesh().hardware.memory
    filled, left, real, asked = int(0.95 * memory), int(0.8 * memory), within_budget.plan_program, list[int]()

    def plan_program(traced: Program, passes: tuple[Pass, ...], request: PlanRequest, *_: Any, **__: Any) -> Planned:
        if not any(p.decides_held for p in passes):
            raise MemoryBudgetError("too large", 2.0 * memory)
        found = real(traced, (), replace(request, memory_budget=math.inf))
        peak = filled if budget_of(request, traced) >= filled else left
        return found._replace(plan=replace(found.plan, memory=replace(found.plan.memory, peak=peak), alternatives=()))

    def held_by_value(*args: Any) -> tuple[None, float]:
        asked.append(args[2].memory.peak)
        return None, math.inf

    monkeypatch.setattr(within_budget, "plan_program", plan_program)
    monkeypatch.setattr(within_budget, "held_by_value", held_by_value)
    step = autoshard.jit(wide_step, mesh=mesh, donate_argnums=0, microbatches=1, memory_budget=int(0.97 * memory))
    assert step.plan(*wide_shapes(65536)).memory.peak == filled
    assert asked == [filled, left]


def test_the_fastest_layout_bounds_what_saves_more() -> None:
    options = ("products:3", "products:2", "products:1", "full")
    bounds, sequences = TimeBounds(), [(), *((Recompute.from_option(o),) for o in options)]
    none, _, some, _, _ = sequences
    assert (bounds.seconds(none), bounds.estimate(sequences, 0)) == (0.0, 0.0)
    bounds.learn(none, MemoryBudgetError("too large", 10e9, 3.0))
    bounds.learn(some, MemoryBudgetError("too large", 10e9, 5.0))
    assert (bounds.seconds(some), bounds.seconds(sequences[3])) == (5.0, 0.0)
    assert [bounds.estimate(sequences, n) for n in range(5)] == [3.0, 3.0, 5.0, 0.0, 0.0]
    found = plan(memory_budget=10**9)
    larger = Alternative("another layout", found.cost.seconds / 2, 10**10)
    bounds.learn(none, replace(found, alternatives=(larger,)))
    assert bounds.seconds(none) == found.cost.seconds / 2
    bounds.learn(none, replace(found, alternatives=()))
    assert bounds.seconds(none) == found.cost.seconds / 2, "what was found with another budget stays true"


def test_what_is_too_large_says_how_fast_it_would_be() -> None:
    free = plan(passes=[], microbatches=1)
    with pytest.raises(MemoryBudgetError) as e:
        plan(passes=[], microbatches=1, memory_budget=free.memory.peak // 100)
    assert e.value.fastest == free.cost.seconds
    assert e.value.least > free.memory.peak // 100


def slow(bandwidth: float, **more: Any) -> LogicalMesh:
    """Over a link so slow that sums over it take longer than layers."""
    return LogicalMesh(("data",), (8,), replace(HARDWARE, links={"link": Link("link", bandwidth, 1e-7)}, **more))


def layers_of(products: int) -> Any:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            y = h
            for _ in range(products):
                y = jnp.sin(y @ w)
            return h + y, None

        return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)

    return loss


def test_parts_that_do_not_fit_do_not_rule_out_more_of_them() -> None:
    """Reduced once after the loop, gradients of more micro-batches take less time than those of fewer in each part."""
    loss, mesh = layers_of(24), slow(3e7, memory=1e12)
    shapes = jax.ShapeDtypeStruct((60, WIDTH, WIDTH), jnp.float32), jax.ShapeDtypeStruct((1 << 17, WIDTH), jnp.float32)
    step = autoshard.jit(lambda w, x: w - 0.1 * jax.grad(loss)(w, x), mesh=mesh, donate_argnums=0, memory_budget=1000)
    with pytest.raises(MemoryBudgetError) as e:
        step.plan(*shapes)
    budget = int(1.02 * e.value.least)
    found = autoshard.jit(
        lambda w, x: w - 0.1 * jax.grad(loss)(w, x), mesh=mesh, donate_argnums=0, memory_budget=budget
    )
    passes = [p.written for p in found.plan(*shapes).passes]
    assert any(p.startswith("microbatch") for p in passes)
    assert "accumulate:data" in passes


def test_an_optimizer_goes_to_the_host_in_as_many_micro_batches_as_are_given() -> None:
    """Its time there is compared with that of the same micro-batches, reduced once."""
    loss, adam = layers_of(4), optax.adam(1e-3)

    def step(state: Any, x: jax.Array) -> Any:
        updates, opt = adam.update(jax.grad(loss)(state["params"], x), state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    params = jax.ShapeDtypeStruct((12, 256, 256), jnp.float32)
    shapes = (
        {"params": params, "opt": jax.eval_shape(adam.init, params)},
        jax.ShapeDtypeStruct((16384, 256), jnp.float32),
    )
    jitted = functools.partial(autoshard.jit, step, mesh=slow(3e8, memory=1e12, host_bandwidth=1e11), donate_argnums=0)
    free = jitted(microbatches=8).plan(*shapes)
    found = jitted(microbatches=8, memory_budget=int(0.98 * free.memory.peak)).plan(*shapes)
    assert "offload:optimizer" in [p.written for p in found.passes]
    assert found.cost.seconds < 1.01 * free.cost.seconds


def test_optional_passes_are_left_out_where_a_preset_splits_nothing_of_what_they_make() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            return jax.lax.scan(lambda total, rows: (total + jnp.square(jnp.tanh(rows @ w)).sum(), None), 0.0, x)[0]

        return w - jax.grad(loss)(w)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 1024), (8, 4096, 512))]
    planned = functools.partial(autoshard.jit, step, mesh={"data": 4, "model": 2}, strategy="fsdp_tp", donate_argnums=0)
    for refine in (0, 2):
        assert not any(p.name == "accumulate" for p in planned(refine=refine).plan(*shapes).passes)
    accumulated = planned(passes=("accumulate:model",))
    with pytest.raises(SpecError, match="splits the batch over data in 4 parts"):
        accumulated.plan(*shapes)


def test_memory_is_saved_where_a_preset_splits_nothing_of_what_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """By recompute, as without that pass."""

    class Unsplit(Pass):
        name = "unsplit"

    def with_one_more(*args: Any, saving: bool | None, **options: Any) -> Iterator[tuple[Pass, ...]]:
        yield from ((Unsplit(),),) if saving is None else with_each_optional(*args, saving=saving, **options)

    def plan_program(traced: Program, ran: tuple[Pass, ...], *args: Any, **options: Any) -> Planned:
        if any(isinstance(p, Unsplit) for p in ran):
            raise SpecError("nothing is split")
        return stages.plan_program(traced, ran, *args, **options)

    budget = int(0.7 * plan(strategy="fsdp").memory.peak)
    usual = plan(strategy="fsdp", microbatches=1, memory_budget=budget)
    assert any(p.name == "recompute" for p in usual.passes)
    with_each_optional = within_budget.with_each_optional
    monkeypatch.setattr(within_budget, "with_each_optional", with_one_more)
    monkeypatch.setattr(within_budget, "plan_program", plan_program)
    found = plan(strategy="fsdp", microbatches=1, memory_budget=budget)
    assert [p.written for p in found.passes] == [p.written for p in usual.passes]
    assert found.cost.seconds == usual.cost.seconds
