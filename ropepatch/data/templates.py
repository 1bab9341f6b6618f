"""The words of a pass key prompt, as data."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from ropepatch.errors import RopepatchError
from ropepatch.settings import check_keys, is_count, read_yaml

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence
    from pathlib import Path

NAMES = tuple(
    f"the {manner} {trade}"
    for trade, manner in product(
        ("baker", "cooper", "ferryman", "gardener", "miller", "potter", "tailor", "weaver"),
        ("busy", "cheerful", "early", "honest", "quiet", "sleepy", "young", "wary"),
    )
)


def _check_texts(field: str, wanted: str, texts: Sequence[str], hint: str) -> None:
    if not isinstance(texts, tuple) or not texts or not all(isinstance(t, str) and t.strip() for t in texts):
        raise RopepatchError(f"the {field} must be {wanted}, got {texts!r}", hint=hint)


@dataclass(frozen=True, kw_only=True)
class PasskeyTemplate:
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

    Raises:
        RopepatchError: A field that is not as above.
    """

    intro: str = "Somewhere on this page there is a pass key. Read on, you will need it."
    filler: tuple[str, ...] = (
        "The mill wheel turns and turns.",
        "Bread cools on the sill.",
        "Smoke climbs from every roof.",
        "A cart rolls by without haste.",
        "Nobody asks for the time.",
    )
    needle: str = "The pass key is {key}. Keep it well: {key} is the pass key."
    question: str = "What is the pass key? The pass key is"
    separator: str = " "
    digits: int = 5
    keys: tuple[int, int] | None = None
    names: tuple[str, ...] = NAMES
    parse: str | None = None
    answer_tokens: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.intro, str):
            raise RopepatchError(f"the intro must be a text, got {self.intro!r}", hint='"" is none')
        if not isinstance(self.needle, str) or "{key}" not in self.needle:
            raise RopepatchError(
                f"the needle must hold {{key}}, got {self.needle!r}", hint='e.g. "The pass key is {key}."'
            )
        _check_texts(
            "filler", "a tuple of sentences", self.filler, 'one sentence is ("The grass is green.",)'
        )
        if not isinstance(self.question, str) or not self.question or self.question[-1].isspace():
            raise RopepatchError(
                f"the question must end in a word, got {self.question!r}",
                hint="leave the space before the key out: it belongs to the answer",
            )
        if ("{name}" in self.needle) != ("{name}" in self.question):
            raise RopepatchError(
                "the needle and the question must both hold {name}, or neither, "
                f"got {self.needle!r} and {self.question!r}",
                hint="the question asks for one of several needles by its name",
            )
        if self.separator not in (" ", "\n"):
            raise RopepatchError(
                f"the separator must be a space or a line break, got {self.separator!r}",
                hint='the default is " "',
            )
        self._check_keys()
        _check_texts("names", "a tuple of different names", self.names, 'e.g. ("the baker", "the miller")')
        if len(set(self.names)) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise RopepatchError(f"the names must differ, got {twice!r} twice", hint="leave one out")
        self._check_parser()

    def _check_keys(self) -> None:
        if not is_count(self.digits):
            raise RopepatchError(f"a key needs at least 1 digit, got {self.digits}", hint="the default is 5")
        if self.keys is None:
            return
        whole = isinstance(self.keys, tuple) and all(type(bound) is int for bound in self.keys)
        if not whole or len(self.keys) != 2 or not 0 <= self.keys[0] <= self.keys[1]:
            raise RopepatchError(
                f"keys must be the least and the greatest key, got {self.keys!r}", hint="e.g. (1, 50000)"
            )

    def _check_parser(self) -> None:
        if (self.parse is None) != (self.answer_tokens is None):
            raise RopepatchError(
                f"parse and answer_tokens belong together, got {self.parse!r} and {self.answer_tokens!r}",
                hint=r'e.g. parse="\\d+" and answer_tokens=8',
            )
        if self.parse is None:
            return
        try:
            re.compile(self.parse)
        except (re.error, TypeError) as error:
            raise RopepatchError(
                f"parse is no regular expression: {self.parse!r}: {error}", hint=r'e.g. "\\d+"'
            ) from error
        if not is_count(self.answer_tokens):
            raise RopepatchError(
                f"answer_tokens must be at least 1, got {self.answer_tokens!r}",
                hint="as many as the longest key may take",
            )

    @property
    def digest(self) -> str:
        """The same 16 hexadecimal digits for the same template, in every process."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def num_keys(self) -> int:
        """How many different keys there are."""
        return 10**self.digits if self.keys is None else self.keys[1] - self.keys[0] + 1

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
    try:
        content = read_yaml(path, "pass key template")
        check_keys(PasskeyTemplate, content)
        if "digits" in content and content.get("keys") is not None:
            raise RopepatchError("a template has digits or keys, got both", hint="leave one of them out")
        tuples = {name: _tuple(content[name]) for name in ("filler", "keys", "names") if name in content}
        return PasskeyTemplate(**content | tuples)
    except RopepatchError as error:
        place = "" if str(path) in str(error) else f"{path}: "
        raise RopepatchError(f"{place}{error}", hint=error.hint) from error


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
