"""Copies to the host's memory and back beside products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import jaxpr as jx
from autoshard.backend.host_copies import beside_products, in_one_layout, stacks_beside_copies


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_the_same_bits_in_the_same_memory_by_way_of_another_place(dtype):
    def there_and_back(x):
        return jax.device_put(jax.device_put(x, jax.memory.Space.Host), jax.memory.Space.Device)

    x = jnp.asarray([[np.nan, -0.0, np.inf], [1e-40, 1.5, -2.0]]).astype(dtype)
    plain = jax.make_jaxpr(there_and_back)(x).jaxpr
    copied = [beside_products(e) for e in plain.eqns]
    copy = ["optimization_barrier", "broadcast_in_dim", "select_n"]
    there, back = ([e.primitive.name for e in eqns] for eqns in copied)
    assert there == [*copy, "device_put"]
    assert back == ["device_put", *copy, "optimization_barrier"]
    assert [eqns[-1].outvars[0].aval for eqns in copied] == [e.outvars[0].aval for e in plain.eqns]
    (got,) = jax.jit(lambda x: jax.core.eval_jaxpr(plain.replace(eqns=[*copied[0], *copied[1]]), [], x))(x)
    np.testing.assert_array_equal(np.asarray(got).view("uint8"), np.asarray(x).view("uint8"))


def test_what_stays_on_the_device_has_one_layout_in_the_loops_that_send_and_fetch():
    """The longest dimension but the minor one is next to that; weights, and what fills no lanes, are as they were."""
    host, device = jax.memory.Space.Host, jax.memory.Space.Device

    def step(x, ws):
        def forward(h, w):
            heads, rows = jnp.sin(h @ w), h.sum(-1, keepdims=True)
            sent = jax.device_put(jnp.cos(heads), host)
            return h + heads, (heads, h[:, 0], rows, sent)

        def backward(g, row):
            (heads, h, rows, sent), w = row
            return (g * heads + jax.device_put(sent, device) + rows) @ w.T + h[:, None], w.sum()

        h, residuals = jax.lax.scan(forward, x, ws)
        return jax.lax.scan(backward, h, (residuals, ws), reverse=True)

    rng = np.random.default_rng(0)
    args = [rng.normal(size=size).astype("float32") for size in ((2, 16, 4, 128), (3, 128, 128))]
    plain = jax.make_jaxpr(step)(*args).jaxpr
    scans = [e for e in plain.eqns if jx.scan_groups(e) is not None]
    stacks = stacks_beside_copies(plain, lambda e: e.primitive.name == "device_put")
    assert stacks == {v for v in scans[0].outvars[1:] if jx.aval(v).memory_space == device}
    bodies = [in_one_layout(jx.regions(e)[0].body, e, stacks, lambda v: jx.aval(v).shape, lanes=128) for e in scans]
    made, read = ([e for e in b.eqns if e.primitive.name == "layout_constraint"] for b in bodies)
    assert set(bodies[0].outvars) >= {e.outvars[0] for e in made}
    assert set(bodies[1].invars) >= {e.invars[0] for e in read}
    for found in made, read:
        assert {e.params["layout"].major_to_minor for e in found} == {(0, 2, 1, 3), (0, 1, 2)}
        assert len(found) == 2
    changed = dict(zip(scans, bodies, strict=True))
    eqns = [jx.with_bodies(e, [changed[e]]) if e in changed else e for e in plain.eqns]
    got = jax.jit(lambda *xs: jax.core.eval_jaxpr(jx.with_eqns(plain, eqns), [], *xs))(*args)
    for was, now in zip(jax.tree.leaves(jax.jit(step)(*args)), got, strict=True):
        np.testing.assert_allclose(now, was, rtol=1e-6, atol=1e-4)
    body = jx.regions(scans[0])[0].body
    for others, shape in ((set(), lambda v: jx.aval(v).shape), (stacks, lambda v: (*jx.aval(v).shape[:-1], 64))):
        assert in_one_layout(body, scans[0], others, shape, lanes=128) is body
    assert not stacks_beside_copies(plain, lambda e: False)
