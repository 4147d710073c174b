"""Losses in chunks of tokens: the same numbers for any spelling of the loss, and no array of tokens x classes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard import jaxpr as jx
from autoshard.errors import PassError
from autoshard.ir.trace import trace
from autoshard.machine.mesh import Hardware, Link, LogicalMesh
from autoshard.passes import Losses
from autoshard.rules import SHIPPED
from autoshard.transforms.pipeline import Pipeline

HARDWARE = Hardware("chip", {"float32": 1e10}, 8e9, 1e10, {"link": Link("link", 1e8, 1e-7)}, 1e-8)
MESH = LogicalMesh(("data", "model"), (2, 2), HARDWARE)
BATCH, SEQ, WIDTH, CLASSES = 8, 12, 6, 40
Loss = Callable[..., Any]
"""logits [batch, seq, classes], batch -> a scalar, or a scalar and further results."""


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def batch() -> dict[str, jax.Array]:
    rng = np.random.default_rng(1)
    return {
        "inputs": normal(BATCH, SEQ, WIDTH, seed=2),
        "labels": jnp.asarray(rng.integers(0, CLASSES, (BATCH, SEQ)), jnp.int32),
        "weights": jnp.asarray(rng.random((BATCH, SEQ)), jnp.float32),
        "soft": jax.nn.softmax(normal(BATCH, SEQ, CLASSES, seed=3)),
    }


def params(tied: bool = False) -> dict[str, jax.Array]:
    head = normal(*((CLASSES, WIDTH) if tied else (WIDTH, CLASSES)), seed=4)
    return {"body": normal(WIDTH, WIDTH), "head": head, "bias": normal(CLASSES, seed=5)}


def step(loss: Loss, *, dtype: Any = jnp.float32, tied: bool = False, wrap: Any = lambda f: f) -> Any:
    """Params, batch -> the loss and the gradients, of a network of one layer and a head."""

    def of(params: Any, batch: Any) -> Any:
        def head(hidden: Any, weight: Any, bias: Any, batch: Any) -> Any:
            logits = jnp.einsum("bsd,vd->bsv" if tied else "bsd,dv->bsv", hidden.astype(dtype), weight.astype(dtype))
            return loss(logits + bias.astype(dtype), batch)

        hidden = params["head"][batch["labels"]] if tied else batch["inputs"]
        hidden = jnp.tanh(hidden @ params["body"])
        return wrap(head)(hidden, params["head"], params["bias"], batch)

    return jax.value_and_grad(of)


def rewritten(fun: Any, *args: Any, axes: str = "", mesh: LogicalMesh = MESH) -> tuple[jx.Jaxpr, jx.Jaxpr, str]:
    """The jaxpr of ``fun`` before and after its losses are computed in chunks, and the pass's report."""
    before = trace(jax.jit(fun), args, {}, mesh, rules=SHIPPED)
    after, (report,) = Pipeline((Losses(axes, 2),)).run(before)
    return before.jaxpr, after.jaxpr, report.change


def results(jaxpr: jx.Jaxpr, *args: Any) -> list[Any]:
    return jax.jit(jx.as_fun(jaxpr))(*jax.tree.leaves(args))


def chunked(fun: Any, *args: Any, **options: Any) -> tuple[jx.Jaxpr, str]:
    """The jaxpr of ``fun`` with its losses in chunks, and the pass's report; checks that the results are the same."""
    before, after, report = rewritten(fun, *args, **options)
    chex.assert_trees_all_close(results(after, *args), results(before, *args), rtol=1e-5, atol=1e-6, strict=True)
    return after, report


def has_logits(jaxpr: jx.Jaxpr) -> bool:
    """Whether an equation makes an array of tokens x classes."""
    size = BATCH * SEQ * CLASSES
    made = (v for e in jx.walk(jaxpr) if e.primitive.name != "reshape" for v in e.outvars)
    return any(math.prod(jx.aval(v).shape) >= size for v in made)


def integer(logits: Any, batch: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def one_hot(logits: Any, batch: Any) -> Any:
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(batch["labels"], CLASSES)).mean()


def soft(logits: Any, batch: Any) -> Any:
    return optax.softmax_cross_entropy(logits, batch["soft"]).mean()


