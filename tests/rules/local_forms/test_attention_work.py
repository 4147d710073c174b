"""What the busiest device computes of a ring, over the mean of what the attention is priced at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.rules.local_forms.attention_ring import key_reach
from autoshard.rules.local_forms.attention_work import balanced_work, chain_work
from autoshard.transforms.attention_op import AttentionConfig, ScoreOp

CAUSAL = AttentionConfig(
    "bqhd", "bkhd", "bkhe", "bqhe", "bhq", "q", "k", (ScoreOp("band", -1e9, high=0),), (), *["float32"] * 4
)
FULL = replace(CAUSAL, score_ops=())


def work(config, parts, keys, backward=False):
    return chain_work(config, key_reach(config, parts, keys), parts, keys, backward)


@pytest.mark.parametrize("kernel", ["cudnn", "splash"])
def test_the_last_device_of_a_causal_ring_has_most_of_the_work(kernel):
    """It computes with seven blocks and half of its own; the average device with half of eight."""
    assert work(replace(CAUSAL, kernel=kernel), 8, 2**17) == pytest.approx(15 / 8, rel=1e-2)
    assert work(replace(FULL, kernel=kernel), 8, 2**17) == pytest.approx(1, rel=1e-2)


def test_without_a_kernel_masked_scores_are_priced_and_the_last_device_computes_them_all():
    assert work(CAUSAL, 8, 2**17) == work(FULL, 8, 2**17) == 1


def test_a_window_is_computed_as_far_as_it_reaches():
    window = replace(CAUSAL, score_ops=(ScoreOp("band", -float("inf"), low=-64, high=0),))
    assert work(window, 8, 64) == 2 / 8
    by_kernel = replace(window, kernel="splash")
    assert work(by_kernel, 8, 2**13) < 1.2, "a window lets all devices but the first see as much"


def test_the_gradients_of_short_blocks_are_one_kernel_where_those_of_the_whole_are_two():
    """The second kernel computes the scores again: seven products in place of five."""
    full = replace(FULL, kernel="splash")
    assert work(full, 8, 2**13, True) == pytest.approx(5 / 7, rel=1e-6)
    assert work(full, 8, 2**14, True) == pytest.approx(1, rel=1e-6)


def test_short_blocks_are_computed_at_a_lower_rate():
    full = replace(FULL, kernel="splash")
    assert work(full, 8, 512) == pytest.approx((1 + 128 / 512) / (1 + 128 / 1024), rel=1e-6)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_a_balanced_ring_computes_half_of_all_scores_and_half_of_the_diagonal(parts):
    assert balanced_work(CAUSAL, parts, 64, False) == pytest.approx((2 * parts + 1) / (4 * parts), rel=1e-12)
    assert balanced_work(replace(CAUSAL, kernel="splash"), parts, 2**17, False) == pytest.approx(1, rel=1e-2)
    assert balanced_work(replace(CAUSAL, kernel="cudnn"), parts, 2**17, True) == pytest.approx(1, rel=2e-2)
