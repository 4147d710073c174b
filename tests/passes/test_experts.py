"""Which programs the pass finds, and that what it makes of them computes the same."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import jaxpr as jx
from autoshard.backend.audit import audit
from autoshard.errors import PassError
from autoshard.ir.rule import Rule
from autoshard.machine.collective import collective_seconds
from autoshard.passes import Experts
from autoshard.passes.experts.positions import positions
from autoshard.rules.composed import grouped_rows
from autoshard.transforms.grouped_rows import grouped_rows_p
from autoshard.transforms.row_rounds import group_capacity
from tests.experts import (
    EXCHANGING,
    Params,
    added_up,
    arrays,
    gradient,
    on,
    products,
    scattered_back,
    sorted_back,
    split_only,
)
from tests.forms import HASTY, same
from tests.programs import mesh, program


def rewritten(
    fun: Callable[..., Any], *args: Any, option: str = "", kind: str = "ragged"
) -> tuple[Counter[str], Callable[..., Any]]:
    """How often each primitive occurs after the pass, and what it computes."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    after = Experts(option)(program(fun, shapes, on(mesh(x=8), kind))).jaxpr
    run = jx.as_fun(after)
    return Counter(e.primitive.name for e in jx.walk(after)), lambda *xs: run(*jax.tree.leaves(xs))


@pytest.mark.parametrize(
    ("spelled", "k", "option", "kind"),
    [
        (sorted_back, 1, "recompute", "blocks"),
        (sorted_back, 2, "", "ragged"),
        (added_up, 2, "", "blocks"),
        (added_up, 8, "recompute", "ragged"),
        (scattered_back, 8, "recompute", "blocks"),
    ],
)
def test_forward_and_backward_become_one_operation_each(spelled: Any, option: str, k: int, kind: str):
    p, x = arrays(40, 8, 16, 10, bias=k == 2)
    fun = gradient(spelled, k)
    found, run = rewritten(fun, p, x, option=option, kind=kind)
    assert (found["grouped_rows"], found["ragged_dot_general"], found["sort"]) == (2, 0, 0)
    same(run(p, x), jax.tree.leaves(jax.jit(fun)(p, x)))


