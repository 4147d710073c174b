"""The command on each of three formats: what it prints, what it writes, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from typer.testing import CliRunner

from autoshard import checkpoint
from autoshard.cli import app
from autoshard.errors import CheckpointError

FORMATS = ["autoshard", "orbax", "safetensors"]


def state() -> dict[str, Any]:
    return {
        "params": {
            "layers": [{"w": jnp.arange(8.0).reshape(2, 4)}, {"w": jnp.ones((2, 4))}],
            "b": jnp.ones(3, jnp.int8),
        },
        "key": jax.random.key(3),
        "step": 7,
    }


def written(folder: Path, format: str, tree: Any) -> Path:
    path = folder / format
    if format == "autoshard":
        checkpoint.save(path, 4, tree, extra={"loader": 3}, wait=True)
    elif format == "safetensors":
        checkpoint.to_safetensors(path, tree, max_bytes=40)
    else:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(path, tree)
    return path


def run(*words: Any, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.output


def back(path: Path, like: Any) -> Any:
    read = checkpoint.from_safetensors if list(path.glob("*.safetensors")) else checkpoint.restore
    return read(path, like=like)


def assert_equal(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert (np.asarray(x).dtype, np.asarray(x).tolist()) == (np.asarray(y).dtype, np.asarray(y).tolist())


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("to", FORMATS)
def test_every_format_to_every_other(tmp_path: Path, source: str, to: str) -> None:
    path = written(tmp_path, source, state())
    said = run("convert", path, tmp_path / "to", "--to", to)
    assert f"{tmp_path / 'to'}: {to}, 5 leaves, " in said
    assert ("beside the leaves: loader" in said) == (source == "autoshard" and to != "autoshard")
    assert_equal(back(tmp_path / "to", state()), state())
    assert run("diff", path, tmp_path / "to") == "0 leaves differ of 5 and 5\n"
    said = "every array can be read; it has no digests" if to == "orbax" else "whole\n"
    assert f": {said}" in run("verify", tmp_path / "to")


def test_of_a_runs_folder_the_checkpoints_are_meant(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "run/checkpoints", 4, {"a": jnp.ones(3)}, wait=True)
    (tmp_path / "run/run.json").write_text("{}")
    for word in ("inspect", "verify"):
        assert run(word, tmp_path / "run") == run(word, tmp_path / "run/checkpoints")
    assert run("diff", tmp_path / "run", tmp_path / "run/checkpoints") == "0 leaves differ of 1 and 1\n"


def test_plain_orbax_restores_what_is_written_for_it(tmp_path: Path) -> None:
    path = written(tmp_path, "autoshard", state())
    run("convert", path, tmp_path / "to", "--to", "orbax", "--ignore", "key", "--rename", "params/layers/*/w=h/*")
    goal = {"h": {"0": jnp.zeros((2, 4)), "1": jnp.zeros((2, 4))}, "params": {"b": jnp.zeros(3, jnp.int8)}, "step": 0}
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "to", goal)
    assert found["h"]["0"].tolist() == state()["params"]["layers"][0]["w"].tolist()
    assert (found["params"]["b"].tolist(), found["step"]) == ([1, 1, 1], 7)


def test_a_manager_restores_what_is_written_as_an_item_of_a_step(tmp_path: Path) -> None:
    """MaxText's way: ``DIR/STEP/items`` has one tree, with the parameters under ``params/params``."""
    path = written(tmp_path, "autoshard", state())
    rename = ["--rename", "params/*=params/params/decoder/*", "--ignore", "key"]
    run("convert", path, tmp_path / "to/7/items", "--to", "orbax", *rename)
    layers = {str(n): {"w": jnp.zeros((2, 4))} for n in range(2)}
    goal = {"params": {"params": {"decoder": {"layers": layers, "b": jnp.zeros(3, jnp.int8)}}}, "step": 0}
    with ocp.CheckpointManager(tmp_path / "to", item_names=("items",)) as manager:
        assert manager.latest_step() == 7
        found = manager.restore(7, args=ocp.args.Composite(items=ocp.args.PyTreeRestore(goal)))["items"]
    for n, layer in enumerate(state()["params"]["layers"]):
        assert found["params"]["params"]["decoder"]["layers"][str(n)]["w"].tolist() == layer["w"].tolist()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        some = {"params": goal["params"]}
        part = checkpointer.restore(
            tmp_path / "to/7/items",
            item=some,
            transforms={},
            restore_args=ocp.checkpoint_utils.construct_restore_args(some),
        )
    assert part["params"]["params"]["decoder"]["b"].tolist() == [1, 1, 1]


