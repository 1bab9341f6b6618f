"""What a config.json states, and the rules for it, each with the public thread that it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropepatch.doctor.findings import (
    CONFIG,
    TOKENIZER,
    Edit,
    Finding,
    Keys,
    Rule,
    edited,
    has_errors,
    value_at,
)
from ropepatch.errors import RopepatchError, argument, plain
from ropepatch.model.architectures import (
    GLOBAL_LAYERS,
    LLAMA_3_VOCABULARY,
    LOCAL_BASE,
    REBUILD_CACHE,
    SLIDING_LAYERS,
    STATE_THETA,
    TRAINED_ON,
    needing_older_keys,
    published_length,
    trained_on,
)
from ropepatch.model.config import (
    ORIGINAL,
    SCALING_KEYS,
    SEQUENCE,
    STATING,
    TEXT_PARTS,
    WITH_ORIGINAL,
    WITHOUT_SITE,
    Config,
    default_theta,
    find_rotary,
    legacy_keys,
    read_rope,
    stated_window,
    switches,
    text_config,
)
from ropepatch.scaling.ramps import yarn_temperature
from ropepatch.settings import shown

# Rope types that leave the frequencies unchanged
UNSCALED = (None, "default", "mrope", "axial")
NEWER = "rope_parameters"  # of transformers 5
OLDER = "rope_scaling"  # of programs before it
THETA_KEYS = ("rope_theta", "rotary_emb_base")  # the second is GPT-NeoX's
LOCAL_THETA = "rope_local_base_freq"  # Gemma 3's base of the sliding layers
DEFAULT_THETA = 10_000.0
SHARES = ("partial_rotary_factor", "rotary_pct")
LISTS = ("short_factor", "long_factor")
KNOWN_TYPES = {"default", "axial", "mrope", "xdrope", "ntk_alpha", *ROPE_INIT_FUNCTIONS}
# Names of other programs (deepseek_yarn is vLLM's), or earlier ones, and that of transformers
RENAMED = {"su": "longrope", "deepseek_yarn": "yarn"}
# Up to this ratio of max_position_embeddings to the original length the former was not raised: Qwen3 has
# 40960 and 32768.
LEFT_BEHIND = 1.25
ROUNDING = 0.01  # by how much factor x original may miss the window
MAX_NUMBER = 1e40  # beyond this a number is damage; ropepatch writes 1e30 for a frequency of zero
MAX_ROUNDS = 50  # repairs of one finding each
ALONE = (
    "DeepSeek's own code, SGLang and mlx-lm use one of mscale and mscale_all_dim alone"
)
UNREAD = {  # keys that transformers does not read: their neutral value, and who reads them
    "attn_factor": (1.0, "SGLang multiplies the attention factor by it"),
    "extrapolation_factor": (1.0, "vLLM and SGLang weigh the ramp by it"),
    "mscale": (1.0, ALONE),
    "mscale_all_dim": (0.0, ALONE),
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
    path: Keys

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
        other = self.config.stand_in
        for name in [str(other.section)] if other else TEXT_PARTS:
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
        both = *self.older, *self.newer
        objects = [rope for rope in both if rope.layer in (None, layer)]
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
        every = [rope.number("rope_theta") or 0 for rope in self.scalings]
        return max(every, default=0) or None

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
    thetas = [rope.number("rope_theta") for rope in facts.objects]
    inside = next(filter(None, thetas), None)
    if key in text and text[key] is None:
        yield _no_theta(top, inside, is_error=True)
    for rope in facts.newer:
        if rope.values.get("rope_theta") is None:
            known = number(text.get(key)) if rope is facts.newest else None
            is_error = rope.is_scaled and known is None
            yield _no_theta((*rope.path, "rope_theta"), known, is_error=is_error)
    if key in text:
        return
    if facts.older and inside and inside != DEFAULT_THETA:
        within = any(rope.number("rope_theta") for rope in facts.older)
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
            yield _no_theta(top, None, is_error=is_llama3)


def _no_theta(path: Keys, known: float | None, *, is_error: bool) -> Finding:
    remedy = "write the base from the model's card or its original config.json"
    if known is not None:
        remedy = f"write {plain(known)}, as stated elsewhere"
    return Finding(
        path,
        f"{'.'.join(path)} is missing",
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
    top = Stated(facts.text, None, facts.prefix)
    newest, theta = facts.newest, top.number(facts.theta_key)
    if newest and theta and newest.number("rope_theta"):
        yield _pair(top, facts.theta_key, newest, "rope_theta")
    for rope in facts.objects:
        kinds = rope.values.get("rope_type"), rope.values.get("type")
        # The second is the older name of the first; transformers 5 keeps both.
        if None not in kinds and kinds != ("default", "mrope"):
            yield _pair(rope, "rope_type", rope, "type")
        if None not in (facts.text.get(ORIGINAL), rope.values.get(ORIGINAL)):
            yield _pair(top, ORIGINAL, rope, ORIGINAL)
    for new, old in product(facts.newer, facts.older):
        of_global = old.layer is None and new.layer == GLOBAL_LAYERS
        if new.layer == old.layer or of_global:
            yield from _in_both(old, new)


def _in_both(old: Stated, new: Stated) -> Iterator[tuple[Keys, Any, Keys, Any]]:
    """Yield the keys that rope_scaling and rope_parameters both have for the same layers."""
    if (old.kind or "default") != (new.kind or "default"):
        yield (*old.path, "rope_type"), old.kind, (*new.path, "rope_type"), new.kind
        return
    for key in sorted(SCALING_KEYS - {"rope_type", "type", "rope_theta"}):
        if key != ORIGINAL or None not in (old.values.get(key), new.values.get(key)):
            yield _pair(old, key, new, key)


def _pair(
    one: Stated, key: str, other: Stated, name: str
) -> tuple[Keys, Any, Keys, Any]:
    first, second = one.values.get(key), other.values.get(name)
    return (*one.path, key), first, (*other.path, name), second


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
    usual = [
        rope.values.get("rope_theta") == default_theta(facts.model_type)
        for rope in unseen
        if not rope.is_scaled
    ]
    # transformers 4 takes the default base of a type anyway.
    if usual and all(usual):
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
    if rope is None or rope.kind is None or not rope.number("rope_theta"):
        return ()
    if any(other.is_scaled for other in facts.newer if other is not rope):
        return ()  # no older key for these
    parameters = rope.values | {"rope_type": rope.kind}
    older: dict[str, Any] = legacy_keys(facts.text, parameters)
    if not _has_own_share(facts, rope):
        older.pop("partial_rotary_factor", None)
    if rope.kind in WITH_ORIGINAL and rope.number(ORIGINAL):
        older[ORIGINAL] = rope.values[ORIGINAL]
    for sliding in facts.newer:
        if sliding.layer == SLIDING_LAYERS and facts.model_type in LOCAL_BASE:
            older[LOCAL_THETA] = sliding.values.get("rope_theta")
    text = facts.text | older
    after = facts.raw | {facts.prefix[0]: text} if facts.prefix else text
    if not has_same_rope(facts.raw, after):
        return ()
    return tuple(Edit(facts.top(key), value) for key, value in older.items())


def has_same_rope(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return whether transformers loads the same RoPE from two configurations."""
    first, second = (
        # `type` is the older name of `rope_type`
        [rope.values | {"type": rope.layer} for rope in Facts(Config(raw)).scalings]
        for raw in (before, after)
    )
    return first == second != []


