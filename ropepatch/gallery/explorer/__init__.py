"""The explorer: one HTML page on which ropes fail and are mended."""

from ropepatch.gallery.explorer.page import explore, page_text

__all__ = ["explore", "page_text"]
