"""Arguments of one process on a mesh of two: what is not the same in both is refused, rows make global arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.backend import executable
from autoshard.backend.process_local import held_rows
from autoshard.errors import AutoshardError, SpecError
from tests.two_processes import run

DATA, TALL = {"data": 4}, {"data": 2, "model": 2}


def outcome(call: Any) -> Any:
    """The result as JSON, or the class and the message of the error."""
    try:
        return np.asarray(process_allgather(call(), tiled=True), np.float64).tolist()
    except AutoshardError as e:
        return f"{type(e).__name__}: {e}"


def sums(x: Any, scale: Any = 1.0) -> Any:
    return x.sum() * scale


def total(**options: Any) -> Any:
    return autoshard.jit(sums, **{"mesh": DATA, **options})


def keyed(key: Any, x: Any) -> Any:
    return x + jax.random.normal(key, x.shape)


def swapped() -> Any:
    """A mesh whose rows of devices alternate between the processes."""
    order = np.asarray(jax.devices(), dtype=object)[[0, 2, 1, 3]]
    return jax.sharding.Mesh(order, ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def program() -> dict[str, Any]:
    """Runs in each of two processes, with two devices each."""
    me = jax.process_index()
    mine, same = np.full((4, 2), me + 1.0), np.arange(8.0).reshape(4, 2)
    rows = {"mesh": DATA, "in_shardings": (P("data"), None)}
    found: dict[str, Any] = {
        "differs": outcome(lambda: total()(mine)),
        "differs, split": outcome(lambda: total(in_shardings=P("data"))(mine)),
        "differs, on a device": outcome(lambda: total(in_shardings=P("data"))(jnp.asarray(mine))),
        "differs, committed": outcome(lambda: total(in_shardings=P())(jax.device_put(mine, jax.local_devices()[0]))),
        "scalar differs": outcome(lambda: total(**rows)(same, float(me))),
        "key differs": outcome(lambda: autoshard.jit(keyed, mesh=DATA)(jax.random.key(me), same)),
        "shape differs": outcome(lambda: total(in_shardings=P())(np.ones((4 + me, 2)))),
        "same": [outcome(lambda s=s: total(in_shardings=s)(same)) for s in (None, P(), P("data"))],
        "same, on a device": outcome(lambda: total()(jnp.asarray(same), jnp.float32(2))),
    }

    dim = "data" if me else None
    found["plans differ"] = outcome(lambda: total(in_shardings=P(dim))(same))
    found["strategy differs"] = outcome(lambda: total(strategy="fsdp" if me else "auto")(same))
    found["mesh differs"] = outcome(lambda: total(mesh=TALL if me else DATA)(same))

    with pytest.MonkeyPatch.context() as patch:
        if me:
            patch.setattr(executable, "collective_order", lambda text: {"collective 1": "all-reduce of f32[]"})
        found["compiled otherwise"] = outcome(lambda: total(in_shardings=P("data"))(same))

    step = total(**rows)
    plan = step.plan(jax.ShapeDtypeStruct((4, 2), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32))
    numbers = plan.local_rows("x")
    found["rows"] = numbers.tolist()
    placed = plan.put(same[numbers], 3.0, local=True)
    found["from rows"] = [outcome(lambda: step(*placed)) for _ in range(2)]
    found["again from the host"] = [outcome(lambda: step(same, 3.0)), outcome(lambda: step(mine, 3.0))]
    found["whole in place of rows"] = outcome(lambda: plan.put(same, 3.0, local=True))
    found["scalars differ, put"] = outcome(lambda: plan.put(same[numbers], float(me), local=True))
    found["put differs"] = outcome(lambda: plan.put(mine, 3.0))
    found["put"] = outcome(lambda: step(*plan.put(same, 3.0)))
    found["init"] = outcome(lambda: step(plan.init(lambda key: jax.random.normal(key, (4, 2)), jax.random.key(3)), 1.0))
    found["init differs"] = outcome(lambda: plan.init(lambda k: jax.random.normal(k, (4, 2)), jax.random.key(me)))

    mixed = autoshard.jit(sums, mesh=swapped(), in_shardings=(P("data"), None)).plan(same, 1.0)
    found["alternating rows"] = mixed.local_rows("x").tolist()
    found["alternating sum"] = outcome(lambda: mixed.put(same[mixed.local_rows("x")], 1.0, local=True)[0].sum(axis=1))

    for name, spec in (("columns", P(None, "data")), ("both", P("model", "data"))):
        plan = total(mesh=TALL, in_shardings=(spec, None)).plan(same, 1.0)
        numbers = plan.local_rows("x")
        found[f"{name} rows"] = numbers.tolist()
        found[f"{name} sum"] = outcome(lambda p=plan, n=numbers: p.put(same[n], 1.0, local=True)[0].sum(axis=1))
        found[f"{name} differ"] = outcome(lambda p=plan, n=numbers: p.put(mine[n], 1.0, local=True))

    plan = total(mesh=DATA, in_shardings=(P(None, "data"), None)).plan(same.T, 1.0)
    numbers = plan.local_rows("x", 1)
    found["own columns"] = [numbers.tolist(), outcome(lambda: plan.put(same.T[:, numbers], 1.0, local=True)[0].sum(0))]
    found["all columns"] = outcome(lambda: plan.put(same.T, 1.0, local=True)[0].sum(axis=0))
    found["all columns of one"] = outcome(lambda: plan.put(same.T if me else same.T[:, numbers], 1.0, local=True))
    return found


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, Any], dict[str, Any]]:
    """What `program` returned in each process."""
    first, second = run("tests.backend.test_process_local:program")
    return first, second


@pytest.mark.parametrize(
    ("case", "path"),
    [
        ("differs", "x"),
        ("differs, split", "x"),
        ("differs, on a device", "x"),
        ("differs, committed", "x"),
        ("scalar differs", "scale"),
        ("key differs", "key"),
        ("put differs", "x"),
    ],
)
def test_an_argument_that_differs_between_processes_is_refused_in_both(found, case, path):
    for one in found:
        assert f"{path} is not the same in processes 0 and 1" in one[case]
        assert "plan.put(*args, local=True)" in one[case]
        assert f"plan.local_rows({path!r})" in one[case]
        assert one[case].startswith("ArgumentError")


@pytest.mark.parametrize(
    ("case", "difference"),
    [
        ("plans differ", "the spec of x: [_, _] in process 0, [data, _] in process 1"),
        ("shape differs", "x: float32[4, 2] in process 0, float32[5, 2] in process 1"),
        ("strategy differs", "strategy: auto in process 0, fsdp in process 1"),
        ("mesh differs", "mesh: (data=4) of cpu in process 0, (data=2, model=2) of cpu in process 1"),
    ],
)
def test_other_plans_in_one_process_are_refused_and_their_differences_named(found, case, difference):
    for one in found:
        assert one[case].startswith("PlanError: the plan of sums is not the same in processes 0 and 1")
        assert f"which share the mesh: {difference}" in one[case]


def test_other_collectives_in_one_process_are_refused_before_they_are_waited_for(found):
    for one in found:
        said = one["compiled otherwise"]
        assert said.startswith("PlanError: the order of collectives in the compiled sums is not the same in processes ")
        assert "collective 1: all-gather of f32[4,2]{1,0} in process 0, all-reduce of f32[] in process 1" in said
        assert "--xla_gpu_shard_autotuning" in said


def test_an_argument_that_is_the_same_everywhere_is_the_whole(found):
    for one in found:
        assert one["same"] == [28.0] * 3
        assert one["same, on a device"] == 56.0
        assert one["put"] == 84.0


def test_each_process_brings_its_rows(found):
    assert [one["rows"] for one in found] == [[0, 1], [2, 3]]
    assert all(one["from rows"] == [84.0, 84.0] for one in found)


def test_calls_with_placed_arrays_do_not_open_a_way_round_the_comparison(found):
    for one in found:
        same, other = one["again from the host"]
        assert same == 84.0
        assert "x is not the same" in other


def test_wrong_rows_are_refused(found):
    for me, one in enumerate(found):
        assert f"x of sums is [4, 2], of which process {me} brings 2 rows, [2, 2]" in one["whole in place of rows"]
        assert "scale is not the same in processes 0 and 1, which both have devices" in one["scalars differ, put"]


def test_what_a_state_is_made_of_is_compared(found):
    assert found[0]["init"] == found[1]["init"]
    assert all("args[0] is not the same in processes 0 and 1" in one["init differs"] for one in found)


def test_rows_may_alternate(found):
    assert [one["alternating rows"] for one in found] == [[0, 2], [1, 3]]
    assert all(one["alternating sum"] == [1.0, 5.0, 9.0, 13.0] for one in found)


@pytest.mark.parametrize("name", ["columns", "both"])
def test_rows_of_several_processes_are_compared_whole(found, name):
    for one in found:
        assert one[f"{name} rows"] == [0, 1, 2, 3]
        assert one[f"{name} sum"] == [1.0, 5.0, 9.0, 13.0]
        assert "of x are not the same in processes 0 and 1, which both have devices" in one[f"{name} differ"]


def test_rows_may_be_of_the_dimension_that_is_split_between_processes(found):
    """As positions [3, batch, seq] are, beside tokens [batch, seq]."""
    for process, one in enumerate(found):
        assert one["own columns"] == [[2 * process, 2 * process + 1], [1.0, 5.0, 9.0, 13.0]]
        assert one["all columns"] == [1.0, 5.0, 9.0, 13.0]
        assert "one process brings all and another its rows" in one["all columns of one"]


def test_the_rows_of_a_process_are_those_of_its_devices_in_every_dimension():
    """Of four processes with two devices each: patches [patches, width], positions [3, batch, seq], and a grid."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for shape, spec, dim, rows in (
        ((32, 5), P("data"), 0, [*range(8, 16)]),
        ((3, 8, 16), P(None, "data"), 1, [2, 3]),
        ((3, 8, 16), P(None, "data"), 0, [0, 1, 2]),
        ((3, 8, 16), P(None, None, ("model", "data")), 2, [2, 3, 10, 11]),
        ((6, 3), P(), 0, [*range(6)]),
    ):
        indices = jax.sharding.NamedSharding(mesh, spec).devices_indices_map(shape)
        second = [indices[device] for device in mesh.devices[1]]
        assert held_rows(second, shape, dim).tolist() == rows


def test_one_process_has_all_rows():
    x = np.arange(16.0).reshape(8, 2)
    step = autoshard.jit(sums, mesh={"data": 4}, in_shardings=(P("data"), None))
    plan = step.plan(x, 2.0)
    assert plan.local_rows("x").tolist() == list(range(8))
    assert step(*plan.put(x, 2.0, local=True)) == 240.0
    with pytest.raises(SpecError, match=r"no argument of sums is called 'y'; known: 'scale', 'x'"):
        plan.local_rows("y")
    assert plan.local_rows("x", 1).tolist() == [0, 1]
    with pytest.raises(SpecError, match=r"x of sums is \[8, 2\], and has no dimension 2"):
        plan.local_rows("x", 2)
    with pytest.raises(SpecError, match="scale of sums is a scalar"):
        plan.local_rows("scale")
