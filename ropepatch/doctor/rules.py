"""The rules for a config.json: one list, each with the public thread that it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from ropepatch.doctor.facts import (
    LEFT_BEHIND,
    NEWER,
    Facts,
    Scaling,
    Written,
    number,
    positive,
)
from ropepatch.doctor.findings import (
    CONFIG,
    TOKENIZER,
    Edit,
    Finding,
    Keys,
    Problem,
    Rule,
    has_errors,
    shown,
)
from ropepatch.errors import RopepatchError, argument, plain
from ropepatch.model.architectures import (
    LLAMA_3_VOCABULARY,
    LOCAL_BASE,
    OPEN_RAMP,
    REBUILD_CACHE,
    SLIDING_LAYERS,
    STATE_THETA,
    needing_older_keys,
    published_base,
    published_length,
    trained_on,
)
from ropepatch.model.config import (
    DUAL_CHUNK,
    KNOWN_TYPES,
    ORIGINAL,
    SCALING_KEYS,
    SEQUENCE,
    VENDOR_TYPES,
    WITH_ORIGINAL,
    blueprint,
    check_rope_types,
    default_theta,
    differs_by_layer,
    dual_chunk_original,
    find_rotary,
    generates,
    is_known,
    kind_of,
    legacy_keys,
    load_config,
    read_rope,
    stated_class,
    stated_window,
    text_config,
)
from ropepatch.scaling.ramps import yarn_temperature

DEFAULT_THETA = 10_000.0
LOCAL_THETA = "rope_local_base_freq"  # Gemma 3's base of the sliding layers
SHARES = ("partial_rotary_factor", "rotary_pct")
LISTS = ("short_factor", "long_factor")
MAX_ROUNDS = 50  # repairs of one finding each
ROUNDING = 0.01  # by how much factor x original may miss the window


# The RoPE base, and the two generations of keys


def lost_theta(facts: Facts) -> Iterator[Problem]:
    """A RoPE base that is null, missing, or missing where programs expect it."""
    top, text = facts.theta_key, facts.text
    at_top = number(text.get(top))
    inside = [
        theta
        for rope in (*facts.newer, *facts.older)
        if (theta := number(rope.values.get("rope_theta")))
    ]
    place = (*facts.prefix, top)
    if top in text and text[top] is None:
        yield _no_theta(
            place, inside[0] if inside else None, is_null=True, is_scaled=True
        )
    for rope in facts.newer:
        if rope.values.get("rope_theta") is None:
            known = at_top if rope is facts.newest else None
            is_null = "rope_theta" in rope.values
            yield _no_theta(
                (*rope.path, "rope_theta"),
                known,
                is_null=is_null,
                is_scaled=rope.is_scaled,
            )
    if facts.older and top not in text and inside and inside[0] != DEFAULT_THETA:
        within = any(number(rope.values.get("rope_theta")) for rope in facts.older)
        readers = (
            "transformers 4 and mlx-lm expect"
            if within
            else "transformers and mlx-lm expect"
        )
        base = plain(inside[0])
        yield Problem(
            place,
            f"rope_theta ({base}) is not at the top level, where {readers} it",
            f"write rope_theta {base} next to rope_scaling",
            edits=(Edit(CONFIG, place, inside[0]),),
            severity="warning" if within else "error",
        )
    if not facts.newer and not inside and top not in text:
        is_llama3 = any(rope.kind == "llama3" for rope in facts.older)
        if is_llama3 or (not facts.prefix and facts.model_type in STATE_THETA):
            yield _no_theta(place, None, is_null=False, is_scaled=is_llama3)


def _no_theta(
    path: Keys, known: float | None, *, is_null: bool, is_scaled: bool
) -> Problem:
    is_error = is_null or (is_scaled and known is None)
    remedy = "write the base from the model's card or its original config.json"
    if known is not None:
        remedy = f"write {plain(known)}, as stated elsewhere"
    return Problem(
        path,
        f"{'.'.join(path)} is {'null' if is_null else 'missing'}",
        remedy,
        edits=() if known is None else (Edit(CONFIG, path, known),),
        severity="error" if is_error else "warning",
    )


def contradictions(facts: Facts) -> Iterator[Problem]:
    """Two keys with contradicting values."""
    for one, first, other, second in _stated_twice(facts):
        if first != second:
            yield Problem(
                one,
                f"{'.'.join(one)} is {shown(first)} and {'.'.join(other)} is {shown(second)}",
                "set both to the value that the model was trained with, or drop the wrong one",
                value=first,
            )


def _stated_twice(facts: Facts) -> Iterator[tuple[Keys, Any, Keys, Any]]:
    """Yield pairs of keys that should be equal, with their values."""
    top, newest = (*facts.prefix, facts.theta_key), facts.newest
    theta = facts.text.get(facts.theta_key)
    if (
        newest
        and number(theta) is not None
        and number(newest.values.get("rope_theta")) is not None
    ):
        yield top, theta, (*newest.path, "rope_theta"), newest.values["rope_theta"]
    for rope in (*facts.newer, *facts.older):
        kinds = rope.values.get("rope_type"), rope.values.get("type")
        # The second is the older name of the first; transformers 5 keeps both.
        if None not in kinds and kinds != ("default", "mrope"):
            yield (*rope.path, "rope_type"), kinds[0], (*rope.path, "type"), kinds[1]
        originals = facts.text.get(ORIGINAL), rope.values.get(ORIGINAL)
        if None not in originals:
            yield (
                (*facts.prefix, ORIGINAL),
                originals[0],
                (*rope.path, ORIGINAL),
                originals[1],
            )
    for new, old in facts.pairs:
        if (old.kind or "default") != (new.kind or "default"):
            yield (*old.path, "rope_type"), old.kind, (*new.path, "rope_type"), new.kind
            continue
        for key in sorted(SCALING_KEYS - {"rope_type", "type", "rope_theta"}):
            first, second = old.values.get(key), new.values.get(key)
            if key != ORIGINAL or None not in (first, second):
                yield (*old.path, key), first, (*new.path, key), second


def only_newer_keys(facts: Facts) -> Iterator[Problem]:
    """RoPE parameters that older programs do not support, where they would take other values."""
    unseen = [rope for rope in facts.newer if _is_unseen(facts, rope)]
    readers = needing_older_keys(str(facts.raw.get("model_type")), facts.model_type)
    default = default_theta(facts.model_type)
    # transformers 4 takes the default base of a type anyway.
    if all(_is_default(rope, default) for rope in unseen):
        readers = [reader for reader in readers if reader != "transformers 4.x"]
    if unseen and readers:
        kinds = ", ".join(dict.fromkeys(str(rope.kind) for rope in unseen))
        do_not = "do not" if len(readers) > 1 else "does not"
        yield Problem(
            (*facts.prefix, NEWER),
            f"the RoPE parameters ({kinds}) are only in rope_parameters, which {' and '.join(readers)} "
            f"{do_not} support",
            "add the older keys with the same values",
            value=facts.text[NEWER],
            edits=_older_keys(facts),
        )


def _is_unseen(facts: Facts, rope: Written) -> bool:
    """Whether programs that do not parse an object of rope_parameters compute something else."""
    if _has_own_share(facts, rope):
        return True
    theta = rope.values.get("rope_theta", DEFAULT_THETA)
    has_own_base = theta != DEFAULT_THETA and facts.theta_key not in facts.text
    return not facts.older and (rope.is_scaled or has_own_base)


def _is_default(rope: Written, theta: float | None) -> bool:
    return not rope.is_scaled and rope.values.get("rope_theta") == theta


def _has_own_share(facts: Facts, rope: Written) -> bool:
    """Whether only this object has a partial_rotary_factor (not that of `proportional`)."""
    share = number(rope.values.get("partial_rotary_factor"))
    return (
        share not in (None, 1.0)
        and rope.kind != "proportional"
        and not facts.text.keys() & {*SHARES}
    )


def _older_keys(facts: Facts) -> tuple[Edit, ...]:
    """Return the keys to add for older programs, if transformers 5 still loads the same RoPE."""
    rope = facts.newest
    if rope is None or rope.kind is None or not positive(rope.values.get("rope_theta")):
        return ()
    if any(
        other.is_scaled for other in facts.newer if other is not rope
    ):  # no older key for these
        return ()
    older: dict[str, Any] = legacy_keys(
        facts.text, rope.values | {"rope_type": rope.kind}
    )
    if not _has_own_share(facts, rope):
        older.pop("partial_rotary_factor", None)
    if rope.kind in WITH_ORIGINAL and rope.values.get(ORIGINAL) is not None:
        older[ORIGINAL] = rope.values[ORIGINAL]
    sliding = next((one for one in facts.newer if one.layer == SLIDING_LAYERS), None)
    if sliding and facts.model_type in LOCAL_BASE and sliding.values.get("rope_theta"):
        older[LOCAL_THETA] = sliding.values["rope_theta"]
    text = facts.text | older
    after = facts.raw | {facts.prefix[0]: text} if facts.prefix else text
    is_judged = is_known(facts.raw.get("model_type")) or rope.layer is not None
    if is_judged and not has_same_rope(facts.raw, after):
        return ()
    return tuple(
        Edit(CONFIG, (*facts.prefix, key), value) for key, value in older.items()
    )


def has_same_rope(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return whether transformers loads the same RoPE from two configurations."""
    first, second = (_rope_of(Facts(raw).config) for raw in (before, after))
    return first is not None and bool(first == second)