def smoothed(logits: Any, batch: Any) -> Any:
    labels = optax.smooth_labels(jax.nn.one_hot(batch["labels"], CLASSES), 0.1)
    return optax.safe_softmax_cross_entropy(logits, labels).mean()


def ignored(logits: Any, batch: Any) -> Any:
    labels = jnp.where(batch["weights"] < 0.3, -100, batch["labels"])
    kept = labels != -100
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(kept, labels, 0))
    return jnp.sum(jnp.where(kept, losses, 0)) / jnp.maximum(kept.sum(), 1)


def where_ignored(logits: Any, batch: Any) -> Any:
    """PyTorch's way: the log-probability of every class, masked after it is picked."""
    logp = jax.nn.log_softmax(logits)
    labels = jnp.where(batch["weights"] < 0.3, -100, batch["labels"])
    picked = jnp.take_along_axis(logp, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return -jnp.where(labels == -100, 0.0, picked).sum() / (labels != -100).sum()


def weighted(logits: Any, batch: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return (losses * batch["weights"]).sum() / batch["weights"].sum()


def z_loss(logits: Any, batch: Any) -> Any:
    log_z = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, batch["labels"][..., None], axis=-1)[..., 0]
    return (log_z - picked + 1e-2 * log_z**2).mean()


def capped(logits: Any, batch: Any) -> Any:
    return integer(30.0 * jnp.tanh(logits / 30.0), batch)


def by_hand(logits: Any, batch: Any) -> Any:
    shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    log_z = jnp.log(jnp.exp(shifted).sum(-1))
    picked = (shifted * jax.nn.one_hot(batch["labels"], CLASSES)).sum(-1)
    return (log_z - picked).sum() / (BATCH * SEQ)


def indexed(logits: Any, batch: Any) -> Any:
    logp = jax.nn.log_softmax(logits.reshape(-1, CLASSES))
    return -logp[jnp.arange(BATCH * SEQ), batch["labels"].reshape(-1)].mean()


def flat(logits: Any, batch: Any) -> Any:
    rows = logits.reshape(-1, CLASSES).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(rows, batch["labels"].reshape(-1)).mean()


def mapped(logits: Any, batch: Any) -> Any:
    one = jax.vmap(jax.vmap(lambda x, y: -jax.nn.log_softmax(x)[y]))
    return one(logits, batch["labels"]).mean()


def shifted(logits: Any, batch: Any) -> Any:
    """The next token's loss, of logits for all tokens."""
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["labels"][:, 1:]).mean()


def focal(logits: Any, batch: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return ((1 - jnp.exp(-losses)) ** 2 * losses).mean()


def distilled(logits: Any, batch: Any) -> Any:
    """From a teacher whose logits are computed in the step."""
    teacher = jax.nn.softmax(jax.lax.stop_gradient(batch["inputs"] @ normal(WIDTH, CLASSES, seed=9)))
    return optax.softmax_cross_entropy(logits, teacher).mean() + integer(logits, batch)


LOSSES = [
    integer, one_hot, soft, smoothed, ignored, where_ignored, weighted, z_loss, capped, by_hand, indexed, flat, mapped,
    shifted, focal, distilled,
]  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
def test_no_logits_are_made_and_the_numbers_are_the_same(loss: Loss) -> None:
    jaxpr, report = chunked(step(loss), params(), batch())
    assert not has_logits(jaxpr), report
    assert report == "1 losses computed in chunks of the tokens"


@pytest.mark.parametrize("loss", LOSSES)
def test_so_with_a_tied_embedding(loss: Loss) -> None:
    assert not has_logits(chunked(step(loss, tied=True), params(tied=True), batch())[0])


@pytest.mark.parametrize("loss", [integer, flat, z_loss])
def test_in_few_digits_the_error_is_no_larger(loss: Loss) -> None:
    """Against float32: sums over the tokens are accumulated in it."""
    args = params(tied=True), batch()
    before, after, _ = rewritten(step(loss, dtype=jnp.bfloat16, tied=True), *args)
    exact = jax.jit(step(loss, tied=True))(*args)
    assert not has_logits(after)
    for x, y, z in zip(results(after, *args), results(before, *args), jax.tree.leaves(exact), strict=True):
        ours, plain = (float(jnp.linalg.norm(a.astype(jnp.float32) - z)) for a in (x, y))
        assert ours <= 1.2 * plain + 1e-3 * float(jnp.linalg.norm(z))


def wide(loss: Loss, precision: Any = None) -> Any:
    """Gradients of a loss whose logits are float32 products of bfloat16 operands."""

    def of(weight: Any, hidden: Any, batch: Any) -> Any:
        logits = jnp.einsum(
            "bsd,dv->bsv",
            hidden,
            weight.astype(hidden.dtype),
            preferred_element_type=jnp.float32,
            precision=precision,
        )
        return loss(logits, batch)

    return jax.value_and_grad(of, (0, 1))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint])
