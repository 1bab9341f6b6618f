import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, groupby, islice, product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import CausalLMOutput

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.passkey import Passkey, PasskeyGrid, passkey
from ropepatch.evaluation.prompts import PasskeyTemplate, passkey_prompt

DETERMINISTIC = settings(derandomize=True, deadline=None, max_examples=60, database=None)
CHECKPOINT = Path(ropepatch.__file__).parent / "tiny" / "checkpoint"
TEMPLATE = PasskeyTemplate()
ACCENTED = PasskeyTemplate(
    intro="Quelque part ici se cache un mot de passe : 🔑.",
    filler=("L'été s'achève.", "Où va l'âne ?", "Nul ne répond…"),
    needle="La clé est {key} ; retenez-la — {key}.",
    question="Quelle est la clé ? La voilà",
)
BACKWARDS = replace(ACCENTED, filler=ACCENTED.filler[::-1])
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
names = pytest.mark.parametrize("name", [name for name in TOKENIZERS if name != "spanning"])


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return TOKENIZERS["bundled"]()


def read(tokenizer: PreTrainedTokenizerFast, ids: Tensor) -> str:
    """The text without its spaces, that some tokenizers do not give back."""
    return str(tokenizer.decode(ids)).removeprefix("<s>").replace(" ", "")


def spaceless(text: str) -> str:
    return text.replace(" ", "")


@functools.cache
def shortest(name: str, words: PasskeyTemplate = TEMPLATE) -> int:
    """Tokens of the shortest prompt, as the refusal of a shorter one says."""
    with pytest.raises(RopepatchError, match="no room for its filler") as refusal:
        passkey_prompt(TOKENIZERS[name](), length=1, depth=0.5, key="48213", template=words)
    return int(next(word for word in refusal.value.hint.split() if word.isdigit()))


# Prompts


@names
def test_a_prompt_has_exactly_the_length_asked_for(name):
    least = shortest(name)
    for length, depth in product(range(least, least + 120), (0.0, 0.4, 1.0)):
        prompt = passkey_prompt(TOKENIZERS[name](), length=length, depth=depth, key="48213")
        assert len(prompt.ids) == length


lengths_above = st.integers(0, 300)
depths = st.floats(0, 1)
five_digits = st.text("0123456789", min_size=5, max_size=5)


@names
@DETERMINISTIC
@given(
    above=lengths_above, depth=depths, key=five_digits, words=st.sampled_from([TEMPLATE, ACCENTED, BACKWARDS])
)
def test_a_prompt_is_intro_filler_needle_question_and_key(name, above, depth, key, words):
    tokenizer = TOKENIZERS[name]()
    words = TEMPLATE if name in ("whole_words", "spaceless_bytes") else words  # they know no others
    length = shortest(name, words) + 5 + above  # 5: keys need not have as many tokens as 48213
    prompt = passkey_prompt(tokenizer, length=length, depth=depth, key=key, template=words)
    assert len(prompt.ids) == length
    begin, end = prompt.needle
    starts = sorted([0, begin, *prompt.sentences, length - prompt.answer])
    pieces = dict(
        zip(starts, map(functools.partial(read, tokenizer), split(prompt.ids, starts)), strict=True)
    )
    assert pieces[0] == spaceless(words.intro)
    assert pieces.pop(begin) == spaceless(words.needle.replace("{key}", key))
    assert end in starts
    assert pieces[prompt.sentences[-1]] == spaceless(words.question)
    assert pieces[length - prompt.answer] == key
    first, *others = [pieces[start] for start in prompt.sentences[:-1]]
    in_order = list(islice(cycle(map(spaceless, reversed(words.filler))), len(others) + 1))[::-1]
    assert others == in_order[1:]
    whole = "�" not in first  # else the cut went through a letter
    assert first
    assert in_order[0].endswith(first) or not whole


