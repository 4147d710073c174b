"""Sphinx's configuration of the documentation; `make docs` builds it with warnings as errors."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

# What pages execute: eight CPU devices, this tree, and the commands of the environment that builds.
os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": str(ROOT)}
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

project = "autoshard"
author = "the autoshard authors"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns: list[str] = []
templates_path: list[str] = []

html_theme = "sphinx_book_theme"
html_title = "autoshard"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"show_navbar_depth": 1, "show_toc_level": 2, "use_download_button": False}
html_show_sphinx = False
html_copy_source = False
html_context = {"default_mode": "auto"}

# What is in docstrings: Google's sections, and names in backquotes.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_use_rtype = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88

myst_heading_anchors = 3

# Pages run as they are built, and what they say on standard error is an error. Notebooks are kept with their outputs.
nb_execution_mode = os.environ.get("AUTOSHARD_DOCS_EXECUTION", "force")
nb_execution_excludepatterns = ["notebooks/*"]
nb_execution_cache_path = str(ROOT / "build" / "executed")
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_output_stderr = "error"
nb_merge_streams = True
