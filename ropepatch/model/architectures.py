"""What the structure of a model does not tell: every exception by architecture, a row each.

A new exception for an architecture is one more name in a row, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Exceptional:
    """The architectures that are unlike others in one way; `model_type in row` tells.

    Args:
        model_types: In transformers' words; `*` stands for any letters.
        reason: What is unlike in them.
        version: Of the program whose sources were read, or which was run.
    """

    model_types: frozenset[str]
    reason: str
    version: str

    def __contains__(self, model_type: object) -> bool:
        return any(fnmatchcase(str(model_type), pattern) for pattern in self.model_types)


# What a user should know when such a model is planned.
LOCAL_ONLY = Exceptional(
    frozenset({"cohere2", "cohere2_moe"}),
    "only the sliding-window layers rotate here: the global layers need no scaling to read farther",
    "transformers 5.23",
)
NORMALISED = Exceptional(
    frozenset({"hunyuan_v1_dense", "hunyuan_v1_moe", "llama4_text", "nanochat"}),
    "queries and keys are normalised after rotation here: an attention factor changes nothing",
    "transformers 5.23",
)

# How config.json names and states the rope.
NEOX_KEYS = Exceptional(
    frozenset({"gpt_neox", "gpt_neox_japanese"}),
    "rope_theta is called rotary_emb_base, and partial_rotary_factor rotary_pct",
    "transformers 4",
)
LOCAL_BASE = Exceptional(
    frozenset({"gemma3*"}),
    "the base of the sliding-window layers stands at the top as rope_local_base_freq",
    "transformers 4",
)
STATE_THETA = Exceptional(
    frozenset({"cohere", "cohere2", "deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3_text", "glm"})
    | frozenset({"glm4", "gpt_oss", "granite", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "phi3"})
    | frozenset({"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2"}),
    "they are younger than the key rope_theta, so that every configuration states it",
    "transformers 4",
)
STATE_THETA_LATELY = Exceptional(
    frozenset({"llama", "phi", "stablelm", "persimmon"}),
    "configurations that transformers 4.34 or a later one wrote state rope_theta",
    "transformers 4.34",
)
OPEN_RAMP = Exceptional(
    frozenset({"gpt_oss"}), "the published configuration itself says truncate: false", "transformers 5.23"
)

# What readers do with it.
REFUSED_BY_4 = Exceptional(
    frozenset({"llama4", "llama4_text", "olmo", "olmo2", "phi3", "phi4_multimodal"}),
    "transformers 4 wants other keys in rope_scaling than it does elsewhere",
    "transformers 4.57.6",
)
SCALED_BY_DEFAULT = Exceptional(
    frozenset({"apertus", "gpt_oss"}),
    "transformers 4 scales the rope of a configuration without rope_scaling; null says that it is not scaled",
    "transformers 4.57.6",
)
IGNORED_BY_4 = Exceptional(
    frozenset({"nemotron"}), "transformers 4 does not look at rope_scaling", "transformers 4.57.6"
)
NEWER_THAN_4 = Exceptional(
    frozenset({"ministral3", "qwen3_5*"}), "transformers 4 does not have them", "transformers 4.57.6"
)
UNSCALED_IN_MLX = Exceptional(
    frozenset({"qwen3_5*"}),
    "mlx-vlm and ollama's MLX runner read rope_theta, partial_rotary_factor and mrope_section alone",
    "mlx-vlm issue 1478, ollama 0.33.3 (issue 18262)",
)
REBUILD_CACHE = Exceptional(
    frozenset({"phi3", "phimoe", "phi4_multimodal"}),
    "generate() drops the cache when LongRoPE switches from one list to the other",
    "transformers 5.23",
)
IN_LLAMA_CPP = Exceptional(
    frozenset({"llama", "mistral", "qwen2"}),
    "llama.cpp's LLaMA graph runs them: the tests have compared the logits there",
    "llama.cpp 0c1e57098",
)
SCALED_EMBEDDINGS = Exceptional(
    frozenset({"*gemma*"}),
    "embeddings are multiplied before the first layer: absolute positions would have another weight there",
    "transformers 5.23",
)
