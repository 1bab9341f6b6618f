"""Rules of what is stated in several places: the base, the two generations of keys, the files beside."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ropepatch.model.architectures import LOCAL_BASE, STATE_THETA
from ropepatch.model.checks.case import (
    DEFAULT_THETA,
    ORIGINAL,
    THETA_KEYS,
    Case,
    Stated,
    number,
    positive,
)
from ropepatch.model.checks.findings import (
    DROP,
    GENERATION,
    TOKENIZER,
    Edit,
    Finding,
    Key,
    Severity,
    set_all,
    shown,
)
from ropepatch.model.checks.values import configured
from ropepatch.model.config import SCALING_KEYS, WITH_ORIGINAL, is_known, legacy_keys

LLAMA_3_VOCABULARY, LLAMA_3_SIZES = range(128_256, 128_512), (2048, 3072, 4096, 8192, 16_384)
LLAMA_3_THETA = 500_000.0
LOOK_IT_UP = "write the base that the model was pretrained with; its card or the original config.json says it"


def lost_theta(case: Case) -> Iterator[Finding]:
    """A base that nobody states, or not where readers look for it."""
    top = case.at(case.theta_key or "rope_theta")
    stated = next((theta for rope in case.ropes if (theta := rope.number("rope_theta"))), None)
    if case.theta_key and top.value is None:
        yield _missing_theta(case, top, stated, null=True)
    for rope in case.newer:
        if rope.values.get("rope_theta") is None:
            known, null = case.theta if rope in case.newest else None, "rope_theta" in rope.values
            yield _missing_theta(case, rope.at("rope_theta"), known, null=null, scaled=rope.scaled)
    if case.older and not case.theta_key and stated not in (None, DEFAULT_THETA):
        within = any(rope.number("rope_theta") for rope in case.older)
        readers = "transformers 4" if within else "transformers (also 5, where rope_scaling is there)"
        problem = f"rope_theta ({stated:g}) is not beside rope_scaling, where {readers} and mlx-lm read it"
        read = (*top.set(DEFAULT_THETA), *case.at("rope_parameters").set(DROP)) if within else ()
        severity: Severity = "warning" if within else "error"
        remedy = f"write {stated:g} there"
        yield top.finding("theta-lost", problem, remedy, fix=top.set(stated), read=read, severity=severity)
    if not case.newer and not stated and not case.theta_key:
        scaled = any(rope.kind == "llama3" for rope in case.ropes)
        if scaled or is_llama_3(case) or (not case.prefix and case.model_type in STATE_THETA):
            yield _missing_theta(case, top, None, scaled=scaled)
    if (case.theta or stated) == DEFAULT_THETA and is_llama_3(case):
        yield _theta_of_llama_3(case, top, "rope_theta is 10000", "warning" if case.theta_key else "error")


def _missing_theta(
    case: Case, key: Key, known: float | None, *, null: bool = False, scaled: bool = False
) -> Finding:
    """A base that is missing, or null, at which transformers 5 ends in a TypeError."""
    problem, value = f"{key} is {'null' if null else 'missing'}", "null" if null else None
    if not known and is_llama_3(case):
        return _theta_of_llama_3(case, key, problem, "error")
    remedy, fix = (f"write {known:g}, as stated elsewhere", key.set(known)) if known else (LOOK_IT_UP, ())
    severity: Severity = "error" if null or (scaled and not known) else "warning"
    return key.finding("theta-lost", problem, remedy, fix=fix, severity=severity, value=value)


def is_llama_3(case: Case) -> bool:
    """Whether size and vocabulary are those of Llama 3, all of whose models have one base."""
    vocabulary, hidden = case.stated.get("vocab_size"), case.stated.get("hidden_size")
    return case.model_type == "llama" and vocabulary in LLAMA_3_VOCABULARY and hidden in LLAMA_3_SIZES


def _theta_of_llama_3(case: Case, key: Key, problem: str, severity: Severity) -> Finding:
    problem += f", and models of Llama 3's size and vocabulary were pretrained with {LLAMA_3_THETA:g}"
    remedy = f"write {LLAMA_3_THETA:g} if the base model's own config.json says so"
    meant = set_all([key, *(rope.at("rope_theta") for rope in case.newer)], LLAMA_3_THETA)
    return key.finding("theta-lost", problem, remedy, meant=meant, severity=severity)


def contradictions(case: Case) -> Iterator[Finding]:
    """Two places that say different things."""
    older = set_all([case.at("rope_scaling"), case.at(case.theta_key or "rope_theta")], DROP)
    read = case.at("rope_parameters").set(DROP)
    for one, other in _stated_twice(case):
        if one.value != other.value:
            generations = {"rope_scaling", *THETA_KEYS} & {*one.path, *other.path}
            value = shown(one.value)
            problem = f"{one} is {value} and {other} is {shown(other.value)}"
            remedy = "make them agree, by what the model was trained with, or drop the one that is wrong"
            meant = older if case.newer and generations else None
            yield one.finding("keys-contradict", problem, remedy, value=value, meant=meant, read=read)


def _stated_twice(case: Case) -> Iterator[tuple[Key, Key]]:
    """Pairs of keys that should hold the same; of two scalings also where one lacks it."""
    theta = case.at(case.theta_key or "rope_theta")
    if number(theta.value) is not None:
        yield from ((theta, rope.at("rope_theta")) for rope in case.newest if rope.number("rope_theta"))
    for rope in (*case.newer, *case.older):
        for one, other in ((rope.at("rope_type"), rope.at("type")), (case.at(ORIGINAL), rope.at(ORIGINAL))):
            if None not in (one.value, other.value):
                yield one, other
    for new, old in case.pairs:
        if (old.kind or "default") != (new.kind or "default"):
            yield replace(old.at("rope_type"), value=old.kind), replace(new.at("rope_type"), value=new.kind)
            continue
        for key in sorted(SCALING_KEYS - {"rope_type", "type", "rope_theta"}):
            one, other = old.at(key), new.at(key)
            if key != ORIGINAL or None not in (one.value, other.value):
                yield one, other


def one_generation(case: Case) -> Iterator[Finding]:
    """A rope that older readers do not find."""
    partial = [rope for rope in case.newer if _only_share(case, rope)]
    bases = [rope for rope in case.newer if rope.values.get("rope_theta", DEFAULT_THETA) != DEFAULT_THETA]
    scaled = [rope for rope in case.newer if rope.scaled]
    unseen = [] if case.older else [*scaled, *(bases if case.theta_key is None else [])]
    if not (unseen := unseen or partial):
        return
    kinds = dict.fromkeys(str(rope.kind) for rope in unseen)
    key, fix = case.at("rope_parameters"), _older_keys(case, case.newest[0]) if case.newest else ()
    problem = f"the rope ({', '.join(kinds)}) stands in rope_parameters only"
    remedy = "write the older keys beside rope_parameters, saying the same"
    yield key.finding("only-new-keys", problem, remedy, fix=fix, meant=(), read=key.set(DROP))


def _older_keys(case: Case, rope: Stated) -> tuple[Edit, ...]:
    """The keys to add for older readers, if transformers 5 goes on reading the same rope."""
    others_scaled = any(other.scaled for other in case.newer if other is not rope)  # no older key says so
    if not rope.positive("rope_theta") or rope.kind is None or others_scaled:
        return ()
    older: dict[str, Any] = legacy_keys(case.stated, rope.values | {"rope_type": rope.kind})
    if _only_share(case, rope):
        older["partial_rotary_factor"] = rope.values["partial_rotary_factor"]
    if rope.kind in WITH_ORIGINAL and rope.values.get(ORIGINAL) is not None:
        older[ORIGINAL] = rope.values[ORIGINAL]
    sliding = next((other for other in case.newer if other.layer_type == "sliding_attention"), None)
    if sliding and case.model_type in LOCAL_BASE and sliding.number("rope_theta"):
        older["rope_local_base_freq"] = sliding.values["rope_theta"]
    edits = tuple(edit for key, value in older.items() for edit in case.at(key).set(value))
    judged = is_known(case.raw.get("model_type")) or rope.layer_type is not None
    return () if judged and not same_rope(case.raw, case.with_edits(edits).raw) else edits


def _only_share(case: Case, rope: Stated) -> bool:
    """Whether only this object says that part of each head rotates; `proportional` means something else."""
    share, elsewhere = rope.number("partial_rotary_factor"), {"partial_rotary_factor", "rotary_pct"}
    return share not in (None, 1.0) and rope.kind != "proportional" and not elsewhere & case.stated.keys()


def same_rope(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether transformers reads the same rope from two configurations."""
    first, second = (getattr(configured(raw), "rope_parameters", None) for raw in (before, after))
    return first is not None and bool(_plain(first) == _plain(second))


