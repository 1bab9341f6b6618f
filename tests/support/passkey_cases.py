"""Tokenizers of several makes, and models whose score is known."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from hypothesis import settings
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import AutoTokenizer, DynamicCache, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutput, CausalLMOutputWithPast

from ropepatch.data.prompts import PasskeyTemplate
from ropepatch.model.source import TINY

DETERMINISTIC = settings(derandomize=True, deadline=None, max_examples=60, database=None)
CHECKPOINT = TINY
TEMPLATE = PasskeyTemplate()
ACCENTED = PasskeyTemplate(
    intro="Quelque part ici se cache un mot de passe : 🔑.",
    filler=("L'été s'achève.", "Où va l'âne ?", "Nul ne répond…"),
    needle="La clé est {key} ; retenez-la — {key}.",
    question="Quelle est la clé ? La voilà",
)
BACKWARDS = ACCENTED.model_copy(update={"filler": ACCENTED.filler[::-1]})
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    " ".join([words.intro, *words.filler, words.needle.replace("{key}", "."), words.question])
    for words in (TEMPLATE, ACCENTED)
]
NUMBERS = [f" {number:03}" for number in range(0, 1000, 3)]  # so that some groups are one token, others two


# Tokenizers


def byte_level(regex: str, *, spans_words: bool = False) -> Tokenizer:
    """Trained on the templates, and on some numbers unless its tokens span words; split at the regex."""
    raw = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(regex), "isolated")
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>"],
        show_progress=False,
    )
    raw.train_from_iterator(TEXTS if spans_words else TEXTS + NUMBERS, trainer)
    raw.decoder = decoders.ByteLevel()
    return raw


def llama3() -> PreTrainedTokenizerFast:
    raw = byte_level(LLAMA3)
    bos = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    raw.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), bos])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")


def gpt2() -> PreTrainedTokenizerFast:
    raw = byte_level(r"'s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    raw.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def spanning() -> PreTrainedTokenizerFast:
    """Its tokens span words and sentences, but for digits and the space before them."""
    raw = byte_level(r" ?\p{N}", spans_words=True)
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")


def single_bytes() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(["<s>", *alphabet])}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")


def metaspace() -> PreTrainedTokenizerFast:
    raw = sentencepiece()
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", unk_token="<unk>")


def llama2() -> PreTrainedTokenizerFast:
    raw = sentencepiece()
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.pre_tokenizer = None
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", unk_token="<unk>")


def sentencepiece() -> Tokenizer:
    """Byte fallback for all but the letters of the bundled template; digits one by one."""
    raw = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=list("0123456789"),
        special_tokens=["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    raw.train_from_iterator(TEXTS[:1], trainer)
    return raw


def spaceless_bytes() -> PreTrainedTokenizerFast:
    """One of a tiny checkpoint of the tests: it drops spaces, which moves the offsets after them."""
    raw = Tokenizer(models.BPE(vocab={chr(i): i for i in range(33, 127)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def whole_words() -> PreTrainedTokenizerFast:
    """A token per word, mark and digit; no token for a space, no decoder to put one back."""
    raw = Tokenizer(models.WordLevel(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    trainer = trainers.WordLevelTrainer(vocab_size=128, special_tokens=["<unk>"], show_progress=False)
    raw.train_from_iterator([*TEXTS[:1], "0 1 2 3 4 5 6 7 8 9"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")


def bundled() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(CHECKPOINT)


TOKENIZERS = {
    build.__name__: functools.cache(build)
    for build in (
        bundled,
        llama3,
        gpt2,
        single_bytes,
        metaspace,
        llama2,
        whole_words,
        spaceless_bytes,
        spanning,
    )
}


def read(tokenizer: PreTrainedTokenizerFast, ids: Tensor) -> str:
    """The text without its spaces, that some tokenizers do not give back."""
    return str(tokenizer.decode(ids)).removeprefix("<s>").replace(" ", "")


def spaceless(text: str) -> str:
    return text.replace(" ", "")


# Models whose score is known


class Known(nn.Module):
    """Says after every token of a row [N] what ``says`` answers [N]; each row by itself."""

    def __init__(self, says: Callable[[list[int]], list[int]], vocabulary: int = 1024) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(100_000, 1), nn.Identity()
        self.says, self.vocabulary = says, vocabulary

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids, use_cache=None, logits_to_keep=0):
        assert (self.training, torch.is_grad_enabled()) == (False, False)
        said = torch.tensor([self.says(row) for row in input_ids.tolist()])
        return CausalLMOutput(logits=self.head(F.one_hot(said, self.vocabulary).float()[:, -logits_to_keep:]))


def copied(ids: list[int]) -> list[int]:
    """After every token: what followed the last four tokens where they first stood before, 0 if nowhere."""
    followers, said = {}, []
    for end in range(1, len(ids) + 1):
        followers.setdefault(tuple(ids[max(end - 5, 0) : end - 1]), ids[end - 1])
        said.append(followers.get(tuple(ids[max(end - 4, 0) : end]), 0))
    return said


def within(window: int) -> Callable[[list[int]], list[int]]:
    """The same from the last tokens of a row alone."""
    return lambda ids: [0] * (len(ids) - window) + copied(ids[-window:])


@contextmanager
def reading(model: nn.Module) -> Iterator[list[Tensor]]:
    """The rows that a model reads within the block, one by one."""
    rows: list[Tensor] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, options: rows.extend(options["input_ids"]), with_kwargs=True
    )
    yield rows
    hook.remove()


class Remembering(Known):
    """The same with a cache, in which the keys of its one layer are the token ids.

    Attributes:
        seen: Every row that was read, put together from the cache and the rest of it.
        read: Per call: rows, tokens read, tokens in the cache before.
    """

    def __init__(self, says: Callable[[list[int]], list[int]], vocabulary: int = 1024) -> None:
        super().__init__(says, vocabulary)
        self.seen: list[list[int]] = []
        self.read: list[tuple[int, int, int]] = []

    def own_cache(self) -> object:
        """The one that it makes itself, for one token."""
        cache = DynamicCache()
        cache.update(torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 2), 0)
        return cache

    def forward(self, input_ids, use_cache=None, past_key_values=None, logits_to_keep=0):
        rows, past = input_ids, 0
        if use_cache and past_key_values is None:  # it is asked for its cache
            assert rows.shape == (1, 1)
            return CausalLMOutputWithPast(past_key_values=self.own_cache())
        if past_key_values is not None:
            assert use_cache
            past = past_key_values.get_seq_length()
            assert past_key_values.get_mask_sizes(rows.shape[1], 0) == (past + rows.shape[1], 0)
            keys = input_ids[:, None, :, None].double().expand(-1, 2, -1, 3)
            keys, values = past_key_values.update(keys, -keys[..., :2], 0)
            assert keys.shape[-1] == 3
            assert torch.equal(values, -keys[..., :2])
            rows = keys[:, 1, :, 2].long()
        self.seen += rows.tolist()
        self.read.append((*input_ids.shape, past))
        fed = input_ids.shape[1]
        return super().forward(rows, logits_to_keep=min(logits_to_keep or fed, fed))


class Speaking(Known):
    """Generates a text after each prompt, made from the prompt's text."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        text: Callable[[str], str],
        says: Callable[[list[int]], list[int]] = copied,
        vocabulary: int = 1024,
    ) -> None:
        super().__init__(says, vocabulary)
        self.tokenizer, self.text, self.asked, self.calls = tokenizer, text, [], 0

    def generate(self, ids, *, attention_mask, do_sample, num_beams, max_new_tokens, pad_token_id):
        assert attention_mask.all()
        assert attention_mask.shape == ids.shape
        assert (do_sample, num_beams, self.training) == (False, 1, False)
        self.asked += ids.tolist()
        self.calls += 1
        texts = [self.text(self.tokenizer.decode(row)) for row in ids]
        said = self.tokenizer(texts, add_special_tokens=False).input_ids
        padded = [row + [self.tokenizer.eos_token_id] + [pad_token_id] * 99 for row in said]
        return torch.cat([ids, torch.tensor([row[:max_new_tokens] for row in padded])], dim=1)
