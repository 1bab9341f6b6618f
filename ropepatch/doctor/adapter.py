"""Adapters: whether the base they name has the rope that they were trained under."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ropepatch.doctor.case import Case, positive, read_case
from ropepatch.doctor.findings import ADAPTER, TOKENIZER, Finding, shown
from ropepatch.errors import RopepatchError
from ropepatch.extension.record import FILE as RECORD
from ropepatch.model.source import find_source
from ropepatch.model.survey import survey_folder
from ropepatch.model.weights import fingerprint, read_headers
from ropepatch.scaling.rope import Rope

BASE = "base_model_name_or_path"
LOADED_ON_BASE = "PEFT, vLLM and transformers load the adapter onto the base as its config.json describes it"


def base_of(case: Case) -> Case:
    """The small files of the base that an adapter names.

    Raises:
        RopepatchError: If none is named, or it cannot be looked at.
    """
    adapter = case.files[ADAPTER]
    name, revision = adapter.get(BASE), adapter.get("revision")
    if not isinstance(name, str) or not name:
        raise RopepatchError("none is named", hint=f"write {BASE} into {ADAPTER}")
    here = name == "tiny" or Path(name).is_dir()
    source = find_source(name, revision if isinstance(revision, str) and not here else None, weights=False)
    return read_case(name, source.folder)


def adapter_findings(case: Case, base: Case) -> Iterator[Finding]:
    """What is wrong between an adapter and its base."""
    try:
        rope = survey_folder(base.folder).rope
    except RopepatchError as error:
        yield no_base(case, error)
        return
    if RECORD in case.files:
        yield from _against_record(case, rope, base, case.record)
    else:
        yield from _without_record(case, rope, base.name)


def no_base(case: Case, error: Exception) -> Finding:
    """That the base cannot be looked at."""
    name = case.files[ADAPTER].get(BASE)
    return _finding(
        "adapter-base-missing", f"its base cannot be looked at: {error}", "its rope is unknown", name
    )


def _finding(code: str, problem: str, why: str, name: object) -> Finding:
    return Finding(
        code,
        "error",
        problem,
        why,
        "name the base checkpoint that it was trained on",
        file=ADAPTER,
        key=BASE,
        value=shown(name),
    )


def _against_record(case: Case, rope: Rope, base: Case, record: dict[str, Any]) -> Iterator[Finding]:
    name, a = base.name, rope.carried_attention_factor
    if (rope.inv_freq().tolist(), a) != (record.get("inv_freq"), record.get("attention_factor")):
        method, target = record.get("method"), record.get("target")
        yield Finding(
            "adapter-base-lacks-rope",
            "warning",  # as `save: adapter` leaves it: our loader knows what to do, others do not
            f"it was trained under {method} to {target} tokens; the base {name} has another rope",
            f"{LOADED_ON_BASE}, that is without the scaling",
            "load it with ropepatch.load_adapter, which patches the base first; or merge it, and save that "
            "(save: merged in the recipe)",
            file=ADAPTER,
            key=BASE,
            value=shown(name),
            meant=tuple(base.edit(key, value) for key, value in case.recorded().items()) or None,
        )
    try:
        changed = (
            "base_weights" in record and fingerprint(read_headers(base.folder)) != record["base_weights"]
        )
    except RopepatchError:
        return  # weights that are not here cannot be compared
    if changed:
        yield _finding(
            "adapter-base-changed",
            f"the base {name} has other weights than it was trained on",
            "the adapter's changes are differences to those weights",
            name,
        )


def _without_record(case: Case, rope: Rope, name: str) -> Iterator[Finding]:
    length = positive(case.files.get(TOKENIZER, {}).get("model_max_length"))
    window = rope.original_max_position_embeddings
    if length and window < length < 1e9:  # larger ones stand for no limit
        yield Finding(
            "adapter-base-lacks-rope",
            "warning",
            f"its tokenizer reads {length:g} tokens, the base {name} {window}",
            f"{LOADED_ON_BASE}; it was trained on longer texts, perhaps under a rope that nobody recorded",
            "ask who trained it for the rope, and load it onto a base that has it",
            file=TOKENIZER,
            key="model_max_length",
            value=shown(case.files[TOKENIZER]["model_max_length"]),
        )
    else:
        yield Finding(
            "adapter-without-record",
            "remark",
            f"nothing says under which rope it was trained; the base {name} reads {window} tokens",
            f"{LOADED_ON_BASE}, which is right if it was trained so",
            "none, if it was trained on the base as it is",
            file=ADAPTER,
            key=BASE,
            value=shown(name),
        )
