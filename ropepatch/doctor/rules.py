"""What a config.json states, and the rules for it, each with the public thread that it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from ropepatch.doctor.findings import (
    TOKENIZER,
    Edit,
    Finding,
    Keys,
    Rule,
    edited,
    has_errors,
    shown,
    value_at,
)
from ropepatch.errors import RopepatchError, argument, plain
from ropepatch.model.architectures import (
    GLOBAL_LAYERS,
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
    STATING,
    TEXT_PARTS,
    VENDOR_TYPES,
    WITH_ORIGINAL,
    WITHOUT_SITE,
    Config,
    blueprint,
    default_theta,
    dual_chunk_original,
    find_rotary,
    is_known,
    legacy_keys,
    read_rope,
    stated_window,
    text_config,
)
from ropepatch.scaling.ramps import yarn_temperature

# Rope types that leave the frequencies unchanged
UNSCALED = (None, "default", "mrope", "axial")
NEWER = "rope_parameters"  # of transformers 5
OLDER = "rope_scaling"  # of programs before it
THETA_KEYS = ("rope_theta", "rotary_emb_base")  # the second is GPT-NeoX's
LOCAL_THETA = "rope_local_base_freq"  # Gemma 3's base of the sliding layers
DEFAULT_THETA = 10_000.0
SHARES = ("partial_rotary_factor", "rotary_pct")
LISTS = ("short_factor", "long_factor")
# Up to this ratio of max_position_embeddings to the original length the former was not raised: Qwen3 has
# 40960 and 32768.
LEFT_BEHIND = 1.25
ROUNDING = 0.01  # by how much factor x original may miss the window
MAX_NUMBER = 1e40  # beyond this a number is damage; ropepatch writes 1e30 for a frequency of zero
MAX_ROUNDS = 50  # repairs of one finding each
UNREAD = {  # keys that transformers does not read: their neutral value, and who reads them
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


def number(value: Any) -> float | None:
    """Return a finite number as a float; None for anything else, including booleans."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= MAX_NUMBER else None


def positive(value: Any) -> float | None:
    """Return a finite number above 0; None for anything else."""
    finite = number(value)
    return finite if finite and finite > 0 else None


class Stated(NamedTuple):
    """RoPE parameters as config.json contains them, or as transformers reads them.

    Args:
        values: The parameters.
        layer: The layer type that they are for; None for all layers.
        path: Where config.json contains them.
    """

    values: dict[str, Any]
    layer: str | None
    path: Keys = ()

    @property
    def kind(self) -> Any:
        """The rope type, under either name of the key; None if missing."""
        return self.values.get("rope_type", self.values.get("type"))

    @property
    def is_scaled(self) -> bool:
        """Whether its type changes the frequencies."""
        return self.kind not in UNSCALED

    def number(self, key: str) -> float | None:
        """Return the number above 0 under a key."""
        return positive(self.values.get(key))


def _by_layer(whole: Any, path: Keys = ()) -> list[Stated]:
    """Return one object of RoPE parameters, those of each layer type, or nothing."""
    if not isinstance(whole, dict):
        return []
    layers = {key: value for key, value in whole.items() if isinstance(value, dict)}
    if layers and not whole.keys() & {"rope_type", "type", "factor"}:
        return [
            Stated(values, layer, (*path, layer)) for layer, values in layers.items()
        ]
    return [Stated(whole, None, path)]


