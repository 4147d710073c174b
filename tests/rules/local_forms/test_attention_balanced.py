"""Balanced causal rings: the numbers of one device, in every size of ring, and which attentions are computed so."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

import autoshard
import autoshard.rules.attention as rules_of_attention
from autoshard.backend.audit import audit
from autoshard.machine.mesh import AttentionRates, Link, LogicalMesh
from autoshard.rules.local_forms.attention_balanced import attend_balanced, can_balance, gradients_balanced
from autoshard.transforms.attention_op import AttentionConfig, ScoreOp, attend, attention_gradients
from tests.attentions import FORMS, HASTY, close, normal, operands, trained

BAND, SCALE, MASK = ScoreOp("band", -1e9, high=0), ScoreOp("scale", 0.3), ScoreOp("mask", -1e9, extra=0)
DIMS = ("bqhgd", "bkhd", "bkhe")
GROUPS = AttentionConfig(
    *DIMS, "bqhge", "bhgq", "q", "k", (SCALE, BAND), (), *["float32"] * 4,
    cotangent_dims="beqhg", grad_dims=("dbqhg", "bkhd", "bekh"), grad_dtypes=("float32",) * 3,
)  # fmt: skip
MASKED = replace(GROUPS, score_ops=(SCALE, BAND, MASK), extra_dims=("b...k",))
CONFIGS = {
    "groups": GROUPS,
    "infinite": replace(GROUPS, score_ops=(SCALE, replace(BAND, constant=-np.inf))),
    "soft cap": replace(GROUPS, score_ops=(SCALE, ScoreOp("tanh"), ScoreOp("scale", 2.0), BAND)),
    "padded": MASKED,
    "weak": replace(GROUPS, score_ops=(SCALE, replace(BAND, constant=-1.0))),
    "weak and padded": replace(MASKED, score_ops=(SCALE, replace(BAND, constant=-1.0), replace(MASK, constant=-1.0))),
}
"""In the last two masked keys have weight."""


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        *(("groups", n) for n in (2, 3, 4, 8)),
        *(("infinite", 5), ("soft cap", 2), ("soft cap", 8), ("padded", 4), ("weak", 3), ("weak and padded", 4)),
    ],
)
def test_the_numbers_are_those_of_one_device(name, parts):
    """Values, statistics and gradients, whichever travels; the devices are those of `jax.vmap`."""
    config, length = CONFIGS[name], 4 * parts
    sizes = {"b": 2, "q": length, "k": length, "h": 2, "g": 2, "d": 8, "e": 4}
    dims = (*DIMS, config.cotangent_dims)
    q, k, v, ct = (jnp.asarray(normal(i, *[sizes[c] for c in x])) for i, x in enumerate(dims))
    there = np.arange(length) >= np.array([[0], [length // 2 + 1]])  # early queries of the second sequence see no key
    extras = [jnp.asarray(there[:, None, None, None])] if config.extra_dims else []

    def shards(x, letters):
        at = next(i for i, c in enumerate(letters) if c in "qk")
        return jnp.stack(jnp.split(x, parts, at))

    def whole(x, letters):
        at = next(i for i, c in enumerate(letters) if c in "qk")
        return jnp.concatenate(list(x), at)

    def each(fun, *xs):
        out = jax.vmap(lambda *shards: fun(("s",), *shards, *extras), axis_name="s")(*xs)
        return [whole(x, letters) for x, letters in zip(out, result_dims[len(xs) > 3], strict=True)]

    result_dims = ((config.out_dims, config.row_dims, config.row_dims), config.grad_dims)

    @jax.jit
    def both(q, k, v, ct):
        want = attend(q, k, v, *extras, config=config)
        sides = [shards(x, letters) for x, letters in zip((q, k, v), DIMS, strict=True)]
        have = each(functools.partial(attend_balanced, config), *sides)
        gradients = [attention_gradients(q, k, v, *want, ct, *extras, config=config)]
        rest = [shards(x, letters) for x, letters in zip((*want, ct), (*result_dims[0], dims[3]), strict=True)]
        for travelling in ("keys", "queries"):
            gradients.append(each(functools.partial(gradients_balanced, config, travelling), *sides, *rest))
        return want, have, gradients

    (out, *rows), (own_out, *own_rows), (wanted, *found) = both(q, k, v, ct)
    close(own_out, out, 1e-5)
    close(*(peak + jnp.log(total) for peak, total in (own_rows, rows)), 1e-5)
    for gradients in found:
        close(gradients, wanted, 1e-5)


FAST = replace(HASTY, links={"link": Link("link", 1e9, 0.0)})
"""Operations are dear, and bytes are not."""


@pytest.fixture
def balanced(monkeypatch):
    """The names of the balanced forms that run."""
    found = []

    def spied(name, form):
        def run(*args):
            found.append(name)
            return form(*args)

        return run

    for name in ("attend_balanced", "gradients_balanced"):
        monkeypatch.setattr(rules_of_attention, name, spied(name, getattr(rules_of_attention, name)))
    return found


def sharded(fun, mesh, spec):
    shardings = {"in_shardings": (spec,) * 3, "out_shardings": ((P(), spec), (spec,) * 3)}
    return autoshard.jit(trained(fun), mesh=mesh, strategy="replicated", passes=["attention"], **shardings)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("causal", {"s": 2}),
        ("groups", {"s": 4}),
        ("jax.nn groups", {"s": 8}),
        ("soft cap", {"s": 4}),
        ("padded and causal", {"s": 8}),
        ("causal", {"x": 2, "y": 4}),
    ],
)
def test_numbers_and_plan_of_a_step(name, axes, balanced):
    fun, heads, _ = FORMS[name]
    mesh = LogicalMesh(tuple(axes), tuple(axes.values()), FAST)
    step, args = sharded(fun, mesh, P(None, tuple(reversed(axes)))), operands(heads=heads)
    plan, compiled = step.plan(*args), step.lower(*args).compile()
    assert set(balanced) == {"attend_balanced", "gradients_balanced"}
    close(step(*args), jax.jit(trained(fun))(*args), 1e-5)
    assert audit(compiled, plan).clean, str(audit(compiled, plan))


@pytest.mark.parametrize("name", ["full", "window", "biased"])
def test_other_masks_run_in_plain_rings(name, balanced):
    fun, heads, _ = FORMS[name]
    mesh = LogicalMesh(("s",), (4,), FAST)
    sharded(fun, mesh, P(None, "s")).lower(*operands(heads=heads, batch=3))
    assert not balanced


def test_a_causal_ring_over_slow_links_is_not_balanced(balanced):
    slow = replace(HASTY, links={"link": Link("link", 1.0, 0.0)})
    mesh = LogicalMesh(("s",), (4,), slow)
    sharded(FORMS["causal"][0], mesh, P(None, "s")).lower(*operands(batch=1))
    assert not balanced


KERNEL = replace(FAST, attention=AttentionRates("splash_interpreted", 0.5, 0.4))


@pytest.mark.parametrize(("name", "parts"), [("causal", 2), ("soft cap", 2), ("groups", 4)])
def test_numbers_of_the_kernel(name, parts, balanced):
    fun, heads, _ = FORMS[name]
    step = sharded(fun, LogicalMesh(("s",), (parts,), KERNEL), P(None, "s"))
    args = operands(heads=heads, seq=256 * parts, batch=1)
    args = tuple(x[:, :, :1] for x in args) if parts == 2 else args  # fewer heads than devices
    plan, compiled = step.plan(*args), step.lower(*args).compile()
    assert "all of them run by splash attention" in next(p.change for p in plan.passes if p.name == "attention")
    assert set(balanced) == {"attend_balanced", "gradients_balanced"}
    ((value, *found), (wanted, *expected)) = (jax.tree.leaves(run(*args)) for run in (compiled, jax.jit(trained(fun))))
    close(found, expected, 1e-5)
    np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-3)  # a sum of terms of both signs
    assert audit(compiled, plan).clean, str(audit(compiled, plan))


@pytest.mark.parametrize(
    ("config", "keys", "can"),
    [
        (GROUPS, 8, True),
        (GROUPS, 7, False),
        (replace(GROUPS, score_ops=(SCALE,)), 8, False),
        (replace(GROUPS, score_ops=(replace(BAND, high=1),)), 8, False),
        (replace(GROUPS, score_ops=(replace(BAND, low=-4),)), 8, False),
        (MASKED, 8, True),
        (replace(MASKED, extra_dims=("bq..k",)), 8, False),
        (replace(MASKED, score_ops=(BAND, replace(MASK, constant=-5.0))), 8, False),  # two masked scores
        (replace(GROUPS, kernel="splash"), 256, True),
        (replace(GROUPS, kernel="splash"), 128, False),
    ],
)
def test_which_rings_can_be_balanced(config, keys, can):
    assert can_balance(config, keys) is can
