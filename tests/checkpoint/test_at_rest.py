"""What a repair puts right, what it names and leaves alone."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner

from autoshard import checkpoint
from autoshard.checkpoint.at_rest import conditions, repair
from autoshard.checkpoint.manifest import LOCK, TEMPORARY, plan_file_name
from autoshard.cli import app
from autoshard.errors import CheckpointError
from autoshard.shared_folder import held
from tests.checkpoint.test_save_restore import FakePlan, largest, mesh_of, plan_for, small

safetensors = pytest.importorskip("safetensors.numpy", reason="the reference that others read and write with")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != LOCK}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Steps 1 and 2, the second with a plan."""
    checkpoint.save(tmp_path, 1, small(1))
    checkpoint.save(tmp_path, 2, small(2), extra={"at": [1]}, plan=plan(), wait=True)
    return tmp_path


def plan() -> FakePlan:
    return plan_for(small(), mesh_of((2,)), P())


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("lost", [Path.unlink, flipped, lambda path: path.write_text("{")])
def test_an_inventory_is_made_again_of_what_is_whole(saved: Path, lost: Any) -> None:
    before = contents(saved)
    lost(saved / "2/inventory.json")
    assert checkpoint.steps(saved) == (1,)
    (done,) = repair(saved)
    assert (done.where, done.refused) == (str(saved / "2"), "")
    assert "its inventory is made again" in done.done
    assert contents(saved) == before
    back, report = checkpoint.restore(saved, like=small(), report=True)
    assert (report.step, report.extra, back["b"].tolist()) == (2, {"at": [1]}, [2] * 8)
    assert repair(saved) == []


def old_manifest(step: Path) -> None:
    kept = Path(__file__).parent / "kept/version-2/3"
    shutil.rmtree(step)
    shutil.copytree(kept, step)
    (step / "inventory.json").unlink()


def two(step: Path, *breaks: Any) -> None:
    (step / "inventory.json").unlink()
    for one in breaks:
        one(step)


REFUSED = {
    "an array": (lambda s: flipped(largest(s)), "cannot be read"),
    "an array and the inventory": (lambda s: two(s, lambda s: flipped(largest(s))), "cannot be read"),
    "a file of arrays and the inventory": (lambda s: two(s, lambda s: largest(s).unlink()), "cannot be read"),
    "the manifest": (lambda s: flipped(s / "manifest/metadata"), "manifest"),
    "a number of the manifest and the inventory": (
        lambda s: two(s, lambda s: _replaced(s / "manifest/metadata", '"at": [1]', '"at": [2]')),
        "it has changed since it was written",
    ),
    "the plan": (lambda s: flipped(next(s.glob("plan-*.json"))), "json has changed since it was written; its"),
    "the plan and the inventory": (
        lambda s: two(s, lambda s: flipped(next(s.glob("plan-*.json")))), "json has changed since it was written"
    ),
    "the inventory of a version without digests": (old_manifest, "version 2 has no digest"),
}  # fmt: skip


def _replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_digest_proves_is_named_and_left_alone(saved: Path, what: str) -> None:
    damage, why = REFUSED[what]
    damage(saved / "2")
    before = contents(saved)
    done = repair(saved)
    if what == "an array":  # of its size: only reading it shows
        assert done == []
    else:
        (refusal,) = done
        assert (refusal.where, refusal.done) == (str(saved / "2"), "")
        assert why in refusal.refused
    assert contents(saved) == before
    first, second = conditions(saved)
    assert (first.problem, first.unproven) == ("", "")
    assert second.problem


def test_what_killed_programs_left_is_completed_or_removed(saved: Path) -> None:
    (saved / "2").rename(saved / f"2{TEMPORARY}")
    shutil.copytree(saved / "1", saved / f"7{TEMPORARY}")
    largest(saved / f"7{TEMPORARY}").unlink()
    shutil.copytree(saved / "1", saved / f"1{TEMPORARY}")
    (saved / "5.deleted").mkdir()
    reported = {Path(done.where).name: done.done.partition(":")[0] for done in repair(saved)}
    assert reported == {
        f"1{TEMPORARY}": "removed", "2": "put in place", "5.deleted": "removed", f"7{TEMPORARY}": "removed",
    }  # fmt: skip
    assert checkpoint.steps(saved) == (1, 2)
    assert checkpoint.restore(saved)["b"].tolist() == [2] * 8