@dataclass(frozen=True)
class Facts:
    """What the rules look at.

    Args:
        config: A config.json, which transformers may reject.
        tokenizer: The content of tokenizer_config.json, if there is one.
    """

    config: Config
    tokenizer: dict[str, Any] = field(default_factory=dict)

    @property
    def raw(self) -> dict[str, Any]:
        """The content of config.json."""
        return self.config.raw

    # As it is written

    @cached_property
    def prefix(self) -> Keys:
        """Where config.json describes the language model: at the top level, or in a part."""
        for name in TEXT_PARTS:
            part = self.raw.get(name)
            if isinstance(part, dict) and part.keys() & {"hidden_size", *STATING}:
                return (name,)
        return ()

    @cached_property
    def text(self) -> dict[str, Any]:
        """The description of the language model."""
        part: dict[str, Any] = self.raw[self.prefix[0]] if self.prefix else self.raw
        return part

    @property
    def model_type(self) -> str:
        """The architecture, as transformers names it."""
        return str(self.text.get("model_type", self.raw.get("model_type")))

    @cached_property
    def newer(self) -> list[Stated]:
        """The objects in rope_parameters, which only transformers 5 writes."""
        return _by_layer(self.text.get(NEWER), self.top(NEWER))

    @cached_property
    def older(self) -> list[Stated]:
        """The objects in rope_scaling."""
        return _by_layer(self.text.get(OLDER), self.top(OLDER))

    @property
    def objects(self) -> list[Stated]:
        """The objects in both."""
        return [*self.newer, *self.older]

    @property
    def newest(self) -> Stated | None:
        """The object in rope_parameters whose values the older keys repeat."""
        every = (None, GLOBAL_LAYERS)
        return next((rope for rope in self.newer if rope.layer in every), None)

    @cached_property
    def theta_key(self) -> str:
        """The top-level key of the RoPE base."""
        return next((key for key in THETA_KEYS if key in self.text), THETA_KEYS[0])

    def at(self, key: str, layer: str | None = None) -> Keys:
        """Return where a RoPE parameter of a layer type is written, or should be."""
        objects = [
            rope for rope in (*self.older, *self.newer) if rope.layer in (None, layer)
        ]
        for rope in objects:
            if key in rope.values:
                return (*rope.path, key)
        if key in self.text or not objects:
            return self.top(key)
        return (*objects[0].path, key)

    def top(self, key: str) -> Keys:
        """Return the path of a key of the language model."""
        return (*self.prefix, key)

    # As transformers reads it

    @cached_property
    def read(self) -> PreTrainedConfig | None:
        """The configuration of the language model; None if transformers rejects it."""
        try:
            return text_config(self.config.whole)
        except RopepatchError:
            return None

    @cached_property
    def scalings(self) -> list[Stated]:
        """The RoPE parameters of each layer type."""
        return _by_layer(getattr(self.read, "rope_parameters", None) or None)

    def scaled(self, *kinds: str) -> list[Stated]:
        """Return the RoPE parameters of some rope types."""
        return [rope for rope in self.scalings if rope.kind in kinds]

    @property
    def is_scaled(self) -> bool:
        """Whether any layer type has a scaling."""
        return any(rope.is_scaled for rope in self.scalings)

    @property
    def theta(self) -> float | None:
        """The largest RoPE base of the layer types."""
        every = [rope.number("rope_theta") for rope in self.scalings]
        return max((theta for theta in every if theta), default=None)

    @property
    def window(self) -> int | None:
        """The context length that config.json states, in tokens."""
        window = getattr(self.read, "max_position_embeddings", None)
        return window if type(window) is int and window > 0 else None


# In the order of this file; the last is asked without errors
Look = Callable[[Facts], Iterable[Finding]]
RULES: dict[Look, Rule] = {}


def rule(
    code: str, severity: str, why: str, thread: str, *, plans: bool = False
) -> Callable[[Look], Look]:
    """Add a rule; see `Rule`."""

    def add(look: Look) -> Look:
        RULES[look] = Rule(code, severity, why, thread, plans)
        return look

    return add


# The RoPE base, and the two generations of keys


