"""The sentences of the synthetic stories: people, animals, sights, chests and the weather.

A fact sentence names its subject, then its value twice, then the subject again. So the subject always
precedes the value.
"""

from __future__ import annotations

from dataclasses import dataclass, field

BOS, EOS = 0, 1  # the special tokens of the tokenizer

PEOPLE = "Anna Boris Clara David Edith Felix Greta Hugo Irma Jonas Karin Leo Marta Nils Olga Peter".split()
FAMILIES = (
    "Alden Birk Corran Dell Eskar Fenn Garth Holm Ister Jarrow Kell Loom Mersk Norden Orrin Pell"
).split()
ANIMALS = "fox owl bear goat wolf hare crow otter".split()
PETS = "Argo Bruno Cora Dixie Ember Flint Gipsy Hazel Ivo Juno Koko Luna Misty Nero Otto Pepper".split()
SIGHTS = "river hill lake wood bridge valley castle island".split()
NAMES = "Arun Brand Calder Dorn Esk Forth Glen Hale Isen Jura Kern Lorn Moor Ness Orme Tarn".split()
COLOURS = "red blue green black white grey brown golden".split()
CODES = [f"{code:03}" for code in range(1000)]
PLACES = "fields roofs road garden meadow orchard harbour village".split()


@dataclass(frozen=True)
class Kind:
    """Sentences of one kind, with equally probable subjects and forms.

    Args:
        share: Their share of all sentences.
        subjects: The choices for ``{subject}``.
        forms: The sentences; if there are values, each contains ``{value}`` twice, between two mentions of
            the subject.
        values: The choices for ``{value}``; a subject keeps its value, drawn uniformly, for a whole document.
    """

    share: float
    subjects: list[str]
    forms: list[str]
    values: list[str] = field(default_factory=list)


KINDS = [
    Kind(
        0.35,
        PEOPLE,
        [
            "{subject} {value} came home, and all the house of {value} greets {subject}.",
            "They sent for {subject} {value}, since there is but one {value} called {subject}.",
            "A letter came for {subject} {value}, and {value} is how they know {subject}.",
        ],
        FAMILIES,
    ),
    Kind(
        0.15,
        ANIMALS,
        [
            "The {subject} {value} sleeps by the fire, for {value} is an old {subject}.",
            "If you meet the {subject} {value}, do not wake {value} the {subject}.",
        ],
        PETS,
    ),
    Kind(
        0.15,
        SIGHTS,
        [
            "The {subject} {value} is far away, but {value} is a fine {subject}.",
            "Go round the {subject} {value}, for nobody crosses {value} the {subject}.",
        ],
        NAMES,
    ),
    Kind(
        0.10,
        COLOURS,
        [
            "Chest {subject} {value} is shut, and only {value} opens chest {subject}.",
            "To open chest {subject} {value} is dialled, so keep {value} for chest {subject}.",
        ],
        CODES,
    ),
    Kind(
        0.25,
        PLACES,
        [
            "Rain falls on the {subject}.",
            "Snow covers the {subject}.",
            "Night comes slowly to the {subject}.",
            "Sunlight fills the {subject}.",
        ],
    ),
]


@dataclass(frozen=True)
class Sentence:
    """A form with its subject, but not yet its value.

    Args:
        text: The sentence; if it states a fact, it contains ``{value}`` twice, each after a space.
        share: The probability of the sentence.
        subject: The subject of the fact; None if the sentence states none.
        values: The choices for the value; empty if the sentence states none.
    """

    text: str
    share: float
    subject: str | None
    values: tuple[str, ...]


SENTENCES = [
    Sentence(
        text=form.replace("{subject}", subject),
        share=kind.share / len(kind.subjects) / len(kind.forms),
        subject=subject if kind.values else None,
        values=tuple(kind.values),
    )
    for kind in KINDS
    for subject in kind.subjects
    for form in kind.forms
]
