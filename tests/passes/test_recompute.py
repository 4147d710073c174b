"""Recompute: the same numbers with fewer bytes of residuals, whatever the step contains."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from autoshard import jaxpr as jx
from autoshard.errors import PassError
from autoshard.ir.trace import trace
from autoshard.jaxpr.arguments import in_host_memory
from autoshard.machine.mesh import Hardware, Link, LogicalMesh
from autoshard.machine.mesh_config import MeshConfig
from autoshard.passes import PASSES, Attention, Recompute
from autoshard.passes.recompute import products
from autoshard.rules import SHIPPED
from autoshard.transforms.held_values import sets
from autoshard.transforms.held_values.names import residual_groups
from autoshard.transforms.held_values.sets import LayerLoop, choose_held, price_of_held
from autoshard.transforms.pipeline import Pipeline, parse_passes
from autoshard.transforms.remat import residual_bytes

HARDWARE = Hardware("cpu", {"float32": 1e11}, 8e9, 1e10, {"host": Link("host", 1e10, 1e-6)}, 1e-6)
MESH = LogicalMesh(("data",), (8,), HARDWARE)
LAYERS, EMBED, HEADS, HIDDEN, VOCAB, BATCH, SEQ = 4, 16, 2, 64, 32, 4, 16
POLICIES = ("full", "dots_saveable", "dots_with_no_batch_dims_saveable", "everything_saveable")


def normal(seed, *shape):
    return 0.2 * np.random.default_rng(seed).normal(size=shape).astype("float32")


def rms(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def layer(h, w):
    x = rms(h)
    q, k, v = (jnp.einsum("bse,ehd->bshd", x, w[n]) for n in "qkv")
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9), -1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    h = h + jnp.einsum("bqhd,hde->bqe", mixed, w["o"])
    return h + jax.nn.gelu(rms(h) @ w["up"]) @ w["down"], None


def decoder_loss(params, tokens, scanned):
    h = params["embed"][tokens]
    if scanned:
        h, _ = jax.lax.scan(layer, h, params["layers"])
    else:
        for i in range(LAYERS):
            h, _ = layer(h, jax.tree.map(lambda x, i=i: x[i], params["layers"]))
    logits = (rms(h) @ params["embed"].T)[:, :-1]
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def decoder_step(params, tokens, scanned):
    loss, grads = jax.value_and_grad(decoder_loss)(params, tokens, scanned)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


@functools.cache
def decoder(scanned):
    width = EMBED // HEADS
    layers = {n: normal(i, LAYERS, EMBED, HEADS, width) for i, n in enumerate("qkv")}
    layers |= {"o": normal(3, LAYERS, HEADS, width, EMBED), "up": normal(4, LAYERS, EMBED, HIDDEN)}
    layers |= {"down": normal(5, LAYERS, HIDDEN, EMBED)}
    tokens = np.random.default_rng(6).integers(0, VOCAB, (BATCH, SEQ), "int32")
    args = ({"embed": normal(7, VOCAB, EMBED), "layers": layers}, tokens)
    return traced(lambda p, t: decoder_step(p, t, scanned), *args), args


@functools.cache
def decoder_run(scanned, policy):
    """What the decoder step gives under the policy (None: without the pass), and how it compiled."""
    program, args = decoder(scanned)
    run = compiled(program if policy is None else rewritten(program, policy)[0], args)
    return run(*jax.tree.leaves(args)), run.memory_analysis().temp_size_in_bytes, run.cost_analysis()["flops"]


def traced(fun, *args):
    return trace(jax.jit(fun), args, {}, MESH, rules=SHIPPED)


def compiled(program, args):
    return jax.jit(jx.as_fun(program.jaxpr)).lower(*jax.tree.leaves(args)).compile()


def rewritten(program, policy="full"):
    return Pipeline((Recompute(policy),)).run(program)


def agree(before, after, args, tolerance=1e-6):
    old, new = (compiled(p, args)(*jax.tree.leaves(args)) for p in (before, after))
    for a, b in zip(old, new, strict=True):
        largest = np.abs(np.asarray(a)).max(initial=1)  # what a sum's terms round by, however small the sum
        np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance * largest)
    return all(np.array_equal(a, b) for a, b in zip(old, new, strict=True))


def count(program, name):
    """Equations called ``name`` at every depth, once each."""

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn.primitive.name
            for body in jx.subjaxprs(eqn):
                yield from walk(body)

    return Counter(walk(program.jaxpr))[name]


@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "unrolled"])
def test_a_decoder_gives_the_same_numbers(scanned):
    plain, full, dots = (decoder_run(scanned, policy)[0] for policy in (None, "full", "dots_saveable"))
    for a, b, c in zip(plain, full, dots, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, c, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "unrolled"])
def test_a_decoder_saves_less_as_the_policy_allows_less(scanned):
    before, _ = decoder(scanned)
    none = residual_bytes(before)
    saved = {p: residual_bytes(rewritten(before, p)[0]) for p in POLICIES}
    assert saved["full"] * 6 < none
    assert saved["full"] * 1.5 < saved["dots_with_no_batch_dims_saveable"] < saved["dots_saveable"] < none / 2
    assert saved["everything_saveable"] == none
    whole, full, dots = (decoder_run(scanned, p)[1] for p in (None, "full", "dots_saveable"))
    assert full * 2.5 < whole, "what is not saved must be gone from the compiled step too"
    assert full < dots < whole * 0.6


def test_a_scanned_decoder_stacks_only_what_enters_a_layer():
    before, _ = decoder(scanned=True)
    after, _ = rewritten(before)
    (forward, _), (now, _) = ([e for e in p.jaxpr.eqns if jx.scan_groups(e)] for p in (before, after))
    assert len(forward.outvars) > 20
    assert [v.aval.shape for v in now.outvars] == [(BATCH, SEQ, EMBED), (LAYERS, BATCH, SEQ, EMBED)]
    assert count(after, "tanh") == 2 * count(before, "tanh")


@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "unrolled"])
def test_products_that_the_policy_saves_are_not_recomputed(scanned):
    before, _ = decoder(scanned)
    after, _ = rewritten(before, "dots_saveable")
    assert count(after, "dot_general") == count(before, "dot_general")
    assert count(after, "tanh") > count(before, "tanh")
    assert count(rewritten(before, "full")[0], "dot_general") > count(before, "dot_general")


@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "unrolled"])
def test_products_are_saved_one_by_one_those_with_most_flops_per_byte_first(scanned):
    before, args = decoder(scanned)
    variants = Recompute().variants(before)
    assert str(variants[-1]) == "recompute:full"
    assert str(variants[-2]) == "recompute:products:1"
    saved = [residual_bytes(variant(before)) for variant in variants]
    assert saved[-1] < saved[0] / 2
    assert len(set(saved)) > 4
    again = [count(variant(before), "dot_general") for variant in variants]
    assert again == sorted(again)
    assert again[0] < again[-1]
    deepest = products(before.jaxpr)[0]
    assert deepest[1:3] == ("dot_general", (BATCH, SEQ, EMBED)), "the MLP's second product sums over the most"
    agree(before, rewritten(before, "products:3")[0], args)


def test_a_number_of_products_is_a_number():
    with pytest.raises(PassError, match=r"no policy 'products:many'; did you mean 'products:1'\?"):
        Recompute("products:many")


def test_an_unrolled_step_needs_no_more_memory_than_checkpointed_layers():
    def loss(params, tokens):
        h = params["embed"][tokens]
        for i in range(LAYERS):
            h, _ = jax.checkpoint(layer)(h, jax.tree.map(lambda x, i=i: x[i], params["layers"]))
        logits = (rms(h) @ params["embed"].T)[:, :-1]
        picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    _, args = decoder(scanned=False)
    _, saved, flops = decoder_run(False, "full")
    by_hand = compiled(traced(jax.value_and_grad(loss), *args), args)
    assert saved <= by_hand.memory_analysis().temp_size_in_bytes
    assert flops <= 1.05 * by_hand.cost_analysis()["flops"]


def test_the_report_says_the_residuals_before_and_after():
    before, _ = decoder(scanned=True)
    after, (report,) = Pipeline(parse_passes(["recompute:full"], PASSES)).run(before)
    assert (report.name, report.written) == ("recompute", "recompute:full")
    assert report.change == f"residuals 0.536 -> {residual_bytes(after) / 2**20:.3g} MiB"
    assert rewritten(before, "everything_saveable")[1][0].change == "residuals 0.536 -> 0.536 MiB"


def test_everything_saveable_returns_the_program_as_it_is():
    before, _ = decoder(scanned=True)
    assert Recompute("everything_saveable")(before) is before


def mlp(body, **options):
    """A step over a scan of ``body`` and its arguments."""

    def loss(w, x):
        c, ys = jax.lax.scan(body, x, w, **options)
        return (c * c).sum() + sum(y.sum() for y in jax.tree.leaves(ys))

    args = normal(0, 6, 8, 8), normal(1, 4, 8)
    return traced(jax.value_and_grad(loss), *args), args


def dense(c, w):
    return jnp.tanh(jnp.sin(c @ w)), None


@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"unroll": 2}, {"unroll": True}], ids=str)
def test_scans_either_way_and_unrolled(options):
    before, args = mlp(dense, **options)
    after, _ = rewritten(before)
    assert residual_bytes(after) < residual_bytes(before)
    agree(before, after, args)
    walls = 1 if options.get("unroll") is True else 0
    assert count(after, "optimization_barrier") == walls
    again = [compiled(p, args).cost_analysis()["transcendentals"] for p in (before, after)]
    assert again[1] > again[0], "a compiler took the second run for the first"


def test_stacked_results_that_the_user_reads_stay():
    def body(c, w):
        c = jnp.tanh(jnp.sin(c @ w))
        return c, (c, jnp.cos(c))

    before, args = mlp(body)
    after, _ = rewritten(before)
    assert residual_bytes(after) < residual_bytes(before)
    agree(before, after, args)


def test_carries_of_several_parts_with_counters_and_keys():
    def body(state, w):
        c, i, key = state
        key, mine = jax.random.split(key)
        c = jnp.where(jax.random.bernoulli(mine, 0.9, c.shape), jnp.tanh(c @ w), 0) * (1 + i)
        return (c, i + 1, key), None

    def step(w, x, key):
        def loss(w):
            return (jax.lax.scan(body, (x, 0, key), w)[0][0] ** 2).sum()

        return jax.value_and_grad(loss)(w)

    args = normal(0, 6, 8, 8), normal(1, 4, 8), jax.random.key(0)
    before = traced(step, *args)
    after, _ = rewritten(before)
    assert residual_bytes(after) < residual_bytes(before)
    agree(before, after, args)


def test_named_values_are_saved():
    def body(c, w):
        return checkpoint_name(jnp.tanh(jnp.sin(c @ w)), "out"), None

    before, args = mlp(body)
    policy = jax.checkpoint_policies.save_only_these_names("out")
    after, _ = rewritten(before, policy)
    assert residual_bytes(after) < residual_bytes(before)
    agree(before, after, args)


@pytest.mark.parametrize("scanned", [True, False])
def test_effects_happen_once(scanned):
    seen = []

    def body(c, w):
        y = jnp.sin(c @ w)
        jax.debug.callback(lambda v: seen.append(float(v)), y.sum())
        return jnp.tanh(y) + io(y), None

    def io(y):
        return jax.pure_callback(lambda v: np.float32(1) + 0 * v, y, jax.lax.stop_gradient(y))

    def loss(w, x):
        if scanned:
            return (jax.lax.scan(body, x, w)[0] ** 2).sum()
        for i in range(6):
            x, _ = body(x, w[i])
        return (x**2).sum()

    args = normal(0, 6, 8, 8), normal(1, 4, 8)
    before = traced(jax.value_and_grad(loss), *args)
    after, _ = rewritten(before)
    for name in ("debug_callback", "pure_callback"):
        assert count(after, name) == count(before, name) > 0
    assert residual_bytes(after) < residual_bytes(before)
    jax.block_until_ready(compiled(after, args)(*args))
    jax.effects_barrier()
    assert len(seen) == 6


def test_what_the_step_checkpoints_itself_stays():
    before, args = mlp(lambda c, w: (jax.checkpoint(lambda c: dense(c, w)[0])(c), None))
    after, _ = rewritten(before)
    assert residual_bytes(after) <= residual_bytes(before)
    assert count(after, "tanh") == count(before, "tanh")
    assert agree(before, after, args)


@pytest.mark.parametrize("policy", ["full", "dots_saveable"])
def test_a_scan_in_a_scan(policy):
    def outer(c, ws):
        return jax.lax.scan(dense, jnp.sin(c), ws)[0], None

    def loss(w, x):
        return (jax.lax.scan(outer, x, w)[0] ** 2).sum()

    args = normal(0, 3, 4, 8, 8), normal(1, 4, 8)
    before = traced(jax.value_and_grad(loss), *args)
    after, (report,) = rewritten(before, policy)
    agree(before, after, args)
    if policy == "full":
        assert residual_bytes(after) * 5 < residual_bytes(before)
    else:
        assert "not recomputed" in report.change
        assert count(after, "dot_general") == count(before, "dot_general")


def test_branches_stay_and_are_reported():
    def body(c, w):
        return jax.lax.cond(c.sum() > 0, lambda c: jnp.tanh(jnp.sin(c @ w)), lambda c: jnp.cos(c @ w), c), None

    def loss(w, x):
        for i in range(6):
            x, _ = body(x, w[i])
        return (x**2).sum()

    args = normal(0, 6, 8, 8), normal(1, 4, 8)
    before = traced(jax.value_and_grad(loss), *args)
    after, (report,) = rewritten(before)
    assert "not recomputed" in report.change
    assert "MiB of cond at " in report.change
    assert "test_recompute.py:" in report.change
    agree(before, after, args)
    scanned, arguments = mlp(body)
    after, _ = rewritten(scanned)
    assert residual_bytes(after) < residual_bytes(scanned)
    agree(scanned, after, arguments)


def test_loops_of_unknown_length_stay():
    def loss(w, x):
        y = jax.lax.while_loop(lambda c: (c**2).sum() > 1e-3, lambda c: 0.5 * c, jax.lax.stop_gradient(x))
        for i in range(6):
            x = jnp.tanh(jnp.sin((x + y) @ w[i]))
        return (x**2).sum()

    args = normal(0, 6, 8, 8), normal(1, 4, 8)
    before = traced(jax.value_and_grad(loss), *args)
    after, _ = rewritten(before)
    assert count(after, "while") == 1
    assert residual_bytes(after) < residual_bytes(before)
    agree(before, after, args)


def test_gradients_taken_in_a_loop():
    def step(w, xs):
        def micro(total, x):
            def loss(w):
                return (jax.lax.scan(dense, x, w)[0] ** 2).sum()

            return total + jax.grad(loss)(w), None

        return jax.lax.scan(micro, jnp.zeros_like(w), xs)[0]

    args = normal(0, 6, 8, 8), normal(1, 3, 4, 8)
    before = traced(step, *args)
    after, _ = rewritten(before)
    assert 0 < residual_bytes(after) < residual_bytes(before)
    agree(before, after, args)


def test_two_losses_in_turn():
    def step(a, b, x):
        def deep(w, x):
            for i in range(6):
                x = jnp.tanh(jnp.sin(x @ w[i]))
            return x

        first, grad = jax.value_and_grad(lambda a: (deep(a, x) ** 2).sum())(a)
        a = a - 0.1 * grad
        second, grad = jax.value_and_grad(lambda b: (deep(b, deep(a, x)) ** 2).sum())(b)
        return a, b - 0.1 * grad, first, second

    args = normal(0, 6, 8, 8), normal(1, 6, 8, 8), normal(2, 4, 8)
    before = traced(step, *args)
    after, _ = rewritten(before)
    assert residual_bytes(after) < residual_bytes(before)
    agree(before, after, args)


def test_hand_written_gradients():
    @jax.custom_vjp
    def soft(x):
        return jnp.tanh(x)

    soft.defvjp(lambda x: (jnp.tanh(x), (jnp.sin(x), x)), lambda kept, ct: (ct * kept[0] * jnp.cos(kept[1]),))

    before, args = mlp(lambda c, w: (soft(c @ w), None))
    after, _ = rewritten(before)
    assert residual_bytes(after) < residual_bytes(before)
    agree(before, after, args)


def test_second_order_gradients():
    def loss(w, x):
        def inner(x):
            return (jax.lax.scan(dense, x, w)[0] ** 2).sum()

        return (jax.grad(inner)(x) ** 2).sum()

    args = normal(0, 6, 8, 8), normal(1, 4, 8)
    before = traced(jax.value_and_grad(loss), *args)
    after, _ = rewritten(before)
    agree(before, after, args)


def test_a_step_without_gradients_is_left_alone():
    before = traced(lambda w, x: jax.lax.scan(dense, x, w)[0], normal(0, 6, 8, 8), normal(1, 4, 8))
    assert Recompute()(before) is before
    assert residual_bytes(before) == 0


def test_the_clones_count_as_backward():
    before, _ = decoder(scanned=False)
    after, _ = rewritten(before)
    tanhs = [jx.is_backward(e) for e in after.jaxpr.eqns if e.primitive.name == "tanh"]
    assert tanhs.count(False) == LAYERS
    assert 0 < tanhs.count(True) < LAYERS + 1
    assert all(jx.source(e).rpartition(":")[0].endswith("test_recompute.py") for e in after.jaxpr.eqns if jx.source(e))


def test_a_policy_that_answers_otherwise_is_refused():
    before, _ = mlp(dense)
    elsewhere = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "unpinned_host")
    with pytest.raises(PassError, match=r"returns .*Offloadable.* for dot_general at .*test_recompute.py:\d+; it must"):
        Recompute(elsewhere)(before)
    with pytest.raises(PassError, match="takes a policy or the name of one, not 3"):
        Recompute(3)


def test_a_policy_of_jax_sends_residuals_of_layers_to_the_host():
    """Beside what it saves on the device, by name; and in a straight line the report says what stays there."""
    by_name = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["kept"],
        names_which_can_be_offloaded=["sent"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def step(params, x, scanned):
        def layer(h, w):
            kept = checkpoint_name(h @ w, "kept")
            sent = checkpoint_name(jnp.sin(kept) @ w, "sent")
            return jnp.tanh(sent) * jnp.cos(kept), None

        def loss(params):
            if scanned:
                return jax.lax.scan(layer, x, params)[0].sum()
            return functools.reduce(lambda h, w: layer(h, w)[0], params, x).sum()

        return jax.grad(loss)(params)

    params, x = jnp.asarray(normal(0, 4, 8, 8)), jnp.asarray(normal(1, 16, 8))
    for scanned in (True, False):
        fun = functools.partial(step, scanned=scanned)
        before = trace(jax.jit(fun), (params, x), {}, MESH, rules=SHIPPED)
        after, (report,) = Pipeline((Recompute(by_name),)).run(before)
        stacks = [v for e in after.jaxpr.eqns if e.primitive.name == "scan" for v in e.outvars]
        on_host = [v for v in stacks if in_host_memory(v.aval)]
        assert len(on_host) == scanned
        outside = "on the device, since no loop has its layers: name at "
        assert (outside in report.change) == (not scanned)
        assert residual_bytes(after) < residual_bytes(before)
        got, want = jx.as_fun(after.jaxpr)(params, x)[0], jax.jit(fun)(params, x)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * np.abs(want).max())


def named_step(params, x):
    """Two unrolled layers whose values are called by a name, a scope and a parameter."""

    def loss(params):
        h = x
        for layer in params:
            a = checkpoint_name(h @ layer["in"], "entry")
            b = checkpoint_name(jnp.sin(a), "wave")
            with jax.named_scope("mixer"):
                c = jnp.einsum("bi,bj->ij", b, b)
            h = jnp.tanh(jnp.tanh(b @ c) @ layer["out"])
        return (h * h).sum()

    return jax.value_and_grad(loss)(params)


@functools.cache
def named():
    args = [{"in": normal(i, 8, 8), "out": normal(9 - i, 8, 8)} for i in range(2)], normal(4, 4, 8)
    return traced(named_step, *args), args


def test_values_are_called_as_the_user_knows_them():
    groups = residual_groups(named()[0])
    assert [(g.name, g.layers) for g in groups] == [
        ("entry", 2), ("wave", 2), ("mixer", 2), (groups[3].name, 2), ("*.out", 2)
    ]  # fmt: skip
    assert groups[3].name.startswith("test_recompute.py:")
    for scanned in (True, False):
        found = {g.name: g.layers for g in residual_groups(decoder(scanned)[0])}
        assert found.keys() > {f"layers.{n}" for n in ("q", "k", "v", "o", "up", "down")}
        assert found.pop("embed") == 1
        assert set(found.values()) == {LAYERS}


@pytest.mark.parametrize(
    ("scanned", "again", "products", "scans"),
    [
        (True, {"*": "all"}, 7, 2),
        (True, {"layers.up": 1}, 1, 4),
        (True, {"*.up": 1, "layers.q": 3, "layers.k": "all"}, 6, 6),
        (False, {"*.up": 1, "layers.q": 2}, 3, 0),
        (True, {"*": "all", "*.up": 0}, 6, 2),
        (True, {}, 0, 2),
    ],
)
def test_values_are_made_again_by_name_in_as_many_layers(scanned, again, products, scans):
    before, args = decoder(scanned)
    recompute = Recompute.by_name(again)
    after, (report,) = Pipeline((recompute,)).run(before)
    assert Recompute.from_option(report.written.partition(":")[2]) == recompute
    assert count(after, "scan") == scans
    assert products == sum(jx.is_made_again(e) and e.primitive.name == "dot_general" for e in jx.walk(after.jaxpr))
    least, most = (residual_bytes(rewritten(before, p)[0]) for p in ("*=all", "*=0"))
    assert least <= residual_bytes(after) <= most * 1.2  # parts of the stacked weights are copies
    asked = {name: LAYERS if n == "all" else n for name, n in again.items() if "*" not in name}
    assert {g.name: g.again for g in residual_groups(after) if g.name in asked} == asked
    for a, b in zip(decoder_run(scanned, None)[0], compiled(after, args)(*jax.tree.leaves(args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("again", "text"),
    [
        ({"layers.upp": "all"}, r"is called 'layers.upp'; did you mean 'layers.up'\?; there are layers.q, layers.k"),
        ({"attention": "all"}, r"is called 'attention' \(the scores of a small attention .*passes=\['attention'\]"),
        ({"*.up": 5}, "'layers.up' cannot be made again in 5 layers: it has 4"),
        ({"*.up": -1}, r"in -1 layers; say a number, 'all', 'host', 'host:NUMBER' or 'NUMBER\+host'"),
        ({"*.up": "hosts"}, r"in 'hosts' layers; say a number"),
        ({"*.up": "3+host:2"}, r"'layers.up' cannot be made again or on the host in 5 layers \(3\+host:2\): it has 4"),
        ({"a,b": 1}, "'a,b' is no name or pattern of a value"),
        (["*.up"], "must map names or patterns to numbers of layers"),
    ],
)
def test_names_and_counts_that_say_nothing(again, text):
    with pytest.raises(PassError, match=text):
        Recompute.by_name(again)(decoder(True)[0])
    with pytest.raises(PassError, match="is not NAME=all, NAME=host or NAME=NUMBER"):
        Recompute("layers.up=some")


@pytest.mark.parametrize(
    ("counts", "scans", "on_host"),
    [
        ({"layers.up": "host"}, 2, 4),
        ({"*.up": "host", "layers.q": "all"}, 2, 4),
        ({"*.up": "1+host:2"}, 6, 2),
        ({"*.up": "2+host", "layers.q": "host:1"}, 6, 3),
        ({"*": "host"}, 2, 28),
    ],
)
def test_values_wait_in_the_host_s_memory_by_name_in_as_many_layers(counts, scans, on_host):
    before, args = decoder(True)
    recompute = Recompute.by_name(counts)
    after, (report,) = Pipeline((recompute,)).run(before)
    assert Recompute.from_option(report.written.partition(":")[2]) == recompute
    assert count(after, "scan") == scans
    sent = [v for e in after.jaxpr.eqns if e.primitive.name == "scan" for v in e.outvars if in_host_memory(v.aval)]
    rows = Counter(v.aval.shape[1:] for v in sent for _ in range(v.aval.shape[0]))
    assert sum(rows.values()) == on_host
    assert not any(in_host_memory(v.aval) for v in after.jaxpr.outvars)
    for a, b in zip(decoder_run(True, None)[0], compiled(after, args)(*jax.tree.leaves(args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_sums_of_rows_stay_on_the_device_while_the_attention_s_output_is_on_the_host():
    width = 32  # a row of the output for one of the sums

    def loss(ws, x):
        def attend(h, w):
            scores = jnp.einsum("bqd,bkd->bqk", h @ w["q"], h)
            return h + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores, -1), h), None

        return jnp.sum(jax.lax.scan(attend, x, ws)[0] ** 2)

    args = ({"q": normal(0, LAYERS, width, width)}, normal(1, BATCH, SEQ, width))
    before = traced(jax.grad(loss), *args)
    after, _ = Pipeline((Attention(), Recompute.by_name({"attention": "host"}))).run(before)
    forward = next(e for e in after.jaxpr.eqns if e.primitive.name == "scan")
    stacks = {v.aval.shape: in_host_memory(v.aval) for v in forward.outvars}
    assert stacks[LAYERS, BATCH, SEQ, width] is True
    assert stacks[LAYERS, BATCH, SEQ] is False
    agree(before, after, args, 1e-5)


def test_unrolled_layers_hold_on_the_device_what_would_wait_on_the_host():
    before, _ = decoder(False)
    after, (report,) = rewritten(before, "layers.up=host")
    assert not any(in_host_memory(v.aval) for e in jx.walk(after.jaxpr) for v in e.outvars)
    assert report.change.endswith("; on the device, since no loop has its layers: layers.up")


def test_layers_with_effects_cannot_differ():
    def body(c, w):
        jax.debug.print("{}", c[0, 0])
        return jnp.tanh(c @ w), None

    before, _ = mlp(body)
    with pytest.raises(PassError, match="cannot differ, for it has effects; say 'all' or 0"):
        Recompute.by_name({"*": 2})(before)


@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"unroll": 2}], ids=str)
def test_a_scan_is_cut_whichever_way_it_runs(options):
    def body(c, w):
        c = jnp.tanh(jnp.sin(c @ w))
        return c, c @ w.T  # read as a whole

    before, args = mlp(body, **options)
    after, _ = rewritten(before, f"{residual_groups(before)[0].name}=2")
    assert count(after, "scan") == 2 * count(before, "scan")
    agree(before, after, args)


@pytest.mark.parametrize("base", [2, 3])
def test_what_is_held_takes_least_time_within_the_room(base):
    """Against every pair of choices and every number of layers; of two loops the room is divided."""
    rng = np.random.default_rng(0)
    names, layers = ("a", "b", "c"), 5
    sizes, times, sent = (rng.uniform(1, 9, 3) for _ in range(3))
    digits = np.array([[s // base**i % base for i in range(3)] for s in range(base**3)])
    loop = LayerLoop(
        layers, names, names, (digits == 0) @ times + (digits == 2) @ sent, (digits == 1) @ sizes, base=base
    )
    rank = np.array([0, 2, 1])[digits]
    for room in (0, 11, 37, 55, 1000):
        (found,) = choose_held([loop], room)
        price = price_of_held([loop], [found])
        assert price.bytes <= room + 1e-9
        every = [
            k * loop.seconds[low] + (layers - k) * loop.seconds[high]
            for low in range(base**3)
            for high in range(base**3)
            for k in range(layers + 1)
            if (rank[low] <= rank[high]).all() and k * loop.bytes[low] + (layers - k) * loop.bytes[high] <= room
        ]
        assert price.seconds == pytest.approx(min(every))
        both = price_of_held([loop, loop], choose_held([loop, loop], 2 * room))
        assert both.bytes <= 2 * room + 1e-9
        assert both.seconds <= 2 * price.seconds * 1.2


@pytest.mark.parametrize(("least", "is_sent"), [(1 / 8, True), (1 / 2, False)])
def test_what_is_small_beside_the_largest_value_stays_on_the_device_unless_asked_for(monkeypatch, least, is_sent):
    monkeypatch.setattr(sets, "SMALLEST_SENT", least)
    program, _ = decoder(True)
    program = replace(program, mesh=MeshConfig(axes={"data": 8}, tpu="v5e:2x4").mesh())
    names = [g.name for g in residual_groups(program)]
    small = "layers.q"
    prices = {n: (250.0 if n == small else 1e3, 1.0) for n in names}
    found = Recompute("full").within(program, prices, dict.fromkeys(names, (LAYERS, 0)), [(9.0, 6e3)])
    assert found is not None
    sent = {p.partition("=")[0] for p in str(found[0]).partition(":")[2].split(",") if p.endswith("host")}
    assert sent
    assert (small in sent) == is_sent