def test_a_condition_names_its_place_once(tmp_path: Path) -> None:
    (reported,) = [str(condition) for condition in conditions(tmp_path / "none")]
    assert reported.count(str(tmp_path / "none")) == 1


UNPROVEN = "it has no digests, so nothing says whether its numbers are those that were written"


def test_what_others_wrote_is_not_repaired_and_not_called_whole(tmp_path: Path) -> None:
    (tmp_path / "tensors").mkdir()
    safetensors.save_file({"a": np.ones(3)}, tmp_path / "tensors/model.safetensors")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "orbax", small())
    for name, read in (
        ("tensors", "its headers fit its files, and every byte can be read"), ("orbax", "every array can be read"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match="no directory that checkpoint.save wrote to.* copy it again"):
            repair(tmp_path / name)
        assert [str(condition) for condition in conditions(tmp_path / name)] == [
            f"{tmp_path / name}: {read}; {UNPROVEN}"
        ]


def test_tensors_that_were_written_here_have_digests(tmp_path: Path) -> None:
    """Every bit of every byte counts: of tensors and of what the header says of them."""
    table = jnp.arange(6.0).reshape(2, 3)
    state = {"a": table, "b": jnp.ones((5, 3), jnp.bfloat16), "empty": jnp.ones((0, 2)), "tied": table, "n": 7}
    checkpoint.to_safetensors(tmp_path, state, max_bytes=32)

    def reported() -> str:
        (condition,) = conditions(tmp_path)
        return str(condition).removeprefix(f"{tmp_path}: ")

    assert reported() == "whole"
    assert checkpoint.from_safetensors(tmp_path, report=True)[1].extra == {}
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) == 3
    for file in files:
        whole = file.read_bytes()
        length = 8 + int.from_bytes(whole[:8], "little")
        for at in range(length, len(whole)):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
            assert re.fullmatch(rf"\w+ in {file.name} has changed since written", reported())
        for old, new in ((b"[2,3]", b"[3,2]"), (b'"BF16"', b'"F16" '), (b'"tied":"a"', b'"teid":"a"')):
            if old in whole:
                file.write_bytes(whole.replace(old, new))
                assert reported() == f"the header of {file.name} has changed since written"
        file.write_bytes(whole)
    others = safetensors.load_file(files[0])
    safetensors.save_file(others, files[0])
    assert reported() == f"whole but for {', '.join(sorted(others))}, which can be read and have no digests"


def test_a_directory_that_is_written_to_is_not_repaired(saved: Path) -> None:
    with held(epath.Path(saved / LOCK), "saves", "wait"), pytest.raises(CheckpointError, match="in use by process"):
        repair(saved)


def test_the_command(saved: Path) -> None:
    def run(*words: Any) -> tuple[int, list[str]]:
        result = CliRunner().invoke(app, ["checkpoint", "verify", str(saved), *words])
        return result.exit_code, result.output.splitlines()

    (saved / "2/inventory.json").unlink()
    assert run()[0] == 1
    code, lines = run("--repair")
    assert code == 0
    assert lines[0].startswith(f"{saved / '2'}: its inventory is made again")
    assert lines[1:] == [f"{saved / '1'}: whole", f"{saved / '2'}: whole"]
    flipped(saved / "2/manifest/metadata")
    code, lines = run("--repair")
    assert code == 1
    assert "not repaired" in lines[0]
    assert run("--repair", "--step", "1")[0] == 2


def test_the_name_of_a_plans_file_is_its_digest(saved: Path) -> None:
    (file,) = (saved / "2").glob("plan-*.json")
    assert file.name == plan_file_name(file.read_text())
    report = checkpoint.restore(saved, report=True)[1]
    assert (report.plan, sorted(report.versions)) == (str(file), ["autoshard", "jax", "orbax-checkpoint"])
    assert not list((saved / "1").glob("plan-*"))
    assert np.array_equal(checkpoint.restore(saved, plan=plan())["b"], jnp.full(8, 2.0))