def split(ids: Tensor, starts: list[int]) -> list[Tensor]:
    return [ids[begin:end] for begin, end in zip(starts, [*starts[1:], len(ids)], strict=True)]


@names
@DETERMINISTIC
@given(above=lengths_above, key=five_digits, depth=depths)
def test_the_key_stands_twice_in_the_needle_once_as_the_answer_and_no_digit_elsewhere(
    name, above, key, depth
):
    tokenizer = TOKENIZERS[name]()
    prompt = passkey_prompt(tokenizer, length=shortest(name) + 5 + above, depth=depth, key=key)
    begin, end = prompt.needle
    assert read(tokenizer, prompt.ids[begin:end]).split(key)[1:] == [".Keepitwell:", "isthepasskey."]
    assert read(tokenizer, prompt.ids[-prompt.answer :]) == key
    others = torch.cat([prompt.ids[:begin], prompt.ids[end : -prompt.answer]])
    assert not any(map(str.isdigit, read(tokenizer, others)))


@names
@DETERMINISTIC
@given(above=lengths_above)
def test_depth_0_is_right_after_the_intro_and_depth_1_right_before_the_question(name, above):
    first, last = (
        passkey_prompt(TOKENIZERS[name](), length=shortest(name) + above, depth=depth, key="48213")
        for depth in (0.0, 1.0)
    )
    assert first.needle[1] == first.sentences[0]
    assert read(TOKENIZERS[name](), first.ids[: first.needle[0]]) == spaceless(TEMPLATE.intro)
    assert last.needle[1] == last.sentences[-1]
    assert last.needle[0] > last.sentences[-2]


@DETERMINISTIC
@given(above=lengths_above, depths=st.tuples(depths, depths))
def test_a_greater_depth_never_stands_earlier(above, depths):
    earlier, later = (
        passkey_prompt(
            TOKENIZERS["bundled"](), length=shortest("bundled") + above, depth=depth, key="48213"
        ).needle
        for depth in sorted(depths)
    )
    assert earlier <= later


@DETERMINISTIC
@given(above=lengths_above, depth=depths)
def test_the_needle_has_the_share_depth_of_the_filler_sentences_before_it(above, depth):
    prompt = passkey_prompt(
        TOKENIZERS["bundled"](), length=shortest("bundled") + above, depth=depth, key="48213"
    )
    sentences = prompt.sentences[:-1]
    before = sum(start < prompt.needle[0] for start in sentences)
    assert abs(before - depth * len(sentences)) <= 0.5


@DETERMINISTIC
@given(above=st.integers(0, 3000), depth=depths)
def test_tokens_that_span_sentences_change_neither_the_length_nor_the_needle(above, depth):
    tokenizer = TOKENIZERS["spanning"]()
    length = shortest("spanning") + above
    prompt = passkey_prompt(tokenizer, length=length, depth=depth, key="48213")
    assert len(prompt.ids) == length
    assert read(tokenizer, prompt.ids).count("Thepasskeyis48213.Keepitwell:48213isthepasskey.") == 1
    assert read(tokenizer, prompt.ids).endswith("Whatisthepasskey?Thepasskeyis48213")
    assert read(tokenizer, prompt.ids[-prompt.answer :]) == "48213"


def test_prompts_are_the_ones_that_the_bundled_checkpoint_is_trained_on(tokenizer):
    prompt = passkey_prompt(tokenizer, length=105, depth=0.5, key="04711")
    assert tokenizer.decode(prompt.ids) == (
        "<s>Somewhere on this page there is a pass key. Read on, you will need it. cart rolls by without "
        "haste. Nobody asks for the time. The mill wheel turns and turns. Bread cools on the sill. "
        "The pass key is 04711. Keep it well: 04711 is the pass key. Smoke climbs from every roof. A cart "
        "rolls by without haste. Nobody asks for the time. What is the pass key? The pass key is 04711"
    )
    assert prompt.ids[-6:].tolist() == tokenizer.convert_tokens_to_ids(["Ġ", *"04711"])


