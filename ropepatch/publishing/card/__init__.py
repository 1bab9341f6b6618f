"""The model card of an extended checkpoint: method, results, how to load it, and citations."""

from ropepatch.publishing.card.model import Extended
from ropepatch.publishing.card.writing import (
    MARKER,
    card_text,
    preview_card,
    write_card,
)

__all__ = ["MARKER", "Extended", "card_text", "preview_card", "write_card"]
