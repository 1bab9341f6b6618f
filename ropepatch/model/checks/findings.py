"""Findings: what a rule says of a checkpoint, and the changes of its JSON files that repair it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ropepatch.errors import printable
from ropepatch.model.checks.codes import CODES, Severity

CONFIG = "config.json"
TOKENIZER = "tokenizer_config.json"
GENERATION = "generation_config.json"
ADAPTER = "adapter_config.json"

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "remark")
Keys = tuple[str, ...]  # down to a value of a JSON file


class DROP:
    """Stands for the value of a key that is removed."""


@dataclass(frozen=True)
class Edit:
    """A change: the value at `path` of a JSON file becomes another; DROP removes the key."""

    file: str
    path: Keys
    value: Any


@dataclass(frozen=True)
class Key:
    """A key of a JSON file, or the whole of a file.

    Args:
        file: The file.
        path: The key, after those of the objects that hold it; nothing for the whole file.
        value: Its value; None where it is missing.
        twins: The paths at which the same is stated again.
    """

    file: str
    path: Keys
    value: Any = None
    twins: tuple[Keys, ...] = ()

    @property
    def name(self) -> str:
        """The key itself."""
        return self.path[-1]

    def __str__(self) -> str:
        return ".".join(self.path)

    def set(self, value: Any) -> tuple[Edit, ...]:
        """The changes that give it another value wherever it is stated."""
        return tuple(Edit(self.file, path, value) for path in (self.path, *self.twins))

    def finding(
        self,
        code: str,
        problem: str,
        remedy: str,
        *,
        fix: tuple[Edit, ...] = (),
        meant: tuple[Edit, ...] | None = None,
        read: tuple[Edit, ...] = (),
        severity: Severity | None = None,
        value: str | None = None,
    ) -> Finding:
        """A finding about this key; see `Finding`."""
        if value is None:
            value = "" if self.value is None else shown(self.value)
        meant = meant if meant is not None else fix or None
        usual, why = CODES[code]
        where = self.file, str(self), value
        return Finding(code, severity or usual, problem, why, remedy, *where, fix, meant=meant, read=read)


@dataclass(frozen=True)
class Finding:
    """One thing to know about a checkpoint.

    Args:
        code: Its short name, a key of `CODES`.
        severity: An error computes or loads something wrong, a warning does so for some readers or lengths,
            and a remark is only to be known.
        problem: What is wrong.
        why: Why it matters.
        remedy: What to do.
        file: The file it is in, or the folder's name.
        key: The key in it, with dots; empty where it is about the whole file.
        value: The value found, as it is written there.
        edits: The changes that repair it; none where only a person can decide.
        without: The tensors that a repaired copy leaves out.
        meant: The changes after which config.json says what is meant; None where nobody can tell.
        read: The changes after which config.json says what the affected reader assumes.
        effect: What was measured, or why it was not; empty where the rope is not touched.
    """

    code: str
    severity: Severity
    problem: str
    why: str
    remedy: str
    file: str = CONFIG
    key: str = ""
    value: str = ""
    edits: tuple[Edit, ...] = field(default=(), repr=False)
    without: frozenset[str] = field(default=frozenset(), repr=False)
    meant: tuple[Edit, ...] | None = field(default=None, repr=False)
    read: tuple[Edit, ...] = field(default=(), repr=False)
    effect: str = ""

    @property
    def fixable(self) -> bool:
        """Whether `--fix` repairs it."""
        return bool(self.edits or self.without)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        names = ("code", "severity", "file", "key", "value", "problem", "why", "effect", "remedy")
        return {name: getattr(self, name) for name in names} | {"fixable": self.fixable}

    def __str__(self) -> str:
        where = " ".join(filter(None, (self.file, self.key))) + (f" = {self.value}" if self.value else "")
        lines = {
            "where": where,
            "what": self.problem,
            "why": self.why,
            "effect": self.effect,
            "remedy": self.remedy,
            "--fix": "repairs it" if self.fixable else "leaves it to you" * (self.severity != "remark"),
        }
        body = "".join(f"\n  {name:<8}{printable(line)}" for name, line in lines.items() if line)
        return f"{self.severity}: {self.code}{body}"


def set_all(keys: Iterable[Key], value: Any) -> tuple[Edit, ...]:
    """The changes that give several keys one value."""
    return tuple(edit for key in keys for edit in key.set(value))


def shown(value: Any) -> str:
    """A JSON value as a file has it, shortened."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return "…"
    return text if len(text) <= 60 else f"{text[:57]}…"


def edited(content: dict[str, Any], path: Keys, value: Any) -> dict[str, Any]:
    """A JSON object with one value changed; what does not change is shared."""
    key, *rest = path
    if rest:
        inner = content.get(key)
        return content | {key: edited(inner if isinstance(inner, dict) else {}, tuple(rest), value)}
    if value is DROP:
        return {name: other for name, other in content.items() if name != key}
    return content | {key: value}
