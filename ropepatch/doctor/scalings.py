"""What single rope types get wrong, or what their readers do."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from typing import Any

from ropepatch.doctor.case import Case, positive
from ropepatch.doctor.findings import DROP, Finding, Mend, shown
from ropepatch.extension.forms import SCALING_KEYS
from ropepatch.model.architectures import OPEN_RAMP, REBUILD_CACHE

BETAS = {"yarn": ("beta_fast", "beta_slow"), "llama3": ("high_freq_factor", "low_freq_factor")}
BETA_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0}
USUAL = 1e-3  # how closely an attention factor agrees with a formula
OTHER_KEYS = {
    *("attn_factor", "extrapolation_factor", "finetuned", "alpha", "mixed_b", "partial_rotary_factor"),
    *("mrope_section", "mrope_interleaved", "llama_4_scaling_beta", "xdrope_section"),
    "long_factor_scale",
}


def swapped_bounds(case: Case) -> Iterator[Finding]:
    """The bound of the fast pairs below that of the slow ones.

    Mended only where ropepatch recorded what it wrote: transformers computes with such bounds, so that a
    model can have been trained under them. Equal ones are a step, which transformers computes too.
    """
    for block in case.blocks:
        if block.kind not in BETAS:
            continue
        fast, slow = BETAS[block.kind]
        bounds = [positive(block.values.get(key, BETA_DEFAULTS.get(key))) or 0.0 for key in (fast, slow)]
        if not all(bounds) or bounds[0] >= bounds[1]:
            continue
        recorded = [case.recorded_at(block, key) for key in (fast, slow)]
        edits = tuple(
            block.edit(key, wrote or bound)
            for key, wrote, bound in zip((fast, slow), recorded, reversed(bounds), strict=True)
        )
        yield Finding(
            "betas-swapped" if block.kind == "yarn" else "bands-swapped",
            "error",
            f"{fast} ({bounds[0]:g}) is not above {slow} ({bounds[1]:g})",
            "the ramp runs the wrong way: pairs that should stay are slowed, and the other way round; "
            "transformers only warns",
            "write what ropepatch.json says"
            if all(recorded)
            else "swap them, unless the model was trained so",
            key=block.key(fast),
            value=shown(block.values.get(fast)),
            mend=Mend(edits) if all(recorded) else None,
            meant=edits,
        )


def open_ramp(case: Case) -> Iterator[Finding]:
    """`truncate: false`, which not every reader reads."""
    for block in case.blocks:
        if block.kind != "yarn" or block.values.get("truncate", True) is not False:
            continue
        nested = block.layer_type is not None
        rounded = (block.edit("truncate", True),)
        yield Finding(
            "truncate-ignored",
            "remark" if case.model_type in OPEN_RAMP else "warning",
            "truncate is false, which some readers ignore",
            "transformers 5 itself does not read it per layer type; llama.cpp, TGI and mlx-lm never do"
            if nested
            else "llama.cpp, TGI and mlx-lm round the ends of the ramp all the same, and so compute others",
            "serve the model with transformers or vLLM, or save the same frequencies as longrope "
            "(ropepatch does so for what yarn cannot say)",
            key=block.key("truncate"),
            value="false",
            meant=(),
            read=rounded,
        )


def attention_factors(case: Case) -> Iterator[Finding]:
    """An attention factor of zero, or below one where the context grew.

    One that ropepatch wrote was asked for. Others below one are mended only to what it recorded: a model can
    have been trained under any.
    """
    for block in case.blocks:
        a, original = block.number("attention_factor"), case.original(block)
        if block.kind not in ("yarn", "longrope") or a is None or not 0 <= a < 1:
            continue
        factor = positive(block.values.get("factor")) or (
            case.window / original if case.window and original else 1.0
        )
        if a == 0:
            edits = (block.edit("attention_factor", DROP),)
            yield Finding(
                "attention-factor-zero",
                "error",
                "attention_factor is 0",
                "transformers honours it: queries and keys become 0 and attention uniform",
                "leave it out, so that readers take the factor of the paper",
                key=block.key("attention_factor"),
                value=shown(block.values["attention_factor"]),
                mend=Mend(edits),
                meant=edits,
            )
        elif factor > 1 and (recorded := case.recorded_at(block, "attention_factor")) != a:
            recorded = positive(recorded)
            exact = abs(a * _usual(block.kind, factor, original) - 1) < USUAL
            edits = (block.edit("attention_factor", recorded or 1 / a),)
            yield Finding(
                "attention-factor-inverted",
                "error" if exact else "warning",
                f"attention_factor is {a:g}, below 1, though the context grew {factor:g} times",
                f"it multiplies the logits by {a * a:.3g}, where longer contexts need sharper attention"
                + (": it is the inverse of the paper's factor" if exact else ""),
                f"write {recorded:g}, as ropepatch.json says"
                if recorded
                else f"write {1 / a:.6g}, unless the model was trained so",
                key=block.key("attention_factor"),
                value=shown(block.values["attention_factor"]),
                mend=Mend(edits) if recorded else None,
                meant=edits,
            )


def _usual(kind: Any, factor: float, original: float | None) -> float:
    """The attention factor of the paper."""
    if kind == "yarn":
        return 0.1 * math.log(factor) + 1
    return math.sqrt(1 + math.log(factor) / math.log(original)) if original and original > 1 else 1.0


def lone_mscale(case: Case) -> Iterator[Finding]:
    """One of two keys that count only together; mscale 1 alone says what every reader takes anyway."""
    for block in case.blocks:
        there = [key for key in ("mscale", "mscale_all_dim") if block.number(key)]
        usual = block.number("mscale") == 1
        if block.kind == "yarn" and len(there) == 1 and not usual and not block.number("attention_factor"):
            yield Finding(
                "mscale-alone",
                "warning",
                f"{there[0]} without the other of mscale and mscale_all_dim",
                "transformers then ignores it and takes 0.1 ln s + 1; DeepSeek's own code, SGLang and mlx-lm "
                "compute with it",
                "write both, or attention_factor",
                key=block.key(there[0]),
                value=shown(block.values[there[0]]),
            )


def longrope_lists(case: Case) -> Iterator[Finding]:
    """Lists of factors of another length, or with impossible ones."""
    for block in case.blocks:
        for name in ("short_factor", "long_factor"):
            factors = block.values.get(name)
            if block.kind not in ("longrope", "su") or factors is None:
                continue
            if not isinstance(factors, list) or not all(map(positive, factors)):
                yield Finding(
                    "impossible-value",
                    "error",
                    f"{name} is no list of numbers above 0",
                    "readers end in a TypeError, or the model computes no number",
                    "write one divisor for each rotary pair",
                    key=block.key(name),
                    value=shown(factors),
                )
            elif case.pairs and len(factors) != case.pairs:
                yield Finding(
                    "list-length",
                    "error",
                    f"{name} has {len(factors)} entries, the model has {case.pairs} rotary pairs",
                    "transformers only warns, then ends in an error when it builds the model",
                    "take the lists of this very model",
                    key=block.key(name),
                    value=shown(factors),
                )


def switching(case: Case) -> Iterator[Finding]:
    """Frequencies that change while keys rotated by the others are in the cache."""
    for block in case.blocks:
        lists = block.values.get("short_factor"), block.values.get("long_factor")
        dynamic = block.kind == "dynamic" and "alpha" not in block.values
        if not dynamic and not (block.kind == "longrope" and None not in lists and lists[0] != lists[1]):
            continue
        rebuilt = not dynamic and case.model_type in REBUILD_CACHE
        where = f"{case.original(block) or case.window or 0:g} tokens"
        yield Finding(
            "switches-against-cache",
            "remark" if rebuilt else "warning",
            f"from {where} on the frequencies grow with the sequence"
            if dynamic
            else f"at {where} the frequencies switch from short_factor to long_factor",
            "keys that were cached before keep the old rotation, so that generating across the switch "
            "differs from reading the same text at once, and a long row changes the short ones of its batch"
            + ("; generate() of this architecture drops the cache at the switch" if rebuilt else ""),
            "a static scaling has one rotation for all lengths: ropepatch extend with another method"
            if dynamic
            else "set both lists to the one that fits the lengths served, or keep prompts on one side",
            key=block.key("rope_type" if "rope_type" in block.values else "type"),
            value=shown(block.kind),
        )


def unread_attention_factor(case: Case) -> Iterator[Finding]:
    """LongRoPE's attention factor, where only transformers reads it."""
    for block in case.blocks:
        a, original, window = block.number("attention_factor"), case.original(block), case.window
        if block.kind != "longrope" or not a or not original or original <= 1 or not window:
            continue
        derived = _usual("longrope", max(window / original, 1), original)
        mscales = [block.number(key) for key in ("short_mscale", "long_mscale")]
        if a < 1 or abs(a / derived - 1) < USUAL or mscales == [a, a]:
            continue
        edits = tuple(block.edit(key, a) for key in ("short_mscale", "long_mscale"))
        yield Finding(
            "attention-factor-unread",
            "warning",
            f"attention_factor is {a:g}; vLLM, SGLang, mlx-lm and llama.cpp derive {derived:.6g} instead",
            "they ignore attention_factor under longrope, and compute it from the two windows",
            "write short_mscale and long_mscale beside it, which vLLM and SGLang read",
            key=block.key("attention_factor"),
            value=shown(block.values["attention_factor"]),
            mend=Mend(edits),
            meant=(),
            read=(block.edit("attention_factor", derived),),
        )


def linear_in_vllm(case: Case) -> Iterator[Finding]:
    """Linear scaling, by which vLLM multiplies the window."""
    for block in case.blocks:
        factor = block.number("factor")
        if block.kind == "linear" and factor and factor > 1 and case.window:
            yield Finding(
                "linear-multiplied",
                "remark",
                f"vLLM takes max_position_embeddings x factor = {case.window * factor:g} for the window",
                "it may serve more than the model reads, if max_position_embeddings is extended already",
                f"pass --max-model-len {case.window:g} to vLLM, if that is the extended window",
                key=block.key("factor"),
                value=shown(block.values["factor"]),
            )


def misspelled_keys(case: Case) -> Iterator[Finding]:
    """A key that is nearly one of the known ones."""
    known = SCALING_KEYS | OTHER_KEYS
    for block in case.blocks:
        for key in block.values.keys() - known:
            if near := difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.85):
                lost = near[0] not in block.values
                yield Finding(
                    "key-misspelled",
                    "error" if lost else "warning",
                    f"no reader knows {key}; {near[0]} is meant, perhaps",
                    "the value has no effect, and readers take a default" if lost else "it has no effect",
                    f"rename it to {near[0]}",
                    key=block.key(key),
                    value=shown(block.values[key]),
                )