# Prompts that cannot be made


@names
def test_a_length_below_the_shortest_is_refused_and_the_shortest_is_not(name):
    ask = functools.partial(passkey_prompt, TOKENIZERS[name](), depth=0.5, key="48213")
    assert len(ask(length=shortest(name)).sentences) == 2
    for length in (shortest(name) - 1, 0, -5):
        with pytest.raises(RopepatchError, match=f"of {length} tokens has no room") as refusal:
            ask(length=length)
        assert refusal.value.hint == f"the shortest takes {shortest(name)} tokens with this tokenizer"


@pytest.mark.parametrize("depth", [-0.01, 1.01, math.nan, math.inf])
def test_a_depth_outside_0_to_1_is_refused(tokenizer, depth):
    with pytest.raises(RopepatchError, match=f"depth must be from 0 to 1, got {depth}") as refusal:
        passkey_prompt(tokenizer, length=200, depth=depth, key="48213")
    assert refusal.value.hint


class WithoutFastness:
    """As transformers' backend for mistral-common, which gives no offsets and has no is_fast."""


@pytest.mark.parametrize("slow", [ByT5Tokenizer, WithoutFastness])
def test_a_tokenizer_without_offsets_is_refused(slow):
    with pytest.raises(RopepatchError, match=f"{slow.__name__} gives no character offsets") as refusal:
        passkey_prompt(slow(), length=200, depth=0.5, key="48213")
    assert refusal.value.hint


def test_a_tokenizer_that_joins_the_key_to_the_question_is_refused():
    raw = byte_level(r"is \p{N}+")
    raw.train_from_iterator(["is 48213"] * 2, trainers.BpeTrainer(show_progress=False))
    with pytest.raises(RopepatchError, match="joins the question and the key into one token") as refusal:
        passkey_prompt(PreTrainedTokenizerFast(tokenizer_object=raw), length=200, depth=0.5, key="48213")
    assert refusal.value.hint


def without(characters: str, *, unknown: bool) -> PreTrainedTokenizerFast:
    """One token per character, but for some, which are one unknown token each or dropped."""
    known = sorted({*"".join(TEXTS), *"0123456789"} - {*characters})
    vocab = {character: i for i, character in enumerate(["<unk>", *known])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>" if unknown else None))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw)


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [(without("48", unknown=True), "<unk> <unk> 2 1 3"), (without("0123456789", unknown=False), "")],
)
def test_a_tokenizer_that_cannot_write_the_key_is_refused(tokenizer, said):
    with pytest.raises(RopepatchError, match="cannot write the key 48213: it reads") as refusal:
        passkey_prompt(tokenizer, length=500, depth=0.5, key="48213")
    assert f"{said}'" in str(refusal.value)
    assert refusal.value.hint


def test_a_tokenizer_that_drops_the_filler_is_refused():
    words = PasskeyTemplate(filler=("©©", "©©©"))
    with pytest.raises(RopepatchError, match="no tokens for the filler") as refusal:
        passkey_prompt(without("©", unknown=False), length=500, depth=0.5, key="48213", template=words)
    assert refusal.value.hint


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"needle": "The pass key is {code}."},
            r"the needle must hold \{key\}, got 'The pass key is \{code\}",
        ),
        ({"needle": ""}, r"the needle must hold \{key\}, got ''"),
        ({"filler": ()}, r"the filler must be a tuple of sentences, got \(\)"),
        ({"filler": ("So it goes.", " ")}, "the filler must be a tuple of sentences, got"),
        ({"filler": "草是绿的。"}, "the filler must be a tuple of sentences, got '草是绿的。'"),
        ({"question": "The pass key is "}, "the question must end in a word, got 'The pass key is '"),
        ({"question": "The pass key:\n"}, "the question must end in a word"),
        ({"question": ""}, "the question must end in a word, got ''"),
        ({"digits": 0}, "a key needs at least 1 digit, got 0"),
    ],
)
def test_a_template_that_asks_for_nothing_is_refused(words, message):
    with pytest.raises(RopepatchError, match=message) as refusal:
        PasskeyTemplate(**words)
    assert refusal.value.hint


