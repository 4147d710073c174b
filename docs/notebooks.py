"""The notebooks that are pages of the documentation, to run and change: made from the pages.

    python -m docs.notebooks

writes those that changed to `notebooks/`, and executes all there, in place. The first two notebooks have no page: they
are written by hand.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from docs.made_pages import FOLDER as MADE

ROOT = Path(__file__).parent.parent
PAGES: Mapping[str, str] = {
    "03_meshes": "concepts/mesh",
    "04_memory": "guides/short_memory",
    "05_long_context": "guides/long_context",
    "06_experts": "guides/experts",
    "07_pipeline": "guides/pipelines",
    "08_lora": "guides/fine_tuning",
    "09_chips_that_are_not_here": "guides/targets",
    "10_rule_for_a_kernel": "guides/rules_and_passes",
}
"""The page of each notebook."""
DEVICES = """import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"  # before JAX is imported"""


class ThisPython(KernelSpecManager):
    """Has one kernel: `sys.executable`, whatever is registered on the machine."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return KernelSpec(**get_kernel_dict())


class Kernel(AsyncKernelManager):
    """Starts it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(kernel_spec_manager=ThisPython(), **kwargs)


def executed(path: Path) -> Any:
    """The notebook at ``path`` with its outputs; raises what a cell raises."""
    notebook = nbformat.read(path, as_version=4)
    # The notebook says itself how many devices it wants.
    kept = {k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS")}
    env = {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])}
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_manager_class=Kernel,
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        coalesce_streams=True,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the notebook machinery itself
        return client.execute(env=env)


def cells(name: str) -> list[tuple[str, str]]:
    """Kind, ``markdown`` or ``code``, and source of every cell of a notebook."""
    page = PAGES[name]
    text = re.sub(r"\A---\n.*?\n---\n", "", (ROOT / "docs" / f"{page}.md").read_text(), flags=re.DOTALL)
    found: list[tuple[str, str]] = []
    for n, part in enumerate(re.split(r"^```\{code-cell\}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)):
        shell = [line.removeprefix("!") for line in part.splitlines() if line.startswith("!")]
        if n % 2 == 0:
            found.append(("markdown", _linked(part.strip(), page)))
        elif shell:
            found.append(("markdown", "\n".join(["```sh", *shell, "```"])))
        else:
            found.append(("code", part.strip()))
    found.insert(1, ("code", DEVICES))
    return [(kind, source) for kind, source in found if source]


def kept(name: str) -> list[tuple[str, str]] | None:
    """The cells that a notebook in `notebooks/` has; None where there is none."""
    file = ROOT / "notebooks" / f"{name}.ipynb"
    if not file.exists():
        return None
    return [(cell.cell_type, cell.source) for cell in nbformat.read(file, as_version=4).cells]


def _linked(text: str, page: str) -> str:
    """``text`` with its links to other pages as they are from `notebooks/`; to a page that is made, the words alone."""
    folder = (ROOT / "docs" / page).parent

    def moved(match: re.Match[str]) -> str:
        words, file, anchor = match.groups(default="")
        target = (folder / file).resolve()
        return words if target.parent == MADE else f"[{words}](../{target.relative_to(ROOT)}{anchor})"

    return re.sub(r"\[([^\]]*)\]\((?!https?:)([^)#]+)(#[^)]*)?\)", moved, text)


def main() -> None:
    for name in PAGES:
        if kept(name) == cells(name):
            continue  # with its outputs
        made = [new_code_cell(s) if kind == "code" else new_markdown_cell(s) for kind, s in cells(name)]
        for n, cell in enumerate(made):
            cell["id"] = f"cell-{n}"
        notebook = new_notebook(cells=made)
        notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
        nbformat.write(notebook, ROOT / "notebooks" / f"{name}.ipynb")
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        print(path.name)
        nbformat.write(executed(path), path)


if __name__ == "__main__":
    main()
