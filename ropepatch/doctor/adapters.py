"""Check that the base model of an adapter has the RoPE that the adapter was trained with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ropepatch.doctor.weights import look_at_weights
from ropepatch.errors import RopepatchError, plain
from ropepatch.extension.record import FILE as RECORD
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.checks.case import Case, positive
from ropepatch.model.checks.findings import ADAPTER, TOKENIZER, Finding, shown
from ropepatch.model.weights import fingerprint
from ropepatch.scaling.rope import Rope

BASE = "base_model_name_or_path"
NAME_IT = f"set {BASE} in {ADAPTER} to the base checkpoint that it was trained on"


def base_name(case: Case) -> tuple[str, str | None]:
    """Return the base model that an adapter names, and its revision if it is on the Hub."""
    adapter = case.files[ADAPTER]
    name, revision = adapter.get(BASE), adapter.get("revision")
    if not isinstance(name, str) or not name:
        raise RopepatchError(f"{ADAPTER} has no {BASE}", hint=f"write {BASE} into {ADAPTER}")
    here = name == "tiny" or Path(name).is_dir()
    return name, revision if isinstance(revision, str) and not here else None


def adapter_findings(case: Case, base: Case, checkpoint: Checkpoint) -> Iterator[Finding]:
    """Check an adapter against its base checkpoint."""
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
    """Report a base model that cannot be loaded."""
    key = case.companion(ADAPTER, BASE)
    return key.finding(
        "adapter-base-missing", f"cannot load the base model: {error}", NAME_IT, value=shown(key.value)
    )


def _against_record(case: Case, rope: Rope, base: Case) -> Iterator[Finding]:
    key, record = case.companion(ADAPTER, BASE), case.record
    carried = rope.inv_freq().tolist(), rope.carried_attention_factor
    same_rope = carried == (record.get("inv_freq"), record.get("attention_factor"))
    weights, _ = look_at_weights(base)  # None if they are not on this machine
    same_weights = weights and fingerprint(weights) == record.get("base_weights")
    if not same_rope:
        yield key.finding(
            "adapter-base-lacks-rope",
            f"it was trained with {record.get('method')} at {record.get('target')} tokens; "
            f"the base {base.name} has other RoPE parameters",
            "load it with ropepatch.load_adapter, which patches the base first; or train with save: merged",
        )
    if weights and "base_weights" in record and not same_weights:
        problem = f"the base {base.name} does not have the weights that the adapter was trained on"
        yield key.finding("adapter-base-changed", problem, NAME_IT)


def _without_record(case: Case, rope: Rope) -> Finding:
    window, base = rope.original_max_position_embeddings, case.companion(ADAPTER, BASE)
    tokenizer = case.companion(TOKENIZER, "model_max_length")
    length = positive(tokenizer.value)
    if length and window < length < 1e9:  # larger numbers mean no limit
        return tokenizer.finding(
            "adapter-base-lacks-rope",
            f"its tokenizer allows {plain(length)} tokens, the base {base.value} has a context of {window}",
            "ask its author for the RoPE parameters, and load it onto a base that has them",
        )
    return base.finding(
        "adapter-without-record",
        f"the RoPE that it was trained with is not recorded; the base {base.value} has {window} tokens",
        "none if it was trained on the unchanged base; else run ropepatch.patch(...).record(folder) where "
        "it was trained",
    )
