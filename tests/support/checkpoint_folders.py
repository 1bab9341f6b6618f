"""Small random checkpoint folders to extend and to damage."""

import json
import resource
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 48
WINDOW = 64
PAIRS = 8


SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1}


def tokenizer_of(by_bytes):
    """A tokenizer with one token per byte, or one for each of the words `word0`, `word1`, ..."""
    first = ["<pad>", "<s>", "</s>"]
    symbols = [*first, *sorted(pre_tokenizers.ByteLevel.alphabet())[:120]]
    words = [*first, "<unk>", *(f"word{i}" for i in range(VOCABULARY - 4))]
    ids = {word: i for i, word in enumerate(symbols if by_bytes else words)}
    raw = Tokenizer(
        models.BPE(vocab=ids, merges=[])
        if by_bytes
        else models.WordLevel(ids, unk_token="<unk>")
    )
    raw.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=False)
        if by_bytes
        else pre_tokenizers.Whitespace()
    )
    return raw


def write_checkpoint(folder, *, by_bytes=False, max_shard_size="1GB", **fields):
    """Save a seeded float32 LLaMA of 64 tokens and 8 rotary pairs, whose logits depend on positions."""
    model = tiny_model("llama", **({} if by_bytes else SMALL) | fields)
    window = model.generation_config.max_length = model.config.max_position_embeddings
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    if not by_bytes:
        special |= {"pad_token": "<pad>", "unk_token": "<unk>"}
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of(by_bytes), model_max_length=window, **special
    )
    made.save_pretrained(folder)
    return folder


def edit_json(path, **values):
    """Replace top-level keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def contents(folder):
    """Modification time and bytes of everything below a folder, by relative path."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in sorted(folder.rglob("*"))
    }


def files_of(folder):
    """The bytes of every file below a folder, by relative path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@contextmanager
def largest_file(num_bytes):
    """Limit the size of files that this process writes, so that writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# Records of ropepatch from before they had a version, one for each way to write one.
RECORDS = {
    file.stem: json.loads(file.read_text(encoding="utf-8"))
    for file in sorted(
        (Path(__file__).parents[1] / "extension" / "records").glob("*.json")
    )
}
SWAPPED = RECORDS.pop(
    "swapped"
)  # the record of a swapped encoding, which has other keys


def with_other_weights(folder):
    """Change the weights of a checkpoint."""
    file = folder / "model.safetensors"
    changed = {name: weight + 1 for name, weight in load_file(file).items()}
    save_file(changed, file, metadata={"format": "pt"})
