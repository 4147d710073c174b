"""The command line as people meet it: in a process of its own, with virtual devices, typing errors and kills."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from autoshard import checkpoint, cli, strict_config
from autoshard.cli import main
from tests.forked import Forked, command

ROOT = Path(__file__).parent.parent

CONFIG = """
model: {layers: 4, d_model: 16, heads: 2, seq: 16}
data: {source: text, holdout: 4}
optimizer: {learning_rate: 1.0e-2, warmup: 2}
batch: 8
strategy: fsdp
phases:
  - {mesh: {axes: {data: 2, model: 2}, hardware: cpu}, until: 12}
  - {mesh: {axes: {data: 4}, hardware: cpu}, until: 24}
eval: {every: 8, batches: 2, final_batches: 4}
checkpoint: {dir: RUN, every: 4}
platform: cpu
"""


def call(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a new interpreter, without a number of devices: it makes its own."""
    inherited = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    return subprocess.run(
        [sys.executable, "-m", "autoshard", *map(str, arguments)],
        check=False,
        env=inherited | {"PYTHONPATH": str(ROOT)} | environment,
        text=True,
        capture_output=True,
        timeout=300,
    )


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`call`, in this process: for what no process of its own can make different, which takes seconds to start."""

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["autoshard", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return subprocess.CompletedProcess(sys.argv, ended.value.code, *capsys.readouterr())

    return run


def write(folder: Path, text: str = CONFIG) -> Path:
    """A training configuration in ``folder``, with text beside it and its run in ``folder/run``."""
    (folder / "text").mkdir(exist_ok=True)
    for number in range(30):
        (folder / f"text/{number}.txt").write_text(f"{number} devices, {number * number} shards, no waste. " * 12)
    path = folder / "train.yaml"
    path.write_text(text.replace("RUN", str(folder / "run")))
    return path


def records(folder: Path) -> list[dict[str, object]]:
    log = folder / "run/log.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def steps_taken(folder: Path) -> list[dict[str, object]]:
    return [record for record in records(folder) if record["event"] == "step"]


def state(folder: Path) -> dict[str, str]:
    """The newest checkpoint: leaf path to bytes, in hexadecimal."""
    found = checkpoint.restore(folder / "run/checkpoints")
    return {path: leaf.tobytes().hex() for path, leaf in found.items()}


def kill_when(process: Forked, moment: Callable[[], bool]) -> None:
    """Kills ``process`` without warning as soon as ``moment`` holds."""
    deadline = time.monotonic() + 120
    while process.poll() is None and not moment():
        assert time.monotonic() < deadline, "the moment to kill at never came"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "the run ended before the kill"


def compiled_once(folder: Path) -> dict[str, str]:
    """Variables for several processes that run the same programs: only the first one compiles them."""
    return {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def test_killed_at_any_moment_it_ends_the_same(tmp_path: Path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    cache = compiled_once(tmp_path)
    uninterrupted = call("train", write(whole), **cache)
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    path = write(broken)

    def before_any_checkpoint() -> bool:
        return len(steps_taken(broken)) >= 2

    def while_saving() -> bool:
        return any((broken / "run/checkpoints").glob("*tmp*")) and len(steps_taken(broken)) > 5

    def in_the_second_phase() -> bool:
        return len(steps_taken(broken)) >= 16

    for moment in (before_any_checkpoint, while_saving, in_the_second_phase):
        kill_when(command("train", path, **cache), moment)
    resumed = command("train", path, **cache)
    shown, errors = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, errors
    assert "resuming" in shown
    assert steps_taken(broken) == steps_taken(whole)
    assert [record["step"] for record in steps_taken(whole)] == list(range(1, 25))
    assert state(broken) == state(whole)
    reports = [json.loads((folder / "run/report.json").read_text()) for folder in (broken, whole)]
    for report in reports:
        report.pop("checkpoint")
    assert reports[0] == reports[1]


def wait_until(process: Forked, moment: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not moment():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.01)


def test_signals_the_lock_and_a_platform_that_is_not_here(tmp_path: Path, inside: Callable[..., Any]):
    """One run's life: without its platform, stopped early, by a scheduler, and twice by hand; never by another run."""
    cache = compiled_once(tmp_path)
    long = CONFIG.replace("until: 12", "until: 100000").replace("until: 24", "until: 100001").replace("fsdp", "dp")
    missing = command("train", write(tmp_path, long.replace("platform: cpu", "platform: gpu")))
    assert re.fullmatch(
        r"error: .*train.yaml:12: platform: it is not available in this process: .+\n", missing.communicate()[1]
    )
    assert missing.returncode == 2
    assert not (tmp_path / "run").exists()

    path = write(tmp_path, long)
    early = command("train", path, **cache)
    wait_until(early, (tmp_path / "run/run.json").exists)
    early.send_signal(signal.SIGINT)
    shown, saved = early.communicate()[1], checkpoint.latest(tmp_path / "run/checkpoints")
    if saved is None:
        assert shown == "stopped; nothing is saved yet, and the same command starts over\n"
    else:  # on a busy machine a step is over before the signal arrives
        assert shown == f"stopped; step {saved} is saved, and the same command resumes from there\n"
    assert early.returncode == 130

    first = command("train", path, **cache)
    wait_until(first, lambda: len(steps_taken(tmp_path)) >= (saved or 0) + 2)
    second = inside("train", path)
    assert second.returncode == 2
    assert re.search(rf"run is in use by process {first.pid} on \S+, since .*one process at a time", second.stderr)
    assert len(second.stderr.splitlines()) == 1
    first.send_signal(signal.SIGTERM)
    shown = first.communicate()[1]
    assert first.returncode == 143
    (said,) = re.findall(r"stopped; step (\d+) is saved, and the same command resumes from there\n$", shown)
    assert [len(steps_taken(tmp_path)), checkpoint.latest(tmp_path / "run/checkpoints")] == [int(said)] * 2

    again = command("train", path, **cache)
    wait_until(again, lambda: len(steps_taken(tmp_path)) >= int(said) + 2)
    again.send_signal(signal.SIGINT)
    again.send_signal(signal.SIGINT)
    shown = again.communicate()[1]
    assert again.returncode == 130
    assert "Traceback" not in shown
    assert re.search(r"stopped; step \d+ is saved|stopped at once: what was not saved is lost", shown)


