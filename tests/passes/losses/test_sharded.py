"""Losses in chunks on a mesh: the numbers of one device, no gradient reduced in the loop, classes sharded too."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.backend.hlo.collectives import collectives
from autoshard.machine.collective import ALL_REDUCE, REDUCE_SCATTER
from autoshard.machine.hardware import load_hardware
from autoshard.machine.mesh import LogicalMesh
from autoshard.passes import Losses

BATCH, SEQ, WIDTH, CLASSES = 16, 64, 32, 256
PASSES = ("dead_code", "one_hot", "transposed_products", "sum_products", "pad_uneven")
ADAM = optax.adamw(1e-3)


def train(params: Any, state: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        hidden = jnp.tanh(params["embedding"][batch["inputs"]] @ params["body"])
        logits = hidden @ params["head"]
        log_z = jax.nn.logsumexp(logits, axis=-1)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]) + 1e-3 * log_z**2
        kept = batch["labels"] != 0
        return jnp.where(kept, losses, 0).sum() / kept.sum(), (logits.argmax(-1) == batch["labels"]).mean()

    (value, accuracy), grads = jax.value_and_grad(loss, has_aux=True)(params)
    updates, state = ADAM.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value, accuracy


def arguments() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    shapes = {"embedding": (CLASSES, WIDTH), "body": (WIDTH, WIDTH), "head": (WIDTH, CLASSES)}
    params = {k: jnp.asarray(rng.standard_normal(s), jnp.float32) / 4 for k, s in shapes.items()}
    tokens = jnp.asarray(rng.integers(0, CLASSES, (2, BATCH, SEQ)), jnp.int32)
    return params, ADAM.init(params), {"inputs": tokens[0], "labels": tokens[1]}


def mesh_of(sizes: tuple[int, int], memory: float | None = None) -> LogicalMesh:
    chip = load_hardware("tpu-v5e")
    chip = chip if memory is None else replace(chip, memory=memory)
    return LogicalMesh(("data", "model"), sizes, chip, (), tuple(jax.devices()))


@pytest.mark.parametrize(
    ("sizes", "strategy", "axes"),
    [
        ((8, 1), "dp", "data"),
        ((8, 1), "fsdp", "data"),
        ((2, 4), "tp", "data"),
        ((2, 4), "fsdp_tp", "data"),
        ((2, 4), "auto", "data+model"),
    ],
)
def test_the_numbers_are_those_of_one_device(sizes: tuple[int, int], strategy: str, axes: str) -> None:
    args = arguments()
    step = autoshard.jit(train, mesh=mesh_of(sizes), strategy=strategy, passes=(Losses(axes, 4), *PASSES))
    plan = step.plan(*args)
    assert plan.passes[0].change == "1 losses computed in chunks of the tokens"
    chex.assert_trees_all_close(step(*args), jax.jit(train)(*args), rtol=1e-5, atol=2e-6)
    compiled = step.lower(*args).compile()
    made = re.findall(r"f32\[([\d,]+)\]", compiled.as_text() or "")
    assert max(math.prod(map(int, shape.split(","))) for shape in made) <= BATCH * SEQ * CLASSES / 4
    if strategy in ("dp", "fsdp"):
        moved = [c for c in collectives(compiled.as_text() or "", plan.mesh) if c.count > 1]
        assert all(c.bytes < WIDTH * CLASSES for c in moved), moved


def test_of_split_classes_a_chunk_reduces_a_maximum_and_two_sums_of_each_token() -> None:
    """In two all-reduces: the sum of exponentials and the label's logit go together. What is else sent in the loop is
    the gradient of the hidden states."""
    rows, classes, chunks = 8, 65536, 4

    def step(head: Any, hidden: Any, labels: Any) -> Any:
        def loss(head: Any, hidden: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(hidden @ head, labels).mean()

        return jax.value_and_grad(loss, (0, 1))(head, hidden)

    split, tokens = P(None, "model"), P("data")
    run = autoshard.jit(
        step,
        mesh=mesh_of((2, 4)),
        in_shardings=(split, tokens, tokens),
        out_shardings=(None, (split, tokens)),
        passes=(Losses("data", chunks), *PASSES),
    )
    shapes = ((SEQ, classes), jnp.float32), ((rows, SEQ, SEQ), jnp.float32), ((rows, SEQ), jnp.int32)
    args = [jax.ShapeDtypeStruct(*of) for of in shapes]
    compiled = run.lower(*args).compile().as_text() or ""
    found = [c for c in collectives(compiled, run.plan(*args).mesh) if c.count == chunks]
    of_token = 4 * rows * SEQ // chunks
    assert [(c.bytes, c.axes) for c in found if c.kind == ALL_REDUCE] == [
        (of_token, ("model",)),
        (2 * of_token, ("model",)),
    ]
    assert [c.kind for c in found if c.kind != ALL_REDUCE] == [REDUCE_SCATTER]


def test_where_logits_do_not_fit_the_planner_chooses_chunks_before_recomputing() -> None:
    shapes = {"embedding": (32768, 256), "body": (256, 256), "head": (256, 32768)}
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    tokens = jax.ShapeDtypeStruct((64, 1024), jnp.int32)
    args = params, jax.eval_shape(ADAM.init, params), {"inputs": tokens, "labels": tokens}
    whole = autoshard.jit(train, mesh=mesh_of((8, 1)), strategy="dp", passes=PASSES).plan(*args)
    logits = 64 * 1024 * 32768 * 4 // 8
    budget = whole.memory.peak - 0.4 * logits
    plan = autoshard.jit(train, mesh=mesh_of((8, 1), budget), strategy="dp", microbatches=1).plan(*args)
    assert plan.passes[0].written == "losses:data"
    assert "recompute" not in {p.name for p in plan.passes}
    assert plan.memory.peak <= budget
