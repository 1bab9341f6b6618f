"""What the doctor says of a checkpoint, and the changes that mend it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any, Literal

from ropepatch.errors import printable

CONFIG = "config.json"
TOKENIZER = "tokenizer_config.json"
GENERATION = "generation_config.json"
ADAPTER = "adapter_config.json"

Severity = Literal["error", "warning", "remark"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "remark")
Keys = tuple[str, ...]  # down to a value of a JSON file


class DROP:
    """Stands for the value of a key that is to go."""


@dataclass(frozen=True)
class Edit:
    """A change: the value at `path` of a JSON file becomes another; DROP removes the key."""

    file: str
    path: Keys
    value: Any


@dataclass(frozen=True)
class Key:
    """A key of a JSON file, and the value that it has there; None where it is missing."""

    file: str
    path: Keys
    value: Any = None

    @property
    def name(self) -> str:
        """The key itself."""
        return self.path[-1]

    def __str__(self) -> str:
        return ".".join(self.path)

    def set(self, value: Any) -> Edit:
        """The change of its value."""
        return Edit(self.file, self.path, value)

    def finding(
        self,
        severity: Severity,
        code: str,
        problem: str,
        why: str,
        remedy: str,
        *,
        value: str | None = None,
        mend: tuple[Edit, ...] = (),
        meant: tuple[Edit, ...] | None = None,
        read: tuple[Edit, ...] = (),
    ) -> Finding:
        """A finding about this key, of the value that the file has unless one is passed; see `Finding`."""
        if value is None:
            value = "" if self.value is None else shown(self.value)
        fix = Mend(mend) if mend else None
        return Finding(code, severity, problem, why, remedy, self.file, str(self), value, fix, meant, read)

    error = partialmethod(finding, "error")
    warning = partialmethod(finding, "warning")
    remark = partialmethod(finding, "remark")


@dataclass(frozen=True)
class Mend:
    """What `--fix` does for one finding.

    Args:
        edits: Changed values.
        without: Tensors that are left out.
        reindex: The index of the weights is made anew from the files.
    """

    edits: tuple[Edit, ...] = ()
    without: frozenset[str] = frozenset()
    reindex: bool = False


@dataclass(frozen=True)
class Finding:
    """One thing to know about a checkpoint.

    Args:
        code: Its short name.
        severity: An error computes or loads something wrong, a warning does so for some readers or lengths,
            and a remark is only to be known.
        problem: What is wrong.
        why: Why it matters.
        remedy: What to do.
        file: The file it is in, or the folder's name.
        key: The key in it, with dots; empty where it is about the whole file.
        value: The value found, as it is written there.
        mend: What `--fix` does; None where only a person can decide.
        meant: The changes after which config.json says what is meant; None where nobody can tell.
        read: The changes after which it says what the reader in trouble takes it for.
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
    mend: Mend | None = field(default=None, repr=False)
    meant: tuple[Edit, ...] | None = field(default=None, repr=False)
    read: tuple[Edit, ...] = field(default=(), repr=False)
    effect: str = ""

    @property
    def fixable(self) -> bool:
        """Whether `--fix` mends it."""
        return self.mend is not None

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
            "--fix": "mends it" if self.fixable else "leaves it to you" * (self.severity != "remark"),
        }
        body = "".join(f"\n  {name:<8}{printable(line)}" for name, line in lines.items() if line)
        return f"{self.severity}: {self.code}{body}"


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
