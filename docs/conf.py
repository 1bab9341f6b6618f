"""The site. Sphinx reads the pages where they lie in the repository, so that their links hold there, too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "eval" / "studies" / "encodings"))

import generate  # beside this file
from sphinx.util.inspect import TypeAliasForwardRef

import ropepatch

TypeAliasForwardRef.__repr__ = lambda alias: alias.name  # in a union, too: int | str | None

project = "ropepatch"
author = "the authors of ropepatch"
release = ropepatch.__version__

root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "eval/**.md",
    "recipes/README.md",
    "ropepatch/data/tiny/checkpoint/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]
exclude_patterns = [".*"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
default_role = "code"
smartquotes = False  # they make one dash of two, in the names of options
autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_type_aliases = {"Length": "int | str", "Positive": "float", "FromOne": "float"}
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "ropepatch"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_search_summary = False  # a browser does not fetch pages from a folder
html_show_sphinx = False
html_show_copyright = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"


def setup(app):
    """Draw the figures, fill in what the registries say, and put beside the pages what is no page."""
    app.connect("builder-inited", lambda app: generate.draw_figures(Path(app.confdir) / "figures"))
    app.connect("source-read", generate.fill_in)
    app.connect("build-finished", generate.finish)
