"""What the kernels of libraries do not take, which blocks they skip, and what their time is worth."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import jax
import numpy as np
import pytest

from autoshard.machine.hardware import AttentionKernelConfig, load_hardware
from autoshard.transforms.attention_kernels import (
    KERNELS,
    KernelCall,
    causal_share,
    flops_at_peak,
    in_rings,
    kernel_call,
    kernel_flops_at_peak,
    peak_share,
    unsupported_reason,
)
from autoshard.transforms.attention_op import AttentionConfig, ScoreOp

ROOT = Path(__file__).parents[2]
SCALE, BAND = ScoreOp("scale", 0.3), ScoreOp("band", -1e9, high=0)
CAP = (ScoreOp("scale", 1 / 50), ScoreOp("tanh"), ScoreOp("scale", 50.0))
CONFIG = AttentionConfig(
    "bqhd", "bkhd", "bkhe", "bqhe", "bhq", "q", "k", (SCALE, BAND), (), *["float32"] * 2, *["bfloat16"] * 2
)
SIZES = {"b": 2, "q": 512, "k": 512, "h": 4, "g": 2, "d": 64, "e": 64}


def sides(config, dtype="bfloat16", sizes=()):
    sizes = SIZES | dict(sizes)
    dims = (config.query_dims, config.key_dims, config.value_dims)
    return [jax.ShapeDtypeStruct([sizes[c] for c in s], dtype) for s in dims]


def test_tables_name_these_kernels():
    assert set(get_args(AttentionKernelConfig.model_fields["kernel"].annotation)) == set(KERNELS)


EITHER = {
    "": CONFIG,
    "(mask)": replace(CONFIG, score_ops=(ScoreOp("mask", -1e9, 0),), extra_dims=("b..k",)),
    "(bias)": replace(CONFIG, score_ops=(ScoreOp("bias", extra=0),), extra_dims=(".hqk",)),
    "these have one by their score of -3": replace(CONFIG, score_ops=(replace(BAND, constant=-10.0), SCALE)),
    "as many queries as keys, not 512 and 1024": (CONFIG, "bfloat16", {"k": 1024}),
    "keys and values of the same heads": replace(CONFIG, value_dims="bke"),
    "no key head without a query head": replace(CONFIG, query_dims="bqd"),
}
SEGMENTS = replace(CONFIG, score_ops=(SCALE, ScoreOp("segments", -1e9, 0), BAND), extra_dims=("bk",))
CUDNN = {
    "the causal mask and causal windows (segments)": SEGMENTS,
    "takes queries, keys and values of bfloat16 or float16, not float32": (CONFIG, "float32"),
    "the dtype of its operands, bfloat16, not float32": replace(CONFIG, out_dtype="float32"),
    "the causal mask and causal windows (window)": replace(CONFIG, score_ops=(replace(BAND, low=-4, high=4),)),
    "causal windows (window)": replace(CONFIG, score_ops=(replace(BAND, low=-4, high=None),)),
    "the causal mask and causal windows (tanh)": replace(CONFIG, score_ops=CAP),
    "multiple of 8 and at most 128, not 12": (CONFIG, "bfloat16", {"d": 12, "e": 12}),
    "multiple of 8 and at most 128, not 256": (CONFIG, "bfloat16", {"d": 256, "e": 256}),
    "values as wide as queries, not 128 beside 64": (CONFIG, "bfloat16", {"e": 128}),
    "sequences that are a multiple of 2, not 257": (CONFIG, "bfloat16", {"q": 257, "k": 257}),
}
WINDOWED = ((replace(BAND, low=-4),), (BAND, replace(BAND, low=-4, high=None)))
SPLASH = {
    "takes queries, keys and values of bfloat16 or float32, not float16": (CONFIG, "float16"),
    "multiple of 8 and at most 256, not 68": (CONFIG, "bfloat16", {"d": 68, "e": 68}),
    "sequences that are a multiple of 128, not 600": (CONFIG, "bfloat16", {"q": 600, "k": 600}),
    "from 512 queries and keys on, and these are 256 and 256": (CONFIG, "bfloat16", {"q": 256, "k": 256}),
    "masks that leave each query its own key": replace(CONFIG, score_ops=(replace(BAND, high=-1),)),
    "one soft cap of the scores, before their mask": replace(CONFIG, score_ops=(BAND, *CAP)),
    "computes products at the default precision": (
        replace(CONFIG, out_dtype="float32", score_precision=jax.lax.Precision.HIGHEST),
        "float32",
    ),
    "one by their score of -3": replace(SEGMENTS, score_ops=(ScoreOp("segments", -3.0, 0),)),
    "takes one array of segment ids, not 2": replace(
        SEGMENTS, score_ops=(*SEGMENTS.score_ops, ScoreOp("segments", -1e9, 1)), extra_dims=("bk", "k")
    ),
    "segment ids that are the same for the query heads of a key head": replace(
        SEGMENTS, query_dims="bqhgd", row_dims="bhgq", out_dims="bqhge", extra_dims=("gk",)
    ),
    "takes one soft cap of the scores, before": replace(SEGMENTS, score_ops=(*SEGMENTS.score_ops[:2], *CAP)),
}
TAKEN = {
    "segments": SEGMENTS,
    "segments of each head": replace(SEGMENTS, extra_dims=("hbk",)),
    "window": replace(CONFIG, score_ops=(replace(BAND, low=-4),)),
    "soft cap": replace(CONFIG, score_ops=(SCALE, *CAP, BAND)),
    "values of another width": (CONFIG, "bfloat16", {"e": 128}),
}


@pytest.mark.parametrize(
    ("name", "reason", "case"),
    [
        *((name, *item) for name in ("cudnn", "splash") for item in EITHER.items()),
        *(("cudnn", *item) for item in CUDNN.items()),
        *(("cudnn", "", replace(CONFIG, score_ops=ops)) for ops in WINDOWED),
        *(("splash", *item) for item in SPLASH.items()),
        *(("splash", "", case) for case in TAKEN.values()),
    ],
)
def test_what_the_kernels_do_not_support(name, reason, case):
    config, dtype, sizes, *_ = (*case, {}) if isinstance(case, tuple) else (case, "bfloat16", {})
    said = unsupported_reason(config, *sides(config, dtype, sizes), name)
    assert reason in said and KERNELS[name].label in said if reason else not said


@pytest.mark.parametrize("name", ["cudnn", "splash"])
def test_time_is_that_of_the_work_below_a_causal_mask_and_of_wide_heads(name):
    sizes = {"q": 8192, "k": 8192, "d": 128, "e": 128}
    q, narrow = (sides(CONFIG, sizes=sizes | s)[0] for s in ({}, {"d": 64, "e": 64}))
    causal, whole = (replace(CONFIG, kernel=name, score_ops=x) for x in (CONFIG.score_ops, ()))
    score = 2 * (2 * 4 * 8192 * 8192) * 128
    for backward, products, computed in (
        (False, 2 * score, {"cudnn": (1 + 246 / 8192) / 2, "splash": 36 / 64}),
        (True, 5 * score, {"cudnn": (1 + 246 / 8192) / 2, "splash": 20 / 32}),
    ):
        time = functools.partial(kernel_flops_at_peak, share=0.5, backward=backward)
        at_peak = products / peak_share(name, 0.5, KERNELS[name].block(8192, 8192, backward=backward)[1])
        assert time(whole, q, q, q) == pytest.approx(at_peak)
        assert time(causal, q, q, q) == pytest.approx(at_peak * computed[name])
    wide, thin = (kernel_flops_at_peak(causal, x, x, x, 0.5) for x in (q, narrow))
    assert thin / wide == pytest.approx(KERNELS[name].full_width / 128)


def test_a_gradient_of_many_blocks_computes_scores_twice():
    long = sides(CONFIG, sizes={"q": 16384, "k": 16384, "d": 128, "e": 128})
    config = replace(CONFIG, kernel="splash", score_ops=())
    forward, backward = (kernel_flops_at_peak(config, *long, 0.5, backward=b) for b in (False, True))
    speed = peak_share("splash", 0.5, 1024) / peak_share("splash", 0.5, 2048)
    assert backward / forward == pytest.approx(7 / 2 * speed)


def test_short_sequences_run_at_less_of_the_peak():
    assert peak_share("cudnn", 0.4, 1024) == pytest.approx(0.4)
    assert peak_share("cudnn", 0.4, 512) == pytest.approx(0.3, rel=2e-3)
    assert peak_share("cudnn", 0.4, 16) < 0.03
    assert peak_share("cudnn", 0.4, 2**20) < 0.6


def test_a_causal_window_costs_its_keys():
    window = replace(CONFIG, kernel="cudnn", score_ops=(SCALE, replace(BAND, low=-1023)))
    q, whole = sides(CONFIG, sizes={"q": 8192, "k": 8192, "d": 128, "e": 128})[0], replace(window, score_ops=(SCALE,))
    ratio = kernel_flops_at_peak(window, q, q, q, 0.5) / kernel_flops_at_peak(whole, q, q, q, 0.5)
    assert ratio == pytest.approx((1024 + 246) / 8192)
    assert causal_share("cudnn", 1024, 4096) == causal_share("cudnn", 1024)
    assert not in_rings(window)
    assert in_rings(replace(window, score_ops=(BAND,)))
    assert in_rings(replace(window, kernel="splash"))


def test_attention_on_an_h100_takes_what_it_took_by_the_clock():
    """Seconds of output and gradients: `benchmarks/results/on_gpu.jsonl`; the fit was to earlier ones of the same, but
    for the window."""
    rates, peak, found = load_hardware("h100").attention, load_hardware("h100").peak_flops("bfloat16"), list[float]()
    assert rates is not None
    lines = map(json.loads, (ROOT / "benchmarks/results/on_gpu.jsonl").read_text().splitlines())
    for shape, _, *cells in (x["row"] for x in lines if x["kind"] == "attention" and x["row"][1] == "cuDNN"):
        batch, length, heads, width, mask = shape.split(", ")
        scores = int(batch) * int(heads.split("/")[0]) * int(length) ** 2
        kind, _, window = mask.partition(" ")
        computed = 1.0 if kind == "full" else causal_share("cudnn", int(length), int(window or length))
        predicted = sum(
            flops_at_peak("cudnn", 2.0 * products * scores * int(width), int(width), int(length), share, computed)
            for products, share in ((2, rates.forward), (5, rates.backward))
        )
        found.append(predicted / peak / (float(cells[0]) * 1e-3))
    assert len(found) == 10
    assert all(0.8 < ratio < 1.2 for ratio in found), found


@pytest.mark.parametrize(
    ("length", "forward", "backward"), [(8192, 1024, 2048), (2048, 1024, 2048), (3072, 1024, 1536), (384, 384, 384)]
)
def test_blocks_divide_the_sequence(length, forward, backward):
    assert KERNELS["splash"].block(length, length, backward=False) == (forward, forward)
    assert KERNELS["splash"].block(length, length, backward=True) == (forward, backward)
    assert KERNELS["cudnn"].block(length, length, backward=True) == (length, length)


@pytest.mark.parametrize(("low", "high"), [(None, 0), (-100, 0), (-300, 60), (-1, 1), (None, None), (300, None)])
@pytest.mark.parametrize("distance", [0, 512, -512, 1024])
def test_computed_blocks_are_those_with_an_unmasked_score(low, high, distance):
    call = KernelCall("splash_interpreted", 1.0, None, low, high).shifted(distance, 512, 256)
    q, k = np.arange(512)[:, None] + distance, np.arange(256)[None, :]
    seen = np.ones((512, 256), bool)
    seen &= True if low is None else k - q >= low
    seen &= True if high is None else k - q <= high
    want = seen.reshape(4, 128, 2, 128).any((1, 3))
    np.testing.assert_array_equal(call.computed_blocks(512, 256), want)
    np.testing.assert_array_equal(call.computed_blocks(512, 256, backward=True), want.any(1, keepdims=True))
    assert call.computed_share(512, 256) == want.mean()
    assert call.some_rows_empty(512, 256) == (not seen.any(1).all())


def test_the_calls_parameters_are_those_of_the_scores():
    ops = (SCALE, *CAP, replace(BAND, low=-7), BAND)
    call = kernel_call(replace(CONFIG, score_ops=ops), "splash")
    assert (call.low, call.high, call.soft_cap) == (-7, 0, 50.0)
    assert math.isclose(call.scale, 0.3)
