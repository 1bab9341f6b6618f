"""Tables of exceptions by architecture that the structure of a model does not show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ropepatch.files import PACKAGE, parse_json, read_text

MOST_ADDED = 512  # tokens by which vocabularies of one model family may differ


def _named(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Each comment states what differs, and the version in which the source was read or the code was run.

# Layer types of transformers
GLOBAL_LAYERS = "full_attention"
SLIDING_LAYERS = "sliding_attention"

# Of global and local layers (sliding window or chunks), only the local ones rotate; 5.24.
ROPE_IN_LOCAL_LAYERS = _named(
    "afmoe cohere2 cohere2_moe exaone4 exaone_moe flint kolibri1 lara_mini"
)

# An attention factor changes nothing; 5.23
NORMALISED_AFTER_ROTATION = _named(
    "hunyuan_v1_dense hunyuan_v1_moe llama4_text nanochat"
)

TIED = _named(  # softmax is scaled by (0.1 mscale_all_dim ln s + 1)^2, s the factor; 5.24
    "axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa hy_v4 "
    "hy_v4_vl_text longcat_flash minicpm3 mistral4 mistral_large4_text sarvam_mla youtu"
)

# The RoPE keys of config.json; transformers 4.57.6.
# rotary_emb_base, rotary_pct for partial_rotary_factor
NEOX_KEYS = _named("gpt_neox gpt_neox_japanese")
# rope_local_base_freq is the base of the sliding-window layers
LOCAL_BASE = _named("gemma3 gemma3_text gemma3n gemma3n_text")
STATE_THETA = _named(  # every published configuration contains rope_theta
    "cohere cohere2 deepseek_v2 deepseek_v3 gemma gemma2 gemma3_text glm glm4 gpt_oss granite mistral "
    "mixtral olmo olmo2 olmo3 phi3 qwen2 qwen2_moe qwen3 qwen3_moe smollm3 starcoder2"
)
# Classes of draft models, which borrow the model_type of another; SGLang, vLLM and SpecForge of 2026-09
DRAFTS = re.compile("[Ee]agle|EAGLE|MTP|NextN|DFlash|DSpark|Medusa|Speculator")
DRAFT_KEYS = {"draft_vocab_size", "dflash_config", "speculators_config"}
# The part of speculators' format that describes the layers
SPECULATED = "transformer_layer_config"
# Classes of remote code that read the same RoPE keys as LLaMA; MiniCPM4, MiniCPM-V 4, Nemotron
LLAMA_KEYS = "MiniCPMForCausalLM", "MiniCPMV", "DeciLMForCausalLM"
# The part of InternVL's remote code that a stock class is made from
WRAPPED = "llm_config"
WITHOUT_ROPE = _named(  # hybrids whose attention has no position encoding, or only by an option; 5.23
    "granitemoehybrid jamba kimi_linear nemotron_h zamba zamba2"
)

# How engines differ.
# Scaled if rope_scaling is absent, not null; 4.57.6
SCALED_BY_DEFAULT = _named("apertus gpt_oss")
# generate() at the switch of LongRoPE; 5.23
REBUILD_CACHE = _named("phi3 phimoe phi4_multimodal")
# GGUF architectures for which llama.cpp supports rope.freq_base, linear and YaRN scaling (betas 32 and 1) and
# an attention factor; b11434, as all of these.
GGUF_PLAIN = _named(
    "bailingmoe bailingmoe2 command-r deepseek dots1 ernie4_5 ernie4_5-moe falcon gemma gemma2 glm4 glm4moe "
    "gpt-oss hunyuan-moe internlm2 minimax-m2 nemotron olmo olmoe orion phi2 qwen2 qwen2moe qwen2vl qwen3 "
    "qwen35 qwen35moe qwen3moe qwen3next qwen3vl qwen3vlmoe seed_oss smollm3 stablelm starcoder2 xverse"
)
# The same, and sliding-window layers keep their frequencies
GGUF_GLOBAL = _named("gemma3 gemma3n laguna")
# of these, where the attention factor also applies to the sliding-window layers
GGUF_SHARED_FACTOR = _named("gemma3 gemma3n")
# and rope_freqs, which convert_hf_to_gguf.py writes for llama3
GGUF_FREQS = _named(
    "apertus arcee deci exaone exaone4 granite granitehybrid granitemoe llama minicpm mistral3 nanbeige"
)
# of these, where the file also states YaRN's betas, and yarn_log_multiplier divides the attention factor
GGUF_YARN_KEYS = _named("mistral3")
# A false rope.scaling.finetuned turns RoPE off
GGUF_ROPE_SWITCH = _named("granite granitehybrid granitemoe")
# With this number of layers, only sliding-window layers rotate
GGUF_LOCAL_ROPE = {"exaone4": 64}
GGUF_FACTORS = _named("phi3 phimoe")  # and rope_factors_long and _short
GGUF_KNOWN = GGUF_PLAIN | GGUF_GLOBAL | GGUF_FREQS | GGUF_FACTORS
# convert_hf_to_gguf.py drops any rope_scaling of these
GGUF_DROPPED = _named("command-r falcon gemma gemma2 phi2 stablelm")
GGUF_OTHERWISE = _named("nemotron phi3 phimoe")  # and writes another scaling for these
GGUF_RENAMED = {
    "mistral": "llama",
    "mixtral": "llama",
    "cohere": "command-r",
    "phi": "phi2",
    "hunyuan_v1_moe": "hunyuan-moe",
    "qwen2_5_vl_text": "qwen2vl",
}
SCALED_EMBEDDINGS = frozenset(  # multiplied before the first layer; 5.23
    name for name in CONFIG_MAPPING if "gemma" in name
)
# Without a beginning-of-sequence token in each window they predict little; lm-evaluation-harness#1465.
BOS_IN_EACH_WINDOW = SCALED_EMBEDDINGS


# The original context length of published models, by type and a larger max_position_embeddings
TRAINED_ON = {
    ("qwen2", 131_072): 32_768,  # Qwen2.5 from 7B on
    ("qwen3", 40_960): 32_768,
    ("qwen3_moe", 40_960): 32_768,
}


LLAMA_3_VOCABULARY = range(128_256, 128_512)


def gguf_architecture(model_type: str) -> str | None:
    """Return the GGUF name of an architecture; None if its graph in llama.cpp was not examined."""
    name = GGUF_RENAMED.get(model_type) or model_type.removesuffix("_text")
    return next((one for one in GGUF_KNOWN if _letters(one) == _letters(name)), None)


def _letters(name: str) -> str:
    return name.replace("_", "").replace("-", "")


def trained_on(config: PreTrainedConfig) -> int | None:
    """Return the original context length of published models whose configuration states another."""
    parameters = getattr(config, "rope_parameters", None) or {}
    scaled = parameters.get("rope_type", "default") != "default"
    stated = str(config.model_type), getattr(config, "max_position_embeddings", 0)
    return None if scaled else TRAINED_ON.get(stated)


@cache
def published() -> dict[str, dict[str, Any]]:
    """Return the config.json of published models by name."""
    presets = parse_json(read_text(PACKAGE / "gallery" / "presets.json"))
    return {preset["model"]: preset["config"] for preset in presets}


def published_length(config: PreTrainedConfig, theta: float) -> tuple[int, str] | None:
    """Return the longest context length of published models of the same shape, and the name of one.

    These are not scaled, and have no smaller base.
    """
    lengths = []
    sizes = "model_type", "hidden_size", "num_hidden_layers"
    for name, raw in published().items():
        other = raw | raw.get("text_config", {})
        rope = other.get("rope_parameters") or {}
        base = other.get("rope_theta") or rope.get("rope_theta") or 10_000.0
        apart = abs(other.get("vocab_size", 0) - getattr(config, "vocab_size", 0))
        same_shape = all(other[size] == getattr(config, size, None) for size in sizes)
        kind = rope.get("rope_type", "default")
        is_scaled = other.get("rope_scaling") or kind != "default"
        if same_shape and apart < MOST_ADDED and not is_scaled and theta <= base:
            lengths.append((other["max_position_embeddings"], name))
    return max(lengths, default=None)


class LocalRope(NamedTuple):
    """The local layers (sliding or chunked attention) that use the one RoPE of the model.

    Args:
        layers: Their number.
        of: The number of all layers.
        window: The sliding window or chunk, in tokens.
        shared: Whether global-attention layers rotate, too.
    """

    layers: int
    of: int
    window: int
    shared: bool


LOCAL_WINDOWS = {
    SLIDING_LAYERS: "sliding_window",
    "chunked_attention": "attention_chunk_size",
}


def local_rope(config: PreTrainedConfig) -> LocalRope | None:
    """Return the local layers of a model with one RoPE; None if it does not mix them with global ones."""
    kinds = getattr(config, "layer_types", None) or []
    local = next((kind for kind in LOCAL_WINDOWS if kind in kinds), None)
    if local is None or GLOBAL_LAYERS not in kinds:
        return None
    shared = str(config.model_type) not in ROPE_IN_LOCAL_LAYERS
    # 1 for a layer with RoPE, as in Llama 4
    if rotates := getattr(config, "no_rope_layers", None):
        shared = (1, GLOBAL_LAYERS) in zip(rotates, kinds, strict=False)
    window = getattr(config, LOCAL_WINDOWS[local])
    return LocalRope(kinds.count(local), len(kinds), window, shared)


def remarks(config: PreTrainedConfig) -> Iterator[str]:
    """Yield remarks for the plan of a model, one sentence each."""
    if str(config.model_type) in NORMALISED_AFTER_ROTATION:
        yield "queries and keys are normalised after rotation here: an attention factor changes nothing"
    sliding = getattr(config, "sliding_window", None)
    is_used = getattr(config, "use_sliding_window", True)
    kinds = getattr(config, "layer_types", None) or [SLIDING_LAYERS]
    if sliding and is_used and {*kinds} == {SLIDING_LAYERS}:
        yield f"sliding_window {sliding} does not change: tokens farther apart do not attend to each other"


# From eval/results/engine-types.json, by docs/tables.py
ENGINE_TYPES = PACKAGE / "model" / "engine_types.json"

OTHER_TYPES = "*"  # all other rope types
TESTED = "default", "linear", "yarn", "llama3", "longrope"

ABSENT, NOT_KNOWN = "absent", "not known"


class Found(NamedTuple):
    """The support of a rope type for an architecture in an engine.

    Args:
        how: `run` if small random models were run in the engine, `read` if its source was read, else None.
        verdict: `right`, `unscaled`, `refused`, `another rope`, `absent` or `not known`.
    """

    how: Literal["run", "read"] | None
    verdict: str


def found(engine: str, whole: str, text: str, rope_type: str) -> Found:
    """Look up whether an engine supports a rope type.

    Args:
        engine: transformers 4.x, vLLM, SGLang or mlx-lm.
        whole: The architecture, as transformers names it.
        text: The architecture of its language model; the same for a text-only model.
        rope_type: The rope type in config.json.
    """
    if not may_have(engine, whole):
        return Found("read", ABSENT)
    rows = _engine_rows(engine)
    how, verdicts = rows.get(whole if whole == text else f"{whole}/{text}") or rows.get(
        text, (None, {})
    )
    verdict = NOT_KNOWN
    # Or all scalings share one verdict
    if rope_type in TESTED or len({*verdicts} - {"default"}) == 1:
        verdict = verdicts.get(rope_type) or verdicts.get(OTHER_TYPES, NOT_KNOWN)
    # It may exist as a part of the multimodal model only
    if verdict == NOT_KNOWN or (verdict == ABSENT and whole != text):
        return Found(None, NOT_KNOWN)
    return Found(how, verdict)


def may_have(engine: str, model_type: str) -> bool:
    """Return whether an engine has an architecture; True if its architectures are not listed."""
    types = engine_facts(engine).get("types")
    return types is None or model_type in types.split()


def needing_older_keys(whole: str, text: str) -> list[str]:
    """Return the engines that are known to run an architecture without parsing its `rope_parameters`."""
    engines = []
    if may_have("transformers 4.x", whole) and may_have("transformers 4.x", text):
        engines.append("transformers 4.x")
    newer = engine_facts("mlx-lm")["new_keys"].split()
    verdict = found("mlx-lm", whole, text, "default").verdict
    if verdict not in (ABSENT, NOT_KNOWN) and not {whole, text}.intersection(newer):
        engines.append("mlx-lm")
    return engines


def engine_facts(engine: str) -> dict[str, Any]:
    """Return what is known of an engine: its architectures, and verdicts by rope type."""
    return _engine_types().get(engine, {"rows": []})  # nothing is known of others


@cache
def _engine_types() -> dict[str, dict[str, Any]]:
    facts: dict[str, dict[str, Any]] = parse_json(read_text(ENGINE_TYPES))
    return facts


@cache
def _engine_rows(engine: str) -> dict[str, tuple[Any, dict[str, str]]]:
    """How the verdicts were obtained, and the verdicts by rope type, for every architecture."""
    return {
        name: (how, verdicts)
        for how, verdicts, names in engine_facts(engine)["rows"]
        for name in names.split()
    }