@rule(
    "theta-lost",
    "error",
    "programs use their own default, mostly 10000, or raise an error",
    "unslothai/unsloth/pull/7028",
    plans=True,
)
def lost_theta(facts: Facts) -> Iterator[Finding]:
    """A RoPE base that is null, missing, or missing where programs expect it."""
    key, text = facts.theta_key, facts.text
    top = facts.top(key)
    thetas = [number(rope.values.get("rope_theta")) for rope in facts.objects]
    inside = next((theta for theta in thetas if theta), None)
    if key in text and text[key] is None:
        yield _no_theta(top, inside, is_null=True, is_scaled=True)
    for rope in facts.newer:
        if rope.values.get("rope_theta") is None:
            known = number(text.get(key)) if rope is facts.newest else None
            is_null = "rope_theta" in rope.values
            place = (*rope.path, "rope_theta")
            yield _no_theta(place, known, is_null=is_null, is_scaled=rope.is_scaled)
    if key in text:
        return
    if facts.older and inside and inside != DEFAULT_THETA:
        within = any(number(rope.values.get("rope_theta")) for rope in facts.older)
        yield Finding(
            top,
            f"rope_theta ({plain(inside)}) is not at the top level, where other programs expect it",
            f"write rope_theta {plain(inside)} next to rope_scaling",
            edits=(Edit(top, inside),),
            severity="warning" if within else "error",
        )
    if not facts.newer and not inside:
        is_llama3 = any(rope.kind == "llama3" for rope in facts.older)
        if is_llama3 or (not facts.prefix and facts.model_type in STATE_THETA):
            yield _no_theta(top, None, is_null=False, is_scaled=is_llama3)


def _no_theta(
    path: Keys, known: float | None, *, is_null: bool, is_scaled: bool
) -> Finding:
    is_error = is_null or (is_scaled and known is None)
    remedy = "write the base from the model's card or its original config.json"
    if known is not None:
        remedy = f"write {plain(known)}, as stated elsewhere"
    return Finding(
        path,
        f"{'.'.join(path)} is {'null' if is_null else 'missing'}",
        remedy,
        edits=() if known is None else (Edit(path, known),),
        severity="error" if is_error else "warning",
    )


@rule(
    "keys-contradict",
    "error",
    "programs use different keys, so they compute different models",
    "vllm-project/vllm/pull/28542",
)
def contradictions(facts: Facts) -> Iterator[Finding]:
    """Two keys with contradicting values."""
    for one, first, other, second in _stated_twice(facts):
        if first != second:
            yield Finding(
                one,
                f"{'.'.join(one)} is {shown(first)} and {'.'.join(other)} is {shown(second)}",
                "set both to the value that the model was trained with, or drop the wrong one",
            )


def _stated_twice(facts: Facts) -> Iterator[tuple[Keys, Any, Keys, Any]]:
    """Yield pairs of keys that should be equal, with their values."""
    top, newest = facts.top(facts.theta_key), facts.newest
    theta = facts.text.get(facts.theta_key)
    if (
        newest
        and number(theta) is not None
        and number(newest.values.get("rope_theta")) is not None
    ):
        yield top, theta, (*newest.path, "rope_theta"), newest.values["rope_theta"]
    for rope in facts.objects:
        kind, older = rope.values.get("rope_type"), rope.values.get("type")
        # The second is the older name of the first; transformers 5 keeps both.
        if None not in (kind, older) and (kind, older) != ("default", "mrope"):
            yield (*rope.path, "rope_type"), kind, (*rope.path, "type"), older
        at_top, inside = facts.text.get(ORIGINAL), rope.values.get(ORIGINAL)
        if None not in (at_top, inside):
            yield facts.top(ORIGINAL), at_top, (*rope.path, ORIGINAL), inside
    for new in facts.newer:
        for old in facts.older:
            of_global = old.layer is None and new.layer == GLOBAL_LAYERS
            if new.layer == old.layer or of_global:
                yield from _in_both(old, new)


def _in_both(old: Stated, new: Stated) -> Iterator[tuple[Keys, Any, Keys, Any]]:
    """Yield the keys that rope_scaling and rope_parameters both have for the same layers."""
    if (old.kind or "default") != (new.kind or "default"):
        yield (*old.path, "rope_type"), old.kind, (*new.path, "rope_type"), new.kind
        return
    for key in sorted(SCALING_KEYS - {"rope_type", "type", "rope_theta"}):
        first, second = old.values.get(key), new.values.get(key)
        if key != ORIGINAL or None not in (first, second):
            yield (*old.path, key), first, (*new.path, key), second