# Rope types and keys


@rule(
    "type-unknown",
    "error",
    "transformers warns, then raises a KeyError when it builds the model",
    "vllm-project/vllm/pull/56446",
    plans=True,
)
def unknown_types(facts: Facts) -> Iterator[Finding]:
    """A rope type that transformers does not have, nor reads as another: Sarvam's deepseek_yarn."""
    if facts.scalings and {str(rope.kind) for rope in facts.scalings} <= KNOWN_TYPES:
        return
    for rope in facts.objects:
        name = str(rope.kind)
        if rope.kind is None or name in KNOWN_TYPES:
            continue
        meant = RENAMED.get(name)
        stated = [key for key in ("rope_type", "type") if key in rope.values]
        yield Finding(
            (*rope.path, stated[0]),
            f"transformers has no rope_type {shown(rope.kind)}",
            f"use {meant or ', '.join(sorted(KNOWN_TYPES))}",
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
            yield Finding(
                (*rope.path, "rope_type"),
                f"rope_type is {rope.kind or 'missing'}, so "
                f"{given[0]} = {shown(rope.values[given[0]])} is ignored",
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
            yield Finding(
                facts.at(key, rope.layer),
                f"transformers does not read {key}: it computes an attention factor of {a:.4f}; {reader}",
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
            yield Finding(
                facts.at("attention_factor", rope.layer),
                f"attention_factor is {a:g}, below 1, although the context grew: it multiplies the logits by "
                f"{a * a:.3g}",
                "drop the key unless the model was trained so",
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
        if not switches(rope.values):
            continue
        switch = plain(rope.number(ORIGINAL) or 0)
        text = f"at {switch} tokens the frequencies switch from short_factor to long_factor"
        severity = "warning"
        if facts.model_type in REBUILD_CACHE:
            text += "; generate() of this architecture rebuilds the cache there"
            severity = "remark"
        yield Finding(
            facts.at("rope_type", rope.layer),
            text,
            "set both lists to the one for your prompt lengths, or keep all prompts on one side",
            severity=severity,
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
            remedy = "write the context length of pretraining"
            factor = rope.number("factor")
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
        elif ratio > LEFT_BEHIND and _decides(rope) and 1 <= factor < ratio * 0.99:
            text = f"factor {factor:g} x {plain(original)} is {plain(factor * original)}, not {window}"
        if text:
            yield Finding(
                facts.at("factor", rope.layer),
                text,
                "use the factor and original length that the model was trained with",
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
    "window-raised",
    "warning",
    "beyond the length that it was trained on, an unscaled model fails",
    "huggingface/sentence-transformers/issues/2738",
    plans=True,
)
def raised_length(facts: Facts) -> Iterator[Finding]:
    """A context length above that of published models of the same shape, without a scaling."""
    if not facts.read or facts.is_scaled or not facts.window or not facts.theta:
        return
    length, name = published_length(facts.read, facts.theta) or (facts.window, "")
    if facts.window <= length or trained_on(facts.read):
        return
    original, published = length, f"{length} tokens"
    if trained := TRAINED_ON.get((facts.model_type, length)):
        original, published = trained, f"{published} (trained on {trained})"
    yield Finding(
        facts.top("max_position_embeddings"),
        f"published models of this shape ({name}) have {published}; {facts.window} without a scaling: "
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
    vocabulary = facts.model_type == "llama" and facts.text.get("vocab_size")
    is_llama_3 = vocabulary in LLAMA_3_VOCABULARY
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
    "not-in-transformers",
    "remark",
    "only config.json could be checked",
    "vllm-project/vllm/pull/56446",
)
def not_in_transformers(facts: Facts) -> Iterator[Finding]:
    """A checkpoint that the installed transformers does not load by itself."""
    config, remedy = facts.config, "none needed"
    text = config.unloaded
    if config.kind != "stock":
        text = f"ropepatch {config.kind} its position encoding"
        remedy = "load it with ropepatch.load, or use the model that it was made from"
    elif not config.is_known:
        text = f"transformers has no model_type {shown(facts.raw.get('model_type'))}"
    if text:
        yield Finding(("model_type",), text, remedy)


@rule(
    "transformers-refuses",
    "error",
    "the checkpoint does not load",
    "vllm-project/vllm/pull/34604",
)
def rejected(facts: Facts) -> Iterator[Finding]:
    """A config.json from which transformers does not build the model and its RoPE."""
    if [*not_in_transformers(facts)] or facts.raw.get("is_encoder_decoder"):
        return
    try:
        _build(facts.config)
    except RopepatchError as error:
        yield Finding((), str(error), error.hint or "fix what the message names")


def _build(config: Config) -> None:
    """Build the model and, if ropepatch supports it, its RoPE."""
    text, model = config.text, config.skeleton
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
            yield RULES[look].found(replace(finding, value=stated))


def repaired(facts: Facts) -> Facts:
    """Repair everything that needs no guess, one finding at a time."""
    for _ in range(MAX_ROUNDS):
        edits = next((finding.edits for finding in check(facts) if finding.edits), ())
        if not edits:
            break
        files = {CONFIG: facts.raw, TOKENIZER: facts.tokenizer}
        for edit in edits:
            files[edit.file] = edited(files[edit.file], edit.path, edit.value)
        facts = Facts(Config(files[CONFIG]), files[TOKENIZER])
    return facts


def plan_findings(config: Config) -> list[Finding]:
    """Return what `plan` warns of in a config.json."""
    looks = [look for look, one in RULES.items() if one.plans]
    return list(_found(Facts(config), looks))


def check_agreement(config: Config) -> None:
    """Raise a `RopepatchError` if config.json contradicts itself, or has another program's rope type."""
    facts = Facts(config)
    renamed = (finding for finding in unknown_types(facts) if finding.edits)
    for finding in (*contradictions(facts), *renamed):
        raise RopepatchError(
            f"config.json: {finding.problem}",
            hint=f"{finding.remedy} (details: ropepatch doctor)",
        )
