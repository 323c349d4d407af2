"""Sphinx builds the pages as a site: python -m sphinx -W -b html docs OUT."""

import importlib.metadata
import pathlib
import sys

# The folder has two extensions of Sphinx.
sys.path.insert(0, str(pathlib.Path(__file__).parent))

project = "jax_tcgemm"
author = "the authors of jax_tcgemm"
version = release = importlib.metadata.version("jax_tcgemm")
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "kernel_tables",
    "themed_pictures",
]
exclude_patterns = ["**/README.md"]
myst_heading_anchors = 3
# tests/test_documentation.py checks links, those to files beside docs/ among them.
suppress_warnings = ["myst.xref_missing"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
html_theme = "sphinx_book_theme"
html_title = "jax_tcgemm"
templates_path = ["templates"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_theme_options = {"use_download_button": False}