def of_rows(fun: Callable[..., Any], *args: Any) -> list[tuple[int, ...]]:
    """The shapes of what the operations of the pass make, but for gradients of matrices."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    after = Experts("recompute")(program(fun, shapes, mesh(x=8))).jaxpr
    made = [v for e in jx.walk(after) if e.primitive.name == "grouped_rows" for v in e.outvars]
    return sorted(jx.aval(v).shape for v in made if jx.aval(v).shape[0] != 10)


def test_what_tokens_make_of_their_rows_is_made_inside():
    p, x = arrays(40, 8, 16, 10)
    tokens, weights, rows = (40, 8), (80,), (80, 8)

    def again(p: Params, x: Any, k: int) -> Any:
        return jax.checkpoint(lambda p, x: sorted_back(p, x, k))(p, x)

    assert of_rows(gradient(again, 2), p, x) == [tokens, tokens, weights]
    assert of_rows(gradient(added_up, 2), p, x) == [tokens, tokens, weights]
    assert of_rows(gradient(sorted_back, 2), p, x) == [tokens, rows]  # the backward part reads them too

    def largest(p: Params, x: Any) -> Any:
        flat = lax.top_k(x @ p["gate"], 2)[1].reshape(-1)
        order = jnp.argsort(flat)
        made = products(p, x[order // 2], jnp.bincount(flat, length=10))[jnp.argsort(order)]
        return jnp.max(made.reshape(40, 2, 8), 1)

    def both(p: Params, x: Any) -> Any:
        flat = lax.top_k(x @ p["gate"], 2)[1].reshape(-1)
        order = jnp.argsort(flat)
        made = products(p, x[order // 2], jnp.bincount(flat, length=10))[jnp.argsort(order)]
        return jnp.sum(made.reshape(40, 2, 8), 1), made[::2]

    assert of_rows(largest, p, x) == of_rows(both, p, x) == [rows]


def test_cotangents_of_tokens_are_sent_in_place_of_rows_and_numbers_come_back():
    """Of rows, backward: there those of tokens and of their cotangents, back the gradients. Forward: there and back."""
    p, x = arrays(1024, 64, 256, 8)
    fun = gradient(lambda p, x, k: jax.checkpoint(lambda p, x: sorted_back(p, x, k))(p, x), 2)
    shard = dict.fromkeys(("up", "gated", "down"), P("x"))
    specs = ({**shard, "gate": P()}, P("x"))
    where: dict[str, Any] = {"mesh": mesh(x=8), "in_shardings": specs, "out_shardings": (specs, P("x"))}
    step = autoshard.jit(fun, passes=EXCHANGING, rules=split_only("exchanged"), **where)
    plan = step.plan(p, x)
    of_rows = [c.bytes for c in plan.cost.collectives if c.kind == "all-to-all" and c.bytes > x.nbytes // 8]
    assert of_rows == [5 * x.nbytes // 16] * 5
    assert audit(step.lower(p, x).compile(), plan).clean
    same(step(p, x), jax.jit(fun)(p, x), scale=1e-3)


def test_layers_that_are_scanned_and_recomputed():
    p, x = arrays(40, 8, 16, 10)
    stacked = jax.tree.map(lambda w: np.stack([w, w[::-1]]), p)

    def loss(p: Params, x: Any) -> Any:
        def layer(x: Any, p: Params) -> tuple[Any, None]:
            return x + sorted_back(p, x, 2), None

        return jnp.sum(lax.scan(jax.checkpoint(layer), x, p)[0] ** 2)

    found, run = rewritten(jax.grad(loss), stacked, x)
    assert (found["grouped_rows"], found["ragged_dot_general"], found["sort"]) == (2, 0, 0)
    same(run(stacked, x), jax.tree.leaves(jax.jit(jax.grad(loss))(stacked, x)))


@pytest.mark.parametrize("kind", ["ragged", "blocks"])
def test_rows_that_are_read_in_sorted_order_are_sorted_for_that(kind: str):
    """Some are of no group."""
    p, x = arrays(40, 8, 16, 10)
    group = np.sort(np.random.default_rng(0).integers(-1, 12, 40)).astype("int32")[::-1]

    def fun(p: Params, x: Any, group: Any) -> Any:
        order = jnp.argsort(group)
        rows = jnp.cos(products(p, x[order], jnp.bincount(group, length=10)))
        return rows, jnp.cumsum(rows, 0), rows[jnp.argsort(order)]

    found, run = rewritten(fun, p, x, group, kind=kind)
    assert found["grouped_rows"] == 1
    same(run(p, x, group), list(jax.jit(fun)(p, x, group)))


def test_groups_that_may_be_out_of_bounds_are_left_where_they_would_count_elsewhere():
    p, x = arrays(40, 8, 16, 10)

    def fun(p: Params, x: Any, group: Any) -> Any:
        order = jnp.argsort(group)
        sizes = jnp.zeros(10, jnp.int32).at[group].add(1)  # -1 counts with the last, but is sorted first
        return products(p, x[order], sizes)[jnp.argsort(order)]

    assert rewritten(fun, p, x, np.zeros(40, np.int32))[0]["grouped_rows"] == 0


def test_an_unknown_option_is_refused():
    p, x = arrays(40, 8, 16, 10)
    with pytest.raises(PassError, match="the only option of this pass is 'recompute'"):
        rewritten(gradient(added_up, 2), p, x, option="twice")


WAYS = {
    "rows": ({}, P(("x", "y"))),
    "experts": ({"up": P("y"), "gated": P("y"), "down": P("y")}, P(("x", "y"))),
    "experts over both axes": (dict.fromkeys(("up", "gated", "down"), P(("x", "y"))), P(("x", "y"))),
    "experts in place": ({"up": P("y"), "gated": P("y"), "down": P("y")}, P("x")),
    "features": ({"up": P(None, None, "y"), "gated": P(None, None, "y"), "down": P(None, "y")}, P("x")),
}


@pytest.mark.parametrize(
    ("spelled", "groups", "k", "way", "beside", "kind"),
    [
        (sorted_back, 8, 2, "experts", "bias", "blocks"),
        (sorted_back, 8, 2, "features", "", "blocks"),
        (added_up, 64, 8, "experts over both axes", "bias and shared", "ragged"),
        (scattered_back, 16, 1, "experts", "shared", "ragged"),
        (scattered_back, 16, 1, "rows", "", "blocks"),
        (sorted_back, 8, 2, "experts in place", "", "blocks"),
        (sorted_back, 16, 4, "experts in place", "bias and shared", "ragged"),
        (added_up, 8, 2, "experts in place", "bias", "ragged"),
        (scattered_back, 8, 2, "experts in place", "", "ragged"),
        (added_up, 8, 1, "experts over both axes", "", "blocks"),
        (sorted_back, 64, 1, "experts", "shared", "blocks"),
        (scattered_back, 64, 2, "experts in place", "bias", "blocks"),
        (added_up, 16, 8, "features", "bias and shared", "ragged"),
        (sorted_back, 64, 8, "experts in place", "", "ragged"),
    ],
)
def test_equal_to_one_device_and_nothing_sent_that_was_not_planned(
    spelled: Any, groups: int, k: int, way: str, beside: str, kind: str
):
    """Loads are uneven: of a device's experts some have more rows than an even load has for all, and one has none."""
    in_place = way == "experts in place"
    p, x = arrays(512 if in_place else 64, 16, 64, groups, bias="bias" in beside, shared="shared" in beside)
    pins, tokens = WAYS[way]
    specs = (dict.fromkeys(p, P()) | pins, tokens)
    fun = gradient(spelled, k)
    where: dict[str, Any] = {"mesh": on(HASTY, kind), "in_shardings": specs, "out_shardings": (specs, tokens)}
    rules = split_only("in place" if in_place else "exchanged")
    step = autoshard.jit(fun, passes=EXCHANGING, strategy="replicated", rules=rules, **where)
    same(step(p, x), jax.jit(fun)(p, x), scale=1e-3)
    plan = step.plan(p, x)
    sent = {c.kind for c in plan.cost.collectives}
    assert ("all-to-all" in sent) == (way in ("experts", "experts over both axes"))
    if in_place:
        assert sent <= {"all-reduce", "all-gather"}, sent
        assert all(c.bytes < p["up"].nbytes for c in plan.cost.collectives if c.kind == "all-gather")
    found = audit(step.lower(p, x).compile(), plan)
    assert found.clean, str(found)


