"""Memory model: exact for state, bounded for intermediates."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autoshard import MeshConfig, jit
from autoshard.cost.cost import CostModel
from autoshard.cost.memory import MemoryModel, tiled_bytes
from autoshard.ir.build_graph import build_graph
from autoshard.ir.dim_classes import argument_roles
from autoshard.ir.propagate import propagate
from autoshard.ir.spec import Spec
from autoshard.passes import SumProducts
from autoshard.search.search import search
from tests.programs import CHIP, graph, mesh, mlp_args, mlp_step, program


def test_state_bytes_are_exact() -> None:
    g = graph(mlp_step, mlp_args(64, 16, 32), mesh(a=4), donate_argnums=0)
    found = MemoryModel(g).memory(propagate(g, []))
    assert found.parameters == 2 * 16 * 32 * 4
    assert found.optimizer == 0
    assert found.inputs == 2 * 64 * 16 * 4
    assert found.gradients == 2 * 16 * 32 * 4
    assert found.peak >= found.parameters + found.inputs + found.gradients


def test_sharded_state_is_divided() -> None:
    g = graph(mlp_step, mlp_args(64, 16, 32), mesh(a=4), donate_argnums=0)
    whole, parts = (search(g, s)[0].memory for s in ("dp", "zero3"))
    assert parts.parameters * 4 == whole.parameters
    assert parts.gradients * 4 == whole.gradients


def test_residuals_grow_with_the_batch_and_the_layers() -> None:
    def fun(ws, x):
        h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]
        return jnp.mean(h**2)

    def residuals(layers: int, batch: int) -> int:
        g = graph(jax.grad(fun), ((layers, 16, 16), (batch, 16)), mesh(a=4))
        return MemoryModel(g).memory(propagate(g, [])).residuals

    one = residuals(2, 32)
    assert one >= 2 * 32 * 16 * 4
    assert residuals(4, 32) > 1.8 * one - 32 * 16 * 4
    assert residuals(2, 64) > 1.9 * one


def test_sub_byte_types_are_counted_in_bits() -> None:
    g = graph(lambda x: x, (jax.ShapeDtypeStruct((64,), jnp.int4),), mesh(a=4))
    assert MemoryModel(g).memory(propagate(g, [{g.inputs[0]: Spec((("a",),))}])).inputs == math.ceil(64 * 4 / 8 / 4)


def test_argument_roles() -> None:
    def step(state, batch):
        grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
        m = 0.9 * state["m"] + grads
        return {"w": state["w"] - m, "m": m}, grads.sum()

    g = graph(step, ({"w": (8, 8), "m": (8, 8)}, (4, 8)), mesh(a=4))
    found = argument_roles(g)
    names = [leaf.path for leaf in g.program.inputs]
    assert {names[i] for i in found.parameters} == {"state['w']"}
    assert {names[i] for i in found.optimizer} == {"state['m']"}
    assert {names[i] for i in found.batch} == {"batch"}


@pytest.mark.parametrize(
    ("shape", "bits", "size"),
    [
        ([1024, 1024], 32, 1024 * 1024 * 4),
        ([4, 1024, 172], 16, 4 * 1024 * 176 * 2),  # 1024 on the lanes: 172 rows need less padding than 172 columns
        ([1024, 1], 32, 1024 * 8 * 4),
        ([8, 64, 1], 32, 8 * 64 * 128 * 4 // 128 * 2),
        ([100], 32, 128 * 4),
        ([1025], 32, 2048 * 4),
        ([0, 8], 32, 0),
    ],
)
def test_arrays_are_padded_to_tiles(shape, bits, size) -> None:
    assert tiled_bytes(shape, bits, (8, 128)) == size
    assert tiled_bytes(shape, bits, (1, 1)) == math.prod(shape) * bits // 8


def test_weights_gathered_at_use_are_live_from_first_to_last_use() -> None:
    g = graph(mlp_step, mlp_args(64, 16, 32), mesh(a=4), donate_argnums=0)
    best = search(g, "fsdp")[0]
    model = MemoryModel(g)
    weight = 16 * 32 * 4
    spans = {
        (g.nodes[r.first].phase, g.nodes[r.last].phase) for r in model.layout_ranges(best.layout) if r.bytes == weight
    }
    assert ("forward", "backward") in spans  # the second layer's weight: all-gathered once, read by both passes
    assert ("backward", "backward") in spans  # a gradient before its reduce-scatter
    assert best.memory.peak == MemoryModel(g).memory(best.layout).peak
    added = model.usage(best.layout) - model.live_bytes(model.sizes(best.layout))
    assert int(added.max()) >= 2 * weight


@pytest.mark.parametrize(
    ("kept", "donated", "more"),
    [(P(None, "a"), (0, 1), 1), (P("b", "a"), (0, 1), 1), (P(), (0, 1), 0), (P(None, "a"), (0,), 0)],
)
def test_a_gathered_result_is_put_together_beside_its_donated_buffer(kept, donated, more) -> None:
    def update(master, weights):
        return master * 0.5, (master * 0.5).astype(weights.dtype)

    whole, specs = 128 * 128 * 2, (kept, P())
    args = jax.ShapeDtypeStruct((128, 128), jnp.float32), jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
    axes = MeshConfig(axes={"a": 2, "b": 2}, hardware="tpu-v4")
    plan = jit(update, mesh=axes, in_shardings=specs, out_shardings=specs, donate_argnums=donated).plan(*args)
    beside = plan.memory.peak - plan.memory.parameters - plan.memory.optimizer - plan.memory.inputs
    own = whole * (1 not in donated)
    assert own + more * whole <= beside < own + more * whole + whole


@pytest.mark.parametrize(("on_chip", "fitting"), [(0, 0), (64 * 64 * 4, 0), (2 * 64 * 64 * 4, 1), (8 * 64 * 64 * 4, 2)])
def test_on_chip_candidates_stay_on_chip_as_far_as_they_fit(on_chip, fitting) -> None:
    def fun(x, w):
        return jnp.tanh(jnp.tanh(jnp.tanh(x @ w) @ w) @ w).sum()

    on = replace(mesh(a=1), hardware=replace(CHIP, on_chip=on_chip))
    usage = [
        MemoryModel(g).usage(propagate(g, [])) for g in (graph(fun, ((64, 64), (64, 64)), m) for m in (mesh(a=1), on))
    ]
    assert int(usage[0].max() - usage[1].max()) == fitting * 64 * 64 * 4  # two at a time: operand and result


def test_operands_of_a_delayed_gradient_stay_live() -> None:
    def loss(ws, x):
        for up, down in ws:
            x = x + jnp.tanh(x @ up) @ down
        return (x**2).sum()

    def buffers(up: Spec, down: Spec) -> int:
        g = graph(jax.grad(loss), ([((64, 64), (64, 64))] * 3, (4096, 64)), mesh(a=4))
        layout = propagate(g, [dict(zip(g.inputs[:6], (up, down) * 3, strict=True))])
        model = MemoryModel(g)
        x = 4096 * 64 * 4
        return sum(r.bytes == x and not r.on_chip_candidate for r in model.layout_ranges(layout))

    column, row, whole = Spec(((), ("a",))), Spec((("a",), ())), Spec(((), ()))
    assert buffers(whole, whole) == 0
    # per layer: its input added the partial gradient of the input, and that added the gradient it is added to
    assert buffers(column, row) > 3


@pytest.mark.parametrize("scale", [lambda _: 3.0, jnp.max], ids=["constant", "computed last"])
def test_an_elementwise_value_overwrites_a_product_that_nothing_is_fused_with(scale) -> None:
    """A product's result with which an all-gather or a reduction is fused is not overwritten."""

    def fun(x, first, second):
        h = x @ first
        y = h @ second
        total = (h * jnp.tanh(y) * scale(first)).sum()  # fused with y
        return jnp.sort(h * jnp.tanh(y)), total

    def buffers_at_sort(second: Spec) -> float:
        g = graph(fun, ((4096, 64), (64, 64), (64, 64)), mesh(a=4))
        x, first, w = g.inputs
        model = MemoryModel(g)
        layout = propagate(g, [{x: Spec((("a",), ())), first: Spec(((), ())), w: second}])
        (sort,) = [n for n, node in enumerate(g.nodes) if node.kind.op == "sort"]
        return round(int(model.usage(layout)[sort]) / model.size(x, layout.specs[x]), 1)

    assert buffers_at_sort(Spec(((), ()))) == 3  # two products, one of them overwritten, and the sorted value
    assert buffers_at_sort(Spec((("a",), ()))) == 4


def test_what_one_step_of_a_sum_of_products_writes_and_another_reads_is_stored() -> None:
    def fun(x, y, a, b):
        dw = x.T @ y
        return jnp.sin(dw @ b), jnp.sin(a @ dw)

    on, shapes = mesh(a=1), ((4096, 512), (4096, 512), (4, 512), (512, 4))
    programs = (program(fun, shapes, on), SumProducts("through")(program(fun, shapes, on)))
    apart, joined = (build_graph(p) for p in programs)
    assert len(joined.nodes) < len(apart.nodes)
    peaks = [MemoryModel(g).memory(propagate(g, [])).peak for g in (apart, joined)]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.02)
    seconds = [CostModel(g).cost(propagate(g, [])).seconds for g in (apart, joined)]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.05)
