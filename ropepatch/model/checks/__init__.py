"""Rules for the JSON files of a checkpoint, independent of its weights and of any plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ropepatch.errors import RopepatchError
from ropepatch.model.checks.case import Case
from ropepatch.model.checks.findings import CONFIG, Finding
from ropepatch.model.checks.rules import RULES, contradictions, load_errors

MAX_ROUNDS = 50  # repairs of one finding each


def check(case: Case) -> list[Finding]:
    """Check the JSON files of a checkpoint, with repairs from ropepatch.json where it settles a problem.

    The recorded values repair a finding in config.json if restoring them removes it and leaves no error.
    Restoring is never the repair of a mere difference from the record, which may be intended.
    """
    findings = _findings(case)
    changed = [str(case.at(name)) for name in case.changed]
    doubtful = [
        one for one in findings if one.file == CONFIG and (one.severity != "remark" or one.key in changed)
    ]
    doubtful = [one for one in doubtful if one.code != "differs-from-record"]
    if not doubtful or not case.recorded:
        return findings
    restored = [one for one in _findings(case.with_edits(case.recorded)) if one.file == CONFIG]
    if has_errors(restored):
        return findings
    left = {(one.code, one.key) for one in restored}
    return [
        replace(one, edits=case.recorded, remedy="restore the values in ropepatch.json")
        if one in doubtful and (one.code, one.key) not in left
        else one
        for one in findings
    ]


def _findings(case: Case) -> list[Finding]:
    findings = [finding for look in RULES for finding in look(case)]
    return findings if has_errors(findings) else [*findings, *load_errors(case)]


def has_errors(findings: Iterable[Finding]) -> bool:
    """Whether any finding is an error."""
    return any(finding.severity == "error" for finding in findings)


def config_errors(raw: dict[str, Any], *also: str) -> tuple[str, ...]:
    """Return the errors of a config.json alone, and its findings with these codes."""
    case = _alone(raw)
    found = [one for look in RULES for one in look(case)]
    return tuple(one.problem for one in found if one.severity == "error" or one.code in also)


def check_agreement(raw: dict[str, Any]) -> None:
    """Raise a `RopepatchError` if config.json contradicts itself."""
    for one in contradictions(_alone(raw)):
        raise RopepatchError(f"config.json contradicts itself: {one.problem}", hint=one.remedy)


def _alone(raw: dict[str, Any]) -> Case:
    return Case("", Path(), {CONFIG: raw}, {})


def repaired(case: Case) -> Case:
    """Repair everything in the JSON files that needs no guess, one finding at a time."""
    for _ in range(MAX_ROUNDS):
        edits = next((finding.edits for finding in check(case) if finding.edits), ())
        if not edits:
            break
        case = case.with_edits(edits)
    return case
