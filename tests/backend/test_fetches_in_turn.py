"""State that comes in whole from the host's memory, when its update is due."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard import jaxpr as jx
from autoshard.backend.fetches_in_turn import fetched_in_turn, least_padded

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def step(params: Any, moments: Any, x: Any) -> Any:
    """Gradients of two arrays and all that needs no moment, then the update of each, whose moment comes in first."""
    loss, grads = jax.value_and_grad(lambda p: jnp.sum(jnp.tanh(x @ p["a"]) @ p["b"]))(params)
    grads = {name: 0.1 * g for name, g in grads.items()}
    new, kept = {}, {}
    for name, g in grads.items():
        m = 0.9 * jax.device_put(moments[name], DEVICE) + g
        new[name], kept[name] = params[name] - m, jax.device_put(m, HOST)
    return new, kept, loss


def traced() -> tuple[jx.Jaxpr, list[jx.Var], list[Any]]:
    """The step, its moments in the host's memory, and arguments."""
    rng = np.random.default_rng(0)
    p = {"a": rng.normal(size=(4, 8)).astype("f4"), "b": rng.normal(size=(8, 4)).astype("f4")}
    args = [p, jax.tree.map(np.ones_like, p), rng.normal(size=(2, 4)).astype("f4")]
    avals = jax.tree.map(jax.typeof, args)
    avals[1] = jax.tree.map(lambda a: a.update(memory_space=HOST), avals[1])
    jaxpr = jx.normalize(jax.make_jaxpr(step)(*avals).jaxpr)
    return jaxpr, list(jaxpr.invars[2:4]), jax.tree.leaves(args)


def test_each_is_there_when_its_gradient_and_what_comes_before_are_made() -> None:
    jaxpr, moments, args = traced()
    late = fetched_in_turn(jaxpr, dict.fromkeys(moments, (0, 1)))
    names = [e.primitive.name for e in late.eqns]
    barriers = [e for e in late.eqns if e.primitive.name == "optimization_barrier"]
    branches = [e for e in late.eqns if e.primitive.name == "cond"]
    assert len(branches) == len(barriers) == 2
    assert [e.invars[1] for e in branches] == moments
    made_by = {v: e for e in late.eqns for v in e.outvars}
    indices = [made_by[e.invars[0]].invars[0] for e in branches]
    assert indices == [b.outvars[-1] for b in barriers]  # of which nobody knows that they hold
    known = [b.invars[:-1] for b in barriers]
    assert [[jx.aval(v).shape for v in of] for of in known] == [[(8, 4), (4, 8)], [(4, 8), (8, 4)]]
    update = names.index("cond", names.index("cond") + 1)
    assert made_by[known[1][0]] in late.eqns[names.index("cond") : update]  # what the first update makes last
    layouts = [e.params["layout"] for b in branches for r in jx.regions(b) for e in r.body.eqns if "layout" in e.params]
    assert [x.major_to_minor for x in layouts] == [(0, 1)] * 4
    got, want = (jax.jit(lambda *a, j=j: jax.core.eval_jaxpr(j, [], *a))(*args) for j in (late, jaxpr))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_other_copies_stay_as_they_are() -> None:
    jaxpr, moments, _ = traced()
    assert fetched_in_turn(jaxpr, {}) is jaxpr
    assert fetched_in_turn(jaxpr, dict.fromkeys(jaxpr.invars[:2], (0, 1))) is jaxpr
    one = fetched_in_turn(jaxpr, {moments[0]: (0, 1)})
    assert [e.primitive.name for e in one.eqns].count("cond") == 1


def test_the_layout_that_pads_least() -> None:
    """As XLA for TPU has an 8B decoder's head, whose 32,064 classes fill no lanes, and embedding."""
    tile = (8, 128)
    assert least_padded((4096, 32064), tile) == (1, 0)
    assert least_padded((128256, 1024), tile) == (0, 1)
    assert least_padded((3, 128), tile) == (0, 1)
    assert least_padded((7,), tile) == (0,)
    assert least_padded((3, 3, 64, 128), tile) is None
