"""Sphinx settings of `make docs`.

The source directory is the root of the repository, so that links between docs/ and examples/ are
the same on GitHub and in the site.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

project = "streamrl"
html_title = "streamrl"
copyright = "the authors of streamrl, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "docstrings"]

root_doc = "docs/index"
include_patterns = ["docs/**.md", "examples/**/README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
# Not searched for pages; the rest of the repository is small.
exclude_patterns = [".*", "build", "**/build", "runs", "wandb"]

# Anchors as GitHub makes them.
myst_heading_anchors = 4
# Blocks without a language are commands and their output.
highlight_language = "text"
# Quotes in docstrings are often of code.
smartquotes = False

toc_object_entries_show_parents = "hide"

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88

html_theme = "furo"
# Leads from the root of the site to the home page, which is in docs/ as its source is.
html_extra_path = ["index.html"]
html_copy_source = False
html_show_sphinx = False
