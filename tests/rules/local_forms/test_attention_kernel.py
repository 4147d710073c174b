"""Attention by a kernel: the numbers of plain JAX code, for any layout of operands and whatever is sharded."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.backend.audit import audit
from autoshard.backend.hlo.collectives import collectives
from autoshard.machine.mesh import AttentionRates, LogicalMesh
from autoshard.rules.local_forms.attention_kernel import attend_fused, gradients_fused
from autoshard.transforms.attention_kernels import KERNELS, unsupported_reason
from autoshard.transforms.attention_op import AttentionConfig, ScoreOp, attend, attention_gradients
from tests.attentions import FORMS as WRITTEN
from tests.attentions import HASTY, LAYOUTS, close, operands, trained
from tests.combinations import every_third

BAND, SCALE = ScoreOp("band", -1e9, high=0), ScoreOp("scale", 0.3)
REST = ((), *["float32"] * 4)
FORMS = {
    "heads last": AttentionConfig("bqhd", "bkhd", "bkhe", "bqhe", "bhq", "q", "k", (SCALE, BAND), *REST),
    "heads first": AttentionConfig("bhqd", "bhkd", "bhke", "bqhe", "bhq", "q", "k", (BAND, SCALE), *REST),
    "groups": AttentionConfig("bqhgd", "bkhd", "bkhe", "bqhge", "bhgq", "q", "k", (BAND,), *REST),
    "groups first": AttentionConfig("gbhqd", "hbkd", "hkbe", "bqhge", "bghq", "q", "k", (), *REST),
    "one key head": AttentionConfig("bqgd", "bkd", "bke", "bqge", "bgq", "q", "k", (SCALE, SCALE), *REST),
    "one head": AttentionConfig("qd", "kd", "ke", "qe", "q", "q", "k", (BAND,), *REST),
}
SIZES = {"b": 2, "h": 3, "g": 2, "q": 16, "k": 16, "d": 8, "e": 8}


def shaped(letters, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=[SIZES[c] for c in letters]), "float32")


@pytest.mark.parametrize("name", FORMS)
def test_the_numbers_are_those_of_the_composition(name):
    config = FORMS[name]
    grads = tuple(x[::-1] for x in (config.query_dims, config.key_dims, config.value_dims))
    config = replace(
        config, kernel="cudnn", cotangent_dims=config.out_dims[::-1], grad_dims=grads, grad_dtypes=("float32",) * 3
    )
    ours = [shaped(x, i) for i, x in enumerate((config.query_dims, config.key_dims, config.value_dims))]
    assert "float32" in unsupported_reason(config, *ours, "cudnn"), "and nothing else stands in the way"
    want, have = jax.jit(lambda *a: (attend(*a, config=config), attend_fused(config, *a)))(*ours)
    np.testing.assert_allclose(have[0], want[0], rtol=1e-5, atol=1e-5)
    logs = [peak + jnp.log(total) for _, peak, total in (want, have)]
    np.testing.assert_allclose(*logs, rtol=1e-5, atol=1e-5)
    cotangent = shaped(config.cotangent_dims, 3)
    both = jax.jit(lambda *a: (gradients_fused(config, *a), attention_gradients(*a, config=config)))(
        *ours, *want, cotangent
    )
    for a, b in zip(*both, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


KERNEL = replace(HASTY, attention=AttentionRates("cudnn", 0.5, 0.4))
BATCHES = LogicalMesh(("b",), (4,), KERNEL), P("b")
HEADS = LogicalMesh(("b", "h"), (2, 2), KERNEL), P("b", None, "h")
SPLITS = {**{name: (replace(on, hardware=KERNEL), spec) for name, (on, spec) in LAYOUTS.items()}}
SPLITS |= {"batch": BATCHES, "batch and heads": HEADS}


@pytest.fixture
def any_float(monkeypatch):
    """The kernel supports float32 too, so that numbers can be compared closely with one device's."""
    cudnn = KERNELS["cudnn"]
    monkeypatch.setitem(KERNELS, "cudnn", replace(cudnn, dtypes=(*cudnn.dtypes, "float32")))


def sharded(fun, split, backward=True):
    on, spec = SPLITS[split]
    out = ((P(), spec), (spec,) * 3) if backward else spec
    fun = trained(fun) if backward else fun
    return autoshard.jit(fun, mesh=on, strategy="replicated", in_shardings=(spec,) * 3, out_shardings=out)


def said(plan):
    return next(p.change for p in plan.passes if p.name == "attention")


@pytest.mark.parametrize(
    ("name", "split"), every_third(["full", "one key head", "jax.nn groups", "causal", "groups", "window"], SPLITS)
)
def test_numbers_of_whatever_is_sharded(name, split, any_float):
    fun, heads, _ = WRITTEN[name]
    args = operands(heads=heads)
    if name == "one key head" and "heads" in split:
        pytest.skip("there are no key heads to split")
    step = sharded(fun, split)
    plan = step.plan(*args)
    assert "1 forward and 1 backward attentions replaced by one operation each, all of them run by cuDNN" in said(plan)
    assert [bool(i.axes) for i in plan.islands] == [split not in ("nothing", "batch", "batch and heads")] * 2
    close(step(*args), jax.jit(trained(fun))(*args))
    assert audit(step.lower(*args).compile(), plan).clean


@pytest.mark.parametrize(
    ("name", "split"),
    every_third(["full", "causal", "groups"], ["sequence", "sequence and heads", "two axes in another order"]),
)
def test_numbers_in_a_ring(name, split, any_float):
    """Three sequences, and heads that are few or split themselves: none can be traded."""
    fun, heads, _ = WRITTEN[name]
    args = operands(heads=heads, batch=3)
    step = sharded(fun, split)
    plan, compiled = step.plan(*args), step.lower(*args).compile()
    assert "all of them run by cuDNN" in said(plan)
    assert "collective-permute" in {c.kind for c in collectives(compiled.as_text(), plan.mesh)}
    assert audit(compiled, plan).clean, str(audit(compiled, plan))
    close(step(*args), jax.jit(trained(fun))(*args))


@pytest.mark.parametrize("split", ["batch", "sequence", "sequence and heads"])
def test_numbers_in_half_precision(split):
    fun, heads, _ = WRITTEN["groups"]
    args = tuple(jnp.asarray(x, "bfloat16") for x in operands(heads=heads))
    step = sharded(fun, split)
    assert "all of them run by cuDNN" in said(step.plan(*args))
    close(step(*args), jax.jit(trained(fun))(*args), rtol=3e-2)


def test_what_the_kernel_does_not_support_is_not_replaced_and_the_plan_says_why():
    fun, heads, _ = WRITTEN["causal"]
    plan = sharded(fun, "batch").plan(*operands(heads=heads))
    assert "0 forward and 0 backward" in said(plan)
    assert "cuDNN takes queries, keys and values of bfloat16 or float16, not float32" in said(plan)
    half = tuple(jnp.asarray(x, "bfloat16") for x in operands())
    plan = sharded(WRITTEN["padded"][0], "batch").plan(*half)
    assert "of masks and biases cuDNN is used for the causal mask and causal windows (mask)" in said(plan)
