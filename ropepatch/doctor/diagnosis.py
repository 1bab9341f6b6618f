"""All checks over one checkpoint, and what came of them."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import chain
from pathlib import Path

from ropepatch.doctor import companions, keys, lengths, rope_types, scalings, theta
from ropepatch.doctor.adapter import adapter_findings, base_of, no_base
from ropepatch.doctor.case import Block, Case, read_case
from ropepatch.doctor.effects import with_effects
from ropepatch.doctor.findings import ADAPTER, CONFIG, SEVERITIES, Finding, Mend
from ropepatch.doctor.tensors import readable, weight_findings
from ropepatch.errors import RopepatchError
from ropepatch.files import json_text
from ropepatch.model.source import find_source


def each_block(look: Callable[[Case, Block], Iterator[Finding]]) -> Callable[[Case], Iterator[Finding]]:
    """A check of one block as a check of them all."""

    @wraps(look)
    def look_at_all(case: Case) -> Iterator[Finding]:
        return chain.from_iterable(look(case, block) for block in case.blocks)

    return look_at_all


# What each looks for stands in its docstring; a new check is a function added here.
CHECKS: tuple[Callable[[Case], Iterator[Finding]], ...] = (
    each_block(scalings.misspelled_keys),
    lengths.broken_numbers,
    lengths.broken_windows,
    each_block(lengths.required_keys),
    each_block(rope_types.unknown_types),
    rope_types.open_head_dim,
    theta.lost_theta,
    keys.contradictions,
    each_block(lengths.lost_original),
    each_block(lengths.factor_against_lengths),
    each_block(lengths.small_factor),
    each_block(lengths.whole_factor),
    each_block(scalings.swapped_bounds),
    each_block(scalings.attention_factors),
    each_block(scalings.lone_mscale),
    each_block(scalings.longrope_lists),
    each_block(scalings.open_ramp),
    each_block(scalings.switching),
    each_block(scalings.unread_attention_factor),
    each_block(scalings.linear_in_vllm),
    keys.one_generation,
    companions.tokenizer_behind,
    companions.generation_behind,
    companions.record_differs,
)
MAX_ROUNDS = 50  # of mending, each of one finding


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with one checkpoint.

    Args:
        case: The checkpoint.
        findings: Errors first.
        looked_at: What was read, for people.
    """

    case: Case = field(repr=False)
    findings: tuple[Finding, ...]
    looked_at: tuple[str, ...]

    @property
    def has_errors(self) -> bool:
        """Whether any finding is an error."""
        return any(finding.severity == "error" for finding in self.findings)

    def to_json(self) -> str:
        """The findings as a JSON list of objects."""
        return json_text([finding.to_dict() for finding in self.findings])

    def __str__(self) -> str:
        looked = f"looked at: {', '.join(self.looked_at)}"
        if not self.findings:
            return f"{self.case.name}: nothing found\n{looked}"
        counts = Counter(finding.severity for finding in self.findings)
        words = ", ".join(
            f"{counts[one]} {one}{'s' if counts[one] > 1 else ''}" for one in SEVERITIES if counts[one]
        )
        return "\n\n".join([f"{self.case.name}: {words}\n{looked}", *map(str, self.findings)])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def diagnose(model: str | Path, revision: str | None = None, *, measure: bool = True) -> Diagnosis:
    """Look for what is wrong with the rope of a checkpoint, or between an adapter and its base.

    Args:
        model: A checkpoint folder, an adapter's folder, a Hub id or `tiny`.
        revision: Of a Hub id.
        measure: Load the weights, where they fit into memory, and measure what a fault does to the model; of
            a Hub id without it only config.json is downloaded.

    Raises:
        RopepatchError: If there is no such checkpoint, or its config.json is no JSON object.
    """
    if folder := _adapter_folder(model):
        return _diagnose_adapter(read_case(str(model), folder), measure)
    source = find_source(model, revision, weights=measure)
    if folder := _adapter_folder(source.folder):  # from the Hub
        return _diagnose_adapter(read_case(source.name, folder), measure)
    case = read_case(source.name, source.folder)
    findings = by_severity([*check(case), *companions.unreadable_files(case), *weight_findings(case)])
    weights = readable(case)
    if measure:
        findings = by_severity(with_effects(case, findings, weights, mended(case)))
    names = [file.name for file in weights.files] if weights else ["no weights that can be read"]
    return Diagnosis(case, findings, (*case.files, *case.unreadable, *names))


def _diagnose_adapter(case: Case, measure: bool) -> Diagnosis:
    try:
        base = base_of(case)
        findings = list(adapter_findings(case, base))
        if measure:
            findings = with_effects(base, findings, readable(base), base)
    except (RopepatchError, OSError) as error:  # OSError: a name that is too long
        findings = [no_base(case, error)]
    findings = [*companions.unreadable_files(case), *findings]
    return Diagnosis(case, by_severity(findings), (*case.files, *case.unreadable, "the base"))


def _adapter_folder(model: str | Path) -> Path | None:
    """The folder, if it holds an adapter and no model."""
    try:
        folder = Path(model).expanduser()
        return folder if (folder / ADAPTER).is_file() and not (folder / CONFIG).is_file() else None
    except (OSError, RuntimeError):  # a name that is too long, ~ of nobody: `find_source` says so
        return None


def check(case: Case) -> list[Finding]:
    """What the small files of a checkpoint say."""
    findings = merged(finding for look in CHECKS for finding in look(case))
    if not any(finding.severity == "error" for finding in findings):
        findings += rope_types.refused(case)
    return findings


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """One finding for a fault that stands in both generations of keys, or in several layer types."""
    first: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        identity = (finding.code, finding.file, finding.problem)
        before = first.setdefault(identity, finding)
        if before is not finding:
            edits = tuple(edit for one in (before, finding) if one.mend for edit in one.mend.edits)
            first[identity] = replace(
                before,
                mend=Mend(edits) if edits else before.mend,
                meant=None if before.meant is None else (*before.meant, *(finding.meant or ())),
                read=(*before.read, *finding.read),
            )
    return list(first.values())


def by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors first, each kind in the order of the checks."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def mended(case: Case) -> Case:
    """The checkpoint after all changes of its small files that need no guess, one finding at a time."""
    for _ in range(MAX_ROUNDS):
        edits = next((finding.mend.edits for finding in check(case) if finding.mend), ())
        if not edits:
            break
        case = case.with_edits(edits)
    return case
