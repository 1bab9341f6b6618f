"""Adapters: whether the base they name has the rope that they were trained under."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ropepatch.doctor.weights import look_at_weights
from ropepatch.errors import RopepatchError
from ropepatch.extension.record import FILE as RECORD
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.checks.case import Case, positive
from ropepatch.model.checks.findings import ADAPTER, TOKENIZER, Finding, shown
from ropepatch.model.weights import fingerprint
from ropepatch.scaling.rope import Rope

BASE = "base_model_name_or_path"
NAME_IT = "name the base checkpoint that it was trained on"


def base_name(case: Case) -> tuple[str, str | None]:
    """The base that an adapter names, and its revision where it is on the Hub."""
    adapter = case.files[ADAPTER]
    name, revision = adapter.get(BASE), adapter.get("revision")
    if not isinstance(name, str) or not name:
        raise RopepatchError("none is named", hint=f"write {BASE} into {ADAPTER}")
    here = name == "tiny" or Path(name).is_dir()
    return name, revision if isinstance(revision, str) and not here else None


def adapter_findings(case: Case, base: Case, checkpoint: Checkpoint) -> Iterator[Finding]:
    """What is wrong between an adapter and its base, a checkpoint."""
    try:
        rope = checkpoint.rope
    except RopepatchError as error:
        yield no_base(case, error)
        return
    if RECORD in case.files:
        yield from _against_record(case, rope, base)
    else:
        yield _without_record(case, rope)


def no_base(case: Case, error: Exception) -> Finding:
    """A base that cannot be read."""
    key = case.companion(ADAPTER, BASE)
    return key.finding(
        "adapter-base-missing", f"its base cannot be read: {error}", NAME_IT, value=shown(key.value)
    )


def _against_record(case: Case, rope: Rope, base: Case) -> Iterator[Finding]:
    key, record = case.companion(ADAPTER, BASE), case.record
    carried = rope.inv_freq().tolist(), rope.carried_attention_factor
    same_rope = carried == (record.get("inv_freq"), record.get("attention_factor"))
    weights, _ = look_at_weights(base)  # those that are not here cannot be compared
    same_weights = weights and fingerprint(weights) == record.get("base_weights")
    parameters = record.get("parameters")
    folded = isinstance(parameters, dict) and bool(parameters.get("queries"))  # into weights of the base
    if not same_rope or (folded and same_weights):
        yield key.finding(
            "adapter-base-lacks-rope",
            f"it was trained under {record.get('method')} to {record.get('target')} tokens; "
            f"the base {base.name} has {'other query weights' if same_rope else 'another rope'}",
            "load it with ropepatch.load_adapter, which patches the base first; or merge it, and save that "
            "(save: merged in the recipe)",
        )
    extended = folded and same_rope and base.record.get("parameters") == parameters  # as the base was patched
    if weights and "base_weights" in record and not (same_weights or extended):
        problem = f"the base {base.name} has other weights than it was trained on"
        yield key.finding("adapter-base-changed", problem, NAME_IT)


def _without_record(case: Case, rope: Rope) -> Finding:
    window, base = rope.original_max_position_embeddings, case.companion(ADAPTER, BASE)
    tokenizer = case.companion(TOKENIZER, "model_max_length")
    length = positive(tokenizer.value)
    if length and window < length < 1e9:  # larger ones stand for no limit
        return tokenizer.finding(
            "adapter-base-lacks-rope",
            f"its tokenizer reads {length:g} tokens, the base {base.value} {window}: trained on more",
            "ask who trained it for the rope, and load it onto a base that has it",
        )
    return base.finding(
        "adapter-without-record",
        f"nothing says under which rope it was trained; the base {base.value} reads {window} tokens",
        "none, if it was trained on the unchanged base; else whoever has the patched model writes it down: "
        "ropepatch.patch(...).record(folder)",
    )
