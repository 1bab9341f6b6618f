"""The two generations of keys: what one of them lacks, and where they contradict each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ropepatch.model.architectures import LOCAL_BASE
from ropepatch.model.checks.case import (
    DEFAULT_THETA,
    ORIGINAL,
    THETA_KEYS,
    WITH_ORIGINAL,
    Block,
    Case,
    positive,
)
from ropepatch.model.checks.findings import DROP, Edit, Finding, Key, shown
from ropepatch.model.checks.interpretation import same_rope
from ropepatch.model.config import SCALING_KEYS, is_known
from ropepatch.model.legacy import legacy_keys


def one_generation(case: Case) -> Iterator[Finding]:
    """A rope that older readers do not find."""
    partial = [block for block in case.newer if _only_share(case, block)]
    bases = [block for block in case.newer if block.values.get("rope_theta", DEFAULT_THETA) != DEFAULT_THETA]
    scaled = [block for block in case.newer if block.scaled]
    unseen = [] if case.older else [*scaled, *(bases if case.theta_key is None else [])]
    if not (unseen := unseen or partial):
        return
    kinds = dict.fromkeys(str(block.kind) for block in unseen)
    newer = case.at("rope_parameters")
    yield newer.warning(
        "only-new-keys",
        f"the rope ({', '.join(kinds)}) stands in rope_parameters only",
        "transformers 4, mlx-lm and what else reads the older keys silently takes no scaling and its own "
        "defaults, base 10000 first of all",
        "write the older keys beside rope_parameters, saying the same",
        mend=_older_keys(case, case.newest) if case.newest else (),
        meant=(),
        read=(newer.set(DROP),),
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
    edits = tuple(case.at(key).set(value) for key, value in older.items())
    judged = is_known(case.raw.get("model_type")) or block.layer_type is not None
    return () if judged and not same_rope(case.raw, case.with_edits(edits).raw) else edits


def _only_share(case: Case, block: Block) -> bool:
    """Whether only this block says that part of each head rotates; `proportional` means something else."""
    share, elsewhere = block.number("partial_rotary_factor"), {"partial_rotary_factor", "rotary_pct"}
    return share not in (None, 1.0) and block.kind != "proportional" and not elsewhere & case.stated.keys()


def contradictions(case: Case) -> Iterator[Finding]:
    """Two places that say different things."""
    for one, other in _stated_twice(case):
        if one.value == other.value:
            continue
        generations = {"rope_scaling", *THETA_KEYS} & {*one.path, *other.path}
        older = tuple(case.at(key).set(DROP) for key in ("rope_scaling", case.theta_key or "rope_theta"))
        yield one.error(
            "keys-contradict",
            f"{one} is {shown(one.value)} and {other} is {shown(other.value)}",
            "readers differ in which they follow, so that the same checkpoint is two models",
            "make them agree, by what the model was trained with, or drop the one that is wrong",
            value=shown(one.value),
            meant=older if case.newer and generations else None,
            read=(case.at("rope_parameters").set(DROP),),
        )


def _stated_twice(case: Case) -> Iterator[tuple[Key, Key]]:
    """Pairs of keys that should hold the same."""
    for block in case.blocks:
        yield from _both(block.at("rope_type"), block.at("type"))
        yield from _both(case.at(ORIGINAL), block.at(ORIGINAL))
    newest = case.newest
    if newest is None:
        return
    theta = case.at(case.theta_key or "rope_theta")
    yield from _both(replace(theta, value=case.theta), newest.at("rope_theta"))
    for old in case.older:
        if old.layer_type not in (None, newest.layer_type):
            continue
        if (old.kind or "default") != (newest.kind or "default"):
            first, second = (replace(block.at("rope_type"), value=block.kind) for block in (old, newest))
            yield first, second
            continue
        for key in sorted(SCALING_KEYS - {"rope_type", "type", "rope_theta", ORIGINAL}):
            yield old.at(key), newest.at(key)
        yield from _both(old.at(ORIGINAL), newest.at(ORIGINAL))


def _both(one: Key, other: Key) -> Iterator[tuple[Key, Key]]:
    """The pair, if both are there."""
    if one.value is not None and other.value is not None:
        yield one, other
