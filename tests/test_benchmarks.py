"""The benchmarks run as they are called on a fresh clone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_cost_of_a_call_is_measured_without_any_setting():
    env = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    done = subprocess.run(
        [sys.executable, "benchmarks/call_overhead.py", "2"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**env, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(\d) device", done.stdout, re.MULTILINE) == ["1", "8"]
    rows = [line.split() for line in done.stdout.splitlines() if line.endswith((" yes", " NO"))]
    assert len(rows) == 18
    assert all(float(row[-4]) > 0 for row in rows)