@pytest.mark.parametrize("form", ["exchanged", "in place"])
@pytest.mark.parametrize("kind", ["ragged", "blocks"])
def test_rows_of_no_group_come_back_where_experts_are_split(kind: str, form: str):
    p, x = arrays(64, 16, 64, 8)
    group = np.random.default_rng(0).integers(-1, 11, 64).astype("int32")

    def fun(p: Params, x: Any, group: Any) -> Any:
        order = jnp.argsort(group)
        return jnp.cos(products(p, x[order], jnp.bincount(group, length=8)))[jnp.argsort(order)]

    pins, tokens = WAYS["experts over both axes" if form == "exchanged" else "experts in place"]
    specs = (dict.fromkeys(p, P()) | pins, tokens, tokens)
    where: dict[str, Any] = {"mesh": on(HASTY, kind), "in_shardings": specs, "out_shardings": tokens}
    step = autoshard.jit(fun, passes=EXCHANGING, strategy="replicated", rules=split_only(form), **where)
    sent = {c.kind for c in step.plan(p, x, group).cost.collectives}
    assert sent == {"all-reduce", "all-to-all"} if form == "exchanged" else sent == {"all-reduce"}, sent
    same(step(p, x, group), jax.jit(fun)(p, x, group))


@pytest.mark.parametrize(("tokens", "hidden", "devices"), [(64, 256, 2), (1024, 512, 4), (2048, 1024, 8)])
def test_experts_send_tokens_and_no_weights(tokens: int, hidden: int, devices: int):
    """Each to its experts' devices, or where these are few to all. Rows, each with a number, are sent five times."""
    p, x = arrays(tokens, 64, hidden, 8)
    fun = gradient(added_up, 2)
    shard = dict.fromkeys(("up", "gated", "down"), P("x"))
    specs = ({**shard, "gate": P()}, P("x"))
    step = autoshard.jit(fun, mesh=mesh(x=devices), in_shardings=specs, out_shardings=(specs, P("x")))
    plan = step.plan(p, x)
    sent = {c.kind: max(d.bytes for d in plan.cost.collectives if d.kind == c.kind) for c in plan.cost.collectives}
    if devices == 2:
        assert sent["all-gather"] == sent["reduce-scatter"] == x.nbytes, plan.cost.collectives
        assert max(sent.values()) <= 2 * x.nbytes < p["up"].nbytes
    else:
        assert sent.keys() == {"all-to-all", "all-reduce"}, plan.cost.collectives
        assert sent["all-reduce"] == p["gate"].nbytes
        exchanged = sum(c.total_bytes for c in plan.cost.collectives if c.kind == "all-to-all")
        assert exchanged <= 5 * 1.25 * 2 * (x.nbytes + 4 * tokens) / devices
    assert "experts:recompute" in str(plan.explain())
    found = audit(step.lower(p, x).compile(), plan)
    assert found.clean, str(found)
    same(step(p, x), jax.jit(fun)(p, x), scale=1e-3)


