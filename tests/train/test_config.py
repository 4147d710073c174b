"""Training configurations: what a file may say, where its paths lead, and what a resumed run must agree in."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoshard.errors import ConfigError
from autoshard.train.config import TrainConfig

ROOT = Path(__file__).parents[2]

PLAIN = """
model: {layers: 1, d_model: 8, heads: 2, seq: 8}
batch: 8
mesh: {axes: {data: 4}, hardware: cpu}
steps: 10
checkpoint: {dir: run}
"""
PHASES = PLAIN.replace("mesh: ", "phases: [{until: 4, mesh: ").replace(
    "cpu}\nsteps: 10", "cpu}}, {until: 10, mesh: cpu-8}]"
)


def read(folder: Path, text: str) -> TrainConfig:
    path = folder / "train.yaml"
    path.write_text(text)
    return TrainConfig.load(path)


@pytest.mark.parametrize("path", sorted((ROOT / "configs/train").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_configurations_are_valid(path: Path):
    assert TrainConfig.load(path).last_step > 0


def test_one_mesh_is_one_phase(tmp_path: Path):
    config = read(tmp_path, PLAIN)
    assert [(phase.until, phase.mesh.axes) for phase in config.all_phases] == [(10, {"data": 4})]
    assert (config.last_step, config.min_devices) == (10, 4)


def test_what_is_made_again_is_said_by_name_and_number_of_layers(tmp_path: Path):
    config = read(tmp_path, PLAIN + 'recompute: {"*.mlp.up": 12, attention: all}')
    assert config.recompute == {"*.mlp.up": 12, "attention": "all"}


@pytest.mark.parametrize("count", ["'hosts'", "-1", "'host:'", "'4:host'", "1.5", "True"])
def test_what_is_no_number_of_layers_is_refused_by_name(tmp_path: Path, count: str):
    with pytest.raises(ConfigError, match=rf"recompute: \*\.mlp\.up: {count} is no number of layers; .* 'host:4'"):
        read(tmp_path, PLAIN + f'recompute: {{attention: 2, "*.mlp.up": {count}}}')


def test_the_devices_are_those_of_the_largest_phase(tmp_path: Path):
    config = read(tmp_path, PHASES)
    assert [phase.until for phase in config.all_phases] == [4, 10]
    assert config.min_devices == 8


def test_paths_are_relative_to_the_file_that_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "models/small.yaml").write_text("{layers: 3, d_model: 8, heads: 2, seq: 8}")
    (tmp_path / "mesh.yaml").write_text("{axes: {data: 2}, hardware: cpu}")
    text = PLAIN.replace(
        "model: {layers: 1, d_model: 8, heads: 2, seq: 8}", "model: models/small.yaml\ndata: {source: text}"
    )
    monkeypatch.chdir("/")
    config = read(tmp_path, text.replace("{axes: {data: 4}, hardware: cpu}", "mesh.yaml"))
    assert config.model.layers == 3
    assert config.all_phases[0].mesh.axes == {"data": 2}
    assert config.data.source == str(tmp_path / "text")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("batch: 8", "bach: 8", "train.yaml:3: bach: unknown key; did you mean 'batch'"),
        ("d_model: 8", "dmodel: 8", "train.yaml:2: model.dmodel: unknown key; did you mean 'd_model'"),
        ("batch: 8", "bach: 8", "unknown key; .*\n.*batch: this key is required"),
        (
            "steps: 10",
            "step_count: 10",
            r"^\S*train.yaml:5: step_count: unknown key; did you mean 'steps' or 'step'\?$",
        ),
        ("batch: 8", "", "batch: this key is required"),
        ("batch: 8", "batch: 0", "train.yaml:3: batch: should be greater than or equal to 1; it is 0"),
        ("batch: 8", "batch: 4611686018427387904", "train.yaml:3: batch: should be less than or equal to 16777216"),
        ("d_model: 8", "d_model: 1099511627776", "model.d_model: should be less than or equal to 16777216"),
        ("seq: 8", "seq: 8, experts: 16777217", "model.experts: should be less than or equal to 16777216"),
        ("steps: 10", "steps: 2147483648", "train.yaml:5: steps: should be less than or equal to 2147483647"),
        (
            "steps: 10",
            "steps: 10\noptimizer: {warmup: 2147483648}",
            "optimizer.warmup: should be less than or equal to",
        ),
        ("steps: 10", "", "give either `mesh` and `steps`, or `phases`"),
        ("steps: 10", "steps: 10\nphases: [{mesh: cpu-8, until: 3}]", "give either `mesh` and `steps`, or `phases`"),
        ("seq: 8", "seq: 8, vocab: 100", "vocab is 100; a token is a byte, so it must be 256"),
        ("{layers: 1, d_model: 8, heads: 2, seq: 8}", "no/such.yaml", "cannot read .*no/such.yaml"),
        ("{axes: {data: 4}, hardware: cpu}", "cpu-9", "no mesh config is named 'cpu-9'; did you mean 'cpu-8'"),
        ("steps: 10", "steps: 10\nstrategy: fdsp", "strategy: .*'fsdp'"),
    ],
)
def test_errors_name_the_entry(tmp_path: Path, old: str, new: str, message: str):
    assert old in PLAIN
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, PLAIN.replace(old, new))


def test_phases_must_end_in_order(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"the phases end at steps \[10, 10\]"):
        read(tmp_path, PHASES.replace("until: 4", "until: 10"))


def test_state_settings(tmp_path: Path):
    plain, phases = read(tmp_path, PLAIN), read(tmp_path, PHASES)
    assert plain.state_settings() == phases.state_settings()  # the mesh may change
    assert plain.state_settings()["optimizer.decay_steps"] == 10
    longer = read(tmp_path, PLAIN.replace("steps: 10", "steps: 20"))
    other = {key for key, value in longer.state_settings().items() if value != plain.state_settings()[key]}
    assert other == {"optimizer.decay_steps"}
