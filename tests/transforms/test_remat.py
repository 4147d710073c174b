"""Residuals, slices, and what is left as it is. What recomputing a whole step gives: tests/passes/test_recompute.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autoshard import jaxpr as jx
from autoshard.ir.trace import trace
from autoshard.machine.mesh import Hardware, Link, LogicalMesh
from autoshard.rules import SHIPPED
from autoshard.transforms import remat

HARDWARE = Hardware("cpu", {"float32": 1e11}, 8e9, 1e10, {"host": Link("host", 1e10, 1e-6)}, 1e-6)
MESH = LogicalMesh(("data",), (8,), HARDWARE)
W, X = jax.ShapeDtypeStruct((6, 8, 8), "float32"), jax.ShapeDtypeStruct((4, 8), "float32")


def traced(fun, *args):
    return trace(jax.jit(fun), args or (W, X), {}, MESH, rules=SHIPPED)


def nothing(eqn):
    return False


def dense(c, w):
    return jnp.tanh(c @ w), None


def names(work):
    return [e.primitive.name for e in work.eqns]


def test_a_program_slice_is_the_fewest_equations_that_compute_its_targets():
    jaxpr = traced(lambda x: (jnp.sin(jnp.exp(x)) + jnp.cos(x), jnp.tanh(jnp.exp(x))), X).jaxpr
    (x,) = jaxpr.invars
    exp, sin, cos = (next(e for e in jaxpr.eqns if e.primitive.name == n) for n in ("exp", "sin", "cos"))
    work = remat.program_slice(jaxpr.eqns, [jaxpr.outvars[1]], ())
    assert (names(work), work.inputs) == (["exp", "tanh"], (x,))
    work = remat.program_slice(jaxpr.eqns, [jaxpr.outvars[0]], [exp.outvars[0], cos.outvars[0]])
    assert names(work) == ["sin", "add"]
    assert set(work.inputs) == {exp.outvars[0], cos.outvars[0]}
    work = remat.program_slice(jaxpr.eqns, [sin.outvars[0]], sin.outvars)
    assert (names(work), work.inputs) == ([], tuple(sin.outvars))


def test_residuals_are_what_the_forward_part_computes_and_the_backward_part_reads():
    # Of x @ w -> tanh -> sum of squares: 1 - tanh^2 and tanh are saved; x and w are inputs and exist anyway.
    program = traced(jax.grad(lambda w, x: (jnp.tanh(x @ w) ** 2).sum()), jax.ShapeDtypeStruct((8, 8), "float32"), X)
    assert remat.residual_bytes(program) == 2 * 4 * 8 * 4


def test_what_a_scan_stacks_counts_whole():
    program = traced(jax.grad(lambda w, x: jax.lax.scan(dense, x, w)[0].sum()))
    assert remat.residual_bytes(program) == 2 * 6 * 4 * 8 * 4


def test_a_loop_whose_iterations_have_both_parts_counts_one_iteration():
    def step(w, x):
        def body(total, _):
            return total + jax.grad(lambda w: jax.lax.scan(dense, x, w)[0].sum())(w), None

        return jax.lax.scan(body, jnp.zeros_like(w), length=5)[0]

    assert remat.residual_bytes(traced(step)) == 2 * 6 * 4 * 8 * 4


def test_a_scan_saves_its_carry_and_nothing_else():
    program = traced(jax.grad(lambda w, x: jax.lax.scan(dense, x, w)[0].sum()))
    after = program.with_jaxpr(jx.eliminate_dead_code(remat.recompute_in_scans(program.jaxpr, nothing)))
    jx.check_jaxpr(after.jaxpr)
    assert remat.residual_bytes(after) == 6 * 4 * 8 * 4


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda w, x: jax.lax.scan(lambda c, w: (c @ w, None), x, w)[0].sum(), id="no gain"),
        pytest.param(lambda w, x: (w * x.sum()).sum(), id="no scan"),
    ],
)
def test_scans_without_a_gain_are_left_alone(loss):
    jaxpr = traced(jax.grad(loss)).jaxpr
    assert remat.recompute_in_scans(jaxpr, nothing) is jaxpr


def test_what_is_saved_anyway_is_read_rather_than_recomputed():
    def step(w, x):
        def loss(w):
            return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c), x, w)

        (y, ys), back = jax.vjp(loss, w)
        return back((jnp.ones_like(y), jnp.zeros_like(ys))), ys

    program = traced(step)
    after = jx.eliminate_dead_code(remat.recompute_in_scans(program.jaxpr, nothing))
    forward = next(e for e in after.eqns if jx.scan_groups(e))
    assert [v.aval.shape for v in forward.outvars] == [(4, 8), (6, 4, 8)], "stacked once, for both readers"
    assert sum(bool(jx.scan_groups(e)) for e in after.eqns) == 2


def test_straight_code_that_is_all_saved_or_all_in_the_last_segment_is_left_alone():
    jaxpr = traced(jax.grad(lambda w, x: jnp.tanh(x @ w[0]).sum())).jaxpr
    assert remat.recompute_in_straight_line(jaxpr, nothing) is jaxpr
    deep = traced(jax.grad(lambda w, x: jnp.tanh(jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) @ w[2]).sum())).jaxpr
    assert remat.recompute_in_straight_line(deep, lambda eqn: True) is deep
    assert remat.recompute_in_straight_line(deep, nothing) is not deep
