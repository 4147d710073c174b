"""A step in micro-batches gives what it gives whole; what needs the whole batch at once is refused by its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard import jaxpr as jx
from autoshard.errors import MicrobatchError, PassError
from autoshard.ir.program import Program
from autoshard.ir.trace import trace
from autoshard.machine.mesh import Hardware, Link, LogicalMesh
from autoshard.passes import PASSES, Accumulate, Microbatch
from autoshard.rules import SHIPPED
from autoshard.transforms.pipeline import Pass, Pipeline, parse_passes
from tests import models

HARDWARE = Hardware("chip", {"float32": 1e10}, 8e9, 1e10, {"link": Link("link", 1e8, 1e-7)}, 1e-8)
MESH = LogicalMesh(("data", "model"), (4, 2), HARDWARE)
BATCH, WIDTH, CLASSES, LAYERS = 16, 8, 12, 3
Loss = Callable[[Any, Any], jax.Array]


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


PARAMS = {
    "in": normal(WIDTH, WIDTH) / 3,
    "layers": normal(LAYERS, WIDTH, WIDTH, seed=1) / 3,
    "out": normal(WIDTH, CLASSES, seed=2),
}
DATA = {
    "x": normal(BATCH, WIDTH, seed=3),
    "y": jnp.asarray(np.random.default_rng(4).integers(0, CLASSES, BATCH)),
    "mask": jnp.asarray(np.random.default_rng(5).integers(0, 2, BATCH), jnp.float32),
}


def logits(params: Any, batch: Any) -> jax.Array:
    """[batch, class], through a scan over layers."""

    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return h + jnp.tanh(h @ w), None

    return jax.lax.scan(layer, batch["x"] @ params["in"], params["layers"])[0] @ params["out"]


def entropies(params: Any, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, batch), batch["y"])


def step_of(loss: Loss) -> Callable[[Any, Any], Any]:
    """A step of gradient descent with momentum and clipping."""

    def step(state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        scale = jnp.minimum(1.0, 1.0 / optax.tree.norm(grads))
        momentum = jax.tree.map(lambda m, g: 0.9 * m + scale * g, state["momentum"], grads)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum}, value

    return step


def traced(fun: Any, *args: Any) -> Program:
    return trace(jax.jit(fun), args, {}, MESH, rules=SHIPPED)


def in_parts(parts: int, fun: Any, *args: Any, then: tuple[Pass, ...] = ()) -> Program:
    """``fun`` in micro-batches; checks that its results are the same."""
    before = traced(fun, *args)
    after = Pipeline((Microbatch(parts), *then)).run(before)[0]
    got, want = (jax.jit(jx.as_fun(p.jaxpr))(*jax.tree.leaves(args)) for p in (after, before))
    chex.assert_trees_all_close(got, want, rtol=2e-5, atol=1e-5, strict=True)
    return after


def in_parts_of(parts: int, loss: Loss, **options: Any) -> Program:
    """A step of ``loss`` in micro-batches; checks that its results are the same."""
    state = {"params": PARAMS, "momentum": jax.tree.map(jnp.zeros_like, PARAMS)}
    return in_parts(parts, step_of(loss), state, DATA, **options)


def loops(program: Program, parts: int) -> list[jx.JaxprEqn]:
    """The loops over micro-batches at the top."""
    return [e for e in program.jaxpr.eqns if (g := jx.scan_groups(e)) is not None and g.length == parts]


def mean(params: Any, batch: Any) -> jax.Array:
    return entropies(params, batch).mean()


@pytest.mark.parametrize("parts", [2, 4, 16])
def test_gradients_and_loss_are_those_of_the_whole_batch(parts):
    after = in_parts_of(parts, mean)
    (loop,) = loops(after, parts)
    groups = jx.scan_groups(loop)
    assert groups is not None
    assert groups.carry == 1 + len(PARAMS)  # the loss and a gradient each: the optimizer runs once
    products = [e for e in jx.walk(after.jaxpr) if jx.contraction_flops(e)]
    assert products
    assert all(BATCH not in jx.aval(a).shape for e in products for a in (*e.invars, *e.outvars))


def test_a_part_has_rows_of_every_device():
    after = in_parts_of(2, mean)
    shapes = [jx.aval(e.outvars[0]).shape for e in jx.walk(after.jaxpr) if e.primitive.name == "dynamic_slice"]
    assert (8, 1, 1, WIDTH) in shapes  # of each eighth of the batch


def test_patches_in_a_row_are_cut_with_the_texts_that_they_are_of():
    """Four patches a text: 64 in the batch, of which eight devices could have a part where of the texts four can."""
    patches = normal(4 * BATCH, WIDTH, seed=6)

    def loss(params: Any, batch: Any) -> jax.Array:
        of_texts = (batch["patches"] @ params["in"]).reshape(BATCH, 4, WIDTH).sum(1)
        return optax.softmax_cross_entropy_with_integer_labels(of_texts @ params["out"], batch["y"]).mean()

    state = {"params": PARAMS, "momentum": jax.tree.map(jnp.zeros_like, PARAMS)}
    assert loops(in_parts(4, step_of(loss), state, {"patches": patches, "y": DATA["y"]}), 4)


def test_partial_sums_are_added_up_after_the_loop():
    after = in_parts_of(2, mean, then=(Accumulate("data"),))
    (loop,) = loops(after, 2)
    assert {v.aval.shape for v in loop.outvars} >= {(4, CLASSES, WIDTH), (LAYERS, 4, WIDTH, WIDTH)}


def test_a_loss_may_divide_by_what_is_counted_in_the_data():
    in_parts_of(4, lambda p, b: (entropies(p, b) * b["mask"]).sum() / b["mask"].sum())


def test_weight_decay_and_terms_of_parameters_alone_are_added_once():
    in_parts_of(4, lambda p, b: entropies(p, b).mean() + 0.1 * sum(jnp.sum(w**2) for w in jax.tree.leaves(p)))


def test_a_tied_weight_has_one_total():
    def tied(params: Any, batch: Any) -> jax.Array:
        h = jnp.tanh(params["in"][batch["y"] % WIDTH] + batch["x"])
        return jnp.mean((h @ params["in"].T - batch["x"]) ** 2)

    (loop,) = loops(in_parts_of(4, tied), 4)
    assert sum(v.aval.shape == (WIDTH, WIDTH) for v in loop.outvars) == 1


@pytest.mark.parametrize("scanned", [True, False])
def test_random_numbers_are_those_of_the_whole_batch(scanned):
    def dropped(params: Any, batch: Any) -> jax.Array:
        def layer(h: jax.Array, at: Any) -> tuple[jax.Array, None]:
            w, key = at
            return h + jnp.tanh(h @ w) * jax.random.bernoulli(key, 0.8, h.shape), None

        h, keys = batch["x"] @ params["in"], jax.random.split(jax.random.key(7), LAYERS)
        if scanned:
            h, _ = jax.lax.scan(layer, h, (params["layers"], keys))
        for i in range(0 if scanned else LAYERS):
            h, _ = layer(h, (params["layers"][i], keys[i]))
        return jnp.mean((h @ params["out"]) ** 2)

    after = in_parts_of(4, dropped)
    (loop,) = loops(after, 4)
    assert BATCH not in {n for a in loop.invars for n in jx.aval(a).shape if jx.aval(a).dtype in (bool, np.uint32)}


def test_checkpointed_layers_branches_and_while_loops_run_on_parts():
    def nested(params: Any, batch: Any) -> jax.Array:
        h = jax.checkpoint(lambda x, w: jnp.sin(x @ w))(batch["x"], params["in"])
        h = jax.lax.cond(params["in"][0, 0] > 0, lambda h: h * 2, lambda h: h - 1, h)
        h = jax.lax.stop_gradient(jax.lax.fori_loop(0, 2 + jnp.argmax(params["in"][0]), lambda i, h: h * 0.9, h)) + h
        return jnp.mean((h @ params["out"]) ** 2)

    in_parts_of(4, nested)


@pytest.mark.parametrize("how", ["add", "set", "multiply", "min", "max"])
def test_what_is_scattered_at_the_examples_own_positions_is_cut(how):
    """In each row of logits the one of the label."""

    def evaluate(params: Any, batch: Any) -> jax.Array:
        found = logits(params, batch)
        return getattr(found.at[jnp.arange(BATCH), batch["y"]], how)(batch["mask"])

    assert loops(in_parts(4, evaluate, PARAMS, DATA), 4)


def shared(params: Any, batch: Any) -> jax.Array:
    """One matrix, read in all layers: its gradient is added up in the scan, from zero."""

    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return h + jnp.tanh(h @ w) @ params["in"], None

    h = jax.lax.scan(layer, batch["x"], params["layers"])[0]
    return optax.softmax_cross_entropy_with_integer_labels(h @ params["out"], batch["y"]).mean()


def carried(params: Any, batch: Any) -> jax.Array:
    """A loss of each layer, added up in what the scan carries."""

    def layer(carry: Any, w: jax.Array) -> tuple[Any, None]:
        h, balance, n = carry
        h = jnp.tanh(h @ w)
        return (h, balance + (h**2).mean() * (n + 1), n + 1), None

    start = batch["x"] @ params["in"], jnp.zeros(()), jnp.zeros(())
    h, balance, _ = jax.lax.scan(layer, start, params["layers"])[0]
    return (h @ params["out"]).mean() + balance


def recurrent(params: Any, batch: Any) -> jax.Array:
    """A scan over positions, in each of which the same weights are read."""

    def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(x[:, None] * params["in"][0] + h @ params["layers"][0])
        return h, h.sum(1)

    h, sums = jax.lax.scan(cell, jnp.zeros_like(batch["x"]), batch["x"].T)
    return (h @ params["out"]).mean() + sums.mean()


@pytest.mark.parametrize("loss", [shared, carried, recurrent])
def test_what_a_scan_adds_up_from_zero_is_a_sum(loss):
    assert loops(in_parts_of(4, loss), 4)


def test_what_begins_with_zero_and_is_none_later_is_not_taken_for_it():
    """A count of layers, added to a mean over the batch in each."""

    def loss(params: Any, batch: Any) -> jax.Array:
        def layer(carry: Any, w: jax.Array) -> tuple[Any, None]:
            h, total, n = carry
            h = jnp.tanh(h @ w)
            return (h, total + ((h**2).mean() + n), n + 1), None

        start = batch["x"], jnp.zeros(()), jnp.zeros(())
        return jax.lax.scan(layer, start, params["layers"])[0][1]

    with pytest.raises(MicrobatchError, match=r"add reads the sum over the whole batch, at .*test_microbatch"):
        in_parts_of(2, loss)


def test_examples_leave_in_their_order():
    in_parts(4, lambda params, batch: (logits(params, batch), logits(params, batch).argmax(-1)), PARAMS, DATA)


def test_what_reads_finished_examples_runs_after_the_loop():
    def ranks_and_scaled(params: Any, batch: Any) -> Any:
        h = logits(params, batch)
        return jnp.sort(entropies(params, batch)), jnp.mean(h * jnp.mean(h))

    in_parts(4, ranks_and_scaled, PARAMS, DATA)


def test_a_callback_runs_once():
    def noise(shape: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng(0).standard_normal(shape).astype(np.float32)

    def noisy(params: Any, batch: Any) -> jax.Array:
        shape = jax.ShapeDtypeStruct((BATCH, CLASSES), jnp.float32)
        return jnp.mean((logits(params, batch) + jax.pure_callback(noise, shape, shape.shape)) ** 2)

    after = in_parts_of(4, noisy)
    assert [e.primitive.name for e in after.jaxpr.eqns].count("pure_callback") == 1
    assert [e.primitive.name for e in jx.walk(after.jaxpr)].count("pure_callback") == 1


def test_gradients_of_few_digits_are_added_up_in_float32():
    low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), PARAMS)
    batch = DATA | {"x": DATA["x"].astype(jnp.bfloat16)}
    grad = jax.grad(lambda p, b: entropies(p, b).sum())
    after = Pipeline((Microbatch(8),)).run(traced(grad, low, batch))[0]
    got = jax.jit(jx.as_fun(after.jaxpr))(*jax.tree.leaves((low, batch)))
    wide = jax.tree.map(lambda w: w.astype(jnp.float32), low), batch | {"x": batch["x"].astype(jnp.float32)}
    want, plain = jax.tree.leaves(grad(*wide)), jax.tree.leaves(grad(low, batch))

    def error(found: list[jax.Array]) -> float:
        return max(float(jnp.abs(a.astype(jnp.float32) - b).max()) for a, b in zip(found, want, strict=True))

    assert error(got) <= 1.5 * error(plain)
    (loop,) = loops(after, 8)
    assert {v.aval.dtype for v in loop.outvars} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("model", [models.moe, models.conv], ids=lambda m: m.name)
def test_statistics_over_the_batch_are_refused_with_their_line(model):
    with pytest.raises(MicrobatchError, match=r"micro-batches: .* the sum over the whole batch, at .*models.py:\d+; "):
        Microbatch(4)(traced(model.step, *model.make(), model.batch(0)))


def contrastive(params: Any, batch: Any) -> jax.Array:
    h = logits(params, batch)
    return optax.softmax_cross_entropy_with_integer_labels(h @ h.T, jnp.arange(BATCH)).mean()


def ranked(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((jnp.sort(logits(params, batch), axis=0) @ params["out"].T) ** 2)


def squared(params: Any, batch: Any) -> jax.Array:
    return jnp.mean(entropies(params, batch)) ** 2


def scaled(params: Any, batch: Any) -> jax.Array:
    h = logits(params, batch)
    return jnp.mean(h * jax.lax.stop_gradient(jnp.mean(h)))


def penalized(params: Any, batch: Any) -> jax.Array:
    def layer(carry: Any, w: jax.Array) -> tuple[Any, None]:
        h, total = carry
        h = jnp.tanh(h @ w)
        return (h, total + (jnp.mean(h**2) + 0.1 * jnp.sum(w**2))), None

    return jax.lax.scan(layer, (batch["x"] @ params["in"], jnp.zeros(())), params["layers"])[0][1]


@pytest.mark.parametrize("loss", [contrastive, ranked, squared, scaled, penalized])
def test_so_is_what_compares_examples_or_is_not_linear_in_their_sum(loss):
    with pytest.raises(MicrobatchError, match="test_microbatch.py"):
        in_parts_of(4, loss)


def test_a_layer_that_reads_the_mean_of_the_batch_is_refused():
    def forward(params: Any, batch: Any) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ w) * jnp.mean(h), None

        return jax.lax.scan(layer, batch["x"], params["layers"])[0]

    with pytest.raises(MicrobatchError, match=r"mul reads the sum over the whole batch, at .*test_microbatch.py:\d+"):
        in_parts(4, forward, PARAMS, DATA)


def test_what_does_not_divide_or_is_no_number_is_one_clear_error():
    state = {"params": PARAMS, "momentum": PARAMS}
    program = traced(step_of(mean), state, DATA)
    with pytest.raises(MicrobatchError, match=r"dimension 0 of batch\['x'\] \[16, 8\] has 16 examples, which 3 micro"):
        Microbatch(3)(program)
    for count in (-1, 2.0, True):
        with pytest.raises(PassError, match="must be a whole number, 1 or more"):
            Microbatch(count)
    for text in ("microbatch", "microbatch:two", "microbatch:", "microbatch:0"):
        with pytest.raises(PassError, match="needs a number of micro-batches, as microbatch:4"):
            parse_passes(text, PASSES)
    with pytest.raises(MicrobatchError, match="has no batch"):
        Microbatch(2)(traced(lambda w: w - 0.1 * jax.grad(lambda w: jnp.sum(w @ w))(w), PARAMS["in"]))


def test_written_as_it_is_read():
    assert parse_passes(["microbatch:4"], PASSES) == (Microbatch(4),)
    program = traced(mean, PARAMS, DATA)
    assert Microbatch(1)(program) is program
    assert [str(p) for p in Microbatch().variants(program)] == [f"microbatch:{n}" for n in (2, 4, 8, 16)]
    assert Microbatch().variants(traced(contrastive, PARAMS, DATA)) == ()
