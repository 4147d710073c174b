"""Cost model: closed forms on hardware with round figures."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.cost.cost import CostModel
from autoshard.ir.propagate import propagate
from autoshard.ir.spec import Spec
from autoshard.machine.collective import collective_seconds
from tests.programs import CHIP, graph, mesh

MESH = mesh(data=4)
ROWS, COLUMNS, WHOLE = Spec((("data",), ())), Spec(((), ("data",))), Spec(((), ()))


def price(fun, shapes, *specs, results=()):
    g = graph(fun, shapes, MESH)
    hard = dict(zip(g.inputs, specs, strict=False)) | dict(zip(g.outputs, results, strict=False))
    return CostModel(g).cost(propagate(g, [], hard))


def test_a_large_product_is_compute_bound() -> None:
    n = 4096
    cost = price(lambda x, w: x @ w, ((n, n), (n, n)), WHOLE, WHOLE)
    assert cost.seconds == pytest.approx(2 * n**3 / CHIP.flops["float32"])
    split = price(lambda x, w: x @ w, ((n, n), (n, n)), ROWS, WHOLE)
    assert split.seconds == pytest.approx(cost.seconds / 4)


@pytest.mark.parametrize(
    ("left", "right", "result", "at_the_peak_of"),
    [
        ("bfloat16", "bfloat16", "float32", "bfloat16"),
        ("float32", "float32", "bfloat16", "float32"),
        ("bfloat16", "float32", "float32", "float32"),
        ("float32", "bfloat16", "float32", "float32"),
    ],
)
def test_a_product_runs_at_the_peak_of_its_wider_operand(left: str, right: str, result: str, at_the_peak_of: str):
    n = 4096
    operands = [jax.ShapeDtypeStruct((n, n), dtype) for dtype in (left, right)]
    g = graph(lambda x, w: lax.dot(x, w, preferred_element_type=result), operands, MESH)
    cost = CostModel(g).cost(propagate(g, [], dict.fromkeys(g.inputs, WHOLE)))
    assert cost.seconds == pytest.approx(2 * n**3 / CHIP.flops[at_the_peak_of])


def test_halos_that_a_convolution_and_the_gradient_of_its_window_read_are_said_to_be_sent_twice() -> None:
    def fun(x, w, ct):
        def conv(x, w):
            return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

        out, back = jax.vjp(conv, x, w)
        return out, *back(ct)

    rows = Spec(((), ("data",), (), ()))
    shapes = ((2, 64, 64, 4), (3, 3, 4, 8), (2, 64, 64, 8))
    cost = price(fun, shapes, rows, Spec(((),) * 4), rows, results=(rows, rows, Spec(((),) * 4)))
    sent = [(c.bytes, c.redundant) for c in cost.collectives if c.kind == "collective-permute"]
    row, changed = 4 * 2 * 64 * 4, 4 * 2 * 64 * 8
    assert sorted(sent) == [(row, False), (row, False), (row, True), (row, True), (changed, False), (changed, False)]


def test_what_is_computed_twice_is_said_to_be_reduced_twice() -> None:
    def fun(x):
        return [jnp.sum(2.0 * x), jnp.sum(2.0 * x), jnp.sum(3.0 * x), jnp.sum(2.0 * jnp.sin(x))]

    cost = price(fun, ((64, 64),), Spec((("data",), ())), results=(Spec(()),) * 4)
    assert [c.redundant for c in cost.collectives] == [False, True, False, False]


def test_a_thin_product_is_memory_bound() -> None:
    cost = price(lambda x, w: x @ w, ((1, 8192), (8192, 8192)), WHOLE, WHOLE)
    assert cost.compute == pytest.approx(4 * (8192 + 8192**2 + 8192) / CHIP.bandwidth)


def test_rates_are_those_that_xla_reaches() -> None:
    n = 4096
    slow = replace(CHIP, product_efficiency=0.5, convolution_efficiency=0.25, memory_efficiency=0.2)

    def seconds(fun, *shapes) -> float:
        return [
            CostModel(g).cost(propagate(g, [])).compute
            for on in (CHIP, slow)
            for g in [graph(fun, shapes, replace(MESH, hardware=on))]
        ]

    def conv(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    cases = {
        2: (lambda x, w: x @ w, (n, n), (n, n)),
        4: (conv, (64, 32, 32, 512), (3, 3, 512, 512)),
        5: (jnp.tanh, (n, n)),
    }
    for slower, (fun, *shapes) in cases.items():
        peak, reached = seconds(fun, *shapes)
        assert reached == pytest.approx(slower * peak)


def test_contracting_a_split_dimension_costs_one_all_reduce() -> None:
    cost = price(lambda x, w: x @ w, ((64, 4096), (4096, 64)), COLUMNS, ROWS)
    (c,) = cost.collectives
    assert (c.kind, c.axes, c.bytes, c.count) == ("all-reduce", ("data",), 64 * 64 * 4, 1)
    assert cost.transfers == pytest.approx(collective_seconds("all-reduce", ("data",), 64 * 64 * 4, MESH))
    assert __file__ in c.source


def test_a_split_result_costs_a_reduce_scatter_instead() -> None:
    cost = price(lambda x, w: x @ w, ((64, 4096), (4096, 64)), COLUMNS, ROWS, results=(ROWS,))
    assert [c.kind for c in cost.collectives] == ["reduce-scatter"]


def test_an_all_gather_that_two_nodes_read_is_charged_once() -> None:
    def fun(x, w):
        return (jnp.sin(x) @ w).sum() + (jnp.cos(x) @ w).sum()

    cost = price(fun, ((65536, 64), (64, 64)), ROWS, ROWS)
    assert [c.kind for c in cost.collectives].count("all-gather") == 1


@pytest.mark.parametrize(
    ("precision", "also", "bits"),
    [(None, False, 16), ("default", False, 16), ("highest", False, 32), (None, True, 32)],
    ids=["by default", "at the default precision", "at a higher one", "and read by others"],
)
def test_what_products_alone_read_is_sent_in_the_bits_that_they_take(precision, also, bits) -> None:
    def fun(x, w):
        product = jnp.matmul(x, w, precision=precision)
        return product, (jnp.matmul(x, w, precision="highest") if also else None)

    on = replace(MESH, hardware=replace(CHIP, operand_bits=16))
    g = graph(fun, ((1024, 64), (64, 4096)), on)
    specs = dict(zip(g.inputs, (ROWS, COLUMNS), strict=True)) | dict.fromkeys(g.outputs, COLUMNS)
    cost = CostModel(g).cost(propagate(g, [], specs))
    gathers = [c.bytes for c in cost.collectives if c.kind == "all-gather"]
    assert gathers == [1024 * 64 * bits // 8]


def test_costs_in_a_loop_are_multiplied_by_the_trip_count() -> None:
    def fun(x, w):
        return jax.lax.fori_loop(0, 7, lambda _, h: jnp.tanh(h @ w), x)

    cost = price(fun, ((64, 4096), (4096, 4096)), WHOLE, Spec((("data",), ())))
    assert {c.count for c in cost.collectives if c.bytes > 4} == {7}
    seconds = [c.count * collective_seconds(c.kind, c.axes or (), c.bytes, MESH) for c in cost.collectives]
    assert cost.transfers == pytest.approx(sum(seconds))


def test_replicated_values_need_no_collective() -> None:
    cost = price(lambda x, w: jnp.tanh(x @ w), ((64, 64), (64, 64)), WHOLE, WHOLE)
    assert cost.collectives == ()
    assert cost.transfers == 0


def test_axes_of_a_dimension_that_cannot_be_split_move_to_another_one() -> None:
    cost = price(lambda x: lax.fft(x, "RFFT", (4096,)).real, ((64, 4096),), COLUMNS, results=(Spec((("data",), ())),))
    assert [c.kind for c in cost.collectives] == ["all-to-all"]


def test_an_iota_is_recomputed_not_gathered() -> None:
    cost = price(lambda x: jnp.argsort(x, 1), ((1, 40),), COLUMNS, results=(COLUMNS,))
    assert [(c.kind, c.bytes) for c in cost.collectives] == [("all-gather", 160)]


def test_a_split_that_a_merged_dimension_cannot_express_is_resharded() -> None:
    cost = price(lambda x: x.reshape(-1), ((64, 64),), COLUMNS, results=(Spec(((),)),))
    assert [c.kind for c in cost.collectives] == ["all-gather"]
    cost = price(lambda x: x.reshape(-1), ((64, 64),), COLUMNS, results=(Spec((("data",),)),))
    assert [c.kind for c in cost.collectives] == ["all-to-all"]
