"""What plain Orbax wrote, restored to our shardings; damaged folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard import checkpoint
from autoshard.errors import CheckpointError

MESH = Mesh(np.asarray(jax.devices(), dtype=object).reshape(4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def state() -> dict[str, Any]:
    w = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(MESH, P("y", "x")))
    params = {"layers": [{"w": w, "b": jnp.ones(8, jnp.bfloat16)}, {"w": w + 1, "b": jnp.zeros(8, jnp.bfloat16)}]}
    return {
        "params": params,
        "opt": optax.adam(1e-3).init(params),
        "narrow": jnp.ones(4, jnp.float8_e4m3fn),
        "a.b": np.arange(3),
        "step": 7,
        "rate": 0.25,
        "none": None,
    }


def abstract(tree: Any) -> Any:
    """On another mesh axis than it was saved with."""

    def one(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(MESH, P("x") if x.shape else P()))

    return jax.tree.map(one, tree)


def standard(path: Path, tree: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def pytree(path: Path, tree: Any, **options: Any) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, tree)


WRITERS: dict[str, Callable[[Path, Any], None]] = {
    "standard": standard,
    "zarr": lambda path, tree: pytree(path, tree, use_ocdbt=False),
    "zarr3": lambda path, tree: pytree(path, tree, use_zarr3=True),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_what_orbax_wrote_is_restored_to_our_shardings(tmp_path: Path, writer: str) -> None:
    tree = state()
    WRITERS[writer](tmp_path / "saved", tree)
    back, report = checkpoint.restore(tmp_path / "saved", like=abstract(tree), report=True)
    assert (report.step, report.extra, report.left_out) == (None, {}, ())
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
        assert (np.asarray(x).dtype, np.asarray(x).tobytes()) == (np.asarray(y).dtype, np.asarray(y).tobytes())
        assert type(x) is type(y)
    assert back["params"]["layers"][0]["w"].sharding.spec == P("x")


def test_the_steps_of_a_manager_and_what_is_beside_them(tmp_path: Path) -> None:
    tree = {"w": jnp.arange(8.0)}
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in (5, 10):
            items = {"state": ocp.args.StandardSave({"w": tree["w"] * step}), "notes": ocp.args.JsonSave({"at": step})}
            manager.save(step, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
    back, report = checkpoint.restore(tmp_path, like=tree, report=True)
    assert (report.step, report.extra, back["w"].tolist()) == (10, {"notes": {"at": 10}}, (tree["w"] * 10).tolist())
    assert checkpoint.restore(tmp_path, 5)["w"].tolist() == (tree["w"] * 5).tolist()
    with pytest.raises(CheckpointError, match="has no step 6"):
        checkpoint.restore(tmp_path, 6)


def test_keys_and_text(tmp_path: Path) -> None:
    keys = {"key": jax.random.key(3), "many": jax.random.split(jax.random.key(4, impl="rbg"), 4)}
    standard(tmp_path / "keys", keys)
    back = checkpoint.restore(tmp_path / "keys", like=keys)
    assert jax.tree.map(jax.random.key_impl, back) == jax.tree.map(jax.random.key_impl, keys)
    assert jax.random.key_data(back["many"]).tolist() == jax.random.key_data(keys["many"]).tolist()
    pytree(tmp_path / "text", {"name": "decoder", "w": jnp.ones(2)})
    assert checkpoint.restore(tmp_path / "text", like={"name": "", "w": jnp.ones(2)})["name"] == "decoder"


def test_the_options_are_those_of_every_restore(tmp_path: Path) -> None:
    """MaxText's way: one tree, the parameters under ``params/params``, layers stacked along dimension 0."""
    with ocp.CheckpointManager(tmp_path) as manager:
        params = {"params": {"decoder": {"layers": {"w": jnp.arange(24.0).reshape(3, 8)}}}}
        items = ocp.args.Composite(items=ocp.args.PyTreeSave({"params": params, "step": jnp.int32(3)}))
        manager.save(3, args=items)
        manager.wait_until_finished()
    like = {"h": [{"w": jax.ShapeDtypeStruct((8,), jnp.bfloat16)}] * 3}
    rename = {"params/params/decoder/layers/*": "h/*"}
    back = checkpoint.restore(tmp_path, like=like, rename=rename, cast=True, ignore=["step"])
    assert [layer["w"][0] for layer in back["h"]] == [0, 8, 16]
    with pytest.raises(CheckpointError, match=r"h/0/w \(bfloat16\[8\]\) is not in the checkpoint.*only there"):
        checkpoint.restore(tmp_path, like=like, cast=True)


def test_several_trees_of_a_step(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        tree = {"w": jnp.ones(2)}
        manager.save(1, args=ocp.args.Composite(a=ocp.args.StandardSave(tree), b=ocp.args.StandardSave(tree)))
        manager.wait_until_finished()
    with pytest.raises(CheckpointError, match="step 1 in .* has several trees, a, b; restore one: .*/1/a"):
        checkpoint.restore(tmp_path)
    assert checkpoint.restore(tmp_path / "1/b")["w"].tolist() == [1, 1]
    with pytest.raises(CheckpointError, match="is one tree, without steps; leave step=1 out"):
        checkpoint.restore(tmp_path / "1/b", 1)


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("_METADATA", b"{", "_METADATA cannot be read: not JSON"),
        ("_METADATA", b"[]", "_METADATA cannot be read: it is no JSON object"),
        ("_METADATA", b'{"tree_metadata": {"a": 3}}', "_METADATA cannot be read: tree_metadata.a"),
        ("w/.zarray", b"{}", "w cannot be read"),
        ("w/.zarray", None, "w cannot be read: NOT_FOUND"),
    ],
)
def test_a_damaged_folder_is_one_error(tmp_path: Path, file: str, content: bytes | None, why: str) -> None:
    pytree(tmp_path / "saved", {"w": jnp.ones(4)}, use_ocdbt=False)
    path = tmp_path / "saved" / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=why):
        checkpoint.restore(tmp_path / "saved")
