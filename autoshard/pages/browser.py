"""A page written to a file, and opened where somebody can see it."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import webbrowser
from pathlib import Path


def open_page(text: str, path: str | os.PathLike[str] | None, name: str) -> Path:
    """Writes the page ``text`` to ``path``, or to a new file named after ``name``; missing folders are created."""
    if path is None:
        plain = re.sub(r"\W+", "-", name, flags=re.ASCII)[:40].strip("-") or "plan"
        handle, made = tempfile.mkstemp(prefix=f"autoshard-{plain}-", suffix=".html")
        os.close(handle)
        path = made
    file = Path(path).absolute()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    if has_screen():
        webbrowser.open(file.as_uri())
    return file


def has_screen() -> bool:
    """Whether this process belongs to a desktop; of a remote shell, a container or a job it does not."""
    if sys.platform in ("darwin", "win32"):
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
