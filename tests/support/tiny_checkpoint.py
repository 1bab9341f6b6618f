"""A checkpoint folder as users have it, with weights, tokenizer and configuration, small and random."""

from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_config
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


def tiny_llama_folder(folder: Path, *, window: int = 64, **fields: Any) -> Path:
    """Save a tiny LLaMA of that window, and other fields, and a byte-level tokenizer; the folder."""
    torch.manual_seed(0)
    config = tiny_config("llama")
    config.update(fields | {"max_position_embeddings": window})
    LlamaForCausalLM(config).save_pretrained(folder)
    symbols = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())[:120]]
    raw = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", model_max_length=window
    ).save_pretrained(folder)
    return folder
