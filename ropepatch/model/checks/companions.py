"""The files beside config.json that say how long the context is."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ropepatch.model.checks.case import ORIGINAL, Case, positive
from ropepatch.model.checks.findings import GENERATION, TOKENIZER, Finding, Key, shown


def tokenizer_behind(case: Case) -> Iterator[Finding]:
    """A tokenizer that truncates or warns before the window ends."""
    key, reach = case.companion(TOKENIZER, "model_max_length"), case.reach() or 0
    if (positive(key.value) or math.inf) < reach:
        why = "with truncation the tokenizer cuts texts there, without it warns of errors to come"
        yield _behind(key, reach, why)


def generation_behind(case: Case) -> Iterator[Finding]:
    """A generation that stops at the window of pretraining."""
    originals = [*map(case.original, case.blocks), positive(case.record.get(ORIGINAL))]
    pretrained = max(filter(None, originals), default=0.0)
    key, reach = case.companion(GENERATION, "max_length"), case.reach() or 0
    if (positive(key.value) or math.inf) <= pretrained < reach:
        yield _behind(key, reach, "generate() stops there, prompt included")


def _behind(key: Key, reach: float, why: str) -> Finding:
    code = f"{key.file.removesuffix('_config.json')}-behind"
    problem = f"{key.name} is {key.value:g}, the model reads {reach:g} tokens"
    return key.warning(code, problem, why, f"write {reach:g}", mend=(key.set(int(reach)),))


def record_differs(case: Case) -> Iterator[Finding]:
    """A configuration that is no longer what ropepatch wrote and proved."""
    changed = [key for key, value in case.recorded.items() if case.stated.get(key) != value]
    if changed:
        key = case.at(changed[0])
        yield key.warning(
            "differs-from-record",
            f"{', '.join(changed)}: not what ropepatch.json says was written",
            "the checkpoint was proven with those values; whatever saved it anew lost or changed them",
            "compare config.json with config_changes in ropepatch.json",
            value=shown(key.value),
        )


def unreadable_files(case: Case) -> Iterator[Finding]:
    """Files beside config.json that are no JSON object."""
    for file, reason in case.unreadable.items():
        yield Finding(
            "file-unreadable",
            "error",
            reason,
            "what loads the checkpoint stops at it, or silently takes its defaults",
            "copy the file again from where the checkpoint came from",
            file=file,
        )
