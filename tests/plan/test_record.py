"""Plans: what they hold, JSON both ways, and what is refused."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
from collections import OrderedDict
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import autoshard
from autoshard import Plan
from autoshard.errors import ArgumentError, PlanError
from autoshard.plan.serialize import VERSION

MESH = {"data": 4, "model": 2}
X = jax.ShapeDtypeStruct((32, 16), jnp.float32)


def make_state(key, hidden=64):
    up, down = jax.random.split(key)
    w = {"up": jax.random.normal(up, (16, hidden)) / 4, "down": jax.random.normal(down, (hidden, 16)) / 8}
    return {"weights": w, "momentum": jax.tree.map(jnp.zeros_like, w), "turns": (jnp.zeros((), jnp.int32),)}


def train_step(state, x):
    def loss(w):
        return jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"] - x) ** 2)

    value, grads = jax.value_and_grad(loss)(state["weights"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    weights = jax.tree.map(lambda w, m: w - 0.1 * m, state["weights"], momentum)
    return {"weights": weights, "momentum": momentum, "turns": (state["turns"][0] + 1,)}, {"loss": value}


def other_step(state, x):
    new, metrics = train_step(state, x)
    return new, {"loss": metrics["loss"] * 2}


def jitted(fun=train_step, mesh=MESH, **options):
    return autoshard.jit(fun, mesh=mesh, donate_argnums=0, **options)


def shapes(hidden=64):
    return jax.eval_shape(lambda k: make_state(k, hidden), jax.random.key(0))


@pytest.fixture(scope="module")
def plan():
    return jitted(strategy="fsdp").plan(shapes(), X)


@pytest.fixture(scope="module", params=["auto", "dp", "fsdp_tp", "replicated", "zero1"])
def any_plan(request):
    return jitted(strategy=request.param).plan(shapes(), X)


def batch():
    return np.random.default_rng(0).standard_normal(X.shape, dtype=np.float32)


def test_specs_have_the_shape_of_arguments_and_results(plan):
    state, x = plan.in_specs
    assert jax.tree.structure(state) == jax.tree.structure(shapes())
    assert all(isinstance(s, PartitionSpec) for s in jax.tree.leaves(plan.in_specs))
    assert x == PartitionSpec(("data", "model"))
    new, metrics = plan.out_specs
    assert new == state
    assert metrics == {"loss": PartitionSpec()}
    for specs, shardings in ((plan.in_specs, plan.in_shardings), (plan.out_specs, plan.out_shardings)):
        assert jax.tree.structure(specs) == jax.tree.structure(shardings)
        for spec, sharding in zip(jax.tree.leaves(specs), jax.tree.leaves(shardings), strict=True):
            assert isinstance(sharding, NamedSharding)
            assert sharding.spec == spec
            assert dict(sharding.mesh.shape) == MESH


def test_static_and_keyword_arguments():
    def scaled(x, power, *, by):
        return x**power * by

    step = autoshard.jit(scaled, mesh=MESH, strategy="dp", static_argnums=1)
    plan = step.plan(X, 2, by=jax.ShapeDtypeStruct((), jnp.float32))
    assert plan.in_specs == (PartitionSpec(("data", "model")),)
    assert [p.path for p in plan.inputs] == ["x", "by"]
    assert Plan.from_json(plan.to_json()) == plan


def test_comes_back_from_json_as_it_was(any_plan, tmp_path):
    assert Plan.from_json(json.loads(json.dumps(any_plan.to_json()))) == any_plan
    file = tmp_path / "plans" / "today" / "plan.json"  # in folders that do not exist yet
    any_plan.save(file)
    loaded = Plan.load(file)
    assert loaded == any_plan
    assert loaded.to_json() == any_plan.to_json()
    assert loaded.profile == any_plan.profile is not None
    assert loaded.in_specs == any_plan.in_specs
    assert loaded.out_specs == any_plan.out_specs
    assert loaded.explain() == any_plan.explain()


def test_a_loaded_plan_runs(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    step = autoshard.jit(train_step, strategy=Plan.load(tmp_path / "plan.json"), donate_argnums=0)
    state, x = make_state(jax.random.key(0)), batch()
    assert step.plan(state, x) == plan
    new, metrics = step(state, x)
    want, reference = jax.jit(train_step)(make_state(jax.random.key(0)), x)
    np.testing.assert_allclose(metrics["loss"], reference["loss"], rtol=1e-5)
    assert jax.tree.map(lambda a: a.sharding.spec, new) == plan.out_specs[0]
    chex.assert_trees_all_close(new, want, rtol=1e-4, atol=1e-6, strict=True)


def test_a_loaded_plan_takes_the_state_it_made(plan):
    loaded = Plan.from_json(plan.to_json())
    step = autoshard.jit(train_step, strategy=loaded, donate_argnums=0)
    _, metrics = step(loaded.init(make_state, jax.random.key(0)), batch())
    want = jax.jit(train_step)(make_state(jax.random.key(0)), batch())[1]["loss"]
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-6)


def test_equal_when_the_same_was_decided(plan):
    assert jitted(strategy="fsdp").plan(shapes(), X) == plan
    assert jitted(strategy="dp").plan(shapes(), X) != plan
    assert jitted(strategy="fsdp").plan(shapes(128), X) != plan


def put(stored, path, value):
    for step in path[:-1]:
        stored = stored[step]
    stored[path[-1]] = value


def drop(stored, path):
    for step in path[:-1]:
        stored = stored[step]
    del stored[path[-1]]


STATE = ["in_tree", 0, "tuple", 0, "tuple", 0, "dict"]
WRONG = {
    "unknown key": (put, ["colour"], "blue", "colour"),
    "unknown key inside": (put, ["cost", "colour"], "blue", "cost.colour"),
    "unknown key in a list": (put, ["inputs", 0, "colour"], "blue", "inputs"),
    "missing key": (drop, ["mesh"], "'mesh'"),
    "missing key inside": (drop, ["memory", "peak"], "peak"),
    "missing structure": (drop, ["in_tree"], "'in_tree'"),
    "another version": (put, ["autoshard_plan"], VERSION + 1, f"version {VERSION + 1}"),
    "number as text": (put, ["memory", "peak"], "1", "peak"),
    "text as number": (put, ["name"], 3, "name"),
    "null for a list": (put, ["inputs"], None, "inputs"),
    "text for a spec": (put, ["inputs", 0, "spec"], "[data]", "spec"),
    "axes as text": (put, ["mesh", "axis_sizes"], ["4", "2"], "axis_sizes"),
    "fraction for a count": (put, ["memory", "peak"], 1.5, "peak"),
    "structure cut off": (put, ["in_tree"], [], "in_tree: expected a list of one"),
    "structure of junk": (put, ["in_tree", 0], {"__import__": "os"}, "in_tree: .*__import__.* is not a structure"),
    "structure of text": (put, ["out_tree"], "result", "out_tree: expected a list of one"),
    "leaves without values": (put, ["out_tree", 0], {"tuple": []}, "out_tree: it has 0 leaves for 6 values"),
    "no call": (put, ["in_tree", 0], {"list": ["leaf"] * 6}, "in_tree: expected positional arguments"),
    "names of others": (
        put,
        [*STATE, 0, 1, "dict", 0, 0],
        "across",
        r"in_tree: the path \['mom.*'across'\] does not match",
    ),
    "names out of order": (put, [*STATE, 0, 1, "dict", 0, 0], "vp", "in_tree: its keys are not in the order"),
    "keys that do not sort": (put, [*STATE, 0, 1, "dict", 0, 0], 3, "in_tree: its keys are not in the order"),
    "key of a list": (put, [*STATE, 0, 1, "dict", 0, 0], ["down"], "in_tree: .* is not a structure"),
    "container unknown": (put, [*STATE, 1, 1], {"set": ["leaf"]}, "in_tree: {'set': .* is not a structure"),
    "part of no kind": (put, [*STATE, 1, 1], {"class": "C", "parts": [["call", "x", "leaf"]]}, "is not a structure"),
    "class that is no name": (put, [*STATE, 1, 1], {"class": 3, "parts": []}, "is not a structure"),
    "axes without sizes": (put, ["mesh", "axis_sizes"], [8], "mesh: .*axes"),
    "axis that the mesh lacks": (put, ["inputs", 0, "spec", "dims", 0], ["modle"], "'modle'"),
    "spec of another rank": (put, ["inputs", 0, "spec", "dims"], [["data"]], r"1 entries, the shape is \[64, 16\]"),
    "axis on two dimensions": (put, ["inputs", 0, "spec", "dims"], [["data"], ["data"]], "mesh axis 'data' twice"),
    "axis twice on one": (put, ["outputs", 0, "spec", "dims", 0], ["data", "data"], "mesh axis 'data' twice"),
    "size that does not divide": (put, ["inputs", 0, "shape"], [63, 16], r"\[63, 16\] has size 63, .* into 8 parts"),
    "no dtype": (put, ["inputs", 0, "dtype"], "float33", "'float33' is not a dtype"),
    "no reason": (put, ["inputs", 0, "reason"], "whim", "inputs.0.reason"),
    "axis of a dimension that the mesh lacks": (put, ["dim_splits", 0, "axes"], ["modle"], "the dimension .*'modle'"),
    "axis of storage that the mesh lacks": (put, ["storage_axes"], ["modle"], "stored state: .*'modle'"),
    "link that the hardware lacks": (put, ["mesh", "axis_links"], ["wire", "wire"], "mesh: cpu has no link 'wire'"),
    "links of some axes": (put, ["mesh", "axis_links"], ["shared"], "mesh: .*links"),
    "no links at all": (put, ["mesh", "hardware", "links"], {}, "no links"),
    "target of no kind": (put, ["mesh", "target"], {"topology": "v5e:4", "slices": 1}, "mesh: .*v5e:4"),
    "no reduction": (put, ["inputs", 0, "spec", "partial"], [["data", "mean"]], "twice|'mean' is no reduction"),
    "diagnostic as text": (put, ["diagnostics"], ["train.py:3: sort is kept whole"], "diagnostics.0"),
    "diagnostic without its source": (put, ["diagnostics"], [{"text": "sort is kept whole"}], "diagnostics.*source"),
    "peak at no moment": (put, ["profile", "peak"], 10**6, "profile: the peak is moment 1000000"),
    "time that is none": (put, ["profile", "spans", 0, "seconds"], math.inf, "profile: inf is no time"),
    "size below nothing": (put, ["profile", "moments", 0, "residuals"], -1, "profile: -1 is no time, size or count"),
    "axis of a span that the mesh lacks": (put, ["profile", "spans", 0, "axes"], ["modle"], "profile: .*'modle'"),
    "axis of a move that the mesh lacks": (put, ["profile", "moves", 0, "axes"], ["modle"], "profile: .*'modle'"),
    "value of another rank": (put, ["profile", "values", 0, "shape"], [], r"profile: .*the shape is \[\]"),
    "replaces no argument": (put, ["outputs", 0, "replaces"], "states", "replaces states, which is not an argument"),
    "batch of no argument": (
        put,
        ["batch"],
        [{"path": "states", "dim": 0}],
        "batch: no argument states has a dimension 0",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_loading_refuses(name, plan, tmp_path):
    change, *args, names = WRONG[name]
    stored = copy.deepcopy(json.loads(json.dumps(plan.to_json())))
    change(stored, *args)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(stored))
    with pytest.raises(PlanError, match=names) as caught:
        Plan.load(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (b"", "not JSON"),
        (b"plan: yes", "not JSON"),
        (b"\x80\x04\x95", "not UTF-8"),
        (b'{"autoshard_plan": 5, "autoshard_plan": 5}', "stands twice"),
        (b'{"autoshard_plan": ' + b"9" * 5000 + b"}", "an integer of 5,000 digits"),
        (b"[]", "not a plan"),
        (b"{}", "not a plan"),
        (b"null", "not a plan"),
        (b'{"autoshard_plan": "1"}', "version '1'"),
        (b'{"autoshard_plan": %d}' % VERSION, "lacks"),
    ],
)
def test_loading_refuses_what_is_no_plan(content, names, tmp_path):
    file = tmp_path / "plan.json"
    file.write_bytes(content)
    with pytest.raises(PlanError, match=names) as caught:
        Plan.load(file)
    assert str(file) in str(caught.value)


def test_loading_refuses_a_truncated_file(plan, tmp_path):
    file = tmp_path / "plan.json"
    plan.save(file)
    text = file.read_text()
    for part in (0.1, 0.5, 0.99):
        file.write_text(text[: int(len(text) * part)])
        with pytest.raises(PlanError, match="not JSON"):
            Plan.load(file)


def test_loading_names_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(PlanError, match="no such file"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(PlanError, match="folder|directory"):
        Plan.load(tmp_path)


def test_refused_for_other_shapes(plan):
    step = autoshard.jit(train_step, strategy=plan)
    with pytest.raises(PlanError, match=r"state\['momentum'\]\['down'\].*64, 16.*128, 16"):
        step.plan(shapes(128), X)
    with pytest.raises(PlanError, match=r"x: float32\[32, 16\].*\[64, 16\]"):
        step(make_state(jax.random.key(0)), np.zeros((64, 16), np.float32))


def test_refused_for_another_program(plan):
    with pytest.raises(PlanError, match="another program than other_step"):
        jitted(other_step, strategy=plan).plan(shapes(), X)


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "model": 4}, {"model": 2, "data": 4}])
def test_refused_for_another_mesh(plan, mesh):
    with pytest.raises(PlanError, match="mesh"):
        jitted(mesh=mesh, strategy=plan).plan(shapes(), X)


def test_accepted_for_its_own_mesh(plan):
    assert jitted(strategy=plan).plan(shapes(), X) == plan


def bytes_on_devices(tree):
    held = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return held


def test_init_is_born_sharded(plan):
    state = plan.init(make_state, jax.random.key(7))
    assert jax.tree.map(lambda a: a.sharding.spec, state) == plan.in_specs[0]
    assert not [a.shape for a in jax.tree.leaves(state) if a.ndim and a.sharding.is_fully_replicated]
    whole = sum(a.nbytes for a in jax.tree.leaves(state) if a.ndim)
    scalars = sum(a.nbytes for a in jax.tree.leaves(state) if not a.ndim)
    assert set(bytes_on_devices(state).values()) == {whole // 8 + scalars}
    chex.assert_trees_all_equal(state, make_state(jax.random.key(7)), strict=True)


def test_init_of_another_argument(plan):
    x = plan.init(lambda: jnp.ones(X.shape, X.dtype), argnum=1)
    assert x.sharding.spec == plan.in_specs[1]


def test_init_names_the_first_array_that_differs(plan):
    with pytest.raises(ArgumentError, match=r"state\['momentum'\]\['down'\].*64, 16.*32, 16"):
        plan.init(lambda key: make_state(key, 32), jax.random.key(0))
    with pytest.raises(ArgumentError, match="5 arrays, the function makes 3"):
        plan.init(lambda key: {k: v for k, v in make_state(key).items() if k != "weights"}, jax.random.key(0))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda s: {**s, "turns": {"n": s["turns"][0]}}, r"takes state\['turns'\]\[0\], .* makes \['turns'\]\['n'\]"),
        (lambda s: {**s, "turns": list(s["turns"])}, r"\['turns'\] is a list, not a tuple"),
        (lambda s: {**s, "extra": None}, r"the tree has .*\['extra'\].*, not \['momentum'\], "),
        (lambda s: OrderedDict(sorted(s.items())), "the tree is a OrderedDict, not a dict"),
        (
            lambda s: {**s, "weights": Pair(s["weights"]["down"], (), s["weights"]["up"])},
            r"makes \['weights'\].up",
        ),
    ],
)
def test_init_refuses_another_structure_of_the_same_shapes(plan, change, names):
    with pytest.raises(ArgumentError, match=names):
        plan.init(lambda key: change(make_state(key)), jax.random.key(0))


def test_init_of_no_argument(plan):
    with pytest.raises(ArgumentError, match="argnum=5, and train_step takes 2 arguments"):
        plan.init(make_state, jax.random.key(0), argnum=5)
    assert plan.init(lambda: jnp.ones(X.shape, X.dtype), argnum=-1).sharding.spec == plan.in_specs[1]


def test_put_places_arguments(plan):
    state, x = plan.put(make_state(jax.random.key(0)), batch())
    assert jax.tree.map(lambda a: a.sharding.spec, (state, x)) == plan.in_specs
    np.testing.assert_array_equal(x, batch())
    alone = plan.put(make_state(jax.random.key(0)))
    assert jax.tree.map(lambda a: a.sharding.spec, alone) == plan.in_specs[0]


def test_put_refuses(plan):
    with pytest.raises(ArgumentError, match=r"x of train_step is float32\[32, 16\], it was given \[64, 16\]"):
        plan.put(make_state(jax.random.key(0)), np.zeros((64, 16), np.float32))
    with pytest.raises(ArgumentError, match="structures differ"):
        plan.put({"weights": 1.0})
    with pytest.raises(ArgumentError, match=r"another structure: .* \['turns'\] is a list, not a tuple"):
        plan.put({**make_state(jax.random.key(0)), "turns": [0]})
    with pytest.raises(ArgumentError, match="takes 2 arguments, 3 were given"):
        plan.put(make_state(jax.random.key(0)), batch(), batch())
    with pytest.raises(ArgumentError, match="takes 5 arrays, it was given 3"):
        plan.put({k: v for k, v in make_state(jax.random.key(0)).items() if k != "weights"})
    names = r"takes state\['momentum'\]\['down'\], it was given \['momentum'\]\['down'\]\['old'\] in its place"
    with pytest.raises(ArgumentError, match=names):
        plan.put({"momentum": {"down": {"old": 1.0}}})


class Pair(NamedTuple):
    """Fields out of alphabetical order, one of them empty."""

    up: jax.Array
    nothing: tuple[()]
    down: jax.Array


def test_a_loaded_plan_keeps_the_order_of_named_fields(tmp_path):
    def make(key):
        w = make_state(key)["weights"]
        return OrderedDict(z=Pair(w["up"], (), w["down"]), a=(w["up"] * 2, ()))

    def turn(state, x):
        moved = jnp.tanh(x @ state["z"].up) @ state["z"].down
        return jax.tree.map(lambda a: a + moved.mean(), state)

    plan = jitted(turn, strategy="fsdp").plan(jax.eval_shape(make, jax.random.key(0)), X)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert jax.tree.leaves(loaded.in_specs) == jax.tree.leaves(plan.in_specs)
    assert loaded.in_specs[0]["z"].up == plan.in_specs[0]["z"].up == loaded.in_specs[0]["z"][0]
    assert loaded.in_specs[0]["z"].up != loaded.in_specs[0]["z"].down
    assert loaded.in_specs[0]["z"].nothing == ()
    state = loaded.init(make, jax.random.key(0))
    assert type(state) is OrderedDict
    assert type(state["z"]) is Pair
    placed = loaded.put(make(jax.random.key(0)))
    assert jax.tree.map(lambda a: a.sharding, placed) == jax.tree.map(lambda a: a.sharding, state)


def test_a_plan_needs_no_devices():
    far = jitted(mesh={"data": 16, "model": 16}, strategy="tp").plan(shapes(256), X)
    assert far.mesh.size == 256
    assert Plan.from_json(far.to_json()) == far
    assert far.explain().startswith("Plan of train_step on the mesh (data=16, model=16)")
    with pytest.raises(autoshard.errors.MeshError, match="256 devices and this process has 8"):
        _ = far.in_shardings


class Net(NamedTuple):
    """A class of containers that JSON does not name."""

    weights: jax.Array


def test_copies_have_no_step_and_no_device():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[::-1]), ("data",))
    step = autoshard.jit(lambda net, x: Net(net.weights + x.sum()), mesh=mesh)
    plan = step.plan(Net(X), X)
    assert plan.in_shardings  # caches the mesh of devices
    for copied in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan), copy.copy(plan)):
        assert type(copied) is Plan
        assert copied == plan
        assert copied is not plan
        assert copied.study is None
        assert copied.mesh.devices is None
        assert "jax_mesh" not in vars(copied)
        assert step.plan(Net(X), X) is plan
        assert autoshard.jit(lambda net, x: Net(net.weights + x.sum()), strategy=copied).plan(Net(X), X) == plan
    assert type(copy.deepcopy(plan).in_specs[0]) is Net
    assert copy.deepcopy({"plans": [plan, plan]})["plans"][0] == plan


def test_its_text_is_a_line(plan):
    assert re.fullmatch(
        r"<Plan of train_step over \(data=4, model=2\) of cpu: [\d.]+ .s, [\d.]+ .?i?B per device>", repr(plan)
    )
    assert repr(plan) == str(plan)
