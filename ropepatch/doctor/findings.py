"""Findings, the rules that make them, and the edits of JSON files that repair them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from ropepatch.errors import printable

CONFIG = "config.json"
TOKENIZER = "tokenizer_config.json"
MEMORY = "in memory"  # the "file" of a loaded model

Severity = Literal["error", "warning", "remark"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "remark")

Keys = tuple[str, ...]  # path of a value in a JSON file


@dataclass(frozen=True)
class Edit:
    """A new value at `path` of a JSON file."""

    file: str
    path: Keys
    value: Any


@dataclass(frozen=True)
class Problem:
    """What a rule found.

    Args:
        path: The path of the key; empty for the whole file.
        text: What is wrong.
        remedy: What to do.
        value: The value in the file; None if missing.
        edits: The edits that repair it; empty if only a person can decide.
        severity: The severity, if it is not the rule's usual one.
        file: The file, or the folder's name; `in memory` for a loaded model.
    """

    path: Keys
    text: str
    remedy: str
    value: Any = None
    edits: tuple[Edit, ...] = ()
    severity: Severity | None = None
    file: str = CONFIG


Look = Callable[[Any], Iterable[Problem]]  # of `Facts`


def never(facts: object) -> Iterable[Problem]:
    """Find nothing in config.json: a rule for other files."""
    return ()


@dataclass(frozen=True)
class Rule:
    """A rule, and the public thread that it comes from.

    Args:
        code: Its short name.
        severity: `error` if the model loads or computes something wrong, `warning` if only some programs or
            lengths are affected, `remark` for information.
        why: Why it matters.
        thread: The address of the thread; empty for checks of ropepatch's own files.
        look: What finds its problems in config.json.
        plans: Whether `plan` also warns of it.
    """

    code: str
    severity: Severity
    why: str
    thread: str
    look: Look = never
    plans: bool = False

    def finding(self, problem: Problem) -> Finding:
        """Make the finding of a problem."""
        return Finding(
            code=self.code,
            severity=problem.severity or self.severity,
            problem=problem.text,
            remedy=problem.remedy,
            why=self.why,
            thread=self.thread,
            file=problem.file,
            key=".".join(problem.path),
            value="" if problem.value is None else shown(problem.value),
            edits=problem.edits,
        )


@dataclass(frozen=True)
class Finding:
    """One problem of a checkpoint.

    Args:
        code: The rule's short name.
        severity: `error`, `warning` or `remark`; see `Rule`.
        problem: What is wrong.
        remedy: What to do.
        why: Why it matters.
        thread: The address of a public thread about it.
        file: The file, or the folder's name; `in memory` for a loaded model.
        key: The key in the file, with dots; empty for the whole file.
        value: The value in the file.
        edits: The edits that repair it; empty if only a person can decide.
    """

    code: str
    severity: Severity
    problem: str
    remedy: str
    why: str
    thread: str
    file: str
    key: str
    value: str
    edits: tuple[Edit, ...] = field(default=(), repr=False)

    @property
    def fixable(self) -> bool:
        """Whether `--fix` or `repair=True` repairs it."""
        return bool(self.edits) or self.file == MEMORY

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        names = (
            "code",
            "severity",
            "file",
            "key",
            "value",
            "problem",
            "why",
            "remedy",
            "thread",
        )
        return {name: getattr(self, name) for name in names} | {"fixable": self.fixable}

    def __str__(self) -> str:
        where = f"{self.file} {self.key}".strip()
        lines = {
            "where": f"{where} = {self.value}" if self.value else where,
            "what": self.problem,
            "why": self.why,
            "remedy": self.remedy,
        }
        if self.file == MEMORY:
            lines["repair"] = "repair=True restores the frequencies of the config"
        elif self.fixable:
            lines["--fix"] = "repairs it"
        elif self.severity != "remark":
            lines["--fix"] = "does not repair it"
        lines["thread"] = self.thread
        body = "".join(
            f"\n  {name:<8}{printable(line)}" for name, line in lines.items() if line
        )
        return f"{self.severity}: {self.code}{body}"


def by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings, errors first."""
    return tuple(
        sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
    )


def has_errors(findings: Iterable[Finding]) -> bool:
    """Whether any finding is an error."""
    return any(finding.severity == "error" for finding in findings)


def shown(value: Any) -> str:
    """Return a value as JSON text of at most 60 characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return "…"
    return text if len(text) <= 60 else f"{text[:57]}…"


def edited(content: dict[str, Any], path: Keys, value: Any) -> dict[str, Any]:
    """Return a JSON object with one value changed, sharing the unchanged parts."""
    key, *rest = path
    if rest:
        inner = content.get(key)
        value = edited(inner if isinstance(inner, dict) else {}, tuple(rest), value)
    return content | {key: value}