def _rope_of(config: PreTrainedConfig | None) -> Any:
    return _without_type(getattr(config, "rope_parameters", None))


def _without_type(parameters: Any) -> Any:
    """Drop `type`, the older name of `rope_type`."""
    if not isinstance(parameters, dict):
        return parameters
    return {
        key: _without_type(value) for key, value in parameters.items() if key != "type"
    }


# Rope types and keys


def unknown_types(facts: Facts) -> Iterator[Problem]:
    """A rope type that transformers does not have."""
    for rope in (*facts.newer, *facts.older):
        kind = rope.kind
        name = kind if isinstance(kind, str) else shown(kind)
        if kind is None or name in KNOWN_TYPES:
            continue
        meant, remedy = VENDOR_TYPES.get(
            name, ("", f"use one of {', '.join(sorted(KNOWN_TYPES))}")
        )
        stated = [key for key in ("rope_type", "type") if key in rope.values]
        yield Problem(
            (*rope.path, stated[0]),
            f"transformers has no rope_type {shown(kind)}",
            remedy,
            value=kind,
            edits=tuple(
                Edit(CONFIG, (*rope.path, key), meant) for key in stated if meant
            ),
        )


def ignored_scaling(facts: Facts) -> Iterator[Problem]:
    """A factor without a type, or of the type default."""
    for rope in (*facts.newer, *facts.older):
        given = [
            key for key in ("factor", *LISTS) if rope.values.get(key) not in (None, 1)
        ]
        if given and rope.kind in (None, "default"):
            is_missing = "missing" if rope.kind is None else "default"
            yield Problem(
                (*rope.path, "rope_type"),
                f"rope_type is {is_missing}, so {given[0]} = {shown(rope.values[given[0]])} is ignored",
                "write the rope_type that the model was trained with, or drop the factor",
                value=rope.kind,
            )


