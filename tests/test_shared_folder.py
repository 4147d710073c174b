"""Who has a folder, and until when."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from etils import epath

from autoshard.errors import CheckpointError
from autoshard.shared_folder import held, is_held


def test_a_folder_is_free_again_though_a_forked_process_still_has_the_file(tmp_path: Path) -> None:
    root = epath.Path(tmp_path / "some.lock")
    assert not is_held(root)
    with held(root, "writes", "go"):
        assert is_held(root)
        with pytest.raises(CheckpointError, match=rf"in use by process {os.getpid()} on .* writes there. .*, or go$"):
            held(root, "writes", "go").__enter__()
        number = next(n for n in os.listdir("/proc/self/fd") if _target(n) == str(root))
        copy = os.dup(int(number))
    try:
        assert not is_held(root)
        with held(root, "writes", "go"):
            pass
    finally:
        os.close(copy)


def _target(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except FileNotFoundError:  # that of the listing itself
        return ""
