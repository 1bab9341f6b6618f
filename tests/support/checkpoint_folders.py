"""Checkpoint folders as users have them, small and random, to extend and to damage."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 48
WINDOW = 64
PAIRS = 8


def write_checkpoint(folder: Path, *, max_shard_size: str = "1GB", **fields: Any) -> Path:
    """Save a seeded float32 LLaMA of 64 tokens and 8 rotary pairs, whose logits depend on positions."""
    small = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 2 * PAIRS,
        "max_position_embeddings": WINDOW,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(small | fields)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    model.generation_config.max_length = WINDOW
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"word{i}" for i in range(VOCABULARY - 4))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=raw, model_max_length=WINDOW, **special).save_pretrained(folder)
    return folder


def edit_json(path: Path, *, drop: tuple[str, ...] = (), **values: Any) -> None:
    """Replace or drop top-level keys of a JSON file."""
    content = {key: value for key, value in json.loads(path.read_text()).items() if key not in drop}
    path.write_text(json.dumps(content | values))


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Everything below a folder: modification time and bytes, by relative path."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }
