"""The browser for tests of pages."""

import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from lacking import lacking

PROGRAM = shutil.which("chromium") or "/usr/bin/chromium"
QUIET = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
]


@contextmanager
def chromium():
    """Start Chromium; skip the tests if it is missing, or fail in CI."""
    if not Path(PROGRAM).exists():
        lacking("no chromium: apt-get install chromium")
    with pytest.importorskip("playwright.sync_api").sync_playwright() as engines:
        browser = engines.chromium.launch(executable_path=PROGRAM, args=QUIET)
        yield browser
        browser.close()


def violations(page):
    """The accessibility violations that axe reports on a page."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page)
    return found.generate_report() if found.violations_count else ""
