"""Tokenizers of several kinds, trained on the words of prompts."""

import functools
import random

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ropepatch.data.haystack import INTRO, KINDS, PASSKEY, PEOPLE, QUOTE, THINGS
from ropepatch.model.checkpoint import TINY

CHECKPOINT = TINY
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = " ".join([INTRO, PASSKEY.intro, *PASSKEY.filler, *THINGS, *PEOPLE])


@functools.cache
def texts():
    """Words of prompts, and every needle with its question."""
    items = [
        item
        for name, kind in KINDS.items()
        if name != QUOTE  # it writes none
        for item in kind.draw(random.Random(0), kind.most)
    ]
    asked = [(*item.needles, item.question, item.stem, item.answer) for item in items]
    return [WORDS, *map(" ".join, asked)]


def byte_level(regex, **special):
    """A byte-level BPE that is split at the regex; some groups of digits are one token, others two."""
    raw = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(regex), "isolated")
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[*dict.fromkeys(special.values())],
        show_progress=False,
    )
    numbers = [f" {number:03}" for number in range(0, 1000, 3)]
    raw.train_from_iterator(texts() + numbers, trainer)
    raw.decoder = decoders.ByteLevel()
    if "bos_token" in special:
        raw.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=raw, **special)


def llama3():
    return byte_level(LLAMA3, bos_token="<s>")


def gpt2():
    return byte_level(r"'s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def neox():
    """As in GPT-NeoX and Pythia: one token is BOS, EOS and UNK."""
    return byte_level(LLAMA3, bos_token="<s>", eos_token="<s>", unk_token="<s>")


def spanning():
    """A tokenizer whose tokens span words and sentences."""
    return byte_level(r"\p{N}", bos_token="<s>")


def single_bytes():
    symbols = ["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")


def sentencepiece(*decoding):
    """A BPE with byte fallback for unknown characters, and one token per digit."""
    raw = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=list("0123456789"),
        special_tokens=["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    raw.train_from_iterator([WORDS], trainer)
    raw.decoder = decoders.Sequence([*decoding])
    return raw


def metaspace():
    raw = sentencepiece(
        decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", unk_token="<unk>"
    )


def llama2():
    raw = sentencepiece(
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    )
    raw.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    raw.pre_tokenizer = None
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", unk_token="<unk>"
    )


def whole_words(digits="0 1 2 3 4 5 6 7 8 9"):
    """One token per word, punctuation mark and digit; decoding does not restore spaces."""
    raw = Tokenizer(models.WordLevel(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    trainer = trainers.WordLevelTrainer(
        vocab_size=2000, special_tokens=["<unk>"], show_progress=False
    )
    words = {word for text in texts() for word in text.split()}
    known = [word for word in sorted(words) if not word.strip(".").isdigit()]
    raw.train_from_iterator([*known, "a", digits], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")


def bundled():
    return AutoTokenizer.from_pretrained(TINY)


TOKENIZERS = {
    build.__name__: functools.cache(build)
    for build in (
        *(bundled, llama3, gpt2, neox, single_bytes),
        *(metaspace, llama2, whole_words, spanning),
    )
}
