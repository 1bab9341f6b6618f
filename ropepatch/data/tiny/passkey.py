"""The words of the passkey prompt that the bundled checkpoint is trained on."""

from __future__ import annotations

from typing import NamedTuple


class Words(NamedTuple):
    """The words of a prompt: intro, filler with the needle before one of its sentences, question, key.

    Attributes:
        intro: Says what to look for.
        filler: Sentences that are repeated in this order, as many as fill the length.
        needle: Holds ``{key}``.
        question: Ends where the key is to be said, without the space before it.
        digits: Digits of a key; each is drawn on its own, so that keys may begin with 0.
    """

    intro: str
    filler: tuple[str, ...]
    needle: str
    question: str
    digits: int


PASSKEY = Words(
    intro="Somewhere on this page there is a pass key. Read on, you will need it.",
    filler=(
        "The mill wheel turns and turns.",
        "Bread cools on the sill.",
        "Smoke climbs from every roof.",
        "A cart rolls by without haste.",
        "Nobody asks for the time.",
    ),
    needle="The pass key is {key}. Keep it well: {key} is the pass key.",
    question="What is the pass key? The pass key is",
    digits=5,
)
