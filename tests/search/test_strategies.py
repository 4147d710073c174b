"""Presets are the layouts that people write by hand, and the compiled program has their collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.backend.audit import audit
from autoshard.pages.page import brief
from autoshard.runtime.plan import Plan
from autoshard.train.models.decoder import ModelConfig, make_steps
from autoshard.train.optimizer import OptimizerConfig

LAYERS = 2
MODEL = ModelConfig(layers=LAYERS, scan=False, d_model=256, heads=8, d_ff=1024, vocab=1024, seq=64)
ACTIVATION = 8 * MODEL.seq * MODEL.d_model * 4


def planned(
    strategy: str, mesh: dict[str, int], batch: int = 8, model: ModelConfig = MODEL
) -> tuple[Plan, Callable[[], Any]]:
    """The plan, and what compiles the step."""
    steps = make_steps(model, OptimizerConfig(), 100)
    state = jax.eval_shape(steps.init, jax.random.key(0))
    tokens = {k: jax.ShapeDtypeStruct((batch, model.seq), jnp.int32) for k in ("inputs", "targets")}
    step = autoshard.jit(steps.train, mesh=mesh, strategy=strategy, donate_argnums=0)
    return step.plan(state, tokens), lambda: step.lower(state, tokens).compile()


def specs(plan: Plan) -> dict[str, str]:
    """Of each parameter of the first layer, and of those outside of the layers."""
    found = {p.path.removeprefix("state['params']"): str(p.spec) for p in plan.inputs if "['params']" in p.path}
    return {k: v for k, v in found.items() if "[1]" not in k}


def test_tp_splits_heads_and_hidden_width_by_columns_and_then_by_rows() -> None:
    """Megatron's, with the sequence split in between: 4 gathers and 4 scatters a layer, of the layer's input."""
    plan, compiles = planned("tp", {"model": 8})
    found = specs(plan)
    for name in ("wq", "wk", "wv"):
        assert found[f"['layers'][0]['attention']['{name}']"] == "[_, model, _]"
    assert found["['layers'][0]['attention']['wo']"] == "[model, _, _]"
    for name in ("up", "gate"):
        assert found[f"['layers'][0]['mlp']['{name}']"] == "[_, model]"
    assert found["['layers'][0]['mlp']['down']"] == "[model, _]"
    sent: Counter[str] = Counter()
    for c in plan.cost.collectives:
        sent[c.kind] += c.count * (c.bytes == ACTIVATION)
    assert sent["all-gather"] == sent["reduce-scatter"] == 4 * LAYERS + 1
    found_by_audit = audit(compiles(), plan)
    assert found_by_audit.clean, str(found_by_audit)


@pytest.mark.parametrize("mesh", [{"data": 4, "model": 2}, {"data": 2, "model": 4}], ids=str)
def test_fsdp_tp_splits_the_batch_over_the_first_axis_and_weights_over_both(mesh: dict[str, int]) -> None:
    plan, _ = planned("fsdp_tp", mesh)
    for p in plan.inputs:
        if p.path.startswith("batch"):
            assert p.spec.dims[0] == ("data",)
        elif "['mlp']" in p.path or "['attention']" in p.path:
            assert set(p.spec.axes) == {"data", "model"}, p.path
    gathered = {c.axes for c in plan.cost.collectives if c.kind == "all-gather" and c.bytes >= 2**16}
    assert ("data",) in gathered


def test_fsdp_tp_gathers_a_layer_of_stacked_weights_at_a_time() -> None:
    model = ModelConfig(layers=4, scan=True, d_model=256, heads=8, d_ff=1024, vocab=1024, seq=64)
    plan, _ = planned("fsdp_tp", {"data": 4, "model": 2}, 16, model)
    gathered = [c for c in plan.cost.collectives if c.kind == "all-gather" and c.axes == ("data",)]
    of_layers = [c for c in gathered if c.count == model.layers and c.bytes >= 2 * model.d_model**2]
    assert len(of_layers) >= 7  # each product reads its weights, whole over the batch's axis
    embedding_and_head = model.vocab * model.d_model * 4 // 2
    assert sum(c.bytes for c in gathered if c.count == 1 and c.bytes >= 2 * model.d_model**2) <= 2 * embedding_and_head


@pytest.mark.parametrize(("strategy", "mesh"), [("fsdp", {"data": 8}), ("fsdp_tp", {"data": 4, "model": 2})])
def test_what_a_loop_reads_alike_is_gathered_before_it(strategy: str, mesh: dict[str, int]) -> None:
    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jax.lax.scan(lambda total, rows: (total + (jnp.tanh(rows @ w) ** 2).sum(), None), 0.0, x)[0]

        return w - jax.grad(loss)(w)

    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 1024), (8, 4096, 512)))
    plan = autoshard.jit(step, mesh=mesh, strategy=strategy, donate_argnums=0, passes=()).plan(w, x)
    gathered = [c for c in plan.cost.collectives if c.kind == "all-gather" and c.axes == ("data",)]
    assert gathered
    assert {c.count for c in gathered} == {1}


def test_no_preset_but_the_replicated_one_leaves_the_state_whole() -> None:
    whole = planned("replicated", {"data": 8})[0].memory
    for strategy in ("zero1", "fsdp", "tp"):
        assert planned(strategy, {"data": 8})[0].memory.optimizer <= whole.optimizer / 7


@pytest.mark.parametrize(
    ("rows", "said"),
    [(50, "no axis of the mesh divides 50; all divide 48 and 56"), (3, "divides 3; all divide 8"), (48, ""), (1, "")],
)
def test_a_batch_that_no_axis_divides_is_said_not_to_be_split(rows: int, said: str) -> None:
    def step(w: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)

    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 32), (rows, 64)))
    plan = autoshard.jit(step, mesh={"data": 8}, donate_argnums=0).plan(w, x)
    found = [d.text for d in plan.diagnostics if "is not split" in d.text]
    assert [text.startswith("dimension 0 of x, of the batch, ") for text in found] == [True] * bool(said)
    assert said in "".join(found)
    assert all(text in brief(plan) for text in found)
