"""Dead code goes, at every depth; effects stay."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from autoshard import jaxpr as jx
from autoshard.ir.trace import trace
from autoshard.machine.mesh import Hardware, Link, LogicalMesh
from autoshard.passes import DeadCode
from autoshard.rules import SHIPPED
from autoshard.transforms.pipeline import Pipeline

HARDWARE = Hardware("cpu", {"float32": 1e11}, 8e9, 1e10, {"host": Link("host", 1e10, 1e-6)}, 1e-6)
MESH = LogicalMesh(("data",), (8,), HARDWARE)
X = jax.ShapeDtypeStruct((8, 4), "float32")


def names(jaxpr):
    return [e.primitive.name for e in jaxpr.eqns]


def test_unused_equations_go_and_inputs_stay():
    def step(x, y):
        jnp.tanh(y)
        return jnp.sin(x)

    before = trace(jax.jit(step), (X, X), {}, MESH, rules=SHIPPED)
    after, (report,) = Pipeline((DeadCode(),)).run(before)
    assert names(after.jaxpr) == ["sin"]
    assert len(after.jaxpr.invars) == 2
    assert (report.equations_before, report.equations_after) == (2, 1)
    x = np.linspace(-1, 1, 32, dtype="float32").reshape(8, 4)
    np.testing.assert_array_equal(jax.jit(jx.as_fun(after.jaxpr))(x, x)[0], jax.jit(step)(x, x))


def test_unused_results_of_loops_go():
    def step(x):
        def turn(c, _):
            return jnp.sin(c), jnp.tanh(c)

        return jax.lax.scan(turn, x, length=3)[0]

    after = DeadCode()(trace(jax.jit(step), (X,), {}, MESH, rules=SHIPPED))
    (scan,) = after.jaxpr.eqns
    assert names(jx.regions(scan)[0].body) == ["sin"]


def test_effects_stay():
    seen = []

    def step(x):
        jax.debug.callback(lambda v: seen.append(float(v)), jnp.tanh(x).sum())
        return jnp.sin(x)

    after, _ = Pipeline((DeadCode(),)).run(trace(jax.jit(step), (X,), {}, MESH, rules=SHIPPED))
    assert "debug_callback" in names(after.jaxpr)
    jax.block_until_ready(jax.jit(jx.as_fun(after.jaxpr))(jnp.zeros((8, 4))))
    jax.effects_barrier()
    assert seen == [0.0]
