"""How Sphinx builds the pages: ``make docs``."""

from __future__ import annotations

import shutil
from pathlib import Path

# Sphinx reads nothing outside of its folder
HERE = Path(__file__).parent
shutil.copytree(HERE.parent / "notebooks", HERE / "notebooks", dirs_exist_ok=True)

project = "fxpipe"
author = "The fxpipe authors"
html_title = "fxpipe"
html_theme = "furo"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["notebooks/README*", "pictures"]

nb_execution_mode = "off"  # they are committed with their outputs, and the tests run them
myst_heading_anchors = 2
suppress_warnings = ["mystnb.unknown_mime_type"]

autodoc_default_options = {"members": True, "undoc-members": False, "member-order": "bysource"}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True