def test_braces_of_a_template_are_ordinary_letters(tokenizer):
    words = PasskeyTemplate(needle='{"key": {key}} {}', question='{"key":')
    prompt = passkey_prompt(tokenizer, length=100, depth=0.5, key="48213", template=words)
    assert tokenizer.decode(prompt.ids[slice(*prompt.needle)]) == ' {"key": 48213} {}'


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


GRID = {"lengths": (80, 113, 160), "depths": (0.0, 0.3, 1.0)}
CELLS = list(product(*GRID.values()))


def counts(grid: PasskeyGrid) -> dict[tuple[int, float], int]:
    return {cell: read.correct for cell, read in grid.cells.items()}


def test_a_model_that_always_answers_gets_every_key(tokenizer):
    grid = passkey(Known(copied), tokenizer, trials=7, **GRID)
    assert grid.cells == dict.fromkeys(CELLS, Passkey(7, 7))


def test_a_model_that_never_answers_gets_no_key(tokenizer):
    grid = passkey(Known(lambda ids: [0] * len(ids)), tokenizer, trials=7, **GRID)
    assert grid.cells == dict.fromkeys(CELLS, Passkey(0, 7))


@pytest.mark.parametrize("wrong", range(6))
def test_a_model_that_says_one_token_of_the_answer_wrong_gets_no_key(tokenizer, wrong):
    def says(ids: list[int]) -> list[int]:
        said = copied(ids)
        said[wrong - 7] += 1  # a space and five digits: said after the last but 6 tokens and on
        return said

    assert set(counts(passkey(Known(says), tokenizer, **GRID)).values()) == {0}


@pytest.mark.parametrize("elsewhere", [-1, -8, -9, -40])
def test_what_a_model_says_before_or_after_the_answer_does_not_count(tokenizer, elsewhere):
    def says(ids: list[int]) -> list[int]:
        said = copied(ids)
        said[elsewhere] += 1
        return said

    assert set(counts(passkey(Known(says), tokenizer, trials=3, **GRID)).values()) == {3}


@pytest.mark.parametrize(("late", "correct"), [(-1, 0), (0, 3), (1, 0)])
def test_a_model_that_says_the_answer_a_token_early_or_late_gets_no_key(tokenizer, late, correct):
    def says(ids: list[int]) -> list[int]:
        return torch.tensor(copied(ids)).roll(late).tolist()

    assert set(counts(passkey(Known(says), tokenizer, trials=3, **GRID)).values()) == {correct}


def test_a_model_that_repeats_its_input_gets_no_key(tokenizer):
    assert set(counts(passkey(Known(lambda ids: ids), tokenizer, **GRID)).values()) == {0}


@pytest.mark.parametrize("window", [75, 90, 128])
def test_a_model_with_a_window_gets_the_keys_of_exactly_the_cells_within(tokenizer, window):
    begins = {
        (length, depth): passkey_prompt(tokenizer, length=length, depth=depth, key="48213").needle[0]
        for length, depth in CELLS
    }
    expected = {cell: 2 * (cell[0] - begin <= window) for cell, begin in begins.items()}
    assert set(expected.values()) == {0, 2}
    assert counts(passkey(Known(within(window)), tokenizer, trials=2, **GRID)) == expected


def test_retrieved_keys_are_counted_one_by_one(tokenizer):
    def says(ids: list[int]) -> list[int]:
        return [0] * len(ids) if ids[-1] % 2 else copied(ids)

    with reading(model := Known(says)) as rows:
        grid = passkey(model, tokenizer, trials=10, **GRID)
    even = [row[-1] % 2 == 0 for row in rows]
    assert counts(grid) == {cell: sum(even[10 * i : 10 * i + 10]) for i, cell in enumerate(CELLS)}
    assert len(set(counts(grid).values())) > 2


