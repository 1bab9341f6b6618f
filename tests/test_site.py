"""The site builds without warnings, and its internal links are valid."""

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import chromium, violations

from ropepatch import ENCODINGS, METHODS, REMAPPINGS
from ropepatch.evaluation.tasks import TASKS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]


class Page(HTMLParser):
    """The anchors and the links of an HTML page."""

    def __init__(self, file):
        super().__init__()
        self.anchors = set()
        self.links = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors.add(found.get("id") or "")
        self.links.update(found[key] or "" for key in ("href", "src") if key in found)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    line = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs"]
    line += ["-d", str(folder / "doctrees"), ".", str(folder / "html")]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def pages(site):
    return {file: Page(file) for file in site.rglob("*.html")}


def test_every_internal_link_leads_to_a_page_and_anchor(pages):
    broken = []
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (
                (file.parent / unquote(parts.path)).resolve() if parts.path else file
            )
            known = pages[target].anchors if target in pages else {parts.fragment}
            if not target.is_file() or (
                parts.fragment and unquote(parts.fragment) not in known
            ):
                broken.append(f"{file.name}: {link}")
    assert not broken


def test_pages_load_no_scripts_images_or_stylesheets_from_other_sites(site):
    files = [*site.rglob("*.html")]
    assert len(files) > 20
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert 'src="http' not in text
        assert '<link rel="stylesheet" type="text/css" href="http' not in text


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("methods", METHODS),
        ("remappings", REMAPPINGS),
        ("encodings", ENCODINGS),
        ("tasks", TASKS),
    ],
)
def test_every_registry_entry_has_an_anchor_on_its_reference_page(
    pages, site, page, names
):
    anchors = pages[site / "docs" / "reference" / f"{page}.html"].anchors
    assert {name.replace("_", "-") for name in names} <= {
        place.replace("_", "-") for place in anchors
    }


@pytest.mark.sweep
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (380, "dark")])
def test_axe_finds_no_accessibility_violations_on_the_main_pages(site, width, scheme):
    with chromium() as browser:
        page = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        for name in (
            "index",
            "quickstart",
            "guides/choose",
            "reference/methods",
            "concepts",
        ):
            page.goto((site / "docs" / f"{name}.html").as_uri())
            assert not violations(page), name
            assert not page.evaluate(
                "document.documentElement.scrollWidth > innerWidth"
            ), name