@rule(
    "only-new-keys",
    "warning",
    "these programs silently apply no scaling and a default base, mostly 10000",
    "deepspeedai/DeepSpeed/pull/8345",
)
def only_newer_keys(facts: Facts) -> Iterator[Finding]:
    """RoPE parameters that older programs do not support, where they would take other values."""
    unseen = [rope for rope in facts.newer if _is_unseen(facts, rope)]
    readers = needing_older_keys(str(facts.raw.get("model_type")), facts.model_type)
    default = default_theta(facts.model_type)
    # transformers 4 takes the default base of a type anyway.
    if all(_is_default(rope, default) for rope in unseen):
        readers = [reader for reader in readers if reader != "transformers 4.x"]
    if unseen and readers:
        kinds = ", ".join(dict.fromkeys(str(rope.kind) for rope in unseen))
        yield Finding(
            facts.top(NEWER),
            f"the RoPE parameters ({kinds}) are only in rope_parameters, which {' and '.join(readers)} "
            "cannot read",
            "add the older keys with the same values",
            edits=_older_keys(facts),
        )


def _is_unseen(facts: Facts, rope: Stated) -> bool:
    """Whether programs that do not parse an object of rope_parameters compute something else."""
    if _has_own_share(facts, rope):
        return True
    theta = rope.values.get("rope_theta", DEFAULT_THETA)
    has_own_base = theta != DEFAULT_THETA and facts.theta_key not in facts.text
    return not facts.older and (rope.is_scaled or has_own_base)


def _is_default(rope: Stated, theta: float | None) -> bool:
    return not rope.is_scaled and rope.values.get("rope_theta") == theta


def _has_own_share(facts: Facts, rope: Stated) -> bool:
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
    others = [other for other in facts.newer if other is not rope]
    if any(other.is_scaled for other in others):  # no older key for these
        return ()
    parameters = rope.values | {"rope_type": rope.kind}
    older: dict[str, Any] = legacy_keys(facts.text, parameters)
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
    return tuple(Edit(facts.top(key), value) for key, value in older.items())


