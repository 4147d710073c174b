"""Jaxprs: normalization, regions, source lines, dtypes."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.source_info_util import register_exclusion
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import jaxpr as jx


def traced(fun: Any, *shapes: tuple[int, ...]) -> jx.Jaxpr:
    return jax.jit(fun).trace(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).jaxpr


def everything(x: Any, ws: Any) -> Any:
    """Calls, loops, branches, remat and custom derivatives in one program."""

    @jax.custom_vjp
    def half(a: Any) -> Any:
        return a / 2

    half.defvjp(lambda a: (a / 2, None), lambda _, g: (g / 2,))
    inner = jax.jit(lambda a: jax.nn.relu(a) + jax.nn.silu(a))
    h = jax.lax.scan(lambda c, w: (inner(jnp.tanh(c @ w)), c.sum()), inner(x), ws)[0]
    h = jax.lax.cond(h[0, 0] > 0, lambda a: inner(a) * 2, lambda a: -a, h)
    h = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, inner(c[1])), (0, h))[1]
    return jax.checkpoint(half)(h) @ jnp.linalg.solve(jnp.eye(4) * 3, h.T)


def test_normalize_computes_the_same_and_defines_each_variable_once() -> None:
    jaxpr = traced(everything, (4, 4), (3, 4, 4))
    normal = jx.normalize(jaxpr)
    jx.check_jaxpr(normal)
    seen: list[jx.Var] = []

    def collect(j: jx.Jaxpr) -> None:
        seen.extend([*j.constvars, *j.invars])
        for eqn in j.eqns:
            assert eqn.primitive.name not in ("call", "closed_call", "jit")
            seen.extend(eqn.outvars)
            for region in jx.regions(eqn):
                collect(region.body)

    collect(normal)
    assert len(seen) == len(set(seen))
    x = np.random.default_rng(0).normal(size=(4, 4)).astype("f4")
    ws = np.random.default_rng(1).normal(size=(3, 4, 4)).astype("f4")
    np.testing.assert_array_equal(jax.jit(jx.as_fun(normal))(x, ws)[0], jax.jit(everything)(x, ws))


def test_region_inputs_outputs_and_carries_have_matching_shapes() -> None:
    found: set[str] = set()

    def walk(j: jx.Jaxpr) -> None:
        for eqn in j.eqns:
            for region in jx.regions(eqn):
                found.add(eqn.primitive.name)
                for wire in region.inputs:
                    outside, inside = jx.aval(eqn.invars[wire.outside]), jx.aval(region.body.invars[wire.inside])
                    assert inside.shape == outside.shape[1 if wire.stacked else 0 :]
                for wire in region.outputs:
                    outside, inside = jx.aval(eqn.outvars[wire.outside]), jx.aval(region.body.outvars[wire.inside])
                    assert inside.shape == outside.shape[1 if wire.stacked else 0 :]
                for end, start in region.carries:
                    assert jx.aval(region.body.outvars[end]).shape == jx.aval(region.body.invars[start]).shape
                walk(region.body)

    walk(jx.normalize(traced(everything, (4, 4), (3, 4, 4))))
    assert {"scan", "while", "cond", "remat2", "custom_jvp_call", "custom_vjp_call", "custom_linear_solve"} <= found


def test_with_bodies_replaces_the_bodies_of_regions() -> None:
    normal = jx.normalize(traced(everything, (4, 4), (3, 4, 4)))
    eqns = [jx.with_bodies(e, [r.body for r in jx.regions(e)]) if jx.regions(e) else e for e in normal.eqns]
    jx.check_jaxpr(normal.replace(eqns=eqns))


def test_a_library_function_called_twice_has_the_source_line_of_each_call() -> None:
    def fun(x: Any) -> Any:
        a = jnp.where(x > 0, x, 1)
        return jnp.where(x > 1, a, 2)

    first = fun.__code__.co_firstlineno + 1
    lines = [jx.source(e) for e in jx.normalize(traced(fun, (4,))).eqns if e.primitive.name == "select_n"]
    assert lines == [f"{__file__}:{first}", f"{__file__}:{first + 1}"]


def test_autodiff_phase() -> None:
    j = jx.normalize(traced(jax.grad(lambda x: jnp.sum(jnp.sin(x) ** 3)), (4,)))
    marks = {e.primitive.name: (jx.is_differentiated(e), jx.is_backward(e)) for e in j.eqns}
    assert marks["sin"] == (True, False)
    assert (True, True) in marks.values()


def test_a_scope_named_like_a_transformation_is_none() -> None:
    def fun(x: Any) -> Any:
        with jax.named_scope("transpose(jvp(x))"):
            return jnp.sin(x)

    assert [jx.autodiff_phase(e) for e in jx.normalize(traced(fun, (4,))).eqns] == [""]
    marked = {e.primitive.name: jx.autodiff_phase(e) for e in jx.normalize(traced(jax.grad(fun), ())).eqns}
    assert marked["cos"] == "forward"


def test_dead_code_elimination_keeps_inputs() -> None:
    j = jx.normalize(traced(lambda x, y: (jnp.sin(y), x + 1)[1], (4,), (4,)))
    assert [e.primitive.name for e in jx.eliminate_dead_code(j).eqns] == ["add"]
    assert len(jx.eliminate_dead_code(j).invars) == 2


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        ("int4", 4),
        ("uint2", 2),
        ("bool", 8),
        ("bfloat16", 16),
        ("float8_e4m3fn", 8),
        ("float32", 32),
        ("complex64", 64),
    ],
)
def test_dtype_bits(dtype: str, bits: int) -> None:
    assert jx.dtype_bits(jnp.dtype(dtype)) == bits


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_key_dtype_names_round_trip(impl: str) -> None:
    dtype = jax.random.key(0, impl=impl).dtype
    assert jx.dtype_from_name(jx.dtype_name(dtype)) == dtype
    assert jx.dtype_bits(dtype) == jax.random.key_data(jax.random.key(0, impl=impl)).size * 32


def test_equal_equations_have_one_key() -> None:
    j = jx.normalize(traced(lambda x: jnp.sin(jnp.sin(x)) + jnp.sin(x[:2]).sum(), (4,)))
    sines = [jx.eqn_key(e) for e in j.eqns if e.primitive.name == "sin"]
    assert sines[0] == sines[1] != sines[2]


def test_contraction_flops() -> None:
    product = next(e for e in traced(lambda a, b: a @ b, (3, 4), (4, 5)).eqns)
    assert jx.contraction_flops(product) == 2 * 3 * 4 * 5
    conv = traced(lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME"), (2, 3, 8, 8), (5, 3, 3, 3)).eqns[-1]
    assert jx.contraction_flops(conv) == 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)


@pytest.mark.parametrize(
    ("precision", "dtype", "rounds"),
    [
        (None, "float32", True),
        ("default", "float32", True),
        (("default", "default"), "bfloat16", True),
        ("highest", "float32", False),
        (("default", "highest"), "float32", False),
        ("BF16_BF16_F32", "float32", False),
        (None, "int32", False),
    ],
)
def test_products_round_their_operands_at_the_default_precision_alone(precision, dtype, rounds) -> None:
    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in ((3, 4), (4, 5))]
    closed = jax.make_jaxpr(lambda a, b: jnp.sin(jnp.matmul(a, b, precision=precision) * 1.0))(*shapes)
    found = {e.primitive.name: jx.rounds_operands(e) for e in closed.jaxpr.eqns}
    assert found["dot_general"] is rounds
    assert not found["sin"]
    groups = jax.make_jaxpr(jax.lax.ragged_dot)(jnp.ones((6, 4)), jnp.ones((2, 4, 5)), jnp.ones(2, int))
    assert not any(map(jx.rounds_operands, groups.jaxpr.eqns))


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_both_gradients_of_a_convolution_have_its_flops(stride: int, padding: str) -> None:
    """Of a strided one, the gradient of the input is a convolution over an array with holes, which are not read."""

    def convolve(x: Any, k: Any) -> Any:
        return jax.lax.conv_general_dilated(x, k, (stride, stride), padding)

    shapes = (2, 3, 96, 96), (5, 3, 3, 3)
    forward = jx.contraction_flops(traced(convolve, *shapes).eqns[-1])
    both = traced(lambda x, k: jax.vjp(convolve, x, k)[1](convolve(x, k)), *shapes)
    gradients = [f for f in map(jx.contraction_flops, both.eqns) if f][-2:]
    assert gradients == pytest.approx([forward] * 2, rel=0.05)  # windows at the edges


def whole_write(x: Any) -> Any:
    ref = jax.new_ref(x)
    ref[...] = x + 1
    return ref[...]


def written_in_a_loop(x: Any) -> Any:
    ref = jax.new_ref(jnp.zeros_like(x))
    ref[2:4] = x[2:4] * 2

    def body(i: Any, carry: Any) -> Any:
        ref[0] = ref[0] + x[i]
        return carry

    jax.lax.fori_loop(0, 3, body, 0)
    return jax.freeze(ref)


@pytest.mark.parametrize("fun", [whole_write, written_in_a_loop])
@pytest.mark.parametrize("passes", [(), None])
def test_mutable_arrays_are_discharged(fun: Any, passes: Any) -> None:
    x = jnp.arange(64.0).reshape(8, 8)
    step = autoshard.jit(fun, mesh={"a": 2, "b": 4}, in_shardings=P("a", "b"), passes=passes)
    np.testing.assert_array_equal(step(x), jax.jit(fun)(x))


@pytest.mark.parametrize(
    "fun",
    [lambda x: jnp.select([x > 0, x > -1], [x, 2 * x]), lambda x: jnp.median(x, axis=1), lambda x: jnp.nanmean(x, 1)],
    ids=["select", "median", "nanmean"],
)
def test_reshards_to_auto_axes_are_removed(fun: Any) -> None:
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    step = autoshard.jit(fun, mesh={"d": 8}, strategy="dp", in_shardings=P("d"))
    plan = step.plan(x)
    assert (plan.diagnostics, plan.cost.collectives) == ((), ())
    assert "all-gather" not in step.lower(x).compile().as_text()
    np.testing.assert_allclose(step(x), jax.jit(fun)(x), rtol=1e-6)


def test_segment_sum_all_reduces_only_sums() -> None:
    x, i = jnp.ones((16, 4)), jnp.arange(16, dtype=jnp.int32) % 3
    step = autoshard.jit(
        lambda x, i: jax.ops.segment_sum(x, i, 4), mesh={"d": 8}, strategy="dp", in_shardings=(P("d"), P("d"))
    )
    assert [c.kind for c in step.plan(x, i).cost.collectives] == ["all-reduce"]
    np.testing.assert_array_equal(step(x, i), jax.ops.segment_sum(x, i, 4))


def test_a_primitive_that_is_defined_later_is_found() -> None:
    assert jx.find_primitive("defined_later") is None
    later = jx.Primitive("defined_later")
    mlir.register_lowering(later, mlir.lower_fun(lambda x: x, multiple_results=False))
    assert jx.find_primitive("defined_later") is later


def test_a_library_that_registers_its_files_later_has_no_source_lines(tmp_path: Path) -> None:
    file = tmp_path / "library.py"
    file.write_text("def double(x):\n    return x * 2\n")
    eqn = traced(runpy.run_path(str(file))["double"], (4,)).eqns[0]
    assert jx.source(eqn) == f"{file}:2"
    register_exclusion(str(file))
    assert str(file) not in jx.source(eqn)


def test_new_equations_have_the_settings_and_the_source_of_their_own_step() -> None:
    """Not those under which the first of their kind was made in this process."""
    sharding = NamedSharding(jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,)), P("d"))

    def made() -> list[jx.JaxprEqn]:
        eqn = traced(lambda x: x * 2, (8,)).eqns[0]
        x, y = eqn.invars[0], eqn.outvars[0]
        assert isinstance(x, jx.Var)
        return [jx.constrain_variable(x, y, sharding, None), jx.optimization_barrier([x], eqn)]

    with set_xla_metadata(kind="first"), jax.named_scope("first"):
        assert [e.ctx.xla_metadata for e in made()] == [{"kind": "first"}] * 2
    assert [e.ctx.xla_metadata for e in made()] == [None] * 2
    assert [jx.source(e).partition(":")[0] for e in made()] == ["", __file__]
    assert "first" not in "".join(str(e.source_info.name_stack) for e in made())


def test_the_flops_of_products_count_loops_as_often_as_they_turn():
    def program(x: Any, w: Any) -> Any:
        y = jax.jit(jnp.matmul)(x, w)
        y = jax.lax.scan(lambda c, _: (jax.checkpoint(jnp.matmul)(c, w), None), y, None, length=5)[0]
        y = jax.lax.cond(y[0, 0] > 0, lambda a: a @ w @ w, lambda a: a @ w, y)
        y = jax.lax.while_loop(lambda c: c[0, 0] < 3, lambda c: c @ w, y)
        return y.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)

    one = 2.0 * 8 * 4 * 4
    assert jx.product_flops(traced(program, (8, 4), (4, 4))) == {"float32": one * (1 + 5 + 2 + 1), "bfloat16": one}
    gradient = traced(jax.grad(lambda w, x: jnp.tanh(x @ w).sum()), (4, 4), (8, 4))
    assert jx.product_flops(gradient) == {"float32": 2 * one}


@pytest.mark.parametrize("fun", [lambda x, y: x, lambda x, y: jnp.float32(2), lambda x, y: y * 1])
def test_spliced_in_is_what_returns_an_operand_or_a_number(fun: Any) -> None:
    jaxpr = jx.normalize(jax.make_jaxpr(lambda x, y: (x + y) * 3)(1.0, 2.0))
    eqns = [e for eqn in jaxpr.eqns for e in (jx.splice(fun, eqn, eqn.invars) if eqn is jaxpr.eqns[0] else [eqn])]
    found = jx.as_fun(jx.with_eqns(jaxpr, eqns))(1.0, 2.0)
    assert found == [fun(jnp.float32(1), jnp.float32(2)) * 3]
