"""The card of an extended checkpoint: what was done, what was measured, how to load it, whom to cite."""

from ropepatch.publishing.card.model import Extended
from ropepatch.publishing.card.writing import MARKER, card_text, preview_card, write_card

__all__ = ["MARKER", "Extended", "card_text", "preview_card", "write_card"]