def _plain(parameters: Any) -> Any:
    """Parameters without `type`, the older name of `rope_type`."""
    if not isinstance(parameters, dict):
        return parameters
    return {key: _plain(value) for key, value in parameters.items() if key != "type"}


def record_differs(case: Case) -> Iterator[Finding]:
    """A configuration that is no longer what ropepatch wrote and verified."""
    if case.changed:
        key = case.at(case.changed[0])
        problem = f"{', '.join(case.changed)}: not what ropepatch.json says was written"
        remedy = "compare config.json with config_changes in ropepatch.json"
        yield key.finding("differs-from-record", problem, remedy, value=shown(key.value))


def tokenizer_behind(case: Case) -> Iterator[Finding]:
    """A tokenizer that truncates or warns before the window ends."""
    key, reach = case.companion(TOKENIZER, "model_max_length"), case.reach() or 0
    if (positive(key.value) or math.inf) < reach:
        yield _behind("tokenizer-behind", key, reach)


def generation_behind(case: Case) -> Iterator[Finding]:
    """A generation that stops at the window of pretraining."""
    originals = [*map(case.original, case.ropes), positive(case.record.get(ORIGINAL))]
    pretrained = max(filter(None, originals), default=0.0)
    key, reach = case.companion(GENERATION, "max_length"), case.reach() or 0
    if (positive(key.value) or math.inf) <= pretrained < reach:
        yield _behind("generation-behind", key, reach)


def _behind(code: str, key: Key, reach: float) -> Finding:
    problem = f"{key.name} is {key.value:g}, the model reads {reach:g} tokens"
    return key.finding(code, problem, f"write {reach:g}", fix=key.set(int(reach)))