@pytest.mark.parametrize("kind", ["ragged", "blocks"])
def test_places_that_no_row_fills_count_for_nothing(kind: str):
    """What is computed of them may be infinite."""
    p, x = arrays(40, 8, 16, 10)

    def loss(p: Params, x: Any) -> Any:
        best = jnp.argmax(x @ p["gate"], -1)
        order, sizes = jnp.argsort(best), jnp.bincount(best, length=10)
        rows = lax.ragged_dot(1 / lax.ragged_dot(x[order], p["up"], sizes), p["down"], sizes)
        return jnp.sum(rows[jnp.argsort(order)])

    found, run = rewritten(jax.grad(loss), p, x, kind=kind, option="recompute")
    assert (found["grouped_rows"], found["ragged_dot_general"]) == (1, 0)
    same(run(p, x), jax.tree.leaves(jax.jit(jax.grad(loss))(p, x)))


@pytest.mark.parametrize(("form", "tokens"), [("exchanged", P("x")), ("in place", P())])
def test_products_of_blocks_are_priced_with_the_places_that_rows_leave_empty(form: str, tokens: P):
    p, x = arrays(1024, 64, 2048, 8)
    fun, shard = gradient(added_up, 2), dict.fromkeys(("up", "gated", "down"), P("x"))
    specs = ({**shard, "gate": P()}, tokens)
    price: dict[str, Any] = {}
    for kind in ("ragged", "blocks"):
        where = on(mesh(x=4), kind)
        step = autoshard.jit(
            fun,
            mesh=replace(where, hardware=replace(where.hardware, bandwidth=1e15)),
            passes=EXCHANGING,
            in_shardings=specs,
            out_shardings=(specs, tokens),
            rules=split_only(form),
            strategy="replicated",
        )
        price[kind] = step.plan(p, x)
    assert price["blocks"].cost.compute == pytest.approx(1.25 * price["ragged"].cost.compute, rel=0.05)
    assert price["blocks"].memory.peak > price["ragged"].memory.peak