def null_head_dim(facts: Facts) -> Iterator[Problem]:
    """A missing head size, under a type that needs it."""
    kinds = [
        rope.kind
        for rope in (*facts.newer, *facts.older)
        if rope.kind in ("yarn", "longrope", "dynamic")
    ]
    if not kinds or differs_by_layer(facts.config):
        return
    stated = facts.text.get("head_dim", "missing")
    size = (
        stated if facts.config is None else getattr(facts.config, "head_dim", "missing")
    )
    if size is not None:
        return
    path = (*facts.prefix, "head_dim")
    hidden, heads = (
        positive(facts.text.get(key)) for key in ("hidden_size", "num_attention_heads")
    )
    edits = (
        (Edit(CONFIG, path, int(hidden // heads)),)
        if hidden and heads and hidden >= heads
        else ()
    )
    yield Problem(
        path,
        f"head_dim is {'null' if stated is None else 'missing'}, but rope_type {kinds[0]} needs it",
        "write hidden_size / num_attention_heads, the meaning of null",
        edits=edits,
    )


READERS = {  # of keys that transformers does not read, with their neutral value
    "attn_factor": (1.0, "SGLang multiplies the attention factor by it"),
    "extrapolation_factor": (1.0, "vLLM and SGLang weigh the ramp by it"),
    "mscale": (
        1.0,
        "DeepSeek's own code, SGLang and mlx-lm use it without mscale_all_dim",
    ),
    "mscale_all_dim": (
        0.0,
        "DeepSeek's own code, SGLang and mlx-lm use it without mscale",
    ),
}


def unread_keys(facts: Facts) -> Iterator[Problem]:
    """A maker's key of YaRN that transformers does not read, and other programs do."""
    for rope in facts.scaled("yarn"):
        factor, stated = rope.number("factor"), rope.number("attention_factor")
        has_both = rope.number("mscale") and rope.number("mscale_all_dim")
        if not factor:
            continue
        a = stated or yarn_temperature(factor)
        for key, (neutral, reader) in READERS.items():
            value = number(rope.values.get(key))
            if value in (None, neutral) or (
                key.startswith("mscale") and (has_both or stated)
            ):
                continue
            product = f" ({a * value:.4f})" if key == "attn_factor" and value else ""
            yield Problem(
                facts.at(key, rope.layer),
                f"transformers does not read {key}: it computes an attention factor of {a:.4f}; "
                f"{reader}{product}",
                f"write the attention_factor that the model was trained with, and drop {key}",
                value=value,
            )


def small_attention_factors(facts: Facts) -> Iterator[Problem]:
    """An attention factor below one, although the context grew."""
    for rope in facts.scaled("yarn", "longrope"):
        a = number(rope.values.get("attention_factor"))
        if a is not None and a < 1 and _growth(facts, rope) > 1:
            remedy = (
                f"write {1 / a:.6g} unless the model was trained so"
                if a > 0
                else "drop the key"
            )
            yield Problem(
                facts.at("attention_factor", rope.layer),
                f"attention_factor is {a:g}, below 1, although the context grew: it multiplies the logits by "
                f"{a * a:.3g}",
                remedy,
                value=a,
            )


def _growth(facts: Facts, rope: Scaling) -> float:
    """Return how many times longer the scaled context is than the original one."""
    original = rope.number(ORIGINAL)
    if factor := rope.number("factor"):
        return factor
    return facts.window / original if facts.window and original else 1.0


def open_ramps(facts: Facts) -> Iterator[Problem]:
    """`truncate: false`, which not every program supports."""
    for rope in facts.scaled("yarn"):
        if rope.values.get("truncate") is False:
            yield Problem(
                facts.at("truncate", rope.layer),
                "truncate is false, which some engines ignore",
                "serve the model with transformers, vLLM or SGLang, or save the same frequencies as longrope",
                value=False,
                severity="remark" if facts.model_type in OPEN_RAMP else "warning",
            )


def switching(facts: Facts) -> Iterator[Problem]:
    """Frequencies that change while the KV cache has keys rotated by the old ones."""
    for rope in facts.scaled("dynamic"):
        if "alpha" not in rope.values:
            yield Problem(
                facts.at("rope_type", rope.layer),
                f"beyond {facts.window} tokens the frequencies change with the sequence length",
                "use a static scaling: ropepatch extend with another method",
                value="dynamic",
            )
    for rope in facts.scaled("longrope"):
        short, long = (rope.values.get(name) for name in LISTS)
        if None in (short, long) or short == long:
            continue
        rebuilt = facts.model_type in REBUILD_CACHE
        text = f"at {plain(rope.number(ORIGINAL) or 0)} tokens the frequencies switch from short_factor to "
        text += "long_factor"
        if rebuilt:
            text += "; generate() of this architecture rebuilds the cache there"
        yield Problem(
            facts.at("rope_type", rope.layer),
            text,
            "set both lists to the one for your prompt lengths, or keep all prompts on one side",
            value="longrope",
            severity="remark" if rebuilt else "warning",
        )


# Lengths


def lost_original(facts: Facts) -> Iterator[Problem]:
    """A type that needs the original context length, without it."""
    for rope in (*facts.newer, *facts.older):
        if rope.kind not in WITH_ORIGINAL:
            continue
        if rope.values.get(ORIGINAL) is None and facts.text.get(ORIGINAL) is None:
            remedy, factor = (
                "write the context length of pretraining",
                positive(rope.values.get("factor")),
            )
            if facts.window and factor:
                probable = plain(facts.window / factor)
                remedy += (
                    f": {probable} if max_position_embeddings is the extended length"
                )
            yield Problem(
                (*rope.path, ORIGINAL),
                f"{rope.kind} scaling without {ORIGINAL}",
                remedy,
            )


def contradicting_lengths(facts: Facts) -> Iterator[Problem]:
    """A context length below the original one, or above factor x original length."""
    for rope, factor, original, window in _lengths(facts):
        text, ratio = "", window / original
        if ratio < 1 - ROUNDING:
            text = f"max_position_embeddings ({window}) is below {ORIGINAL} ({plain(original)})"
        elif (
            ratio > LEFT_BEHIND
            and _decides(rope)
            and 1 <= factor < ratio * (1 - ROUNDING)
        ):
            text = f"factor {factor:g} x {plain(original)} is {plain(factor * original)}, not {window}"
        if text:
            remedy = (
                "use the factor and original length that the model was trained with"
            )
            yield Problem(facts.at("factor", rope.layer), text, remedy, value=factor)


def window_left_behind(facts: Facts) -> Iterator[Problem]:
    """A scaling whose length max_position_embeddings does not state."""
    for rope, factor, original, window in _lengths(facts):
        was_raised = not 1 - ROUNDING <= window / original <= LEFT_BEHIND
        if (
            _decides(rope)
            and not was_raised
            and factor * original > window * (1 + ROUNDING)
        ):
            reach = plain(factor * original)
            yield Problem(
                (*facts.prefix, "max_position_embeddings"),
                f"max_position_embeddings is {window}, factor x original length is {reach}",
                f"write {reach}, or pass the longer context length to the engine",
                value=window,
            )


def _lengths(facts: Facts) -> Iterator[tuple[Scaling, float, float, int]]:
    """Yield scalings with their factor, their original length and the context length."""
    for rope in facts.scaled(*WITH_ORIGINAL):
        factor, original = rope.number("factor"), rope.number(ORIGINAL)
        if factor and original and facts.window:
            yield rope, factor, original, facts.window


def _decides(rope: Scaling) -> bool:
    """Whether transformers computes the frequencies from factor and original length.

    With an attention factor, it does not use LongRoPE's factor. Llama 3's factor is chosen by hand: Llama 3.1
    has factor 8 for 16 times its original length.
    """
    kind = rope.values["rope_type"]
    return kind == "yarn" or (
        kind == "longrope" and rope.number("attention_factor") is None
    )


def multiplied_length(facts: Facts) -> Iterator[Problem]:
    """Linear scaling whose stated length vLLM multiplies by the factor."""
    for rope in facts.scaled("linear"):
        factor, window = rope.number("factor"), facts.window
        if not factor or factor <= 1 or not window:
            continue
        stated = stated_window(window, factor, facts.text.get(SEQUENCE))
        if stated and stated > window:
            continue  # unambiguous, and vLLM uses the right one
        longer = plain(window * factor)
        yield Problem(
            facts.at("factor", rope.layer),
            f"vLLM uses max_position_embeddings x factor = {longer} as context length",
            f"if {window} is the extended length, pass --max-model-len {window} to vLLM; or state the length "
            f'in config.json: "{SEQUENCE}": {window} or {longer}',
            value=factor,
        )


def length_with_room(facts: Facts) -> Iterator[Problem]:
    """A context length above the one that published models of this type were trained on."""
    trained = (
        None if facts.config is None or facts.is_scaled else trained_on(facts.config)
    )
    if trained:
        yield Problem(
            (*facts.prefix, "max_position_embeddings"),
            f"published models of this type state {facts.window} tokens but were trained on {trained}",
            f"extend it with {argument('original', trained)}",
            value=facts.window,
        )


def raised_length(facts: Facts) -> Iterator[Problem]:
    """A context length above that of published models of the same shape, without a scaling."""
    if facts.config is None or facts.is_scaled or facts.window is None:
        return
    known = published_length(facts.config, facts.theta)
    if known is None or facts.window <= known.length or trained_on(facts.config):
        return
    original, published = known.length, f"{known.length} tokens"
    if known.trained:
        original, published = known.trained, f"{published} (trained on {known.trained})"
    yield Problem(
        (*facts.prefix, "max_position_embeddings"),
        f"published models of this shape ({known.name}) have {published}; {facts.window} without a scaling: "
        "raised by hand?",
        f"extend the original model, or name its length: {argument('original', original)}",
        value=facts.window,
    )


def lost_llama3(facts: Facts) -> Iterator[Problem]:
    """A long Llama 3 without the scaling that it was trained with."""
    is_llama_3 = (
        facts.model_type == "llama"
        and facts.text.get("vocab_size") in LLAMA_3_VOCABULARY
    )
    is_long = (facts.window or 0) >= 131_072 and (
        facts.theta or 0
    ) <= 500_000  # longer ones raised the base
    others = facts.scaled("default", "linear", "dynamic")
    if is_llama_3 and is_long and others:
        scaling = others[0].values["rope_type"]
        yield Problem(
            facts.at("rope_type"),
            f"Llama 3 at {facts.window} tokens was trained with rope_type llama3; this one has {scaling}",
            "copy rope_scaling from the original config.json, and extend that",
        )


def unpublished_theta(facts: Facts) -> Iterator[Problem]:
    """A RoPE base below that of similar published models."""
    vocabulary = positive(facts.text.get("vocab_size"))
    if facts.theta is None or vocabulary is None or facts.window is None:
        return
    known = published_base(facts.model_type, int(vocabulary), facts.window)
    if known and facts.theta < known[0]:
        yield Problem(
            facts.at("rope_theta"),
            f"rope_theta is {plain(facts.theta)}; {known[1]}, of the same type and vocabulary, has "
            f"{plain(known[0])}",
            "check the base on the model's card; Qwen2.5-Math and its derivatives have 10000",
            value=facts.theta,
        )


def dual_chunks(facts: Facts) -> Iterator[Problem]:
    """Dual chunk attention, which transformers ignores."""
    original = None if facts.config is None else dual_chunk_original(facts.config)
    if original:
        yield Problem(
            (*facts.prefix, DUAL_CHUNK),
            f"transformers ignores it: the model was trained on {original} tokens, and its attention up to "
            f"{facts.window} tokens is vLLM's and SGLang's",
            f"extend it from {original} tokens, which ropepatch does, or use {argument('method', 'dca')}",
        )


def tokenizer_behind(facts: Facts) -> Iterator[Problem]:
    """A tokenizer that truncates or warns below the context length."""
    limit = positive(facts.tokenizer.get("model_max_length"))
    if limit and facts.reach and limit < facts.reach:
        path = ("model_max_length",)
        yield Problem(
            path,
            f"model_max_length is {plain(limit)}, below the context length of {facts.reach}",
            f"write {facts.reach}",
            value=facts.tokenizer["model_max_length"],
            edits=(Edit(TOKENIZER, path, facts.reach),),
            file=TOKENIZER,
        )


# Whether stock transformers loads it


def no_language_model(facts: Facts) -> Iterator[Problem]:
    """A class without a language model head: a classifier, a reranker or an embedding model."""
    kind = None if facts.config is None else stated_class(load_config(facts.raw))
    if kind:
        text = f"architectures names {kind.__name__}, which has no language model head"
        yield Problem(("architectures",), text, "none needed")


def not_in_transformers(facts: Facts) -> Iterator[Problem]:
    """An architecture that the installed transformers does not have."""
    kind = facts.raw.get("model_type")
    if kind_of(facts.raw) == "stock" and not is_known(kind):
        yield Problem(
            ("model_type",),
            f"transformers has no model_type {shown(kind)}",
            "none needed",
            value=kind,
        )


def needs_ropepatch(facts: Facts) -> Iterator[Problem]:
    """A checkpoint of ropepatch that stock transformers must reject."""
    texts = {
        "swapped": "ropepatch replaced RoPE with another position encoding",
        "mapped": "it uses a position remapping, whose code is in its folder",
    }
    if text := texts.get(kind_of(facts.raw)):
        remedy = (
            "load it with ropepatch.load, or use the checkpoint that it was made from"
        )
        yield Problem(("model_type",), text, remedy, value=facts.raw["model_type"])


def rejected(facts: Facts) -> Iterator[Problem]:
    """A config.json from which transformers does not build the model and its RoPE."""
    if kind_of(facts.raw) != "stock" or not is_known(facts.raw.get("model_type")):
        return
    try:
        _build(facts.raw)
    except RopepatchError as error:
        yield Problem((), str(error), error.hint or "fix what the message names")


def _build(raw: dict[str, Any]) -> None:
    """Build the model and, if ropepatch supports it, its RoPE."""
    config = load_config(raw)
    text = text_config(config)
    check_rope_types(text)
    kind = stated_class(config)
    if kind is None and not generates(config.model_type):
        return
    model = blueprint(config, kind)
    try:
        site = find_rotary(model)
    except RopepatchError:  # another architecture, not another config.json
        return
    read_rope(text, site)


GITHUB = "https://github.com"
REFUSES = Rule(
    "transformers-refuses",
    "error",
    "the checkpoint does not load",
    f"{GITHUB}/vllm-project/vllm/pull/34604",
    rejected,
)
CONTRADICTS = Rule(
    "keys-contradict",
    "error",
    "programs use different keys, so they compute different models",
    f"{GITHUB}/vllm-project/vllm/pull/28542",
    contradictions,
)
RULES = (
    Rule(
        "theta-lost",
        "error",
        "programs use their own default, mostly 10000, or raise an error",
        f"{GITHUB}/unslothai/unsloth/pull/7028",
        lost_theta,
        plans=True,
    ),
    CONTRADICTS,
    Rule(
        "only-new-keys",
        "warning",
        "these programs silently apply no scaling and a default base, mostly 10000",
        f"{GITHUB}/deepspeedai/DeepSpeed/pull/8345",
        only_newer_keys,
    ),
    Rule(
        "type-unknown",
        "error",
        "transformers warns, then raises a KeyError when it builds the model",
        f"{GITHUB}/vllm-project/vllm/pull/56446",
        unknown_types,
        plans=True,
    ),
    Rule(
        "scaling-ignored",
        "error",
        "RoPE is not scaled, and the factor has no effect",
        f"{GITHUB}/lightseekorg/TorchSpec/pull/103",
        ignored_scaling,
        plans=True,
    ),
    Rule(
        "head-dim-null",
        "error",
        "transformers 5 raises a TypeError",
        f"{GITHUB}/HabanaAI/vllm-fork/pull/1294",
        null_head_dim,
        plans=True,
    ),
    Rule(
        "key-unread",
        "warning",
        "programs compute different models",
        f"{GITHUB}/deepseek-ai/DeepSeek-R1/issues/684",
        unread_keys,
        plans=True,
    ),
    Rule(
        "attention-factor-inverted",
        "warning",
        "it flattens attention, but longer contexts need sharper attention",
        f"{GITHUB}/deepseek-ai/DeepSeek-R1/issues/684",
        small_attention_factors,
        plans=True,
    ),
    Rule(
        "truncate-ignored",
        "warning",
        "llama.cpp, TGI, mlx-lm, and transformers 5 by layer type, use other frequencies",
        f"{GITHUB}/vllm-project/vllm/pull/28244",
        open_ramps,
    ),
    Rule(
        "switches-against-cache",
        "warning",
        "keys cached before the switch keep the old rotation",
        f"{GITHUB}/huggingface/transformers/issues/25104",
        switching,
    ),
    Rule(
        "original-missing",
        "error",
        "transformers silently uses max_position_embeddings, perhaps the extended length",
        f"{GITHUB}/hiyouga/LlamaFactory/pull/8101",
        lost_original,
        plans=True,
    ),
    Rule(
        "factor-contradicts-lengths",
        "error",
        "transformers uses the factor, others the lengths: one result is wrong",
        f"{GITHUB}/huggingface/transformers/issues/38224",
        contradicting_lengths,
        plans=True,
    ),
    Rule(
        "window-left-behind",
        "remark",
        "Qwen and others document it so; a program that uses it as limit never scales",
        f"{GITHUB}/sgl-project/sglang/issues/2108",
        window_left_behind,
    ),
    Rule(
        "linear-multiplied",
        "remark",
        "right for Vicuna and LongChat; deepseek-coder states the extended length",
        f"{GITHUB}/NVIDIA-NeMo/Safe-Synthesizer/pull/623",
        multiplied_length,
    ),
    Rule(
        "window-with-room",
        "remark",
        "a factor computed from all of it is smaller than the authors' factor",
        f"{GITHUB}/QwenLM/Qwen3/issues/1424",
        length_with_room,
    ),
    Rule(
        "window-raised",
        "warning",
        "beyond the length that it was trained on, an unscaled model fails",
        f"{GITHUB}/huggingface/sentence-transformers/issues/2738",
        raised_length,
        plans=True,
    ),
    Rule(
        "llama3-lost",
        "warning",
        "without it, perplexity rose from 10 to 2134 in this thread",
        f"{GITHUB}/unslothai/unsloth/pull/7028",
        lost_llama3,
        plans=True,
    ),
    Rule(
        "theta-not-as-published",
        "remark",
        "if the published base was lost, the model produces garbage",
        f"{GITHUB}/arcee-ai/mergekit/issues/667",
        unpublished_theta,
        plans=True,
    ),
    Rule(
        "dual-chunk",
        "remark",
        "SGLang and vLLM build it before they look at a scaling, which they then ignore",
        f"{GITHUB}/sgl-project/sglang/pull/9032",
        dual_chunks,
    ),
    Rule(
        "tokenizer-behind",
        "warning",
        "the tokenizer truncates texts there if truncation is on, and else warns",
        f"{GITHUB}/waybarrios/vllm-mlx/pull/626",
        tokenizer_behind,
    ),
    Rule(
        "no-language-model",
        "remark",
        "ropepatch extends causal language models",
        f"{GITHUB}/vllm-project/vllm/pull/19260",
        no_language_model,
    ),
    Rule(
        "not-in-transformers",
        "remark",
        "only config.json could be checked, not the frequencies",
        f"{GITHUB}/vllm-project/vllm/pull/56446",
        not_in_transformers,
    ),
    Rule(
        "needs-ropepatch",
        "remark",
        "transformers rejects it on purpose: the stated RoPE is not the model's",
        "",
        needs_ropepatch,
    ),
    REFUSES,
)


def check(facts: Facts) -> list[Finding]:
    """Apply the rules; whether transformers builds the model is asked only if there is no other error."""
    findings = list(_found(facts, [rule for rule in RULES if rule is not REFUSES]))
    if not has_errors(findings):
        findings += _found(facts, [REFUSES])
    return findings


def _found(facts: Facts, rules: Iterable[Rule]) -> Iterator[Finding]:
    for rule in rules:
        for problem in rule.look(facts):
            value = facts.value(problem.path) if problem.file == CONFIG else None
            yield rule.finding(
                problem if problem.value is not None else replace(problem, value=value)
            )


def repaired(facts: Facts) -> Facts:
    """Repair everything that needs no guess, one finding at a time."""
    for _ in range(MAX_ROUNDS):
        edits = next((finding.edits for finding in check(facts) if finding.edits), ())
        if not edits:
            break
        facts = facts.with_edits(edits)
    return facts


# For `plan`


def plan_findings(raw: dict[str, Any]) -> list[Finding]:
    """Return what `plan` warns of in a config.json."""
    return list(_found(Facts(raw), [rule for rule in RULES if rule.plans]))


def check_agreement(raw: dict[str, Any]) -> None:
    """Raise a `RopepatchError` if config.json contradicts itself."""
    for problem in contradictions(Facts(raw)):
        raise RopepatchError(
            f"config.json contradicts itself: {problem.text}", hint=problem.remedy
        )


@contextmanager
def explained(raw: dict[str, Any]) -> Iterator[None]:
    """If transformers fails on config.json within the block, raise the error of a rule, if one has it."""
    try:
        yield
    except RopepatchError as error:
        for finding in plan_findings(raw):
            if finding.severity == "error" and error.__cause__ is not None:
                hint = "run `ropepatch doctor` for details"
                raise RopepatchError(
                    f"config.json: {finding.problem}", hint=hint
                ) from error
        raise