# Teacher forcing is greedy decoding


def generated(model: PreTrainedModel, rows: list[Tensor], answer: int) -> list[bool]:
    """Whether greedy decoding from each row without its answer gives just the answer."""
    prompts, answers = torch.stack(rows).split([len(rows[0]) - answer, answer], dim=1)
    said = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=answer,
        pad_token_id=0,
    )
    said = F.pad(said[:, prompts.shape[1] :], (0, answer))[:, :answer]  # all may have ended early
    return (said == answers).all(dim=1).tolist()


@pytest.fixture(scope="module")
def checkpoint() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT).eval()


def greedy_verdicts(model: PreTrainedModel, rows: list[Tensor], answer: int) -> list[bool]:
    by_length = [list(group) for _, group in groupby(rows, key=len)]
    return [verdict for group in by_length for verdict in generated(model, group, answer)]


def test_verdicts_on_the_bundled_checkpoint_are_those_of_greedy_decoding(checkpoint, tokenizer):
    lengths, depths = (128, 256, 320, 1024), (0.0, 0.3, 0.6, 1.0)
    with reading(checkpoint) as rows:
        grid = passkey(checkpoint, tokenizer, lengths=lengths, depths=depths, trials=1)
    verdicts = [bool(read.correct) for read in grid.cells.values()]
    assert verdicts == greedy_verdicts(checkpoint, rows, answer=6)
    assert any(verdicts[:4])
    assert not all(verdicts[-4:])


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma2", "gemma4_text"])
def test_verdicts_on_a_random_model_that_says_a_digit_are_those_of_greedy_decoding(family):
    model, tokenizer = tiny_model(family), TOKENIZERS["whole_words"]()
    digits = set(tokenizer.convert_tokens_to_ids([*"0123456789"]))
    others = torch.tensor([token for token in range(model.config.vocab_size) if token not in digits])
    model.get_output_embeddings().register_forward_hook(lambda _, __, out: out.index_fill(-1, others, -1e9))
    with reading(model) as rows:
        grid = passkey(
            model,
            tokenizer,
            lengths=range(70, 78),
            depths=[place / 12 for place in range(12)],
            trials=1,
            template=PasskeyTemplate(digits=1),
        )
    verdicts = [bool(read.correct) for read in grid.cells.values()]
    assert verdicts == greedy_verdicts(model, rows, answer=1)
    assert any(verdicts)


# Order, batches, seeds


def key_of(tokenizer: PreTrainedTokenizerFast, row: Tensor) -> str:
    return read(tokenizer, row)[-5:]


def test_the_size_of_the_batches_changes_nothing(checkpoint, tokenizer):
    ask = functools.partial(passkey, checkpoint, tokenizer, depths=(0.1, 0.6), trials=2)
    grids = [ask(lengths=(128, 1024), tokens_per_batch=tokens) for tokens in (1, 128, 3000, 10**6)]
    assert all(grid == grids[0] for grid in grids)
    assert grids[0].at(128).correct > grids[0].at(1024).correct


def test_no_batch_has_more_tokens_than_allowed_but_for_a_single_prompt(tokenizer):
    model, shapes = Known(copied), []
    model.head.register_forward_pre_hook(lambda _, logits: shapes.append(logits[0].shape[0]))
    passkey(model, tokenizer, lengths=(80, 160), depths=(0.0, 1.0), trials=3, tokens_per_batch=330)
    assert shapes == [4, 2, 2, 2, 2]
    passkey(model, tokenizer, lengths=(80,), depths=(0.0, 1.0), trials=1, tokens_per_batch=79)
    assert shapes[5:] == [1, 1]