def has_same_rope(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return whether transformers loads the same RoPE from two configurations."""
    first, second = (
        _without_type(getattr(Facts(Config(raw)).read, "rope_parameters", None))
        for raw in (before, after)
    )
    return first is not None and bool(first == second)


def _without_type(parameters: Any) -> Any:
    """Drop `type`, the older name of `rope_type`."""
    if not isinstance(parameters, dict):
        return parameters
    return {
        key: _without_type(value) for key, value in parameters.items() if key != "type"
    }


# Rope types and keys


@rule(
    "type-unknown",
    "error",
    "transformers warns, then raises a KeyError when it builds the model",
    "vllm-project/vllm/pull/56446",
    plans=True,
)
def unknown_types(facts: Facts) -> Iterator[Finding]:
    """A rope type that transformers does not have."""
    for rope in facts.objects:
        kind = rope.kind
        name = kind if isinstance(kind, str) else shown(kind)
        if kind is None or name in KNOWN_TYPES:
            continue
        meant, remedy = VENDOR_TYPES.get(
            name, ("", f"use one of {', '.join(sorted(KNOWN_TYPES))}")
        )
        stated = [key for key in ("rope_type", "type") if key in rope.values]
        yield Finding(
            (*rope.path, stated[0]),
            f"transformers has no rope_type {shown(kind)}",
            remedy,
            edits=tuple(Edit((*rope.path, key), meant) for key in stated if meant),
        )


@rule(
    "scaling-ignored",
    "error",
    "RoPE is not scaled, and the factor has no effect",
    "lightseekorg/TorchSpec/pull/103",
    plans=True,
)
def ignored_scaling(facts: Facts) -> Iterator[Finding]:
    """A factor without a type, or of the type default."""
    for rope in facts.objects:
        given = [
            key for key in ("factor", *LISTS) if rope.values.get(key) not in (None, 1)
        ]
        if given and rope.kind in (None, "default"):
            is_missing = "missing" if rope.kind is None else "default"
            yield Finding(
                (*rope.path, "rope_type"),
                f"rope_type is {is_missing}, so {given[0]} = {shown(rope.values[given[0]])} is ignored",
                "write the rope_type that the model was trained with, or drop the factor",
            )


@rule(
    "key-unread",
    "warning",
    "programs compute different models",
    "deepseek-ai/DeepSeek-R1/issues/684",
    plans=True,
)
def unread_keys(facts: Facts) -> Iterator[Finding]:
    """A maker's key of YaRN that transformers does not read, and other programs do."""
    for rope in facts.scaled("yarn"):
        factor, stated = rope.number("factor"), rope.number("attention_factor")
        has_both = rope.number("mscale") and rope.number("mscale_all_dim")
        if not factor:
            continue
        a = stated or yarn_temperature(factor)
        for key, (neutral, reader) in UNREAD.items():
            value = number(rope.values.get(key))
            if value in (None, neutral):
                continue
            if key.startswith("mscale") and (has_both or stated):
                continue
            product = f" ({a * value:.4f})" if key == "attn_factor" and value else ""
            yield Finding(
                facts.at(key, rope.layer),
                f"transformers does not read {key}: it computes an attention factor of {a:.4f}; "
                f"{reader}{product}",
                f"write the attention_factor that the model was trained with, and drop {key}",
            )


@rule(
    "attention-factor-inverted",
    "warning",
    "it flattens attention, but longer contexts need sharper attention",
    "deepseek-ai/DeepSeek-R1/issues/684",
    plans=True,
)
def small_attention_factors(facts: Facts) -> Iterator[Finding]:
    """An attention factor below one, although the context grew."""
    for rope in facts.scaled("yarn", "longrope"):
        a = number(rope.values.get("attention_factor"))
        if a is not None and a < 1 < (rope.number("factor") or 2):
            remedy = "drop the key"
            if a > 0:
                remedy = f"write {1 / a:.6g} unless the model was trained so"
            yield Finding(
                facts.at("attention_factor", rope.layer),
                f"attention_factor is {a:g}, below 1, although the context grew: it multiplies the logits by "
                f"{a * a:.3g}",
                remedy,
            )


@rule(
    "truncate-ignored",
    "warning",
    "llama.cpp, TGI, mlx-lm, and transformers 5 by layer type, use other frequencies",
    "vllm-project/vllm/pull/28244",
)
def open_ramps(facts: Facts) -> Iterator[Finding]:
    """`truncate: false`, which not every program supports."""
    for rope in facts.scaled("yarn"):
        if rope.values.get("truncate") is False:
            yield Finding(
                facts.at("truncate", rope.layer),
                "truncate is false, which some engines ignore",
                "serve the model with transformers, vLLM or SGLang, or save the same frequencies as longrope",
                severity="remark" if facts.model_type in OPEN_RAMP else "warning",
            )


@rule(
    "switches-against-cache",
    "warning",
    "keys cached before the switch keep the old rotation",
    "huggingface/transformers/issues/25104",
)
def switching(facts: Facts) -> Iterator[Finding]:
    """Frequencies that change while the KV cache has keys rotated by the old ones."""
    for rope in facts.scaled("dynamic"):
        if "alpha" not in rope.values:
            yield Finding(
                facts.at("rope_type", rope.layer),
                f"beyond {facts.window} tokens the frequencies change with the sequence length",
                "use a static scaling: ropepatch extend with another method",
            )
    for rope in facts.scaled("longrope"):
        short, long = (rope.values.get(name) for name in LISTS)
        if None in (short, long) or short == long:
            continue
        rebuilt = facts.model_type in REBUILD_CACHE
        switch = plain(rope.number(ORIGINAL) or 0)
        text = f"at {switch} tokens the frequencies switch from short_factor to long_factor"
        if rebuilt:
            text += "; generate() of this architecture rebuilds the cache there"
        yield Finding(
            facts.at("rope_type", rope.layer),
            text,
            "set both lists to the one for your prompt lengths, or keep all prompts on one side",
            severity="remark" if rebuilt else "warning",
        )


# Lengths


@rule(
    "original-missing",
    "error",
    "transformers silently uses max_position_embeddings, perhaps the extended length",
    "hiyouga/LlamaFactory/pull/8101",
    plans=True,
)
def lost_original(facts: Facts) -> Iterator[Finding]:
    """A type that needs the original context length, without it."""
    for rope in facts.objects:
        if rope.kind not in WITH_ORIGINAL:
            continue
        if rope.values.get(ORIGINAL) is None and facts.text.get(ORIGINAL) is None:
            remedy, factor = (
                "write the context length of pretraining",
                rope.number("factor"),
            )
            if facts.window and factor:
                remedy += (
                    f": {plain(facts.window / factor)} if max_position_embeddings is "
                    "the extended length"
                )
            yield Finding(
                (*rope.path, ORIGINAL),
                f"{rope.kind} scaling without {ORIGINAL}",
                remedy,
            )


@rule(
    "factor-contradicts-lengths",
    "error",
    "transformers uses the factor, others the lengths: one result is wrong",
    "huggingface/transformers/issues/38224",
    plans=True,
)
def contradicting_lengths(facts: Facts) -> Iterator[Finding]:
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
            yield Finding(facts.at("factor", rope.layer), text, remedy)


@rule(
    "window-left-behind",
    "remark",
    "Qwen and others document it so; a program that uses it as limit never scales",
    "sgl-project/sglang/issues/2108",
)
def window_left_behind(facts: Facts) -> Iterator[Finding]:
    """A scaling whose length max_position_embeddings does not state."""
    for rope, factor, original, window in _lengths(facts):
        was_raised = not 1 - ROUNDING <= window / original <= LEFT_BEHIND
        is_short = factor * original > window * (1 + ROUNDING)
        if _decides(rope) and is_short and not was_raised:
            reach = plain(factor * original)
            yield Finding(
                facts.top("max_position_embeddings"),
                f"max_position_embeddings is {window}, factor x original length is {reach}",
                f"write {reach}, or pass the longer context length to the engine",
            )


def _lengths(facts: Facts) -> Iterator[tuple[Stated, float, float, int]]:
    """Yield scalings with their factor, their original length and the context length."""
    for rope in facts.scaled(*WITH_ORIGINAL):
        factor, original = rope.number("factor"), rope.number(ORIGINAL)
        if factor and original and facts.window:
            yield rope, factor, original, facts.window


def _decides(rope: Stated) -> bool:
    """Whether transformers computes the frequencies from factor and original length.

    With an attention factor, it does not use LongRoPE's factor. Llama 3's factor is chosen by hand: Llama 3.1
    has factor 8 for 16 times its original length.
    """
    has_factor = rope.number("attention_factor") is not None
    return rope.kind == "yarn" or (rope.kind == "longrope" and not has_factor)


@rule(
    "linear-multiplied",
    "remark",
    "right for Vicuna and LongChat; deepseek-coder states the extended length",
    "NVIDIA-NeMo/Safe-Synthesizer/pull/623",
    plans=True,
)
def multiplied_length(facts: Facts) -> Iterator[Finding]:
    """Linear scaling whose stated length vLLM multiplies by the factor."""
    for rope in facts.scaled("linear"):
        factor, window = rope.number("factor"), facts.window
        if not factor or factor <= 1 or not window:
            continue
        stated = stated_window(window, factor, facts.text.get(SEQUENCE))
        if stated and stated > window:
            continue  # unambiguous, and vLLM uses the right one
        longer = plain(window * factor)
        yield Finding(
            facts.at("factor", rope.layer),
            f"vLLM uses max_position_embeddings x factor = {longer} as context length",
            f"if {window} is the extended length, pass --max-model-len {window} to vLLM; or state the length "
            f'in config.json: "{SEQUENCE}": {window} or {longer}',
        )


@rule(
    "window-with-room",
    "remark",
    "a factor computed from all of it is smaller than the authors' factor",
    "QwenLM/Qwen3/issues/1424",
)
def length_with_room(facts: Facts) -> Iterator[Finding]:
    """A context length above the one that published models of this type were trained on."""
    if facts.read is None or facts.is_scaled:
        return
    if trained := trained_on(facts.read):
        yield Finding(
            facts.top("max_position_embeddings"),
            f"published models of this type state {facts.window} tokens but were trained on {trained}",
            f"extend it with {argument('original', trained)}",
        )


@rule(
    "window-raised",
    "warning",
    "beyond the length that it was trained on, an unscaled model fails",
    "huggingface/sentence-transformers/issues/2738",
    plans=True,
)
def raised_length(facts: Facts) -> Iterator[Finding]:
    """A context length above that of published models of the same shape, without a scaling."""
    if facts.read is None or facts.is_scaled or facts.window is None:
        return
    known = published_length(facts.read, facts.theta)
    if known is None or facts.window <= known.length or trained_on(facts.read):
        return
    original, published = known.length, f"{known.length} tokens"
    if known.trained:
        original, published = known.trained, f"{published} (trained on {known.trained})"
    yield Finding(
        facts.top("max_position_embeddings"),
        f"published models of this shape ({known.name}) have {published}; {facts.window} without a scaling: "
        "raised by hand?",
        f"extend the original model, or name its length: {argument('original', original)}",
    )


@rule(
    "llama3-lost",
    "warning",
    "without it, perplexity rose from 10 to 2134 in this thread",
    "unslothai/unsloth/pull/7028",
    plans=True,
)
def lost_llama3(facts: Facts) -> Iterator[Finding]:
    """A long Llama 3 without the scaling that it was trained with."""
    is_llama = facts.model_type == "llama"
    is_llama_3 = is_llama and facts.text.get("vocab_size") in LLAMA_3_VOCABULARY
    is_long = (facts.window or 0) >= 131_072
    has_base = (facts.theta or 0) <= 500_000  # longer ones raised it
    others = facts.scaled("default", "linear", "dynamic")
    if is_llama_3 and is_long and has_base and others:
        scaling = others[0].kind
        yield Finding(
            facts.at("rope_type"),
            f"Llama 3 at {facts.window} tokens was trained with rope_type llama3; this one has {scaling}",
            "copy rope_scaling from the original config.json, and extend that",
        )


@rule(
    "theta-not-as-published",
    "remark",
    "if the published base was lost, the model produces garbage",
    "arcee-ai/mergekit/issues/667",
    plans=True,
)
def unpublished_theta(facts: Facts) -> Iterator[Finding]:
    """A RoPE base below that of similar published models."""
    vocabulary = positive(facts.text.get("vocab_size"))
    if facts.theta is None or vocabulary is None or facts.window is None:
        return
    known = published_base(facts.model_type, int(vocabulary), facts.window)
    if known and facts.theta < known[0]:
        yield Finding(
            facts.at("rope_theta"),
            f"rope_theta is {plain(facts.theta)}; {known[1]}, of the same type and vocabulary, has "
            f"{plain(known[0])}",
            "check the base on the model's card; Qwen2.5-Math and its derivatives have 10000",
        )


@rule(
    "dual-chunk",
    "remark",
    "SGLang and vLLM build it before they look at a scaling, which they then ignore",
    "sgl-project/sglang/pull/9032",
)
def dual_chunks(facts: Facts) -> Iterator[Finding]:
    """Dual chunk attention, which transformers ignores."""
    original = None if facts.read is None else dual_chunk_original(facts.read)
    if original:
        yield Finding(
            facts.top(DUAL_CHUNK),
            f"transformers ignores it: the model was trained on {original} tokens, and its attention up to "
            f"{facts.window} tokens is vLLM's and SGLang's",
            f"extend it from {original} tokens, which ropepatch does, or use {argument('method', 'dca')}",
        )


@rule(
    "tokenizer-behind",
    "warning",
    "the tokenizer truncates texts there if truncation is on, and else warns",
    "waybarrios/vllm-mlx/pull/626",
)
def tokenizer_behind(facts: Facts) -> Iterator[Finding]:
    """A tokenizer that truncates or warns below the context length."""
    limit = positive(facts.tokenizer.get("model_max_length"))
    reach = facts.window or 0
    for rope, factor, original, window in _lengths(facts):
        if _decides(rope) and window <= LEFT_BEHIND * original:
            reach = max(reach, int(factor * original))
    if limit and limit < reach:
        path = ("model_max_length",)
        yield Finding(
            path,
            f"model_max_length is {plain(limit)}, below the context length of {reach}",
            f"write {reach}",
            edits=(Edit(path, reach, TOKENIZER),),
            file=TOKENIZER,
        )


# Whether stock transformers loads it


@rule(
    "draft-or-remote-code",
    "remark",
    "its RoPE was checked as that of a stock class; its weights were not",
    "vllm-project/vllm/pull/48894",
)
def draft_or_remote_code(facts: Facts) -> Iterator[Finding]:
    """A draft model, or remote code whose RoPE a stock class of transformers reads."""
    if facts.config.unloaded:
        yield Finding(("architectures",), facts.config.unloaded, "none needed")


@rule(
    "not-in-transformers",
    "remark",
    "only config.json could be checked, not the frequencies",
    "vllm-project/vllm/pull/56446",
)
def not_in_transformers(facts: Facts) -> Iterator[Finding]:
    """An architecture that the installed transformers does not have."""
    if facts.config.kind == "stock" and not facts.config.is_known:
        text = f"transformers has no model_type {shown(facts.raw.get('model_type'))}"
        yield Finding(("model_type",), text, "none needed")


@rule(
    "needs-ropepatch",
    "remark",
    "transformers rejects it on purpose: the stated RoPE is not the model's",
    "",
)
def needs_ropepatch(facts: Facts) -> Iterator[Finding]:
    """A checkpoint of ropepatch that stock transformers must reject."""
    kind = facts.config.kind
    if kind != "stock":
        text = f"ropepatch {kind} its position encoding"
        remedy = "load it with ropepatch.load, or use the model that it was made from"
        yield Finding(("model_type",), text, remedy)


@rule(
    "transformers-refuses",
    "error",
    "the checkpoint does not load",
    "vllm-project/vllm/pull/34604",
)
def rejected(facts: Facts) -> Iterator[Finding]:
    """A config.json from which transformers does not build the model and its RoPE."""
    is_stock = facts.config.kind == "stock"
    if not is_stock or not facts.config.is_known or facts.config.unloaded:
        return
    try:
        _build(facts.config)
    except RopepatchError as error:
        yield Finding((), str(error), error.hint or "fix what the message names")


def _build(config: Config) -> None:
    """Build the model and, if ropepatch supports it, its RoPE."""
    text = config.text
    model = blueprint(config.whole)
    try:
        site = find_rotary(model)
    except RopepatchError:  # another architecture, not another config.json
        return
    if site is not WITHOUT_SITE:
        read_rope(text, site)


# What they find


def check(facts: Facts) -> list[Finding]:
    """Apply the rules; whether transformers builds the model is asked only if there is no other error."""
    *others, last = RULES
    findings = list(_found(facts, others))
    if not has_errors(findings):
        findings += _found(facts, [last])
    return findings


def _found(facts: Facts, looks: Iterable[Look]) -> Iterator[Finding]:
    for look in looks:
        for finding in look(facts):
            content = facts.tokenizer if finding.file == TOKENIZER else facts.raw
            stated = value_at(content, finding.path) if finding.path else None
            yield replace(RULES[look].found(finding), value=stated)


def repaired(facts: Facts) -> Facts:
    """Repair everything that needs no guess, one finding at a time."""
    for _ in range(MAX_ROUNDS):
        edits = next((finding.edits for finding in check(facts) if finding.edits), ())
        if not edits:
            break
        raw, tokenizer = facts.raw, facts.tokenizer
        for edit in edits:
            if edit.file == TOKENIZER:
                tokenizer = edited(tokenizer, edit.path, edit.value)
            else:
                raw = edited(raw, edit.path, edit.value)
        facts = Facts(Config(raw), tokenizer)
    return facts


def plan_findings(config: Config) -> list[Finding]:
    """Return what `plan` warns of in a config.json."""
    looks = [look for look, one in RULES.items() if one.plans]
    return list(_found(Facts(config), looks))


def check_agreement(config: Config) -> None:
    """Raise a `RopepatchError` if config.json contradicts itself."""
    for finding in contradictions(Facts(config)):
        raise RopepatchError(
            f"config.json contradicts itself: {finding.problem}", hint=finding.remedy
        )


def explained(config: Config) -> RopepatchError | None:
    """Return the error of a rule for a config.json on which transformers fails, if one has it."""
    for finding in plan_findings(config):
        if finding.severity == "error":
            hint = "run `ropepatch doctor` for details"
            return RopepatchError(f"config.json: {finding.problem}", hint=hint)
    return None
