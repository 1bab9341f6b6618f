"""What the structure of a model does not show: exceptions by architecture, a row each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Exceptional:
    """Model types that need special handling; `model_type in row` tells.

    Args:
        model_types: In transformers' words; `*` stands for any letters.
        reason: The difference to others.
        version: Of the program whose sources were read, or which was run.
    """

    model_types: frozenset[str]
    reason: str
    version: str

    def __contains__(self, model_type: object) -> bool:
        return any(fnmatchcase(str(model_type), pattern) for pattern in self.model_types)


def _row(model_types: str, reason: str, version: str) -> Exceptional:
    return Exceptional(frozenset(model_types.split()), reason, version)


T4, T5 = "transformers 4.57.6", "transformers 5.23"

# Remarks of a plan.
LOCAL_ONLY = _row(
    "cohere2 cohere2_moe",
    "only the sliding-window layers rotate here: the global layers need no scaling to read farther",
    T5,
)
NORMALISED = _row(
    "hunyuan_v1_dense hunyuan_v1_moe llama4_text nanochat",
    "queries and keys are normalised after rotation here: an attention factor changes nothing",
    T5,
)

TIED = _row(
    "axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa hy_v4 "
    "longcat_flash minicpm3 mistral4 mistral_large4 youtu",
    "attention multiplies its softmax scale by (0.1 mscale_all_dim ln s + 1)^2, s the factor of the rope",
    T5,
)

# How config.json names and states the rope.
NEOX_KEYS = _row(
    "gpt_neox gpt_neox_japanese", "rotary_emb_base is rope_theta, rotary_pct partial_rotary_factor", T4
)
LOCAL_BASE = _row("gemma3*", "rope_local_base_freq is the base of the sliding-window layers", T4)
STATE_THETA = _row(
    "cohere cohere2 deepseek_v2 deepseek_v3 gemma gemma2 gemma3_text glm glm4 gpt_oss granite mistral "
    "mixtral olmo olmo2 olmo3 phi3 qwen2 qwen2_moe qwen3 qwen3_moe smollm3 starcoder2",
    "younger than the key rope_theta, which every configuration states",
    T4,
)
OPEN_RAMP = _row("gpt_oss", "the published configuration says truncate: false", T5)

# How readers differ.
REFUSED_BY_4 = _row(
    "llama4 llama4_text olmo olmo2 phi3 phi4_multimodal", "transformers 4 wants other rope_scaling keys", T4
)
SCALED_BY_DEFAULT = _row(
    "apertus gpt_oss", "transformers 4 scales the rope where rope_scaling is absent, not where it is null", T4
)
IGNORED_BY_4 = _row("nemotron", "transformers 4 ignores rope_scaling", T4)
NEWER_THAN_4 = _row("ministral3 qwen3_5*", "transformers 4 does not have them", T4)
UNSCALED_IN_MLX = _row(
    "qwen3_5*",
    "mlx-vlm and ollama's MLX runner read rope_theta, partial_rotary_factor and mrope_section alone",
    "mlx-vlm issue 1478, ollama 0.33.3 (issue 18262)",
)
REBUILD_CACHE = _row(
    "phi3 phimoe phi4_multimodal", "generate() drops the cache where LongRoPE switches lists", T5
)
IN_LLAMA_CPP = _row(
    "llama mistral qwen2", "run by llama.cpp's LLaMA graph: logits were compared", "llama.cpp 0c1e57098"
)
SCALED_EMBEDDINGS = _row("*gemma*", "embeddings are multiplied before the first layer", T5)


def remarks(config: PreTrainedConfig) -> Iterator[str]:
    """Yield what to know before a model is extended, a sentence each."""
    yield from (row.reason for row in (LOCAL_ONLY, NORMALISED) if config.model_type in row)
    sliding = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if sliding and not getattr(config, "layer_types", None):
        yield f"sliding_window = {sliding} stays: tokens farther apart than that never attend to each other"
