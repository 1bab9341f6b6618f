"""What single rope types get wrong, or what their readers do."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from ropepatch.model.architectures import OPEN_RAMP, REBUILD_CACHE
from ropepatch.model.checks.case import Block, Case, number, positive
from ropepatch.model.checks.findings import DROP, Finding, shown
from ropepatch.model.config import SCALING_KEYS
from ropepatch.model.rotary import SEQUENCE, stated_window
from ropepatch.scaling.ramps import yarn_temperature
from ropepatch.scaling.searched import longrope_attention_factor

BETAS = {"yarn": ("beta_fast", "beta_slow"), "llama3": ("high_freq_factor", "low_freq_factor")}
BETA_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0}
USUAL = 1e-3  # how closely an attention factor agrees with a formula
OTHER_KEYS = {
    *("attn_factor", "extrapolation_factor", "finetuned", "alpha", "mixed_b", "partial_rotary_factor"),
    *("mrope_section", "mrope_interleaved", "llama_4_scaling_beta", "xdrope_section"),
    "long_factor_scale",
}


def swapped_bounds(case: Case, block: Block) -> Iterator[Finding]:
    """The bound of the fast pairs below that of the slow ones.

    Mended only where ropepatch recorded what it wrote: transformers computes with such bounds, so that a
    model can have been trained under them. Equal ones are a step, which transformers computes too.
    """
    if block.kind not in BETAS:
        return
    keys = fast, slow = tuple(map(block.at, BETAS[block.kind]))
    bounds = [positive(block.values.get(key.name, BETA_DEFAULTS.get(key.name))) or 0.0 for key in keys]
    if not all(bounds) or bounds[0] >= bounds[1]:
        return
    recorded = [case.recorded_at(key) for key in keys]
    swapped = zip(keys, recorded, reversed(bounds), strict=True)
    edits = tuple(key.set(was or bound) for key, was, bound in swapped)
    yield fast.error(
        "betas-swapped" if block.kind == "yarn" else "bands-swapped",
        f"{fast.name} ({bounds[0]:g}) is not above {slow.name} ({bounds[1]:g})",
        "the ramp runs the wrong way: pairs that should stay are slowed, and the other way round; "
        "transformers only warns",
        "write what ropepatch.json says" if all(recorded) else "swap them, unless the model was trained so",
        value=shown(fast.value),
        mend=edits if all(recorded) else (),
        meant=edits,
    )


def open_ramp(case: Case, block: Block) -> Iterator[Finding]:
    """`truncate: false`, which not every reader reads."""
    key = block.at("truncate")
    if block.kind == "yarn" and key.value is False:
        yield key.finding(
            "remark" if case.model_type in OPEN_RAMP else "warning",
            "truncate-ignored",
            "truncate is false, which some readers ignore",
            "llama.cpp, TGI and mlx-lm round the ends of the ramp all the same, and so compute others"
            if block.layer_type is None
            else "transformers 5 itself does not read it per layer type; llama.cpp, TGI and mlx-lm never do",
            "serve the model with transformers or vLLM, or save the same frequencies as longrope "
            "(ropepatch does so for what yarn cannot say)",
            meant=(),
            read=(key.set(True),),
        )


def attention_factors(case: Case, block: Block) -> Iterator[Finding]:
    """An attention factor of zero, or below one where the context grew.

    One that ropepatch wrote was asked for. Others below one are mended only to what it recorded: a model can
    have been trained under any.
    """
    key, original, window = block.at("attention_factor"), case.original(block), case.window
    a = number(key.value)
    if block.kind not in ("yarn", "longrope") or a is None or not 0 <= a < 1:
        return
    factor = positive(block.values.get("factor")) or (window / original if window and original else 1.0)
    if a == 0:
        edits = (key.set(DROP),)
        yield key.error(
            "attention-factor-zero",
            "attention_factor is 0",
            "transformers honours it: queries and keys become 0 and attention uniform",
            "leave it out, so that readers take the factor of the paper",
            mend=edits,
            meant=edits,
        )
    elif factor > 1 and (recorded := case.recorded_at(key)) != a:
        recorded = positive(recorded)
        exact = abs(a * _usual(block.kind, factor, original) - 1) < USUAL
        edits = (key.set(recorded or 1 / a),)
        yield key.finding(
            "error" if exact else "warning",
            "attention-factor-inverted",
            f"attention_factor is {a:g}, below 1, though the context grew {factor:g} times",
            f"it multiplies the logits by {a * a:.3g}, where longer contexts need sharper attention"
            + (": it is the inverse of the paper's factor" if exact else ""),
            f"write {recorded:g}, as ropepatch.json says"
            if recorded
            else f"write {1 / a:.6g}, unless the model was trained so",
            mend=edits if recorded else (),
            meant=edits,
        )


def _usual(kind: str | None, factor: float, original: float | None) -> float:
    """The attention factor of the paper."""
    if kind == "yarn":
        return yarn_temperature(factor)
    return longrope_attention_factor(factor, original) if original and original > 1 else 1.0


def lone_mscale(case: Case, block: Block) -> Iterator[Finding]:
    """One of two keys that count only together; mscale 1 alone says what every reader takes anyway."""
    present = [name for name in ("mscale", "mscale_all_dim") if block.number(name)]
    usual = block.number("mscale") == 1
    if block.kind == "yarn" and len(present) == 1 and not usual and not block.number("attention_factor"):
        yield block.at(present[0]).warning(
            "mscale-alone",
            f"{present[0]} without the other of mscale and mscale_all_dim",
            "transformers then ignores it and takes 0.1 ln s + 1; DeepSeek's own code, SGLang and mlx-lm "
            "compute with it",
            "write both, or attention_factor",
        )


def longrope_lists(case: Case, block: Block) -> Iterator[Finding]:
    """Lists of factors of another length, or with impossible ones."""
    for key in map(block.at, ("short_factor", "long_factor")):
        factors = key.value
        if block.kind not in ("longrope", "su") or factors is None:
            continue
        if not isinstance(factors, list) or not all(map(positive, factors)):
            yield key.error(
                "impossible-value",
                f"{key.name} is no list of numbers above 0",
                "readers end in a TypeError, or the model computes no number",
                "write one divisor for each rotary pair",
            )
        elif case.pairs and len(factors) != case.pairs:
            yield key.error(
                "list-length",
                f"{key.name} has {len(factors)} entries, the model has {case.pairs} rotary pairs",
                "transformers only warns, then ends in an error when it builds the model",
                "take the lists of this very model",
            )


def switching(case: Case, block: Block) -> Iterator[Finding]:
    """Frequencies that change while keys rotated by the others are in the cache."""
    lists = block.values.get("short_factor"), block.values.get("long_factor")
    dynamic = block.kind == "dynamic" and "alpha" not in block.values
    if not dynamic and not (block.kind == "longrope" and None not in lists and lists[0] != lists[1]):
        return
    rebuilt = not dynamic and case.model_type in REBUILD_CACHE
    where = f"{case.original(block) or case.window or 0:g} tokens"
    yield block.at("rope_type" if "rope_type" in block.values else "type").finding(
        "remark" if rebuilt else "warning",
        "switches-against-cache",
        f"from {where} on the frequencies grow with the sequence"
        if dynamic
        else f"at {where} the frequencies switch from short_factor to long_factor",
        "keys that were cached before keep the old rotation, so that generating across the switch "
        "differs from reading the same text at once, and a long row changes the short ones of its batch"
        + ("; generate() of this architecture drops the cache at the switch" if rebuilt else ""),
        "a static scaling has one rotation for all lengths: ropepatch extend with another method"
        if dynamic
        else "set both lists to the one that fits the lengths served, or keep prompts on one side",
    )


def unread_attention_factor(case: Case, block: Block) -> Iterator[Finding]:
    """LongRoPE's attention factor, where only transformers reads it."""
    key, original, window = block.at("attention_factor"), case.original(block), case.window
    a = number(key.value)
    if block.kind != "longrope" or not a or not original or original <= 1 or not window:
        return
    derived = _usual("longrope", max(window / original, 1), original)
    mscales = [block.at(name) for name in ("short_mscale", "long_mscale")]
    if a < 1 or abs(a / derived - 1) < USUAL or [number(mscale.value) for mscale in mscales] == [a, a]:
        return
    yield key.warning(
        "attention-factor-unread",
        f"attention_factor is {a:g}; vLLM, SGLang, mlx-lm and llama.cpp derive {derived:.6g} instead",
        "they ignore attention_factor under longrope, and compute it from the two windows",
        "write short_mscale and long_mscale beside it, which vLLM and SGLang read",
        mend=tuple(mscale.set(a) for mscale in mscales),
        meant=(),
        read=(key.set(derived),),
    )