@pytest.mark.parametrize("loss", [integer, z_loss, where_ignored])
def test_gradients_of_float32_logits_are_products_of_what_the_logits_are(loss: Loss, wrap: Any) -> None:
    weight, hidden = params()["head"], batch()["inputs"].astype(jnp.bfloat16)
    args = (weight, hidden, batch())
    before, after, report = rewritten(wide(wrap(loss)), *args)
    products = [e for e in jx.walk(after) if e.primitive.name == "dot_general"]
    assert not has_logits(after), report
    assert {str(jx.aval(a).dtype) for e in products for a in e.invars} == {"bfloat16"}
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(wide(loss))(weight, hidden.astype(jnp.float32), batch())
    for x, y, z in zip(results(after, *args), results(before, *args), jax.tree.leaves(exact), strict=True):
        ours, plain = (float(jnp.linalg.norm(a.astype(jnp.float32) - z)) for a in (x, y))
        assert ours <= plain + 2.0**-8 * float(jnp.linalg.norm(z))


def test_so_are_not_those_of_a_higher_precision_nor_where_the_chip_rounds_itself() -> None:
    args = (params()["head"], batch()["inputs"].astype(jnp.bfloat16), batch())
    rounding = replace(MESH, hardware=replace(HARDWARE, operand_bits=16))
    for fun, mesh in ((wide(integer, "highest"), MESH), (wide(integer), rounding)):
        _, after, _ = rewritten(fun, *args, mesh=mesh)
        products = [e for e in jx.walk(after) if e.primitive.name == "dot_general"]
        assert "float32" in {str(jx.aval(a).dtype) for e in products for a in e.invars}


@pytest.mark.parametrize("loss", [integer, one_hot, z_loss])
def test_forward_alone(loss: Loss) -> None:
    def evaluate(params: Any, batch: Any) -> Any:
        return loss(batch["inputs"] @ params["head"], batch)

    assert not has_logits(chunked(evaluate, params(), batch())[0])


def test_metrics_of_the_logits_are_computed_in_the_loop() -> None:
    def with_metrics(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = batch["inputs"] @ params["head"]
            best = jnp.argmax(logits, -1)
            accuracy = (best == batch["labels"]).mean()
            return integer(logits, batch), (accuracy, logits.max(), jnp.isfinite(logits).all())

        return jax.value_and_grad(loss, has_aux=True)(params)

    assert not has_logits(chunked(with_metrics, params(), batch())[0])


def test_checkpointed_losses_are_computed_once() -> None:
    for fun in (step(integer, wrap=jax.checkpoint), step(jax.checkpoint(integer))):
        jaxpr, report = chunked(fun, params(), batch())
        assert not has_logits(jaxpr)
        assert report == "1 losses computed in chunks of the tokens"
        assert (
            sum(e.primitive.name == "dot_general" for e in jx.walk(jaxpr)) == 5
        )  # two of the layer, three of the loss


def test_a_loss_in_a_loop_over_micro_batches() -> None:
    def accumulated(params: Any, batches: Any) -> Any:
        def micro(total: Any, batch: Any) -> Any:
            return jax.tree.map(jnp.add, total, step(weighted)(params, batch)), None

        return jax.lax.scan(micro, jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params)), batches)[0]

    two = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), batch())
    assert not has_logits(chunked(accumulated, params(), two)[0])


def mlp(params: Any, batch: Any) -> Any:
    return jnp.mean((jax.nn.gelu(batch["inputs"] @ params["head"] + params["bias"]) @ params["head"].T) ** 2)


@pytest.mark.parametrize("axes", ["", "data", "data+model"])
def test_partial_sums_are_added_after_the_loop(axes: str) -> None:
    jaxpr, _ = chunked(step(z_loss), params(), batch(), axes=axes)
    parts = {"": (), "data": (2,), "data+model": (4,)}[axes]
    loop = next(e for e in jaxpr.eqns if jx.scan_groups(e))
    assert {(*parts, WIDTH, CLASSES), (*parts, CLASSES, WIDTH)} & {jx.aval(v).shape for v in loop.outvars}


