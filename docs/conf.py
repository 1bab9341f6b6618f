"""The site. Sphinx builds the pages from their places in the repository, so that links work in both."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "eval" / "studies" / "encodings"))
sys.path.insert(0, str(Path(__file__).parents[1] / "eval" / "studies"))

import generate  # beside this file

import ropepatch

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
exclude_patterns = [".*", "eval/board"]  # the card of a dataset is no page

extensions = ["myst_parser"]
myst_heading_anchors = 4
smartquotes = False  # they make one dash of two, in the names of options

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
    """Fill in the link to the explorer, and add to the pages what is no page."""
    app.connect("source-read", generate.fill_in)
    app.connect("build-finished", generate.finish)