def linear_in_vllm(case: Case, block: Block) -> Iterator[Finding]:
    """Linear scaling whose window may be the one before it, by which vLLM multiplies it."""
    key, factor, window = block.at("factor"), block.number("factor"), case.window
    if block.kind != "linear" or not factor or factor <= 1 or not window:
        return
    stated = stated_window(int(window), factor, case.stated.get(SEQUENCE))
    if stated and stated > window:
        return  # both readings are told apart, and vLLM takes the right one
    yield key.remark(
        "linear-multiplied",
        f"vLLM takes max_position_embeddings x factor = {window * factor:g} for the window",
        "it may serve more than the model reads, if max_position_embeddings is extended already "
        "(deepseek-coder); of Vicuna and LongChat it is the window before scaling, and vLLM is right"
        if not stated
        else f"it serves more than the model reads: {SEQUENCE} says {stated}",
        f"pass --max-model-len {window:g} to vLLM, if that is the extended window; "
        f'"{SEQUENCE}": {window:g} or {window * factor:g} in config.json says which it is',
    )


def dual_chunks(case: Case) -> Iterator[Finding]:
    """Qwen's dual chunk attention, which is another way to read far."""
    key = case.at("dual_chunk_attention_config")
    if key.value is not None:
        yield key.remark(
            "dual-chunk-attention",
            "beyond a chunk the model was made to read by dual chunk attention",
            "transformers ignores the key and rotates by the distance itself; vLLM obeyed it up to 0.8.5, "
            "has no backend for it since 0.11.0 (vllm#25351), and may not start with it (vllm#21452)",
            "drop the key and extend the rope, or, in transformers alone, by an attention map: --method dca",
        )


def misspelled_keys(case: Case, block: Block) -> Iterator[Finding]:
    """A key that is nearly one of the known ones."""
    known = SCALING_KEYS | OTHER_KEYS
    for name in block.values:
        near = [] if name in known else difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.85)
        if near:
            lost = near[0] not in block.values
            yield block.at(name).finding(
                "error" if lost else "warning",
                "key-misspelled",
                f"no reader knows {name}; {near[0]} is meant, perhaps",
                "the value has no effect, and readers take a default" if lost else "it has no effect",
                f"rename it to {near[0]}",
                value=shown(block.values[name]),
            )
