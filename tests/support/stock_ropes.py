"""Frequencies of stock transformers from `rope_parameters`: the first oracle."""

import torch
from transformers import GPTNeoXConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ropepatch.scaling.rope import Frequencies

STOCK_TYPES = {
    "default",
    *ROPE_INIT_FUNCTIONS,
}  # transformers 5.4 has no `proportional`


def stock_table(parameters, rope, length=None, share=1.0, reach=None):
    """The frequencies of a Llama or, where only a share of the head rotates, of a GPT-NeoX.

    Args:
        parameters: The `rope_parameters`; a missing rope_theta is added.
        rope: The rotary dimension, base and original length of the model.
        length: The sequence length, for dynamic types; None for the initial frequencies of the module.
        share: The share of the head that rotates.
        reach: Its max_position_embeddings; None for the original length.
    """
    d = rope.rotary_dim
    common = {
        "hidden_size": int(d / share),
        "num_attention_heads": 1,
        "max_position_embeddings": reach or rope.original_max_position_embeddings,
        "rope_parameters": {"rope_theta": rope.rope_theta} | parameters,
    }
    if share == 1:
        config, rotary = LlamaConfig(head_dim=d, **common), LlamaRotaryEmbedding
    else:
        common["rope_parameters"]["partial_rotary_factor"] = share
        config, rotary = (
            GPTNeoXConfig(rotary_pct=share, **common),
            GPTNeoXRotaryEmbedding,
        )
    kind = parameters["rope_type"]
    if kind != "default" and length is not None:
        return Frequencies(
            *ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
        )
    module = rotary(config)
    return Frequencies(module.inv_freq, module.attention_scaling)
