"""The explorer: one HTML page that shows why RoPE fails past the trained length."""

from ropepatch.gallery.explorer.page import explore, page_text

__all__ = ["explore", "page_text"]
