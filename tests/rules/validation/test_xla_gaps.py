"""What XLA makes of the rules: every split on two devices gives the same numbers, with the collectives it should.

Local factors are not for XLA to split.
"""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard import jaxpr as jx
from autoshard.rules.validation.case import load
from autoshard.rules.validation.samples import samples

COLLECTIVE = re.compile(r"= \S+ (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
EXPECTED = {"parallel": set(), "halo": {"collective-permute"}}
BROKEN = {"mulhi", "philox2x32", "philox4x32"}
"""Plain JAX cannot compile them for several devices."""
DOUBLE = {"select_and_scatter", "select_and_scatter_add"}
"""XLA partitions them in single precision only."""
GATHERED = ("top_k", "triangular_solve", "tridiagonal_solve")
"""XLA (on two CPU devices, JAX 0.12) gathers operands that need no communication: of `top_k` the batch too, of the
solvers the right-hand sides. The results are right."""
GATHERED_IN_GROUPS = "conv_general_dilated"
"""So are those of a convolution, where feature groups are neither one nor the channels."""
CONVERGENCE_LOOPS = ("igamma", "igamma_grad_a", "igammac", "random_gamma", "regularized_incomplete_beta")
"""Lowered to loops that run until all elements have converged: a scalar all-reduce in each iteration."""
FIRST = {s.name: s for s in reversed(samples())}


def sharding(mesh, dims, factor):
    return NamedSharding(mesh, PartitionSpec(*("x" if dim and dim[0] == factor else None for dim in dims)))


@pytest.mark.parametrize("name", sorted(set(FIRST) - BROKEN))
def test_xla_splits_as_the_rule_says(name):
    if jx.find_primitive(name) is None:
        pytest.skip(f"this JAX has no {name}")
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    with jax.enable_x64(True):
        case = load(FIRST[name])
        rule, eqn = case.rule, case.eqn
        dims = [dim for value in (*rule.operands, *rule.results) for dim in value]
        keys = any(jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in (*eqn.invars, *eqn.outvars))
        for factor in rule.factors:
            kind = rule.kind(factor)
            if kind in {"local", "whole"} or case.sizes[factor] % 2 or keys or any(factor in dim[1:] for dim in dims):
                continue
            ins = [sharding(mesh, d, factor) for d in rule.operands]
            outs = [sharding(mesh, d, factor) for d in rule.results]
            step = jax.jit(
                lambda *xs, eqn=eqn: jax.tree.leaves(eqn.primitive.bind(*xs, **eqn.params)),
                in_shardings=tuple(ins),
                out_shardings=outs,
            )
            operands = [jax.device_put(x, s) for x, s in zip(case.operands, ins, strict=True)]
            compiled = step.lower(*operands).compile()
            if name != "empty":
                for got, expected in zip(compiled(*operands), case.results, strict=True):
                    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)
            emitted = set(COLLECTIVE.findall(compiled.as_text()))
            allowed = EXPECTED.get(kind, {"all-reduce"}) | ({"all-reduce"} if name in CONVERGENCE_LOOPS else set())
            if name not in {*GATHERED, GATHERED_IN_GROUPS, *DOUBLE}:
                assert emitted <= allowed, f"{factor} ({kind}) of {rule}"


@pytest.mark.parametrize("name", GATHERED)
def test_what_is_said_to_be_gathered_is(name):
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    with jax.enable_x64(True):
        case = load(FIRST[name])
        dims = [*case.rule.operands, *case.rule.results]
        factors = [f for f in case.rule.factors if case.rule.kind(f) == "parallel" and case.sizes[f] % 2 == 0]
        gathered = set()
        for factor in factors:
            ins = tuple(sharding(mesh, d, factor) for d in case.rule.operands)
            outs = [sharding(mesh, d, factor) for d in case.rule.results]
            step = jax.jit(
                lambda *xs: jax.tree.leaves(case.eqn.primitive.bind(*xs, **case.eqn.params)),
                in_shardings=ins,
                out_shardings=outs,
            )
            gathered |= set(COLLECTIVE.findall(step.lower(*case.operands).compile().as_text()))
    assert len(dims) > 1
    assert gathered == {"all-gather"}
