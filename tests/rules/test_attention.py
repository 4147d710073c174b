"""Attention over a sequence in parts: the numbers of one device, what was planned, fewer bytes than XLA sends."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import jaxpr as jx
from autoshard.backend.audit import audit
from autoshard.backend.hlo.collectives import collectives
from autoshard.machine.hardware import load_hardware
from autoshard.machine.mesh import LogicalMesh
from autoshard.rules import OWN
from autoshard.rules.local_forms.attention_ring import key_reach, masked_score
from autoshard.transforms.attention_op import AttentionConfig, ScoreOp
from tests.attentions import (
    FORMS,
    LAYOUTS,
    PADDED,
    H,
    K,
    causal_kind,
    close,
    every_form,
    mesh,
    mix,
    operands,
    over_sequence,
    rewritten,
    scores,
    seconds_by,
    trained,
    way,
)
from tests.combinations import every_second, every_third


def sharded(fun, layout):
    on, spec = layout
    shardings = {"in_shardings": (spec,) * 3, "out_shardings": ((P(), spec), (spec,) * 3)}
    return autoshard.jit(trained(fun), mesh=on, strategy="replicated", passes=["attention"], **shardings)


@pytest.mark.parametrize(
    ("name", "layout"), every_third(["full", "causal", "padded", "biased", "jax.nn groups"], LAYOUTS)
)
def test_numbers_on_a_split_sequence(name, layout):
    fun, heads, _ = FORMS[name]
    args = operands(heads=heads)
    step = sharded(fun, LAYOUTS[layout])
    plan = step.plan(*args)
    assert [bool(i.axes) for i in plan.islands] == [layout != "nothing"] * 2
    close(step(*args), jax.jit(trained(fun))(*args))
    assert audit(step.lower(*args).compile(), plan).clean


@every_form
def test_numbers_of_every_form_in_a_ring(name):
    fun, heads, _ = FORMS[name]
    args, on, spec = operands(heads=heads), mesh(s=4), P(None, "s")
    step = autoshard.jit(trained(fun), mesh=on, strategy="replicated", passes=["attention"], in_shardings=(spec,) * 3)
    assert [i.axes for i in step.plan(*args).islands] == [("s",)] * 2
    close(step(*args), jax.jit(trained(fun))(*args))


@pytest.mark.parametrize("name", ["causal", "padded", "one key head", "window"])
def test_numbers_in_double_and_half_precision(name):
    fun, heads, _ = FORMS[name]
    with jax.enable_x64(True):
        args = operands("float64", heads)
        step = sharded(fun, LAYOUTS["sequence and batch"])
        assert len(step.plan(*args).islands) == 2
        close(step(*args), jax.jit(trained(fun))(*args), rtol=1e-12)
    half = tuple(jnp.asarray(a, "bfloat16") for a in operands(heads=heads))
    step = sharded(fun, LAYOUTS["sequence and batch"])
    assert len(step.plan(*half).islands) == 2
    close(step(*half), jax.jit(trained(fun))(*half), rtol=3e-2)


def test_rows_without_any_key_are_nan_as_they_are_without_the_pass_and_blocks_without_are_not():
    def fun(q, k, v):
        return mix(jax.nn.softmax(jnp.where(PADDED[:, None, None], scores(q, k), -jnp.inf), -1), v)

    args = operands()
    step = sharded(fun, LAYOUTS["sequence"])
    assert len(step.plan(*args).islands) == 2
    (_, got), _ = step(*args)
    (_, want), _ = jax.jit(trained(fun))(*args)
    assert np.isnan(want[3]).all()
    assert not np.isnan(want[:3]).any()
    close(got, want)


# config, heads of keys, sequences in the batch, whether gradients are taken, and what carries the keys or the heads
WIRE = {
    "full, trained": ("full", H, 4, True, "all-to-all"),
    "full, few heads, trained": ("full", H, 1, True, "collective-permute"),
    "causal, trained": ("causal", H, 4, True, "all-to-all"),
    "causal, few heads": ("causal", H, 1, False, "collective-permute"),
    "causal, few heads, trained": ("causal", H, 1, True, "collective-permute"),
    "groups, trained": ("jax.nn groups", K, 4, True, "all-to-all"),
    "groups, few heads, trained": ("groups", K, 1, True, "collective-permute"),
    "window": ("window", H, 4, False, "collective-permute"),
    "window, trained": ("window", H, 4, True, "collective-permute"),
}
HALF = ("causal, trained", "groups, few heads, trained")
WIRED = [(name, "float32") for name in WIRE] + [(name, "bfloat16") for name in HALF]


@pytest.mark.parametrize(
    ("name", "heads", "batch", "gradients", "kind", "dtype"),
    [(*WIRE[name], dtype) for name, dtype in WIRED],
    ids=map(", ".join, WIRED),
)
def test_fewer_bytes_are_sent_and_less_memory_used_than_by_xla_alone(name, heads, batch, gradients, kind, dtype):
    fun, on, spec = FORMS[name][0], *LAYOUTS["sequence"]
    args = tuple(jnp.asarray(a, dtype) for a in operands(heads=heads, seq=512, batch=batch))
    fun, out = (trained(fun), ((P(), spec), (spec,) * 3)) if gradients else (fun, spec)
    step = autoshard.jit(
        fun, mesh=on, strategy="replicated", passes=["attention"], in_shardings=(spec,) * 3, out_shardings=out
    )
    plan, ours = step.plan(*args), step.lower(*args).compile()
    placed = jax.tree.map(
        lambda p: NamedSharding(on.concrete(), p), ((spec,) * 3, out), is_leaf=lambda p: isinstance(p, P)
    )
    alone = jax.jit(fun, in_shardings=placed[0], out_shardings=placed[1]).lower(*args).compile()
    found = [collectives(c.as_text(), on) for c in (ours, alone)]
    sent = [sum(c.wire_bytes(on) for c in cs) for cs in found]
    memory = [c.memory_analysis().temp_size_in_bytes for c in (ours, alone)]
    table = "\n".join(
        f"{who}: {n:,.0f} bytes sent, {size:,} memory: {', '.join(map(str, cs))}"
        for who, n, size, cs in zip(("ours", "xla"), sent, memory, found, strict=True)
    )
    assert sent[0] < sent[1], table
    assert memory[0] < memory[1] / 2, table
    assert kind in {c.kind for c in found[0]}, table
    if dtype == "float32":  # a CPU has no collectives in half precision: XLA sends twice the bytes there, for both
        assert audit(ours, plan).clean, str(audit(ours, plan))
    close(step(*args), alone(*jax.device_put(args, placed[0])), rtol=2e-5 if dtype == "float32" else 3e-2)


@pytest.mark.parametrize(
    ("name", "layout"),
    every_third(
        ["full", "causal", "padded", "padded and causal", "window", "groups", "one key head"],
        ["sequence", "sequence and heads", "two axes in another order"],
    ),
)
def test_numbers_where_there_are_too_few_heads_to_exchange(name, layout):
    """Three sequences, and heads that are few or split themselves: blocks travel, in rings and in chains."""
    fun, heads, _ = FORMS[name]
    args = operands(heads=heads, batch=3)
    step = sharded(fun, LAYOUTS[layout])
    plan, compiled = step.plan(*args), step.lower(*args).compile()
    assert sum("attend" in island.op or "attention" in island.op for island in plan.islands) == 2
    assert "collective-permute" in {c.kind for c in collectives(compiled.as_text(), plan.mesh)}
    assert audit(compiled, plan).clean, str(audit(compiled, plan))
    close(step(*args), jax.jit(trained(fun))(*args))


@pytest.mark.parametrize(("name", "batch"), every_second(["causal", "padded and causal", "window"], [3, 4]))
def test_derivatives_of_the_step_to_the_second_order(name, batch):
    fun, heads, _ = FORMS[name]
    on, spec = LAYOUTS["sequence"]
    with jax.enable_x64(True):
        args = operands("float64", heads, batch=batch)
        step = autoshard.jit(fun, mesh=on, strategy="replicated", passes=["attention"], in_shardings=(spec,) * 3)
        assert len(step.plan(*args).islands) == 1

        def twice(fun):
            first = jax.grad(lambda *a: jnp.sin(fun(*a)).sum(), (0, 1, 2))
            return jax.jit(lambda a: (first(*a), jax.jvp(first, a, a)[1]))(args)

        close(twice(step), twice(fun), rtol=1e-10)


def config(*steps):
    return AttentionConfig("bqhe", "bkhe", "bkhe", "bqhe", "bhq", "q", "k", steps, (), *("float32",) * 4)


def band(number, low=None, high=None):
    return ScoreOp("band", number, low=low, high=high)


@pytest.mark.parametrize(
    ("steps", "score"),
    [
        ([band(-1e9, high=0)], -1e9),
        ([band(-np.inf, high=0), ScoreOp("bias", extra=0)], -np.inf),
        ([ScoreOp("bias", extra=0), band(-1e9, high=0), ScoreOp("scale", 2.0), ScoreOp("shift", 1.0)], -2e9 + 1),
        ([band(-1e9, high=0), ScoreOp("mask", -1e9, 0)], -1e9),
        ([ScoreOp("mask", -1e30, 0), band(-1e9, high=0)], -1e9),
        ([band(-1e9, high=0), ScoreOp("mask", -1e30, 0)], None),
        ([band(-1e9, high=0), ScoreOp("bias", extra=0)], None),
        ([band(-1e9, high=0), band(-1e30, low=-3)], None),
        ([band(-np.inf, high=0), ScoreOp("scale", -1.0)], None),
        ([band(-np.inf, high=0), ScoreOp("scale", 0.0)], None),
    ],
)
def test_the_score_of_masked_keys(steps, score):
    assert masked_score(config(*steps)) == score
    if score is None:
        assert key_reach(config(*steps), 8, 4).ring


def by_bytes(algorithms, parts):
    """The algorithm whose busiest device sends fewest bytes."""

    def sent(a):
        return sum(n if kind == "collective-permute" else n * (parts - 1) / parts for kind, n in a.sent)

    return min(algorithms, key=sent)


def test_a_long_causal_attention_trades_heads_where_a_ring_would_send_less_and_wait_for_its_last_device():
    on = LogicalMesh(("s",), (4,), load_hardware("tpu-v6e"))
    kind = causal_kind(on, 2**17)
    found, algorithms, taken = over_sequence(kind, on)
    ring = by_bytes(algorithms, 4)
    assert (way(ring), way(taken)) == ("attend_ring", "attend_ulysses")
    assert found.seconds(on) < 0.6 * seconds_by(kind, on, ring)


@pytest.mark.parametrize("backward", [False, True])
def test_a_long_causal_ring_is_balanced_and_its_copies_are_priced(backward):
    on = LogicalMesh(("s",), (16,), load_hardware("tpu-v6e"))
    kind = causal_kind(on, 2**17, backward=backward)
    found, algorithms, taken = over_sequence(kind, on)
    assert way(taken) == ("gradients_balanced" if backward else "attend_balanced")
    assert found.seconds(on) < 0.65 * min(seconds_by(kind, on, a) for a in algorithms if "ring" in way(a))
    without = seconds_by(kind, on, taken._replace(moved=0))
    assert found.seconds(on) - without == pytest.approx(taken.moved / on.hardware.memory_rate, rel=1e-6)
    short = causal_kind(on, 2**13, backward=backward)
    assert "ring" in way(over_sequence(short, on)[2]), "what is exchanged would take longer than what it saves"


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("chip", ["tpu-v6e", "tpu-v5p", "h100"])
def test_no_attention_takes_longer_than_by_any_other_algorithm(chip, backward):
    hardware, flipped = load_hardware(chip), 0
    for parts in (2, 4, 8, 32):
        on = LogicalMesh(("s",), (parts,), hardware)
        for length, key_heads in itertools.product((2**14, 2**18), (1, 8, 32)):
            kind = causal_kind(on, length, key_heads=key_heads, backward=backward)
            found, algorithms, taken = over_sequence(kind, on)
            seconds = [seconds_by(kind, on, a) for a in algorithms]
            assert found.seconds(on) == pytest.approx(min(seconds), rel=1e-12)
            assert [(c.kind, c.bytes) for c in found.collectives] == list(taken.sent)
            flipped += way(by_bytes(algorithms, parts)) != way(taken)
    assert flipped, "or bytes would do"


@pytest.mark.parametrize("length", [1, 3, 4])
@pytest.mark.parametrize("low", [None, -40, -9, -4, -3, 0, 2, 6])
@pytest.mark.parametrize("high", [None, -5, -1, 0, 1, 4, 5, 40])
def test_how_far_queries_reach(length, low, high):
    if low is not None and high is not None:
        low, high = sorted((low, high))
    parts = 8
    ahead = np.arange(parts * length) - np.arange(parts * length)[:, None]
    seen = (ahead >= (-np.inf if low is None else low)) & (ahead <= (np.inf if high is None else high))
    rows, cols = np.nonzero(seen.reshape(parts, length, parts, length).any((1, 3)))
    reach = key_reach(config(band(-np.inf, low, high)), parts, length)
    if reach.ring:
        assert (rows - cols).max() == (cols - rows).max() == parts - 1
    else:
        assert reach.before == max(0, *(rows - cols), 0)
        assert reach.behind == max(0, *(cols - rows), 0)


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        (
            "causal",
            "abc., abc., abc. -> ac.b, acb, acb {b: local}",
            "abc., abc., abc., ac.b, acb, acb, ac.b -> acb., acb., ac.b {b: local}",
        ),
        (  # groups pass forwards, and are summed over backwards
            "groups",
            "abcd., abc., abc. -> ac.db, acbd, acbd {b: local}",
            "abc.., abc., abc., ac..b, acb., acb., ac..b -> acb.., acb., ac.b {b: local}",
        ),
        (  # a mask of keys is whole wherever keys are split
            "padded",
            "abc., abc., abc., a... -> ac.b, acb, acb {b: local}",
            "abc., abc., abc., ac.b, acb, acb, ac.b, a... -> acb., acb., ac.b {b: local}",
        ),
    ],
)
def test_the_rules(name, forward, backward):
    fun, heads, _ = FORMS[name]
    done, _ = rewritten(trained(fun), operands(heads=heads))
    texts = [str(OWN[e.primitive](*map(jx.aval, e.invars), **e.params)) for e in done.jaxpr.eqns if e.primitive in OWN]
    assert texts == [forward, backward]
