"""How Sphinx builds the pages: ``make docs``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.writers.html5 import HTML5Translator

# Sphinx reads nothing outside of its folder
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from generated import MARKS  # noqa: E402

shutil.copytree(HERE.parent / "notebooks", HERE / "notebooks", dirs_exist_ok=True)

project = "fxpipe"
author = "The fxpipe authors"
html_title = "fxpipe"
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_math_renderer = "mathml"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["notebooks/README*", "pictures"]

nb_execution_mode = "off"  # they are committed with their outputs, and the tests run them
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type"]

autodoc_default_options = {"members": True, "undoc-members": False, "member-order": "bysource"}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True


def prose(docstring: GoogleDocstring) -> tuple[str, list[str]]:
    """No type and the text of a property: what stands before a colon there is no type."""
    return "", GoogleDocstring(docstring._consume_to_end(), docstring._config).lines()


GoogleDocstring._consume_inline_attribute = prose


def formula(translator: HTML5Translator, node: nodes.Element) -> None:
    """Write a formula as MathML, which browsers show without a script from elsewhere."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    translator.body.append(convert(node.astext(), display=display))
    raise nodes.SkipNode


def relative_paths(app: Sphinx, page: nodes.document) -> None:
    """Name the files of a difference as they are named in the repository."""
    for block in page.findall(nodes.literal_block):
        if block.get("language") == "udiff":
            text = block.astext().replace(f"{HERE.parent}/", "")
            block.replace_self(nodes.literal_block(text, text, **block.attributes))


def made_of_code(app: Sphinx, page: str, source: list[str]) -> None:
    """Put tables that are made of the code where a page has their marks."""
    for mark, table in MARKS.items():
        if mark in source[0]:
            source[0] = source[0].replace(mark, table())


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", relative_paths)
    app.connect("source-read", made_of_code)
    app.add_html_math_renderer("mathml", (formula, None), (formula, None))