def hash_that_is_interrupted(*_: object, **__: object) -> None:
    """As JAX, whose dispatch makes a ValueError of what a hash raises."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except KeyboardInterrupt as error:
        raise ValueError("Non-hashable static arguments are used") from error


def test_an_interrupt_that_becomes_another_error_stops_the_run_too(tmp_path: Path):
    ended = Forked(_interrupted_in_a_hash, (str(write(tmp_path)),), {})
    assert ended.communicate(120) == ("", "stopped; nothing is saved yet, and the same command starts over\n")
    assert ended.returncode == 130


def _interrupted_in_a_hash(path: str) -> None:
    cli.train = hash_that_is_interrupted
    sys.argv = ["autoshard", "train", path]
    main()


def test_a_misspelt_key_is_one_line(tmp_path: Path):
    done = call("train", write(tmp_path, CONFIG.replace("warmup", "warmpu")))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"error: {tmp_path}/train.yaml:4: optimizer.warmpu: unknown key; did you mean 'warmup'?"
    ]


def test_a_mesh_larger_than_the_machine_is_one_line(tmp_path: Path, inside: Callable[..., Any]):
    done = inside("train", write(tmp_path, CONFIG.replace("fsdp", "replicated").replace("data: 2", "data: 8")))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "needs 16 devices and this process has 8" in line


def test_plan_prints_without_the_devices(inside: Callable[..., Any]):
    done = inside("plan", ROOT / "configs/train/decoder-8b.yaml")
    assert done.returncode == 0, done.stderr
    assert "phase 1: to step 100000 on mesh (data=32, model=8) of TPU v5e:16x16" in done.stdout
    assert "state['params']['embed']" in done.stdout
    assert "on each of 256 devices" in done.stdout


def test_the_exit_status_of_compile(tmp_path: Path, inside: Callable[..., Any]):
    path = write(tmp_path, CONFIG.replace("fsdp", "dp"))
    done = inside("compile", path, "--json", "--html", tmp_path / "pages" / "compiled.html")
    found = json.loads(done.stdout)["phases"]
    clean = all(phase["audit"]["clean"] for phase in found)
    assert done.returncode == (0 if clean else 3), done.stderr
    assert [phase["devices"] for phase in found] == [4, 4]
    assert all(phase["fits"] and phase["collectives"] for phase in found)
    assert all(phase["estimate"]["bound"] <= phase["estimate"]["sum"] for phase in found)
    pages = [(tmp_path / f"pages/compiled-{n}.html").read_text() for n in (1, 2)]
    assert all("emitted" in page for page in pages)
    assert len(set(pages)) == 2


def test_mesh_and_version(inside: Callable[..., Any]):
    assert inside("mesh", "cpu-8").stdout == "(data=4, model=2) of cpu\n"
    assert inside("version").stdout.startswith("autoshard 0.1.0, jax ")
    missing = inside("mesh", "cpu-9")
    assert missing.returncode == 2
    assert missing.stderr == "error: no mesh config is named 'cpu-9'; did you mean 'cpu-8'?\n"


def test_the_mesh_of_a_training_configuration_is_that_of_its_phases(tmp_path: Path, inside: Callable[..., Any]):
    assert inside("mesh", write(tmp_path)).stdout == "(data=2, model=2) of cpu\n(data=4) of cpu\n"


def test_a_runs_folder_that_cannot_be_made_names_its_line(tmp_path: Path, inside: Callable[..., Any]):
    path = write(tmp_path)
    (tmp_path / "run").write_text("a file")
    at = f"error: {path}:11: checkpoint.dir: {tmp_path / 'run'}"
    assert inside("train", path).stderr.startswith(f"{at} cannot be the run's folder: File exists; name another")
    path.write_text(path.read_text().replace("/run,", "/run/below,"))
    assert inside("train", path).stderr.startswith(f"{at}/below cannot be the run's folder: Not a directory; ")


def test_generate_says_what_it_takes_where_it_is_given_a_runs_folder(tmp_path: Path, inside: Callable[..., Any]):
    (tmp_path / "run.json").write_text("{}")
    said = inside("generate", tmp_path, "--prompt", "a").stderr
    assert said == f"error: {tmp_path} is a run's folder; give the configuration of the run, the file that train took\n"


def test_a_plan_is_written_as_a_page_for_each_phase(inside, tmp_path):
    done = inside("plan", write(tmp_path), "--html", tmp_path / "pages" / "plan.html")
    assert done.returncode == 0
    pages = [tmp_path / "pages" / f"plan-{n}.html" for n in (1, 2)]
    assert all(str(page) in done.stdout for page in pages)
    assert all(page.read_text().startswith("<!doctype html>") for page in pages)
    elsewhere = inside("plan", write(tmp_path), "--mesh", "cpu-8").stdout
    assert elsewhere.count("on mesh (data=4, model=2) of cpu") == 2


@pytest.mark.parametrize("name", ["train", "plan"])
def test_a_missing_file_is_one_line(tmp_path: Path, name: str, inside: Callable[..., Any]):
    done = inside(name, tmp_path / "none.yaml")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("kind", ["train", "mesh", "hardware"])
def test_the_schema_takes_what_ships_and_no_misspelt_key(kind: str, inside: Callable[..., Any]):
    schema = json.loads(inside("schema", kind).stdout)
    files = sorted((ROOT / "configs" / kind).glob("*.yaml"))
    assert len(files) > 1
    for file in files:
        entries = strict_config._Loader(file.read_text()).get_single_data()
        jsonschema.validate(entries, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(entries | {"devcies": 8}, schema)
    if kind == "train":
        own = {"call": "models:make", "with": {"width": 4}}
        jsonschema.validate(entries | {"model": own, "data": own, "optimizer": own, "loss": own}, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(entries | {"model": own | {"wiht": {}}}, schema)


def test_a_misspelt_word_is_answered_with_the_nearest(inside: Callable[..., Any]):
    refused = inside("schema", "trian")
    assert (refused.returncode, refused.stderr) == (2, "error: there is no schema 'trian'; did you mean 'train'?\n")
    assert "Did you mean 'show'?" in inside("runs", "shwo").stderr


def test_runs_are_listed_and_drawn(tmp_path: Path, inside: Callable[..., Any]):
    (tmp_path / "demo").mkdir()
    lines = [json.dumps({"event": "step", "step": n, "loss": 1 / n}) for n in range(1, 9)]
    (tmp_path / "demo/log.jsonl").write_text("\n".join(lines) + "\n")
    assert re.search(r"demo +stopped +8 +0.1250", inside("runs", "--in", tmp_path).stdout)
    assert inside("runs", "--in", tmp_path, "show", "demo").stdout.startswith("loss\n")
    refused = inside("runs", "--in", tmp_path, "show", "demo", "--only", "los")
    assert (refused.returncode, refused.stderr) == (2, "error: demo has no metric 'los'; did you mean 'loss'?\n")
    assert "is not a directory" in inside("runs", "--in", tmp_path / "none").stderr
    failed = {"event": "end", "step": 8, "how": "failed", "error": "OSError: no space left"}
    (tmp_path / "demo/log.jsonl").write_text("\n".join([*lines, json.dumps(failed)]) + "\n")
    shown = inside("runs", "--in", tmp_path, "show", "demo").stdout
    assert shown.startswith("loss\n")
    assert shown.endswith("\ndemo failed after step 8: OSError: no space left\n")
    (tmp_path / "demo/log.jsonl").write_text("")
    assert inside("runs", "--in", tmp_path, "show", "demo").stdout == "demo has no metrics yet\n"
