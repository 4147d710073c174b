"""Structures as plain data: what comes back, what stands for a class, and how two are distinguished."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict, defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx, struct
from flax.core import FrozenDict
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.plan.treedef import UnknownNode, difference, leaf_paths, treedef_from_json, treedef_to_json


@struct.dataclass
class Pair:
    first: Any
    second: Any = None


class Flat:
    """A node without names for its parts."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


jax.tree_util.register_pytree_node(Flat, lambda f: (f.parts, None), lambda _, parts: Flat(*parts))

PLAIN = [
    None,
    0,
    (),
    [],
    {},
    OrderedDict(),
    {"a": [1, (2, None)], "b": {1: 3, 10: []}},
    OrderedDict(z=1, a=({"y": 2},)),
]
CLASSES = [
    optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init({"w": [1.0, (2.0,)], "none": {}}),
    Pair(1, [2]),
    FrozenDict({"b": 1, "a": {"z": 2}}),
    defaultdict(int, k=1),
    Flat(1, (2, 3)),
    {(1, 2): 3, (0, 1): 4},
    nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0))),
]


def again(tree: Any) -> Any:
    """``tree`` with its structure taken through JSON."""
    leaves, structure = jax.tree.flatten(tree)
    return treedef_from_json(json.loads(json.dumps(treedef_to_json(structure)))).unflatten(leaves)


@pytest.mark.parametrize("tree", PLAIN, ids=str)
def test_plain_containers_come_back_as_they_were(tree: Any):
    assert jax.tree.structure(again(tree)) == jax.tree.structure(tree)
    assert again(tree) == tree


@pytest.mark.parametrize("tree", CLASSES, ids=lambda t: type(t).__name__)
def test_a_class_comes_back_as_a_node_with_the_same_paths(tree: Any):
    back = again(tree)
    both = [jax.tree.structure(t) for t in (tree, back)]
    assert [jax.tree_util.keystr(p) for p in leaf_paths(both[0])] == [
        jax.tree_util.keystr(p) for p in leaf_paths(both[1])
    ]
    assert treedef_to_json(both[0]) == treedef_to_json(both[1])
    assert not difference(*both)
    assert jax.tree.structure(copy.deepcopy(back)) == both[1]


def test_the_parts_of_a_node_are_reached_as_they_were():
    adam = again(CLASSES[0])[1][0]
    assert type(adam) is UnknownNode
    assert adam.mu == adam[1] == {"none": {}, "w": [0.0, (0.0,)]}
    assert (len(adam), list(adam)) == (3, [adam.count, adam.mu, adam.nu])
    assert str(again(Pair(1, None))) == "Pair(first=1, second=None)"
    frozen = again(CLASSES[2])
    assert (frozen["a"], list(frozen), again(CLASSES[3])["k"]) == ({"z": 2}, ["a", "b"], 1)
    assert again(Flat(1, 2))[1] == 2
    with pytest.raises(AttributeError, match="ScaleByAdamState has no 'nv'; it has count, mu, nu"):
        _ = adam.nv
    with pytest.raises(KeyError):
        _ = frozen["c"]
    with pytest.raises(IndexError):
        _ = adam[3]


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        ({"a": [1]}, {"a": (1,)}, "['a'] is a list, not a tuple"),
        ([1, 2], [1], "the tree has [0], [1], not [0]"),
        (Pair(1, None), Pair(1, 2), ".second is None, not an array"),
        ((Pair(1, 2),), ({"first": 1, "second": 2},), "[0] is Pair, not a dict"),
        (OrderedDict(a=1, b=2), OrderedDict(b=1, a=2), "the tree has its children in another order"),
        (optax.EmptyState(), (), "the tree is EmptyState, not a tuple"),
        ((1, {}), (1, {}), ""),
    ],
)
def test_a_difference_is_named(a: Any, b: Any, says: str):
    assert difference(jax.tree.structure(a), jax.tree.structure(b)) == says


def make(kind: type) -> Any:
    return {"w": kind([jnp.ones((16, 16)), jnp.ones(16)]), "nothing": (), "none": None}


def decay(state: Any) -> Any:
    return jax.tree.map(lambda x: x * 0.9, state)


def test_a_loaded_plan_has_the_structure_of_its_arguments():
    plan = autoshard.jit(decay, mesh={"data": 4, "model": 2}).plan(make(list))
    loaded = autoshard.Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert loaded.in_specs == plan.in_specs
    assert jax.tree.structure(loaded.in_avals) == jax.tree.structure(plan.in_avals)
    specs = jax.tree.map(lambda _, spec: spec, make(list), loaded.in_specs[0])
    assert isinstance(specs["w"][0], P)
    assert loaded == plan
    assert hash(loaded) == hash(plan)


def test_plans_of_other_containers_are_not_equal():
    step = autoshard.jit(decay, mesh={"data": 8})
    plans = [step.plan(make(kind)) for kind in (list, tuple)]
    assert [p.path for p in plans[0].inputs] == [p.path for p in plans[1].inputs]
    assert plans[0] != plans[1]
    for plan in plans:
        assert autoshard.Plan.from_json(plan.to_json()) == plan