def test_values_of_layers_before_may_be_as_large_as_logits() -> None:
    """Scores of attention over long sequences: their cotangents are computed from the logits', as is all before."""

    def of(params: Any, batch: Any) -> Any:
        hidden = jnp.tanh(batch["inputs"] @ params["body"])
        scores = jax.nn.softmax(jnp.einsum("bqd,bkd,h->bhqk", hidden, hidden, params["heads"]))
        hidden = hidden + jnp.einsum("bhqk,bkd->bqd", scores, hidden)
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["head"], batch["labels"]).mean()

    state = params() | {"heads": normal(4, seed=6)}
    assert 4 * SEQ >= CLASSES
    after, report = chunked(jax.value_and_grad(of), state, batch())
    shapes = {jx.aval(v).shape for e in jx.walk(after) for v in e.outvars}
    assert (BATCH, 4, SEQ, SEQ) in shapes
    assert (BATCH, SEQ, CLASSES) not in shapes
    assert report.startswith("1 losses computed in chunks of the tokens")


def test_an_mlp_is_no_loss() -> None:
    for fun in (mlp, jax.grad(mlp)):
        before, after, report = rewritten(fun, params(), batch())
        assert (after, report) == (before, "no loss to compute in chunks")


def returned(logits: Any, batch: Any) -> Any:
    return integer(logits, batch), logits


def of_log(logits: Any, batch: Any) -> Any:
    return jnp.log(integer(logits, batch))


def centred(logits: Any, batch: Any) -> Any:
    return integer(logits - logits.mean((0, 1)), batch)


def contrastive(logits: Any, batch: Any) -> Any:
    """Each token against all others, both ways."""
    rows, other = logits.reshape(BATCH * SEQ, CLASSES), batch["soft"].reshape(BATCH * SEQ, CLASSES)
    pairs = rows[:, :WIDTH] @ other[:, :WIDTH].T
    own = jnp.arange(BATCH * SEQ)
    both = (optax.softmax_cross_entropy_with_integer_labels(x, own).mean() for x in (pairs, pairs.T))
    return sum(both)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (returned, "the step, or the function that it is in, returns the logits"),
        (of_log, "it needs the sum over all tokens that reduce_sum computes"),
        (centred, "it needs the sum over all tokens that reduce_sum computes"),
        (contrastive, "over all tokens that reduce_max computes"),
    ],
)
def test_what_cannot_be_cut_stays_and_the_report_says_why(loss: Loss, reason: str) -> None:
    def gradients(params: Any, batch: Any) -> Any:
        def of(params: Any) -> Any:
            found = loss(batch["inputs"] @ params["head"], batch)
            return found if isinstance(found, tuple) else (found, 0)

        return jax.grad(of, has_aux=True)(params)

    before, after, report = rewritten(gradients, params(), batch())
    assert after is before
    assert reason in report
    assert "test_losses.py:" in report.split("; not in chunks: ")[1]


def test_the_step_of_an_optimizer() -> None:
    adam = optax.adamw(1e-3)

    def train(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = step(smoothed)(params, batch)
        updates, state = adam.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    assert not has_logits(chunked(train, params(), adam.init(params()), batch())[0])


def test_the_planner_is_offered_large_logits_alone_with_the_axes_of_the_batch() -> None:
    small = trace(jax.jit(step(integer)), (params(), batch()), {}, MESH, rules=SHIPPED)
    assert Losses().variants(small) == ()
    chip = replace(HARDWARE, memory=BATCH * SEQ * CLASSES * 4 / MESH.size)
    large = replace(small, mesh=replace(MESH, hardware=chip))
    assert [str(p) for p in Losses().variants(large, ("data",))] == ["losses:data"]
    assert [str(p) for p in Losses().variants(large)] == ["losses:data+model", "losses:model"]


def test_an_axis_that_the_mesh_lacks_is_named() -> None:
    with pytest.raises(PassError, match="no axis 'date'; did you mean 'data'"):
        Losses("date")(trace(jax.jit(jnp.sin), (normal(2),), {}, MESH, rules=SHIPPED))
