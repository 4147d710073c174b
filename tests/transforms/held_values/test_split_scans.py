"""Scans over layers cut in two: the same numbers, whoever reads their stacks."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from autoshard.passes import Recompute
from autoshard.transforms.pipeline import Pipeline
from tests.passes.test_recompute import agree, count, normal, traced


def test_a_stack_is_read_by_a_scan_that_is_cut_elsewhere():
    def loss(w, x):
        def first(h, a):
            h = h + jnp.tanh(h @ a)
            return h, h

        def second(h, each):
            c, y = each
            return h + jnp.tanh(h @ c) + jax.lax.stop_gradient(y), None

        h, stack = jax.lax.scan(first, x, w["a"])
        return (jax.lax.scan(second, h, (w["c"], stack))[0] ** 2).mean()

    args = {"a": normal(0, 4, 16, 16), "c": normal(1, 4, 16, 16)}, normal(2, 8, 16)
    before = traced(jax.value_and_grad(loss), *args)
    after, _ = Pipeline((Recompute("a=2,c=3"),)).run(before)
    assert count(after, "scan") == 2 * count(before, "scan")
    agree(before, after, args)
