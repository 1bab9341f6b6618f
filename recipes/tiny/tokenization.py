"""The tokenizer of the bundled checkpoint: byte-level BPE, digits one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from ropepatch.data.tiny.grammar import BOS, EOS
from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from collections.abc import Iterable

SPECIAL = ["<s>", "</s>"]

# A word with its leading space, one digit, or a run of marks: Qwen2's splitting, which llama.cpp supports.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, model_max_length: int
) -> PreTrainedTokenizerFast:
    """Train a lossless tokenizer of exactly ``vocab_size`` entries.

    ``<s>`` and ``</s>`` in a text are parsed as special tokens, as by stock tokenizers.

    Raises:
        RopepatchError: If ``vocab_size`` is too small for all bytes, or too large for the texts.
    """
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise RopepatchError(
            f"the texts make a vocabulary of {tokenizer.get_vocab_size()} entries, not of {vocab_size}",
            hint="it takes 258 for bytes and special tokens, and as many more as the texts have merges for",
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A",
        pair="<s> $A <s> $B",
        special_tokens=list(zip(SPECIAL, (BOS, EOS), strict=True)),
    )
    wrap: Any = PreTrainedTokenizerFast
    wrapped: PreTrainedTokenizerFast = wrap(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
    )
    return wrapped