def rule_of_rows(p: Params, x: Any) -> Rule:
    """Of the operation that the pass makes of `sorted_back`, where its products are of blocks."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (p, x))
    after = Experts("")(program(lambda p, x: sorted_back(p, x, 2), shapes, on(mesh(x=4), "blocks"))).jaxpr
    (made,) = (e for e in jx.walk(after) if e.primitive is grouped_rows_p)
    return grouped_rows(*map(jx.aval, made.invars), **made.params)


def test_what_kernels_beside_the_products_of_blocks_read_and_write():
    """Tokens are put into blocks, and summed out of them; the activation reads two products and is written."""
    p, x = arrays(1024, 64, 2048, 8)
    places = 8 * group_capacity(2048, 8)
    assert places == 1.25 * 2048
    rule = rule_of_rows(p, x)
    local = rule.local
    assert local is not None
    assert local.work is not None
    work = local.work({})
    assert work.flops == 1.25 * 2 * 3 * 2048 * 64 * 2048
    assert work.moved == 2 * x.nbytes + 4 * (2 * places * 64 + 3 * places * 2048)
    assert work.rounds == 1
    assert [local.read_after[i] for i in (2, 3, 4)] == pytest.approx([0, 1 / 3, 2 / 3])  # weights, in order of products


def test_of_two_exchanges_one_runs_beside_the_products_of_the_other():
    p, x = arrays(8192, 64, 2048, 8)
    shard = dict.fromkeys(("up", "gated", "down"), P("x"))
    specs = ({**shard, "gate": P()}, P("x"))
    costs: dict[float, Any] = {}
    for hidden in (0.0, 0.5):
        where = on(mesh(x=4), "blocks")
        step = autoshard.jit(
            gradient(sorted_back, 2),
            mesh=replace(where, hardware=replace(where.hardware, hidden_collectives=hidden)),
            passes=EXCHANGING,
            in_shardings=specs,
            out_shardings=(specs, P("x")),
            rules=split_only("exchanged"),
            strategy="replicated",
        )
        costs[hidden] = step.plan(p, x).cost
    exchanged = sum(
        c.count * collective_seconds(c.kind, c.axes or (), c.bytes, where)
        for c in costs[0.0].collectives
        if c.kind == "all-to-all" or c.bytes == 4
    )
    assert (costs[0.0].hidden, costs[0.5].compute) == (0.0, costs[0.0].compute)
    assert costs[0.5].hidden == pytest.approx(0.5 * 0.5 * exchanged, rel=1e-3)
    assert costs[0.5].sent == pytest.approx(costs[0.0].transfers)


def test_a_step_that_fits_with_blocks_alone_keeps_what_else_would_be_computed_again():
    p, x = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays(4096, 64, 64, 32))
    whole, fun = on(mesh(x=4), "blocks"), gradient(added_up, 2)

    def planned(memory: float, passes: Any = None) -> Any:
        small = replace(whole, hardware=replace(whole.hardware, memory=memory))
        return autoshard.jit(fun, mesh=small, passes=passes).plan(p, x)

    masked, blocks = (planned(1e12, passes).memory.peak for passes in ("dead_code", ("dead_code", "experts")))
    assert masked > 2 * blocks
    plan = planned(1.2 * blocks)
    assert "experts" in {p.name for p in plan.passes}
    assert not {p.name for p in plan.passes} & {"recompute", "offload", "microbatch"}


def test_positions_are_freed_when_they_are_known():
    """Large programs have gigabytes of them, in few objects: Python's search for cycles does not hurry for those."""
    jaxpr = jax.make_jaxpr(lambda order: lax.div(order, 2))(np.arange(8)).jaxpr
    known = {jaxpr.invars[0]: np.arange(8)}
    order = weakref.ref(known[jaxpr.invars[0]])
    gc.disable()
    try:
        np.testing.assert_array_equal(
            positions(jaxpr.outvars[0], {e.outvars[0]: e for e in jaxpr.eqns}, known), [0, 0, 1, 1, 2, 2, 3, 3]
        )
        del known
        assert order() is None
    finally:
        gc.enable()
