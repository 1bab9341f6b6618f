"""Findings, the rules that make them, and the edits of JSON files that repair them."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ropepatch.errors import printable
from ropepatch.settings import shown

CONFIG = "config.json"
TOKENIZER = "tokenizer_config.json"
SEVERITIES = ("error", "warning", "remark")

Keys = tuple[str, ...]  # path of a value in a JSON file


class Edit(NamedTuple):
    """A new value at `path` of a JSON file."""

    path: Keys
    value: Any
    file: str = CONFIG


@dataclass(frozen=True)
class Finding:
    """One problem of a checkpoint.

    Args:
        path: The path of the key; empty for the whole file.
        problem: What is wrong.
        remedy: What to do.
        file: The file's name.
        value: The value in the file; None if missing.
        edits: The edits that repair it; empty if only a person can decide.
        severity: `error`, `warning` or `remark`; see `Rule`.
        code: The rule's short name.
        why: Why it matters.
        thread: The address of a public thread about it.
    """

    path: Keys
    problem: str
    remedy: str
    file: str = CONFIG
    value: Any = None
    edits: tuple[Edit, ...] = ()
    severity: str = ""
    code: str = ""
    why: str = ""
    thread: str = ""

    @property
    def key(self) -> str:
        """The key in the file, with dots; empty for the whole file."""
        return ".".join(self.path)

    @property
    def fixable(self) -> bool:
        """Whether `--fix` repairs it."""
        return bool(self.edits)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        names = "code", "severity", "file", "key", "problem", "why", "remedy", "thread"
        value = "" if self.value is None else shown(self.value)
        stated = {name: getattr(self, name) for name in names}
        return stated | {"value": value, "fixable": self.fixable}

    def __str__(self) -> str:
        stated = self.to_dict()
        where = f"{self.file} {self.key}".strip()
        if stated["value"]:
            where += f" = {stated['value']}"
        lines = [f"{self.severity}: {self.code}", f"  where   {printable(where)}"]
        for name in ("problem", "why", "remedy", "thread"):
            if stated[name]:
                lines.append(f"  {name:<8}{printable(stated[name])}")
        if self.fixable:
            lines.append("  --fix   repairs it")
        return "\n".join(lines)


@dataclass(frozen=True)
class Rule:
    """A rule, and the public thread that it comes from.

    Args:
        code: Its short name.
        severity: `error` if the model loads or computes something wrong, `warning` if only some programs or
            lengths are affected, `remark` for information.
        why: Why it matters.
        thread: The thread on GitHub; empty for checks of ropepatch's own files.
        plans: Whether `plan` also warns of it.
    """

    code: str
    severity: str
    why: str
    thread: str
    plans: bool = False

    def found(self, finding: Finding) -> Finding:
        """Return a finding with what its rule says of it."""
        return replace(
            finding,
            code=self.code,
            severity=finding.severity or self.severity,
            why=self.why,
            thread=self.thread and f"https://github.com/{self.thread}",
        )


def by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings, errors first."""
    return tuple(sorted(findings, key=lambda one: SEVERITIES.index(one.severity)))


def has_errors(findings: Iterable[Finding]) -> bool:
    """Whether any finding is an error."""
    return any(finding.severity == "error" for finding in findings)


def value_at(content: Any, path: Keys) -> Any:
    """Return the value at a path of a JSON object; None if missing."""
    for key in path:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def edited(content: dict[str, Any], path: Keys, value: Any) -> dict[str, Any]:
    """Return a copy of a JSON object with one value changed."""
    changed = deepcopy(content)
    value_at(changed, path[:-1])[path[-1]] = value
    return changed
