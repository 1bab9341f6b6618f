"""Estimates of what runs of a model cost, from its configuration: operations, memory, and time on a card.

Memory is for decoders with attention and an MLP in every layer, without a [T, T] mask and with logits
computed in chunks; it is without fragmentation of the allocator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from ropepatch.model.config import differs_by_layer, head_dim_of, key_value_heads_of

GIB = 2**30
CHUNK = 1024  # positions whose logits are in memory at once
HOUR = {"cpu": 5e14, "cuda": 1e18}  # operations per hour, roughly
CARDS = {"cpu": "two CPU cores", "cuda": "an H100"}  # those of `HOUR`


@dataclass(frozen=True)
class Cost:
    """An estimate of what a run costs in each of its processes.

    Args:
        steps: Its steps, of a training; its sequences, of an evaluation.
        tokens: The tokens that it reads, over all processes.
        memory: The largest memory of a process, in GiB.
        host: The memory of the host for what is offloaded to it, in GiB.
        hours: The time on the card.
        card: What the hours are for.
    """

    steps: int
    tokens: int
    memory: float
    hours: float
    card: str
    host: float = 0.0

    def __str__(self) -> str:
        time = (
            f"{self.hours:,.1f} h" if self.hours >= 1 else f"{60 * self.hours:.0f} min"
        )
        host = f" and {self.host:.1f} GiB of the host" if self.host else ""
        return (
            f"{self.steps:,} steps, {self.tokens:,} tokens, {self.memory:.1f} GiB{host}, {time} on "
            f"{self.card} (estimates)"
        )


def kind_of(device: str) -> str:
    """Return the entry of `HOUR` that is nearest to a type of device."""
    return "cuda" if device == "cuda" else "cpu"


def forward_operations(config: Any, weights: int, tokens: int) -> int:
    """Count the operations of a forward pass: two per weight and token, plus causal attention."""
    queries = int(config.num_attention_heads) * head_dim_of(config)
    return 2 * tokens * (weights + int(config.num_hidden_layers) * queries * tokens)


def cache_bytes(config: PreTrainedConfig, tokens: int, itemsize: int = 2) -> int | None:
    """Return the bytes of the KV cache of one sequence, or None if unknown.

    Sliding-window layers cache their window. Multi-head latent attention caches its latents. The state of
    linear attention has a fixed size and is not counted.
    """
    held, by_layer = 0, differs_by_layer(config)
    for index, layer in enumerate(DynamicCache(config=config).layers):
        of: Any = config.per_layer_config[index] if by_layer else config
        if rank := getattr(of, "kv_lora_rank", None):
            width = rank + of.qk_rope_head_dim
        else:
            width = 2 * key_value_heads_of(of) * head_dim_of(of)
        if not isinstance(width, int):
            return None
        if isinstance(layer, DynamicLayer):
            window = getattr(layer, "sliding_window", None) or tokens
            held += width * min(tokens, window)
    return itemsize * held


def forward_bytes(
    config: Any, tokens: int, itemsize: int, *, cached: bool = False
) -> int:
    """Estimate the peak of a forward pass without gradients: a layer, with the KV cache, or the logits."""
    hidden = int(config.hidden_size)
    # The peak of a layer is in its MLP
    layer = tokens * itemsize * (9 * hidden // 2 + 3 * _mlp_width(config))
    if cached:
        layer += cache_bytes(config, tokens, itemsize) or 0
    return max(
        layer,
        tokens * itemsize * hidden + _logits_bytes(config, tokens),
    )


def step_bytes(
    config: Any, tokens: int, itemsize: int, *, stream: int, recomputed: bool
) -> int:
    """Estimate the peak of a forward and backward pass, without weights and gradients.

    With recomputed activations: the hidden state of every layer, and one layer at its peak, the backward pass
    of its MLP. Otherwise all layers are held. The peak holds six tensors of the MLP's width, four of the
    attention's and eight float32 ones of the hidden size, as measured on transformers' LLaMA. The last vary
    by a fifth with the trained weights; an adapter on the MLP takes a fifth more in all.

    Args:
        config: The text config.
        tokens: Tokens of the pass.
        itemsize: Bytes of a number in the layers.
        stream: Bytes of a number of a hidden state between the layers.
        recomputed: Whether activations are recomputed.
    """
    layers, head = int(config.num_hidden_layers), head_dim_of(config)
    attention = (
        2 * head * (int(config.num_attention_heads) + key_value_heads_of(config))
    )
    layer = 32 * config.hidden_size + itemsize * (attention + 6 * _mlp_width(config))
    held = (
        stream * config.hidden_size * layers + layer if recomputed else layer * layers
    )
    return int(tokens * held + _logits_bytes(config, tokens))


def _logits_bytes(config: Any, tokens: int) -> int:
    """Return the bytes of three float32 copies of a chunk of logits."""
    return 3 * 4 * min(CHUNK, tokens) * int(config.vocab_size)


def _mlp_width(config: Any) -> int:
    """Return the numbers per token of an MLP; a mixture of experts counts the experts of one token."""
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    width = width if isinstance(width, int) else max(width)
    experts = getattr(config, "num_experts_per_tok", None)
    if not experts:
        return int(width)
    width = experts * (getattr(config, "moe_intermediate_size", None) or width)
    return int(width + (getattr(config, "shared_expert_intermediate_size", None) or 0))
