"""Hardware tables: those that ship are plausible; missing and invalid ones are errors that name the mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from autoshard.errors import CompileError, ConfigError
from autoshard.machine.hardware import hardware_of, is_of_other_chip, load_hardware, require_compiler
from autoshard.machine.mesh import LogicalMesh
from autoshard.machine.mesh_config import MeshConfig, load_mesh_config
from autoshard.strict_config import load_yaml

TABLES = sorted((Path(__file__).parents[2] / "configs/hardware").glob("*.yaml"))


@pytest.mark.parametrize("path", TABLES, ids=lambda p: p.stem)
def test_every_hardware_table_is_plausible(path):
    hardware = load_hardware(path.stem)
    assert hardware.name == path.stem
    assert {"bfloat16", "float32"} <= set(hardware.flops)
    assert hardware.flops["bfloat16"] >= hardware.flops["float32"]
    assert 1e9 < hardware.memory < 1e12
    for link in hardware.links.values():
        # A link within a machine may be as fast as the memory that it is made of; none is much faster.
        assert 1e9 <= link.bandwidth <= 2 * hardware.bandwidth
        assert 1e-7 < link.latency < 1e-3
    first = next(iter(hardware.links.values()))
    assert first == LogicalMesh(("a",), (2,), hardware).slowest_link(("a",))


def test_no_two_tables_claim_one_kind_of_device():
    kinds = [kind for path in TABLES for kind in _kinds(path)]
    assert len(kinds) == len(set(kinds))
    for path in TABLES:
        for kind in _kinds(path):
            assert hardware_of(kind).name == path.stem


def _kinds(path):
    return load_yaml(path, _Kinds).device_kinds


class _Kinds(BaseModel):
    device_kinds: list[str]


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(ConfigError, match="no hardware config is named 'tpu-v5'; did you mean 'tpu-v5"):
        load_hardware("tpu-v5")
    with pytest.raises(ConfigError, match="no hardware table lists the device kind 'Abacus'.*cpu.*path"):
        hardware_of("Abacus")


def test_a_users_table(tmp_path):
    table = tmp_path / "mine.yaml"
    table.write_text(
        "flops: {float32: 1e12}\nmemory: 8GiB\nbandwidth: 1e11\nlinks: {wire: {bandwidth: 1e9, latency: 1e-6}}\n"
    )
    mesh = MeshConfig(axes={"a": 2}, hardware=str(table)).mesh()
    assert (mesh.hardware.name, mesh.hardware.memory, mesh.slowest_link(("a",)).name) == ("mine", 8 * 2**30, "wire")
    table.write_text("flops: {floaty: 1}\nmemory: 8GiB\nbandwidth: 0\nlinks: {}\n")
    with pytest.raises(ConfigError) as caught:
        load_hardware(str(table))
    assert len(str(caught.value).splitlines()) == 3
    for text in ("mine.yaml:1: flops.floaty: should be 'bfloat16'", "mine.yaml:3: bandwidth", "mine.yaml:4: links"):
        assert text in str(caught.value)


def test_whether_a_table_is_of_another_chip_is_known_of_those_that_ship(tmp_path):
    assert is_of_other_chip(load_hardware("tpu-v5e"), "cpu")
    assert not is_of_other_chip(load_hardware("tpu-v5e"), "TPU v5 lite")
    own = tmp_path / "my-chip.yaml"
    own.write_text((TABLES[0].parent / "cpu.yaml").read_text())
    assert not is_of_other_chip(load_hardware(str(own)), "TPU v5 lite")


@pytest.mark.parametrize("name", ["tpu-v5e-16", "h100-8"])
def test_what_is_compiled_for_cpu_is_not_taken_for_an_accelerator(name):
    chip = load_mesh_config(name).hardware
    with pytest.raises(CompileError, match=f"has the hardware table {chip}, and would be compiled for CPU"):
        require_compiler(load_mesh_config(name).mesh())
    for other in ("h100-16", "cpu-8"):
        require_compiler(load_mesh_config(other).mesh())
