"""Every check of the small files of a checkpoint; nothing here reads weights or knows a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any

from ropepatch.model.checks import architecture, companions, keys, lengths, rope_types, scalings, theta
from ropepatch.model.checks.case import Block, Case
from ropepatch.model.checks.findings import CONFIG, Finding, Mend


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
    lengths.broken_shapes,
    each_block(lengths.sections),
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
    scalings.dual_chunks,
    keys.one_generation,
    companions.tokenizer_behind,
    companions.generation_behind,
    companions.record_differs,
)
MAX_ROUNDS = 50  # of mending, each of one finding


def check(case: Case) -> list[Finding]:
    """What the small files of a checkpoint say."""
    findings = merged(finding for look in CHECKS for finding in look(case))
    if not any(finding.severity == "error" for finding in findings):
        findings += [*rope_types.refused(case), *architecture.known_hard(case)]
    return findings


def config_errors(raw: dict[str, Any]) -> tuple[str, ...]:
    """What is wrong with a config.json by itself, whether or not transformers takes it."""
    case = Case("", Path(), {CONFIG: raw}, {})
    findings = merged(finding for look in CHECKS for finding in look(case))
    return tuple(finding.problem for finding in findings if finding.severity == "error")


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


def mended(case: Case) -> Case:
    """The checkpoint after all changes of its small files that need no guess, one finding at a time."""
    for _ in range(MAX_ROUNDS):
        edits = next((finding.mend.edits for finding in check(case) if finding.mend), ())
        if not edits:
            break
        case = case.with_edits(edits)
    return case