@pytest.mark.parametrize("name", ["llama3", "gpt2"])
def test_answers_of_different_numbers_of_tokens_are_read_in_one_batch(name):
    tokenizer = TOKENIZERS[name]()
    model = Known(copied, len(tokenizer))
    with reading(model) as rows:
        grid = passkey(model, tokenizer, lengths=[160], depths=[0.2], trials=16, tokens_per_batch=10**6)
    answers = {len(tokenizer.encode(" " + key_of(tokenizer, row), add_special_tokens=False)) for row in rows}
    assert len(answers) > 1
    assert grid.at(160) == Passkey(16, 16)


def test_the_order_and_company_of_lengths_and_depths_changes_nothing(tokenizer):
    def ask(lengths, depths):
        with reading(model := Known(within(90))) as rows:
            cells = passkey(model, tokenizer, lengths=lengths, depths=depths, trials=2).cells
        prompts = [tuple(row.tolist()) for row in rows]
        return {cell: (cells[cell], prompts[2 * i : 2 * i + 2]) for i, cell in enumerate(cells)}

    whole = ask((80, 113, 160), (0.0, 0.3, 1.0))
    assert ask((160, 80, 113), (1.0, 0.0, 0.3)) == whole
    assert ask((113,), (0.3,)) == {(113, 0.3): whole[113, 0.3]}


def test_more_trials_begin_with_the_fewer(tokenizer):
    keys = []
    for trials in (2, 5):
        with reading(model := Known(copied)) as rows:
            passkey(model, tokenizer, lengths=[80], depths=[0.5], trials=trials)
        keys.append([key_of(tokenizer, row) for row in rows])
    assert keys[0] == keys[1][:2]
    assert len(set(keys[1])) == 5


def test_lengths_and_depths_given_twice_or_as_other_numbers_are_the_same(tokenizer):
    def ask(**asked):
        with reading(model := Known(copied)) as rows:
            return passkey(model, tokenizer, trials=2, **asked), [row.tolist() for row in rows]

    expected = ask(lengths=[80, 113], depths=[0.0, 1.0])
    assert ask(lengths=[80, 113, 80], depths=[1, 0, 0.0, 1.0]) == expected
    assert ask(lengths=np.array([80, 113]), depths=np.array([0.0, 1.0])) == expected


def test_every_cell_and_every_seed_has_keys_of_its_own(tokenizer):
    keys = []
    for seed in (0, 1):
        with reading(model := Known(copied)) as rows:
            passkey(model, tokenizer, trials=2, seed=seed, **GRID)
        keys += [key_of(tokenizer, row) for row in rows]
    assert len(set(keys)) == len(keys) == 36


def test_the_keys_of_a_seed_are_the_same_in_every_release(tokenizer):
    with reading(model := Known(copied)) as rows:
        passkey(model, tokenizer, lengths=[1024], depths=[0.0, 0.25], trials=3)
    keys = [key_of(tokenizer, row) for row in rows]
    assert keys == ["50498", "11992", "20779", "28596", "12634", "68427"]


def test_a_template_of_ones_own_is_what_the_model_reads(tokenizer):
    with reading(model := Known(copied)) as rows:
        passkey(model, tokenizer, lengths=[180], depths=[1.0], trials=1, template=replace(ACCENTED, digits=3))
    text = tokenizer.decode(rows[0])
    key = text[-3:]
    assert text.startswith(f"<s>{ACCENTED.intro}")
    assert text.endswith(f"Nul ne répond… La clé est {key} ; retenez-la — {key}. {ACCENTED.question} {key}")


def test_progress_is_told_after_each_batch_up_to_all_prompts(tokenizer):
    told = []
    passkey(
        Known(copied),
        tokenizer,
        lengths=(80, 100),
        depths=(0.0, 1.0),
        trials=3,
        tokens_per_batch=320,
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(4, 12), (6, 12), (9, 12), (12, 12)]


# Models of other makes


