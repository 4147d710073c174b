"""Tracing: paths, carries, pins."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.errors import ArgumentError, SpecError
from autoshard.ir.spec import Spec
from tests.programs import mesh, program

MESH = mesh(data=2, model=2)


class State(NamedTuple):
    """A carried state."""

    params: Any
    count: Any


def step(state: Any, batch: Any) -> Any:
    return State(jax.tree.map(lambda p: p + batch.sum(), state.params), state.count + 1), {"loss": batch.mean()}


STATE = State({"layers": [{"w": (4, 4)}, {"w": (4, 4)}]}, ())


def test_argument_paths() -> None:
    p = program(step, (STATE, (8, 4)), MESH)
    assert [leaf.path for leaf in p.inputs] == [
        "state.params['layers'][0]['w']",
        "state.params['layers'][1]['w']",
        "state.count",
        "batch",
    ]
    assert p.outputs[0].path == "result[0].params['layers'][0]['w']"
    assert p.name == "step"
    assert __file__ in p.source


def test_state_is_paired_with_its_result() -> None:
    assert program(step, (STATE, (8, 4)), MESH).carries == ((0, 0), (1, 1), (2, 2))


def test_a_lone_donated_array_is_paired_and_a_lone_kept_one_is_not() -> None:
    def fun(x: Any, y: Any) -> Any:
        return x + 1, y.sum()

    assert program(fun, ((4,), (4,)), MESH, donate_argnums=0).carries == ((0, 0),)
    assert program(fun, ((4,), (4,)), MESH).carries == ()


def test_two_states_of_one_shape_are_paired_in_order() -> None:
    def fun(a: Any, b: Any) -> Any:
        return [x + 1 for x in a], [x + 2 for x in b]

    pair = [(4,), (4,)]
    assert program(fun, (pair, pair), MESH).carries == ((0, 0), (1, 1), (2, 2), (3, 3))


def test_pins_are_pytree_prefixes() -> None:
    p = program(step, (STATE, (8, 4)), MESH, in_shardings=(None, P("data")), out_shardings=(P(), None))
    assert [leaf.pin for leaf in p.inputs] == [None, None, None, Spec((("data",), ()))]
    assert p.outputs[0].pin == Spec(((), ()))
    assert p.outputs[-1].pin is None


def test_a_sharding_over_another_mesh_is_refused() -> None:
    other = NamedSharding(jax.make_mesh((4, 2), ("x", "y")), P("x"))
    with pytest.raises(SpecError, match=r"batch: its sharding is over the mesh .*'x': 4"):
        program(step, (STATE, (8, 4)), MESH, in_shardings=(None, other))


@pytest.mark.parametrize("prefix", [(None,), (None, None, None), {"a": P()}])
def test_a_prefix_of_the_wrong_structure_is_refused(prefix: Any) -> None:
    with pytest.raises(ArgumentError, match="in_shardings is no pytree prefix of the arguments"):
        program(step, (STATE, (8, 4)), MESH, in_shardings=prefix)


def test_other_leaves_than_specs_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"in_shardings has 'data' as a leaf; leaves are PartitionSpec"):
        program(lambda x: x, ((4,),), MESH, in_shardings="data")


def test_closed_over_arrays_are_constants() -> None:
    table = jnp.arange(8.0)
    p = program(lambda x: x + table, ((8,),), MESH)
    assert len(p.inputs) == 1
    assert len(p.jaxpr.consts) <= 1


def test_a_program_prints_its_arguments() -> None:
    text = str(program(step, (STATE, (8, 4)), MESH, in_shardings=(None, P("data")), donate_argnums=0))
    assert "batch: float32[8,4]  pinned [data, _]" in text
    assert "donated, -> result[0].count" in text
