"""The two generations of keys: what one of them lacks, and where they contradict each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ropepatch.doctor.case import DEFAULT_THETA, FIRST_LAYERS, ORIGINAL, WITH_ORIGINAL, Block, Case, positive
from ropepatch.doctor.findings import DROP, Edit, Finding, Mend, shown
from ropepatch.doctor.interpretation import same_rope
from ropepatch.extension.forms import SCALING_KEYS
from ropepatch.model.architectures import LOCAL_BASE
from ropepatch.model.config import is_known
from ropepatch.model.legacy import legacy_keys


def one_generation(case: Case) -> Iterator[Finding]:
    """A rope that older readers do not find."""
    partial = [block for block in case.newer if _only_share(case, block)]
    bases = [block for block in case.newer if block.values.get("rope_theta", DEFAULT_THETA) != DEFAULT_THETA]
    scaled = [block for block in case.newer if block.scaled]
    telling = [] if case.older else [*scaled, *(bases if case.theta_key is None else [])]
    if not (telling := telling or partial):
        return
    block = next((block for block in case.newer if block.layer_type in (None, FIRST_LAYERS)), None)
    edits = _older_keys(case, block) if block else ()
    yield Finding(
        "only-new-keys",
        "warning",
        f"the rope ({', '.join(dict.fromkeys(str(block.kind) for block in telling))}) stands in "
        "rope_parameters only",
        "transformers 4, mlx-lm and what else reads the older keys silently takes no scaling and its own "
        "defaults, base 10000 first of all",
        "write the older keys beside rope_parameters, saying the same",
        key=case.key("rope_parameters"),
        value=shown(case.stated["rope_parameters"]),
        mend=Mend(edits) if edits else None,
        meant=(),
        read=(case.without_newer(),),
    )


def _older_keys(case: Case, block: Block) -> tuple[Edit, ...]:
    """What to add for older readers, if transformers 5 goes on reading the same rope."""
    if not positive(block.values.get("rope_theta")) or block.kind is None:
        return ()
    older: dict[str, Any] = legacy_keys(case.stated, block.values | {"rope_type": block.kind})
    if _only_share(case, block):
        older["partial_rotary_factor"] = block.values["partial_rotary_factor"]
    if block.kind in WITH_ORIGINAL and block.values.get(ORIGINAL) is not None:
        older[ORIGINAL] = block.values[ORIGINAL]
    sliding = next((other for other in case.newer if other.layer_type == "sliding_attention"), None)
    if sliding and case.model_type in LOCAL_BASE and sliding.number("rope_theta"):
        older["rope_local_base_freq"] = sliding.values["rope_theta"]
    edits = tuple(case.edit(key, value) for key, value in older.items())
    judged = is_known(case.raw.get("model_type")) or block.layer_type is not None
    return () if judged and not same_rope(case.raw, case.with_edits(edits).raw) else edits


def _only_share(case: Case, block: Block) -> bool:
    """Whether only this block says that part of each head rotates; `proportional` means something else."""
    share, elsewhere = block.number("partial_rotary_factor"), ("partial_rotary_factor", "rotary_pct")
    return share not in (None, 1.0) and block.kind != "proportional" and not {*elsewhere} & case.stated.keys()


def contradictions(case: Case) -> Iterator[Finding]:
    """Two places that say different things."""
    for block in case.blocks:
        kinds = block.values.get("rope_type"), block.values.get("type")
        if None not in kinds and kinds[0] != kinds[1]:
            yield _contradiction(case, block.key("rope_type"), kinds[0], block.key("type"), kinds[1])
        top, nested = case.stated.get(ORIGINAL), block.values.get(ORIGINAL)
        if None not in (top, nested) and top != nested:
            yield _contradiction(case, case.key(ORIGINAL), top, block.key(ORIGINAL), nested)
    new = next((block for block in case.newer if block.layer_type in (None, FIRST_LAYERS)), None)
    if new is None:
        return
    theta = new.values.get("rope_theta")
    if None not in (case.theta, theta) and case.theta != theta:
        yield _contradiction(case, case.key(case.theta_key or ""), case.theta, new.key("rope_theta"), theta)
    for old in case.older:
        if old.layer_type not in (None, new.layer_type):
            continue
        if (old.kind or "default") != (new.kind or "default"):
            yield _contradiction(case, old.key("rope_type"), old.kind, new.key("rope_type"), new.kind)
            continue
        for key in sorted(SCALING_KEYS - {"rope_type", "type", "rope_theta", ORIGINAL}):
            said = old.values.get(key), new.values.get(key)
            if said[0] != said[1]:
                yield _contradiction(case, old.key(key), said[0], new.key(key), said[1])
        said = old.values.get(ORIGINAL), new.values.get(ORIGINAL)
        if None not in said and said[0] != said[1]:
            yield _contradiction(case, old.key(ORIGINAL), said[0], new.key(ORIGINAL), said[1])


def _contradiction(case: Case, one: str, value: Any, other: str, another: Any) -> Finding:
    generations = {"rope_scaling", "rope_theta", "rotary_emb_base"} & {*one.split("."), *other.split(".")}
    older = tuple(case.edit(key, DROP) for key in ("rope_scaling", case.theta_key or "rope_theta"))
    return Finding(
        "keys-contradict",
        "error",
        f"{one} is {shown(value)} and {other} is {shown(another)}",
        "readers differ in which they follow, so that the same checkpoint is two models",
        "make them agree, by what the model was trained with, or drop the one that is wrong",
        key=one,
        value=shown(value),
        meant=older if case.newer and generations else None,
        read=(case.without_newer(),),
    )
