"""The words of a passkey prompt, as data."""

from __future__ import annotations

import hashlib
import json
import random
import re
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ropepatch.errors import RopepatchError
from ropepatch.settings import Count, Settings, Several, Whole, expected

NAMES = tuple(
    f"the {manner} {trade}"
    for trade, manner in product(
        ("baker", "cooper", "ferryman", "gardener", "miller", "potter", "tailor", "weaver"),
        ("busy", "cheerful", "early", "honest", "quiet", "sleepy", "young", "wary"),
    )
)


Needle = Annotated[str, Field(pattern=r"\{key\}"), expected("a text with {key}")]
Question = Annotated[str, Field(pattern=r"\S$"), expected("a text that ends in a word")]
Words = Annotated[str, Field(pattern=r"\S"), expected("a text that is not blank")]


class PasskeyTemplate(Settings):
    """The words of a prompt: intro, filler with the needle between two of its sentences, question, answer.

    Args:
        intro: Says what to look for.
        filler: Sentences that are repeated in this order, as many as fill the length.
        needle: Holds ``{key}``, and ``{name}`` where several needles are to be told apart.
        question: Ends where the key is to be said, without the space before it; holds ``{name}`` if the
            needle does.
        separator: A space or a line break, between all of these; between two sentences of the filler and
            before the key stands a space.
        digits: Digits of a key; each is drawn on its own, so that keys may begin with 0.
        keys: The least and the greatest key, in place of ``digits``: a whole number in between, as it is
            written, so that keys may have different numbers of digits.
        names: What ``{name}`` is drawn from.
        parse: A regular expression; its first match in what the model generates must be the key, letter by
            letter. None: the model must say the tokens of the key.
        answer_tokens: How many tokens are generated for ``parse``.
    """

    intro: str = "Somewhere on this page there is a pass key. Read on, you will need it."
    filler: Several[Words] = (
        "The mill wheel turns and turns.",
        "Bread cools on the sill.",
        "Smoke climbs from every roof.",
        "A cart rolls by without haste.",
        "Nobody asks for the time.",
    )
    needle: Needle = "The pass key is {key}. Keep it well: {key} is the pass key."
    question: Question = "What is the pass key? The pass key is"
    separator: Annotated[Literal[" ", "\n"], expected("a space or a line break")] = " "
    digits: Count = 5
    keys: Annotated[tuple[Whole, Whole], expected("the least and the greatest key")] | None = None
    names: Several[Words] = NAMES
    parse: str | None = None
    answer_tokens: Count | None = None

    def check(self) -> None:
        """Refuse words that ask for nothing."""
        if ("{name}" in self.needle) != ("{name}" in self.question):
            raise RopepatchError(
                "the needle and the question must both hold {name}, or neither, "
                f"got {self.needle!r} and {self.question!r}",
                hint="the question asks for one of several needles by its name",
            )
        if self.keys and self.keys[0] > self.keys[1]:
            raise RopepatchError(
                f"keys must be the least and the greatest key, got {self.keys}", hint="e.g. [1, 50000]"
            )
        if len(set(self.names)) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise RopepatchError(f"the names must differ, got {twice!r} twice", hint="leave one out")
        if (self.parse is None) != (self.answer_tokens is None):
            raise RopepatchError(
                f"parse and answer_tokens belong together, got {self.parse!r} and {self.answer_tokens!r}",
                hint=r'e.g. parse="\\d+" and answer_tokens=8',
            )
        try:
            re.compile(self.parse or "")
        except re.error as error:
            raise RopepatchError(
                f"parse is no regular expression: {self.parse!r}: {error}", hint=r'e.g. "\\d+"'
            ) from error

    @property
    def digest(self) -> str:
        """The same 16 hexadecimal digits for the same template, in every process."""
        return hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def num_keys(self) -> int:
        """How many different keys there are."""
        return 10**self.digits if self.keys is None else self.keys[1] - self.keys[0] + 1

    def say(self, key: str, name: str = "") -> str:
        """The needle of a key."""
        return self.needle.replace("{name}", name).replace("{key}", key)

    def draw_key(self, draw: random.Random) -> str:
        """One key, each as likely as any other."""
        if self.keys is None:
            return "".join(draw.choices("0123456789", k=self.digits))
        return str(draw.randint(*self.keys))


NAMED = PasskeyTemplate(
    intro="Somewhere on this page there are pass keys. Read on, you will need one.",
    needle="The pass key of {name} is {key}. Keep it well: {key} is the pass key of {name}.",
    question="What is the pass key of {name}? The pass key of {name} is",
)


def bundled(*, distractors: int) -> PasskeyTemplate:
    """Our own words; with ``{name}`` if there are distractors."""
    return NAMED if distractors else PasskeyTemplate()


def read_template(path: Path) -> PasskeyTemplate:
    r"""A template of a YAML file, with the keys of `PasskeyTemplate`; what is absent is as bundled.

    Example::

        intro: A number is hidden in this letter. You will be asked for it.
        filler: [It rained all day., We stayed at home.]
        needle: The number is {key}.
        question: Which number was it? It was
        separator: "\n"
        keys: [1, 50000]
        parse: \d+
        answer_tokens: 8

    Raises:
        RopepatchError: No such file, a key that is unknown, keys as well as digits, or a value that
            `PasskeyTemplate` refuses.
    """
    template = PasskeyTemplate.from_yaml(path)
    if template.keys is not None and "digits" in template.model_fields_set:
        raise RopepatchError(f"{path}: a template has digits or keys, got both", hint="leave one of them out")
    return template
