"""Copies to the host's memory and back beside products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import MeshConfig
from autoshard import jaxpr as jx
from autoshard.backend.host_copies import fetched, in_one_layout, products_that_wait, sent, stacks_beside_copies
from autoshard.backend.lower import constrain
from autoshard.ir.graph import BACKWARD


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_the_same_bits_in_the_same_memory_by_way_of_another_place(dtype):
    def there_and_back(x):
        return jax.device_put(jax.device_put(x, jax.memory.Space.Host), jax.memory.Space.Device)

    x = jnp.asarray([[np.nan, -0.0, np.inf], [1e-40, 1.5, -2.0]]).astype(dtype)
    plain = jax.make_jaxpr(there_and_back)(x).jaxpr
    back, arrived = fetched(plain.eqns[1])
    copied = [sent(plain.eqns[0]), back]
    copy = ["optimization_barrier", "broadcast_in_dim", "select_n"]
    assert [e.primitive.name for e in copied[0]] == [*copy, "device_put"]
    assert [e.primitive.name for e in back] == ["device_put", *copy, "optimization_barrier"]
    assert back[0].outvars == [arrived]
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


LAYERS, MESH = 5, MeshConfig(axes={"data": 8}, tpu="v5e:2x4")


def train(params, x):
    """Of three products a layer, one after the other; what the first and the second make is named."""

    def layer(h, w):
        a = checkpoint_name(h @ w["first"], "a")
        b = checkpoint_name(jnp.sin(a) @ w["second"], "b")
        return h + jnp.sin(b) @ w["third"], None

    def loss(params):
        return (jax.lax.scan(layer, x, params)[0] ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments(tokens, width, dtype):
    w = jax.ShapeDtypeStruct((LAYERS, width, width), dtype)
    return dict.fromkeys(("first", "second", "third"), w), jax.ShapeDtypeStruct((8, tokens // 8, width), dtype)


def planned(tokens, width, dtype, *on_host, mesh=MESH):
    recompute = dict.fromkeys(on_host, "host")
    step = autoshard.jit(train, mesh=mesh, strategy="dp", donate_argnums=0, memory_budget="10TiB", recompute=recompute)
    return step.plan(*arguments(tokens, width, dtype))


def backward(jaxpr):
    """The scan that reads what is on the host."""
    (found,) = (e for e in jaxpr.eqns if jx.scan_groups(e) and e.params["reverse"])
    return found


@pytest.mark.parametrize("on_host", [(), ("a",), ("a", "b")])
def test_a_loop_fetches_what_the_next_iteration_reads(on_host):
    """By the number of the iteration once what it carries is there, in the layout in which it was sent; the numbers are
    those of the plain step."""
    plan = planned(64, 128, "float32", *on_host)
    devices = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    scan = backward(jaxpr := constrain(plan.study.graph, plan, devices))
    placed = {
        v: e.params["layout"] for e in jx.walk(jaxpr) for v in e.outvars if e.primitive.name == "layout_constraint"
    }
    ways = [e for e in jx.walk(jaxpr) if e.primitive.name == "device_put"]
    there = [placed[e.invars[0]] for e in ways if jx.aval(e.outvars[0]).memory_space == jax.memory.Space.Host]
    back = [e for e in ways if jx.aval(e.outvars[0]).memory_space == jax.memory.Space.Device]
    assert [x.major_to_minor for x in there] == [(0, 1, 2)] * len(on_host)
    assert len(back) == 2 * len(on_host)  # the first one comes before the loop
    assert all(any(e.outvars[0] in f.invars for f in jx.walk(jaxpr) if f.outvars[0] in placed) for e in back)
    groups, (region,) = jx.scan_groups(scan), jx.regions(scan)
    body, host = region.body, jax.memory.Space.Host
    made = {v: e for e in body.eqns for v in e.outvars}
    stacks = [v for v in body.invars[: groups.consts] if jx.aval(v).memory_space == host]
    assert len(stacks) == len(on_host)
    assert not any(jx.aval(v).memory_space == host for v in body.invars[groups.consts :])
    rows = [e for e in body.eqns if e.primitive.name == "dynamic_slice" and e.invars[0] in stacks]
    assert len(rows) == len(on_host)
    for row in rows:
        read, begins = [row.invars[1]], set[jx.Var]()
        while read:
            made_by = made.get(at := read.pop())
            if made_by is None or made_by.primitive.name == "optimization_barrier":
                begins.add(at)
            else:
                read += [a for a in made_by.invars if isinstance(a, jx.Var)]
        assert begins.issubset({v for v in made if not jx.aval(v).shape})
        assert all(jx.aval(v).shape for v in (made[at].outvars[0] for at in begins))
    waits = [e for e in body.eqns if e.primitive.name == "optimization_barrier" and len(e.outvars) == len(on_host) + 1]
    ends = {*body.outvars[: groups.carry]}
    assert any({*e.outvars[1:]} <= ends for e in waits) is bool(on_host)
    keys = jax.random.split(jax.random.key(0), 4)
    w, x = arguments(64, 128, "float32")
    params = {name: jax.random.normal(k, v.shape) / 16 for k, (name, v) in zip(keys, w.items(), strict=False)}
    x = jax.random.normal(keys[3], x.shape)
    for was, now in zip(
        jax.tree.leaves(jax.jit(train)(params, x)),
        jax.jit(jx.as_fun(jaxpr))(*jax.tree.leaves((params, x))),
        strict=True,
    ):
        np.testing.assert_allclose(now, was, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("width", "on_host", "before"),
    [(8192, (), None), (16384, ("a",), 1), (8192, ("a",), 3), (16384, ("a", "b"), 3), (4096, ("a", "b"), 5)],
)
def test_a_product_waits_before_which_others_take_as_long_as_the_copies(width, on_host, before):
    """A copy takes as long as 1.4 products at a width of 8,192. Gradients may come after all that others read."""
    plan = planned(65536, width, "bfloat16", *on_host)
    graph, found = plan.study.graph, products_that_wait(plan.study.graph, plan)
    products = [n for n, node in enumerate(graph.nodes) if node.kind.flops and node.phase == BACKWARD]
    order = [n for pair in zip(products[1::2], products[::2], strict=True) for n in pair]
    assert len(order) == 6
    assert [(order.index(n), len(w.fetched)) for n, w in found.items()] == ([(before, len(on_host))] if before else [])


@pytest.mark.parametrize(("tokens", "before"), [(131072, 1), (65536, 2)])
def test_where_there_are_no_gradients_what_others_read_waits(tokens, before):
    """For a weight of the next layer, which takes as long as 0.75 or 1.5 products; the operand is a weight too."""

    def predict(params, x):
        def layer(h, w):
            return h + jnp.sin(jnp.sin(h @ w["first"]) @ w["second"]) @ jax.device_put(
                w["third"], jax.memory.Space.Device
            ), None

        return jax.lax.scan(layer, x, params)[0]

    params, x = arguments(tokens, 8192, "bfloat16")
    devices = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    pins = {"third": NamedSharding(devices, P(), memory_kind="pinned_host")}
    plan = autoshard.jit(
        predict, mesh=MESH, strategy="dp", in_shardings=({"first": None, "second": None, **pins}, None)
    ).plan(params, x)
    graph = plan.study.graph
    ((n, wait),) = products_that_wait(graph, plan).items()
    assert [m for m, node in enumerate(graph.nodes) if node.kind.flops].index(n) == before
    assert graph.nodes[n].kind.shapes[wait.operands[0]] == (8192, 8192)


@pytest.mark.parametrize(("width", "waiting"), [(65536, 3), (32768, 5), (8192, 4)])
def test_where_sparse_cores_scatter_gradients_these_come_last(width, waiting):
    """A copy takes as long as 1.6 products at a width of 32,768 there, of the three that others read."""
    plan = planned(65536, width, "bfloat16", "a", mesh=MeshConfig(axes={"data": 8}, tpu="v6e:2x4"))
    graph, ((n, _),) = plan.study.graph, products_that_wait(plan.study.graph, plan).items()
    products = [n for n, node in enumerate(graph.nodes) if node.kind.flops and node.phase == BACKWARD]
    assert products.index(n) == waiting  # each gradient before what others read


def test_what_takes_longer_than_the_loop_is_there_before_its_last_product():
    plan = planned(64, 128, "float32", "a")
    graph = plan.study.graph
    ((n, wait),) = products_that_wait(graph, plan).items()
    gradient, _ = [m for m, node in enumerate(graph.nodes) if node.kind.flops and node.phase == BACKWARD][-2:]
    assert (n, wait.operands) == (gradient, (0, 1))  # the layer's input comes before its cotangent
