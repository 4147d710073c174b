"""Whether the type checker sees every package: a wrong type is planted in a copy of each, and each must be reported.

    python -m tests.planted_types

Exit status 1 and the packages that went unnoticed, if any. Takes one run of pyright.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
WRONG = '\n_WRONG: int = "text"\n'


def packages() -> list[Path]:
    """Every folder of sources, links left out, and the files at the top."""
    folders = [p for top in ("autoshard", "passes", "rules") for p in (ROOT / top, *(ROOT / top).rglob("*"))]
    found = [p for p in folders if p.is_dir() and not p.is_symlink() and (p / "__init__.py").exists()]
    return sorted(p.relative_to(ROOT) for p in found)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "runs", "build")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
        planted = {package: max((copy / package).glob("*.py")) for package in packages()}
        for file in planted.values():
            with file.open("a") as f:
                f.write(WRONG)
        command = [ROOT / ".venv/bin/pyright", "--pythonpath", ROOT / ".venv/bin/python", "--project", copy]
        said = subprocess.run(command, capture_output=True, text=True, check=False, cwd=copy).stdout
    missed = [
        str(p) for p, file in planted.items() if not any(str(file) in l and "error" in l for l in said.splitlines())
    ]
    print(f"{len(planted) - len(missed)} of {len(planted)} planted errors reported")
    if missed:
        sys.exit(f"not seen in: {', '.join(missed)}")


if __name__ == "__main__":
    main()
