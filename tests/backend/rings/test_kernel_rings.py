"""Weights of kernels that are gathered in rings, and sums that are scattered in them: the same results, in turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.backend.audit import audit
from autoshard.backend.rings import ring as one_ring
from autoshard.backend.rings.kernel_rings import weight_rings
from tests.experts import arrays, gradient, sorted_back, split_only
from tests.forms import same
from tests.programs import mesh

SPLIT = P("model", "data")
PASSES = ("dead_code", "one_hot", "transposed_products", "experts:recompute")
GRADIENT = gradient(lambda p, x, k: jax.checkpoint(lambda p, x: sorted_back(p, x, k))(p, x), 2)


def update(p: Any, x: Any) -> tuple[Any, Any]:
    """One step of SGD, and the mixture's results."""
    (of_p, _), out = GRADIENT(p, x)
    return jax.tree.map(lambda a, g: a - 0.1 * g, p, of_p), out


def planned(
    fun: Any = update, *, gathers: bool = True, scatters: bool = True, matrices: P = SPLIT, **axes: int
) -> tuple[Any, autoshard.Plan, tuple[Any, Any]]:
    """A mixture whose experts are split over one axis, and their matrices over another as well, for a chip that
    computes nothing beside gathers or reduce-scatters."""
    p, x = arrays(2048, 64, 128, 8)
    on = mesh(**axes)
    chip = replace(on.hardware, blocking_gathers=gathers, blocking_reduce_scatters=scatters)
    kept, rows = {**dict.fromkeys(("up", "gated", "down"), matrices), "gate": P()}, P(("data", "model"))
    step = autoshard.jit(
        fun,
        mesh=replace(on, hardware=chip),
        passes=PASSES,
        rules=split_only("exchanged"),
        in_shardings=(kept, rows),
        out_shardings=(kept, rows) if fun is update else ((kept, rows), rows),
    )
    return step, step.plan(p, x), (p, x)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_ring, "MIN_SUM", 16)


@pytest.mark.parametrize(
    ("axes", "permutes", "gathers"),
    [({"data": 4, "model": 2}, 27, 0), ({"data": 2, "model": 4}, 6, 3)],
    ids=["all in rings", "backward, weights are gathered where they enter the recomputed part"],
)
def test_what_a_step_makes_is_what_one_device_makes(axes: dict[str, int], permutes: int, gathers: int) -> None:
    step, plan, args = planned(**axes)
    same(step(*args), jax.jit(update)(*args), scale=1e-3)
    compiled = step.lower(*args).compile()
    text = compiled.as_text() or ""
    assert text.count(" collective-permute(") == permutes
    assert text.count(" all-gather(") == gathers
    assert " reduce-scatter(" not in text
    assert audit(compiled, plan).clean


def test_weights_come_in_the_order_in_which_products_read_them() -> None:
    step, plan, args = planned(data=4, model=2)
    graph = step.executable(*args).graph
    found = weight_rings(graph, plan)
    assert [len(rings) for rings in found.values()] == [3, 3]
    for node, rings in found.items():
        after = [graph.nodes[node].kind.rule.local.read_after[ring.operand] for ring in rings]
        assert after == sorted(after)
        assert after[-1] > 0
        assert {ring.axis for ring in rings} == {"data"}


def barriers(**options: Any) -> int:
    step, _, args = planned(data=4, model=2, **options)
    return step.lower(*args).as_text().count("optimization_barrier")


def test_a_ring_begins_when_the_one_before_it_is_done() -> None:
    none = barriers(gathers=False, scatters=False)
    assert barriers(scatters=False) == none + 4  # two of three weights in either direction
    assert barriers(gathers=False) == none + 2  # two of three gradients


def test_sums_that_are_whole_afterwards_do_not_wait_for_each_other() -> None:
    """Matrices are whole along data: their gradients are all-reduced, and XLA may combine that."""
    assert barriers(matrices=P("model")) == barriers(matrices=P("model"), gathers=False, scatters=False)


@pytest.mark.parametrize("reason", ["no wait", "small", "long", "not carried"])
def test_others_are_gathered_at_once(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    limits = {"small": ("MIN_SUM", 1 << 16), "long": ("MAX_PARTS", 2)}
    if reason in limits:
        monkeypatch.setattr(one_ring, *limits[reason])
    fun = GRADIENT if reason == "not carried" else update
    step, plan, args = planned(fun, gathers=reason != "no wait", data=4, model=2)
    assert weight_rings(step.executable(*args).graph, plan) == {}
    assert " all-gather(" in (step.lower(*args).compile().as_text() or "")


def test_a_convolution_is_no_kernel() -> None:
    """XLA has it for its own, though its rule has a local form."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return (
                lax.conv_general_dilated(x, w, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")) ** 2
            ).mean()

        return w - 0.1 * jax.grad(loss)(w)

    w, x = np.ones((2, 2, 16, 64), "f4"), np.ones((16, 8, 8, 16), "f4")
    on = mesh(a=8)
    chip = replace(on.hardware, blocking_gathers=True, blocking_reduce_scatters=True)
    kept = P(None, None, None, "a")
    planned = autoshard.jit(
        step, mesh=replace(on, hardware=chip), donate_argnums=0, in_shardings=(kept, P("a")), out_shardings=kept
    )
    text = planned.lower(w, x).compile().as_text() or ""
    assert " collective-permute(" not in text
    assert " all-gather(" in text