def test_names_dtypes_and_what_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, "autoshard", state())
    options = ["--rename", "params/layers/*/w=model.layers.*.weight", "--ignore", "key", "--ignore", "step"]
    said = run("convert", path, tmp_path / "to", *options, "--cast", "bfloat16", "--cast", "*.1.*=float16")
    assert "left out: key\nleft out: step\n" in said
    found = checkpoint.from_safetensors(tmp_path / "to")
    assert {name: (x.dtype.name, x.ravel()[0]) for name, x in found.items()} == {
        "model.layers.0.weight": ("bfloat16", 0), "model.layers.1.weight": ("float16", 1), "params/b": ("int8", 1),
    }  # fmt: skip
    for wrong, why in (
        (["--rename", "b"], "'b' is not OLD=NEW"),
        (["--rename", "x=y"], "no leaf of the checkpoint has this name"),
        (["--cast", "int8"], "'int8' is no dtype of floats"),
        (["--to", "orbax", "--rename", "step=params"], "params is a prefix of another leaf"),
        (["--to", "orbax", "--rename", "step=key/x"], "key/x has another leaf as a prefix"),
    ):
        with pytest.raises(CheckpointError, match=why):
            run("convert", path, tmp_path / "no", *wrong)
    with pytest.raises(CheckpointError, match="is there already"):
        run("convert", path, tmp_path / "to", "--to", "orbax")


@pytest.mark.parametrize("format", FORMATS)
def test_inspect_prints_every_leaf(tmp_path: Path, format: str) -> None:
    path = written(tmp_path, format, state())
    said = run("inspect", path)
    assert "params/layers/0/w  float32[2,4]\n" in said
    assert f"{format}, 5 leaves, " in said
    found = json.loads(run("inspect", path, "--json"))
    assert (found["format"], found["step"]) == (format, 4 if format == "autoshard" else None)
    assert {"name": "params/b", "dtype": "int8", "shape": [3], "bytes": 3} in found["leaves"]


def test_inspect_shows_what_convert_would_write(tmp_path: Path) -> None:
    path = written(tmp_path, "orbax", state())
    said = run("inspect", path, "--ignore", "key", "--rename", "params/layers/*/w=h.*", "--cast", "*.1=bfloat16")
    assert {"h.0  float32[2,4]", "h.1  bfloat16[2,4]"} <= set(said.splitlines())
    assert "key" not in said


def test_diff_names_what_differs_and_by_how_much(tmp_path: Path) -> None:
    tree = state()
    first = written(tmp_path / "a", "autoshard", tree)
    tree["params"]["layers"][0]["w"] = tree["params"]["layers"][0]["w"].at[1, 2].add(0.5).at[0, 0].add(0.25)
    tree["params"]["b"] = jnp.ones(4, jnp.int8)
    tree["new"], tree["step"] = 1.5, 8
    del tree["key"]
    second = written(tmp_path / "b", "safetensors", tree)
    assert run("diff", first, second, status=1).splitlines() == [
        "key: only in the first, key<fry>[]",
        "params/b: int8[3] in the first, int8[4] in the second",
        "params/layers/0/w: float32[2,4], 2 elements differ, by 0.5 at most",
        "step: int 7 in the first, int64[] 8 in the second",
        "new: only in the second, float64[]",
        "5 leaves differ of 5 and 5",
    ]


def test_merge_joins_what_does_not_contradict(tmp_path: Path) -> None:
    tree = state()
    base = written(tmp_path / "a", "safetensors", tree["params"])
    more = written(tmp_path / "b", "orbax", {"b": tree["params"]["b"], "lora": jnp.ones((2, 2))})
    run("merge", base, more, tmp_path / "to", "--rename", "lora=adapter/w")
    want = {**tree["params"], "adapter": {"w": jnp.ones((2, 2))}}
    assert_equal(checkpoint.restore(tmp_path / "to", like=want), want)
    other = written(tmp_path / "c", "orbax", {"b": tree["params"]["b"] * 2})
    with pytest.raises(
        CheckpointError, match=r"b: int8\[3\], 3 elements differ, by 1 at most: the first is .*safetensors"
    ):
        run("merge", base, other, tmp_path / "no")
    run("merge", base, status=2)


def test_verify_reads_every_byte(tmp_path: Path) -> None:
    path = written(tmp_path, "autoshard", state())
    checkpoint.save(path, 5, {"w": np.random.default_rng(0).integers(0, 256, 4096, np.uint8)}, wait=True)
    assert run("verify", path).splitlines() == [f"{path}/4: whole", f"{path}/5: whole"]
    file = max((p for p in (path / "5").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    said = run("verify", path, status=1).splitlines()
    assert said[0] == f"{path}/4: whole"
    assert "cannot be read" in said[1]
    assert run("verify", path, "--step", 4) == f"{path}/4: whole\n"
    (path / "4/inventory.json").unlink()
    assert "it has no inventory" in run("verify", path, "--step", 4, status=1)
    tensors = written(tmp_path, "safetensors", state())
    some = next(tensors.glob("*.safetensors"))
    some.write_bytes(some.read_bytes()[:-1])
    assert "cannot be read: its tensors have" in run("verify", tensors, status=1)
