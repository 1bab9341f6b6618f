"""The files of `eval/` and `recipes/` that come with the package."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent


def shipped(folder: str) -> Path:
    """A folder like ``eval/suites``: within an installed package, or beside the package in a checkout."""
    installed = PACKAGE / "shipped_data" / folder
    return installed if installed.is_dir() else PACKAGE.parent / folder
