"""Check that the base model of an adapter has the RoPE that the adapter was trained with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ropepatch.doctor.findings import Finding, Rule
from ropepatch.errors import RopepatchError
from ropepatch.model.checkpoint import ADAPTER, ADAPTER_BASE, Checkpoint

THREAD = "huggingface/trl/issues/4277"
MISSING = Rule(
    "adapter-base-missing", "error", "the RoPE of its base is unknown", THREAD
)
LACKS_ROPE = Rule(
    "adapter-base-lacks-rope",
    "warning",
    "PEFT, vLLM and transformers load the adapter with the RoPE of its base",
    THREAD,
)
NO_RECORD = Rule(
    "adapter-without-record",
    "remark",
    "programs load it onto the unchanged base, which may be what it was trained on",
    THREAD,
)


def adapter_findings(
    adapter: dict[str, Any], record: dict[str, Any]
) -> Iterator[Finding]:
    """Check an adapter against the base checkpoint that it names.

    Args:
        adapter: The content of adapter_config.json.
        record: The content of ropepatch.json; empty without one.
    """
    name, revision = adapter.get(ADAPTER_BASE), adapter.get("revision")
    try:
        if not isinstance(name, str) or not name:
            raise RopepatchError(f"{ADAPTER} has no {ADAPTER_BASE}")
        is_here = name == "tiny" or Path(name).is_dir()
        base = Checkpoint.find(name, None if is_here else revision)
        rope = base.config.rope
    except (RopepatchError, OSError) as error:  # OSError: a name that is too long
        rule, problem = MISSING, f"cannot load the base model: {error}"
        remedy = f"set {ADAPTER_BASE} in {ADAPTER} to the base checkpoint that it was trained on"
    else:
        carried = rope.inv_freq().tolist(), rope.carried_attention_factor
        if not record:
            rule = NO_RECORD
            problem = (
                f"the RoPE that it was trained with is not recorded; the base {base.name} has "
                f"{base.config.window} tokens"
            )
            remedy = (
                "none if it was trained on the unchanged base; else run ropepatch.patch(...).record(folder) "
                "where it was trained"
            )
        elif carried != (record.get("inv_freq"), record.get("attention_factor")):
            rule = LACKS_ROPE
            problem = (
                f"it was trained with {record.get('method')} at {record.get('target')} tokens; the base "
                f"{base.name} has other RoPE parameters"
            )
            remedy = (
                "load it with ropepatch.load_adapter, which patches the base first; or train with "
                "save: merged"
            )
        else:
            return
    yield rule.found(Finding((ADAPTER_BASE,), problem, remedy, ADAPTER, name))
