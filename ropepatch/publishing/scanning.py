"""Keys, tokens and private keys in files that are to be carried."""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ropepatch.errors import RopepatchError
from ropepatch.files import check_regular

RULES = Path(__file__).with_name("gitleaks.toml")
HUB_TOKEN = re.compile(rb"hf_[A-Za-z0-9]{34}")  # older ones have digits, which gitleaks does not expect
LARGEST = 256 << 20  # bytes; what is larger is no text
BEFORE, AFTER = 128, 8192  # of a rule's keyword: within it every secret lies but a private key
UNBOUNDED = "private-key"  # those of PGP may be long; a second header ends the search for the first one's end


@dataclass(frozen=True)
class Rule:
    """One of gitleaks' rules."""

    name: str
    keywords: tuple[bytes, ...]  # in small letters, of which each secret holds one
    pattern: re.Pattern[bytes]
    entropy: float  # bits per character, at least

    def finds(self, data: bytes, lowered: bytes) -> bool:
        """Whether there is one."""
        for keyword in self.keywords:
            place = lowered.find(keyword)
            while place >= 0:
                end = len(data) if self.name == UNBOUNDED else place + AFTER
                matches = self.pattern.finditer(data, max(0, place - BEFORE), end)
                if any(_entropy(match[match.lastindex or 0]) >= self.entropy for match in matches):
                    return True
                place = lowered.find(keyword, place + 1)
        return False


def check_secrets(files: Mapping[str, Path], token: str | None = None) -> tuple[str, ...]:
    """Refuse files that hold a secret, which is not repeated, in UTF-8, UTF-16 or UTF-32.

    Args:
        files: The files by the names that an error says.
        token: One more secret: the user's.

    Returns:
        The names of those too large to be searched.
    """
    large = []
    for name, path in files.items():
        try:
            check_regular(path)
            if path.stat().st_size > LARGEST:
                large.append(name)
                continue
            data = path.read_bytes()
        except OSError as error:
            raise RopepatchError(
                f"cannot read {path}: {error.strerror or error}", hint="make the file readable, or remove it"
            ) from error
        if kind := next(_kinds(data, token), None):
            raise RopepatchError(
                f"{name} holds {kind}", hint="remove it there, and revoke it if others may have seen it"
            )
    return tuple(large)


def _kinds(data: bytes, token: str | None) -> Iterator[str]:
    """What is found, as it is called in a sentence."""
    narrow = data.replace(b"\0", b"")  # UTF-16 and UTF-32 as ASCII
    for text in (data,) if len(narrow) == len(data) else (narrow, data):
        lowered = text.lower()
        if HUB_TOKEN.search(text) or (token and token.encode() in text):
            yield "an access token of the Hub"
        for rule in _rules():
            if rule.finds(text, lowered):
                yield f"what looks like a secret ({rule.name})"


@cache
def _rules() -> tuple[Rule, ...]:
    rules = tomllib.loads(RULES.read_text(encoding="utf-8"))["rules"]
    return tuple(
        Rule(
            rule["id"],
            tuple(keyword.encode() for keyword in rule["keywords"]),
            re.compile(rule["regex"].encode()),
            rule.get("entropy", 0.0),
        )
        for rule in rules
    )


def _entropy(secret: bytes) -> float:
    """Bits per character."""
    counts = Counter(secret).values()
    return sum(count / len(secret) * math.log2(len(secret) / count) for count in counts)
