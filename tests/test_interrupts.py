"""Ctrl-C before a command does anything: it ends without a word, with the code that shells give."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.interrupts import is_command

ROOT = Path(__file__).parent.parent


def test_an_interrupt_while_the_command_imports_ends_it_quietly(tmp_path: Path):
    """A module of JAX's name stands before JAX, and is interrupted."""
    (tmp_path / "jax.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    command = [sys.executable, "-m", "autoshard", "version"]
    heard = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    ended = subprocess.run(
        [sys.executable, "-c", heard, *command],  # what runs in the background ignores the signal
        check=False,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["/bin/python", "/home/me/.venv/bin/autoshard", "train", "a.yaml"], True),
        (["python", "-m", "autoshard"], True),
        (["python", "-X", "dev", "-u", "-m", "autoshard", "plan"], True),
        (["python", "train.py", "autoshard"], False),
        (["python", "-m", "pytest", "autoshard"], False),
        (["python", "-c", "import autoshard"], False),
        (["python"], False),
    ],
)
def test_which_process_is_the_command(arguments: list[str], wanted: bool):
    assert is_command(arguments) is wanted
