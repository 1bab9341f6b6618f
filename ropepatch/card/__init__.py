"""The card of an extended checkpoint: what was done, what was measured, how to load it, whom to cite."""

from ropepatch.card.extended import Extended
from ropepatch.card.writing import card_text, write_card

__all__ = ["Extended", "card_text", "write_card"]
