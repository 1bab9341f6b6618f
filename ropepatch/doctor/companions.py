"""The files beside config.json that say how long the context is."""

from __future__ import annotations

from collections.abc import Iterator

from ropepatch.doctor.case import Case, positive
from ropepatch.doctor.findings import GENERATION, TOKENIZER, Edit, Finding, Mend, shown


def tokenizer_behind(case: Case) -> Iterator[Finding]:
    """A tokenizer that truncates or warns before the window ends."""
    length, reach = positive(case.files.get(TOKENIZER, {}).get("model_max_length")), case.reach()
    if length and reach and length < reach:
        yield Finding(
            "tokenizer-behind",
            "warning",
            f"model_max_length is {length:g}, the model reads {reach:g} tokens",
            "with truncation the tokenizer cuts texts there, without it warns of errors to come",
            f"write {reach:g}",
            file=TOKENIZER,
            key="model_max_length",
            value=shown(case.files[TOKENIZER]["model_max_length"]),
            mend=Mend((Edit(TOKENIZER, ("model_max_length",), int(reach)),)),
        )


def generation_behind(case: Case) -> Iterator[Finding]:
    """A generation that stops at the window of pretraining."""
    length, reach = positive(case.files.get(GENERATION, {}).get("max_length")), case.reach()
    recorded = positive(case.record.get("original_max_position_embeddings"))
    originals = [*(case.original(block) for block in case.blocks), recorded]
    if length and reach and length <= max((one for one in originals if one), default=0) < reach:
        yield Finding(
            "generation-behind",
            "warning",
            f"max_length is {length:g}, the model reads {reach:g} tokens",
            "generate() stops there, prompt included",
            f"write {reach:g}",
            file=GENERATION,
            key="max_length",
            value=shown(case.files[GENERATION]["max_length"]),
            mend=Mend((Edit(GENERATION, ("max_length",), int(reach)),)),
        )


def record_differs(case: Case) -> Iterator[Finding]:
    """A configuration that is no longer what ropepatch wrote and proved."""
    changed = [key for key, value in case.recorded().items() if case.stated.get(key) != value]
    if changed:
        yield Finding(
            "differs-from-record",
            "warning",
            f"{', '.join(changed)}: not what ropepatch.json says was written",
            "the checkpoint was proven with those values; whatever saved it anew lost or changed them",
            "compare config.json with config_changes in ropepatch.json",
            key=case.key(changed[0]),
            value=shown(case.stated.get(changed[0])),
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
