import functools
import math
from itertools import cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from passkey_cases import (
    ACCENTED,
    BACKWARDS,
    DETERMINISTIC,
    TEMPLATE,
    TEXTS,
    TOKENIZERS,
    byte_level,
    read,
    spaceless,
)
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from ropepatch.data.prompts import PasskeyTemplate, passkey_prompt
from ropepatch.errors import RopepatchError

names = pytest.mark.parametrize("name", [name for name in TOKENIZERS if name != "spanning"])


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return TOKENIZERS["bundled"]()


@functools.cache
def shortest(name: str, words: PasskeyTemplate = TEMPLATE) -> int:
    """Tokens of the shortest prompt, as the refusal of a shorter one says."""
    with pytest.raises(RopepatchError, match="no room for its filler") as refusal:
        passkey_prompt(TOKENIZERS[name](), length=1, depth=0.5, key="48213", template=words)
    return int(next(word for word in refusal.value.hint.split() if word.isdigit()))


# Prompts


LINES = TEMPLATE.model_copy(update={"separator": "\n"})
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
@given(above=lengths_above, depth=depths | st.sampled_from([0.0, 1.0]))
def test_the_needle_has_the_share_depth_of_the_filler_sentences_before_it(name, above, depth):
    prompt = passkey_prompt(TOKENIZERS[name](), length=shortest(name) + above, depth=depth, key="48213")
    sentences = prompt.sentences[:-1]
    before = sum(start < prompt.needle[0] for start in sentences)
    assert abs(before - depth * len(sentences)) <= 0.5


@pytest.mark.parametrize("name", TOKENIZERS)
@DETERMINISTIC
@given(above=lengths_above, depth=depths)
def test_a_prompt_in_lines_has_exactly_the_length_asked_for(name, above, depth):
    ask = functools.partial(passkey_prompt, TOKENIZERS[name](), depth=depth, key="48213", template=LINES)
    assert len(ask(length=shortest(name, LINES) + above).ids) == shortest(name, LINES) + above


@pytest.mark.parametrize("name", ["llama3", "gpt2", "single_bytes", "bundled"])
@pytest.mark.parametrize("depth", [0.0, 0.6, 1.0])
def test_a_prompt_in_lines_keeps_its_line_breaks_whatever_is_left_out(name, depth):
    tokenizer = TOKENIZERS[name]()
    for length in range(shortest(name, LINES), shortest(name, LINES) + 60):
        prompt = passkey_prompt(tokenizer, length=length, depth=depth, key="48213", template=LINES)
        intro, *lines, question = str(tokenizer.decode(prompt.ids)).removeprefix("<s>").split("\n")
        assert (intro, question) == (LINES.intro, f"{LINES.question} 48213")
        assert LINES.needle.replace("{key}", "48213") in lines
        assert len(lines) <= 3


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


class WithoutFastness:
    """As transformers' backend for mistral-common, which gives no offsets and has no is_fast."""


def joining() -> PreTrainedTokenizerFast:
    """It has one token for the end of the question and the key."""
    raw = byte_level(r"is \p{N}+")
    raw.train_from_iterator(["is 48213"] * 2, trainers.BpeTrainer(show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def without(characters: str, *, unknown: bool) -> PreTrainedTokenizerFast:
    """One token per character, but for some, which are one unknown token each or dropped."""
    known = sorted({*"".join(TEXTS), *"0123456789"} - {*characters})
    vocab = {character: i for i, character in enumerate(["<unk>", *known])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>" if unknown else None))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw)


@pytest.mark.parametrize(
    ("tokenizer", "options", "message"),
    [
        *(
            (TOKENIZERS["bundled"](), {"depth": depth}, f"depth must be from 0 to 1, got {depth}")
            for depth in (-0.01, 1.01, math.nan, math.inf)
        ),
        *(
            (slow, {}, f"{type(slow).__name__} gives no character offsets")
            for slow in (ByT5Tokenizer(), WithoutFastness())
        ),
        (joining(), {}, "joins the question and the key into one token"),
        (without("48", unknown=True), {}, "cannot write the key 48213: it reads '<unk> <unk> 2 1 3'"),
        (without("0123456789", unknown=False), {}, "cannot write the key 48213: it reads ''"),
        (
            without("©", unknown=False),
            {"template": PasskeyTemplate(filler=("©©", "©©©"))},
            "no tokens for the filler",
        ),
    ],
)
def test_what_no_prompt_can_be_made_of_is_refused(tokenizer, options, message):
    with pytest.raises(RopepatchError, match=message) as refusal:
        passkey_prompt(tokenizer, **{"length": 500, "depth": 0.5, "key": "48213"} | options)
    assert refusal.value.hint


def test_braces_of_a_template_are_ordinary_letters(tokenizer):
    words = PasskeyTemplate(needle='{"key": {key}} {}', question='{"key":')
    prompt = passkey_prompt(tokenizer, length=100, depth=0.5, key="48213", template=words)
    assert tokenizer.decode(prompt.ids[slice(*prompt.needle)]) == ' {"key": 48213} {}'
