"""States as safetensors: what is kept, what is refused, changed models, several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import checkpoint
from autoshard.checkpoint.at_rest import conditions
from autoshard.errors import CheckpointError
from tests.checkpoint.test_restoring import CASES, Case, abstract, nested, numbers
from tests.two_processes import run

safetensors = pytest.importorskip("safetensors.numpy", reason="the reference that others read and write with")


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.what)
def test_a_changed_model(tmp_path: Path, case: Case) -> None:
    """The options are those of `restore`: a third of its cases."""
    saved, fallback = numbers(case.saved), numbers(case.wanted, 500) if "fallback" in case.options else {}
    checkpoint.to_safetensors(tmp_path, nested(saved), max_bytes=64)
    options, like = dict(case.options), abstract(case.wanted)
    if options.get("fallback") is True:
        options["fallback"] = nested(fallback)
    if isinstance(case.expected, str):
        with pytest.raises(CheckpointError, match=case.expected):
            checkpoint.from_safetensors(tmp_path, like=nested(like), **options)
        return
    state, report = checkpoint.from_safetensors(tmp_path, like=nested(like), report=True, **options)
    want = case.expected(saved, fallback)
    for leaf, x in zip(report.leaves, jax.tree.leaves(state), strict=True):
        assert x.sharding == like[leaf.name].sharding
        assert np.asarray(x).tobytes() == np.asarray(want[leaf.name]).tobytes()


def test_every_kind_of_leaf(tmp_path: Path) -> None:
    state = {
        "keys": (jax.random.key(3), jax.random.split(jax.random.key(4, impl="rbg"), 4)),
        "python": (True, -7, 0.1),
        "none": (None, (), {}),
        "empty": jnp.zeros((0, 4), jnp.bfloat16),
        "scalar": jnp.asarray(2.5),
        "numpy": np.arange(4, dtype=np.int64),
    }
    checkpoint.to_safetensors(tmp_path, state)
    back = checkpoint.from_safetensors(tmp_path, like=state)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert [k.dtype for k in back["keys"]] == [k.dtype for k in state["keys"]]
    for a, b in zip(back["keys"], state["keys"], strict=True):
        assert jax.random.key_data(a).tolist() == jax.random.key_data(b).tolist()
    assert (back["python"], list(map(type, back["python"]))) == ((True, -7, 0.1), [bool, int, float])
    assert (back["empty"].shape, back["empty"].dtype) == ((0, 4), jnp.bfloat16)
    assert back["numpy"].tolist() == [0, 1, 2, 3]


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    table = jnp.arange(8.0).reshape(4, 2)
    checkpoint.to_safetensors(tmp_path, {"embed": table, "head": table, "b": jnp.ones(2)}, max_bytes=32)
    stored = [safetensors.load_file(p) for p in sorted(tmp_path.glob("*.safetensors"))]
    assert sorted(name for file in stored for name in file) == ["b", "embed"]
    back = checkpoint.from_safetensors(tmp_path, like={"embed": table, "head": table, "b": jnp.ones(2)})
    assert back["head"].tolist() == back["embed"].tolist() == table.tolist()


def test_names_of_others(tmp_path: Path) -> None:
    state = {"layers": [{"w": jnp.ones(2)}, {"w": jnp.zeros(2)}], "step": 3}
    names = {"layers/*/w": "model.layers.*.weight", "step": "n"}
    checkpoint.to_safetensors(tmp_path, state, rename=names)
    file = safetensors.load_file(tmp_path / "model.safetensors")
    assert sorted(file) == ["model.layers.0.weight", "model.layers.1.weight", "n"]
    back = checkpoint.from_safetensors(tmp_path, like=state, rename={new: old for old, new in names.items()})
    assert (back["layers"][0]["w"].tolist(), back["step"]) == ([1, 1], 3)
    stack = checkpoint.from_safetensors(
        tmp_path, like={"layers": {"w": jnp.ones((2, 2))}}, rename={"model.layers.*.weight": "layers/*/w"}, ignore=["n"]
    )
    assert stack["layers"]["w"].tolist() == [[1, 1], [0, 0]]


def test_a_module(tmp_path: Path) -> None:
    def update(model: nnx.Linear, x: jax.Array) -> jax.Array:
        return model(x).sum()

    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    checkpoint.to_safetensors(tmp_path, model)
    plan = autoshard.jit(update, mesh={"data": 8}, strategy="fsdp").plan(model, jnp.ones((8, 8)))
    other = nnx.Linear(8, 8, rngs=nnx.Rngs(1))
    back = checkpoint.from_safetensors(tmp_path, plan=plan)
    assert jax.tree.map(lambda x: x.sharding, back) == plan.in_shardings[0]
    nnx.update(other, back)
    np.testing.assert_array_equal(other.kernel[...], model.kernel[...])


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    two = {"a": jnp.ones(2), "b": jnp.ones(2)}
    for state, options, why in (
        ({"n": "text"}, {}, "n is text, which no tensor holds"),
        ({"n": jnp.ones(2, jnp.int4)}, {}, r"n is int4\[2\], and safetensors has no int4; cast it first"),
        ({"n": print}, {}, r"state\['n'\] is builtin_function_or_method"),
        (two, {"rename": {"a": "b"}}, "rename gives a and b .* one name"),
        (two, {"rename": {"a": "__metadata__"}}, "cannot be named __metadata__"),
        (two, {"max_bytes": "5 XB"}, "max_bytes: '5 XB' is not a size"),
    ):
        with pytest.raises(CheckpointError, match=why):
            checkpoint.to_safetensors(tmp_path / "new", state, **options)
    assert not (tmp_path / "new").exists()
    checkpoint.to_safetensors(tmp_path, two)
    with pytest.raises(CheckpointError, match="has model.safetensors already; choose another folder"):
        checkpoint.to_safetensors(tmp_path, two)
    with pytest.raises(CheckpointError, match="absent does not exist"):
        checkpoint.from_safetensors(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="is no local path"):
        checkpoint.to_safetensors("gs://bucket/x", two)
    (tmp_path / "sub").mkdir()
    with pytest.raises(CheckpointError, match="has no model.safetensors and no model.safetensors.index.json"):
        checkpoint.from_safetensors(tmp_path / "sub")
    (tmp_path / "sub/pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"index\.json; pytorch_model\.bin is not read: a pickle executes"):
        checkpoint.from_safetensors(tmp_path / "sub")


def test_a_key_that_is_none(tmp_path: Path) -> None:
    safetensors.save_file({"k": np.zeros(3, np.uint32)}, tmp_path / "x.safetensors", {"prng k": "threefry2x32"})
    with pytest.raises(CheckpointError, match=r"k is uint32\[3\], no key of threefry"):
        checkpoint.from_safetensors(tmp_path / "x.safetensors")


def in_one_of_two_processes(folder: str) -> dict[str, Any]:
    """Writes an array over all devices with its columns split, and reads it with its rows split; and a failed write."""
    mesh = Mesh(np.asarray(jax.devices(), dtype=object), ("x",), axis_types=(AxisType.Auto,))
    columns, rows = NamedSharding(mesh, P(None, "x")), NamedSharding(mesh, P("x"))
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    placed = jax.make_array_from_callback((8, 8), columns, lambda index: x[index])
    checkpoint.to_safetensors(folder, {"x": placed, "n": 3}, max_bytes=100)
    back = checkpoint.from_safetensors(
        folder, like={"x": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=rows), "n": 0}
    )
    try:
        checkpoint.to_safetensors(folder, {"x": placed})
        refused = ""
    except CheckpointError as error:
        refused = str(error)
    return {"rows": [np.asarray(s.data).tolist() for s in back["x"].addressable_shards], "refused": refused}


def test_two_processes_write_one_set(tmp_path: Path) -> None:
    first, second = run(
        "tests.checkpoint.test_safetensors_state:in_one_of_two_processes", str(tmp_path / "both"), devices=4
    )
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    assert [*first["rows"], *second["rows"]] == x[:, None].tolist()
    assert "has model-00001-of-00002.safetensors already" in first["refused"]
    assert "could not be written by process 0" in second["refused"]
    np.testing.assert_array_equal(checkpoint.from_safetensors(tmp_path / "both")["x"], x)
    assert [str(found) for found in conditions(tmp_path / "both")] == [f"{tmp_path / 'both'}: whole"]