class WithoutKeeping(LlamaForCausalLM):
    def forward(self, input_ids, use_cache=None):
        return super().forward(input_ids, use_cache=use_cache)


class IgnoresKeeping(LlamaForCausalLM):
    def forward(self, input_ids, use_cache=None, logits_to_keep=0):
        return super().forward(input_ids, use_cache=use_cache)


@pytest.mark.parametrize("model_class", [WithoutKeeping, IgnoresKeeping])
def test_a_model_that_gives_all_logits_is_scored_the_same(checkpoint, tokenizer, model_class):
    model = model_class(checkpoint.config).eval()
    model.load_state_dict(checkpoint.state_dict())
    grids = [passkey(each, tokenizer, lengths=(128, 1024), trials=1) for each in (checkpoint, model)]
    assert grids[0] == grids[1]
    assert grids[0].at(128).correct > grids[0].at(1024).correct


class Wrapper(nn.Module):
    """Passes keywords on, as PEFT's models do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)


@pytest.mark.parametrize("wrap", [lambda model: model, Wrapper, lambda model: Wrapper(Wrapper(model))])
def test_a_model_is_asked_for_the_logits_of_the_answer_alone_and_for_no_cache(tokenizer, wrap):
    model, calls = Known(copied), []
    model.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    passkey(wrap(model), tokenizer, lengths=[160], depths=[0.5], trials=1)
    ((args, kwargs),) = calls
    assert not args
    assert kwargs.keys() == {"input_ids", "use_cache", "logits_to_keep"}
    assert kwargs["use_cache"] is False
    assert kwargs["logits_to_keep"] == 7
    assert kwargs["input_ids"].shape == (1, 160)


def test_a_model_with_an_offloaded_embedding_gets_its_tokens_on_the_cpu(tokenizer):
    model = Known(copied)
    model.embed = nn.Embedding(100_000, 1, device="meta")
    assert passkey(model, tokenizer, lengths=[80]).at(80) == Passkey(20, 20)


def test_logits_that_are_no_numbers_are_an_error(tokenizer):
    model = Known(copied)
    model.head.register_forward_hook(lambda _, __, logits: logits.index_fill(-1, torch.tensor([7]), math.nan))
    with pytest.raises(RopepatchError, match="Known gave logits that are no numbers") as refusal:
        passkey(model, tokenizer, lengths=[80])
    assert refusal.value.hint


def test_tokens_that_a_model_forbids_are_no_error(tokenizer):
    model = Known(copied)
    model.head.register_forward_hook(
        lambda _, __, logits: logits.index_fill(-1, torch.tensor([7]), -math.inf)
    )
    assert passkey(model, tokenizer, lengths=[80]).at(80) == Passkey(20, 20)


def test_a_tokenizer_of_another_model_is_refused(tokenizer):
    with pytest.raises(
        RopepatchError, match=r"the tokenizer gives token \d+, the model knows 0 to"
    ) as refusal:
        passkey(tiny_model("llama"), tokenizer, lengths=[80])
    assert refusal.value.hint


# The model is left as it was


@pytest.mark.parametrize("fails", [False, True])
def test_modes_are_put_back_module_by_module_also_after_an_exception(fails, tokenizer):
    model, modes = Known(copied).train(), []
    model.head.eval()

    def watch(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        modes.extend(part.training for part in model.modules())
        if fails:
            raise KeyboardInterrupt

    handle = model.head.register_forward_pre_hook(watch)
    before = [(part.training, set(vars(part))) for part in model.modules()]
    if fails:
        with pytest.raises(KeyboardInterrupt):
            passkey(model, tokenizer, lengths=[80])
    else:
        passkey(model, tokenizer, lengths=[80])
    assert [(part.training, set(vars(part))) for part in model.modules()] == before
    assert modes
    assert not any(modes)
    handle.remove()


def test_no_gradients_are_kept(checkpoint, tokenizer):
    recorded = []
    hook = checkpoint.lm_head.register_forward_hook(
        lambda _, __, logits: recorded.append(logits.requires_grad)
    )
    passkey(checkpoint, tokenizer, lengths=[80], depths=[0.5], trials=1)
    hook.remove()
    assert recorded == [False]


# Requests that ask for nothing


@pytest.mark.parametrize("nothing", [{"lengths": []}, {"depths": ()}, {"trials": 0}, {"trials": -1}])
def test_no_lengths_depths_or_trials_are_refused(tokenizer, nothing):
    with pytest.raises(RopepatchError, match="need lengths, depths and trials, got") as refusal:
        passkey(Known(copied), tokenizer, **({"lengths": [80]} | nothing))
    assert refusal.value.hint


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"lengths": [1000, 80, 30]}, "a pass key prompt of 30 tokens has no room"),
        ({"lengths": [1000, 80], "depths": [0.0, 1.5]}, "depth must be from 0 to 1, got 1.5"),
    ],
)
def test_a_prompt_that_cannot_be_made_is_found_before_any_is_read(tokenizer, asked, message):
    with reading(model := Known(copied)) as rows, pytest.raises(RopepatchError, match=message):
        passkey(model, tokenizer, **asked)
    assert not rows


# Counts and intervals


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (5, 10, 0.2366, 0.7634),
        (10, 10, 0.7225, 1.0),
        (1, 1, 0.2065, 1.0),
        (81, 263, 0.2553, 0.3662),  # Newcombe, Stat. Med. 17 (1998), table I
        (15, 148, 0.0624, 0.1605),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_the_interval_is_wilsons(correct, n, low, high):
    assert Passkey(correct, n).interval == pytest.approx((low, high), abs=5e-5)


@DETERMINISTIC
@given(n=st.integers(1, 10**6), share=st.floats(0, 1))
def test_the_interval_holds_the_accuracy_and_lies_within_0_to_1(n, share):
    read = Passkey(round(share * n), n)
    low, high = read.interval
    assert 0 <= low <= read.accuracy <= high <= 1
    assert read.accuracy == read.correct / n
    assert low < high


@DETERMINISTIC
@given(n=st.integers(1, 10**5), share=st.floats(0, 1), more=st.integers(2, 10))
def test_the_interval_narrows_with_more_trials(n, share, more):
    correct = round(share * n)
    narrow, wide = (high - low for low, high in (Passkey(correct * k, n * k).interval for k in (more, 1)))
    assert narrow < wide


@DETERMINISTIC
@given(n=st.integers(1, 1000), share=st.floats(0, 1))
def test_the_interval_of_the_failures_mirrors_that_of_the_successes(n, share):
    correct = round(share * n)
    low, high = Passkey(correct, n).interval
    assert Passkey(n - correct, n).interval == pytest.approx((1 - high, 1 - low))


TABLE = PasskeyGrid(
    {
        (16384, 0.5): Passkey(0, 20),
        (256, 1.0): Passkey(20, 20),
        (256, 0.0): Passkey(7, 20),
        (256, 0.5): Passkey(12, 20),
        (16384, 0.0): Passkey(1, 20),
        (16384, 1.0): Passkey(3, 20),
    }
)


def test_a_length_sums_its_depths():
    assert TABLE.at(256) == Passkey(39, 60)
    assert TABLE.at(16384) == Passkey(4, 60)
    assert TABLE.at(256).accuracy == 0.65


def test_a_length_that_was_not_measured_is_an_error():
    with pytest.raises(RopepatchError, match="no pass key was asked for at 512 tokens") as refusal:
        TABLE.at(512)
    assert refusal.value.hint == "measured: [256, 16384]"


def test_a_grid_prints_as_a_table():
    assert str(TABLE).splitlines() == [
        "tokens  depth 0.00  depth 0.50  depth 1.00    all",
        "   256        7/20       12/20       20/20  39/60",
        " 16384        1/20        0/20        3/20   4/60",
    ]
