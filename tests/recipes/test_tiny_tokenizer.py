"""The bundled tokenizer, and the training of one like it."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pretraining_rows import tell
from tokenization import train_tokenizer
from transformers import AutoTokenizer

from ropepatch.data.tiny.grammar import BOS, EOS
from ropepatch.errors import RopepatchError
from ropepatch.model.source import TINY

ENTRIES = 1024
TEXTS = [tell(60, seed) for seed in range(4)]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def split(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def test_a_text_gets_the_beginning_token_unless_special_tokens_are_left_out(tokenizer):
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<s>", BOS)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("</s>", EOS)
    plain = split(tokenizer, "Rain falls.")
    assert BOS not in plain
    assert tokenizer("Rain falls.").input_ids == [BOS, *plain]
    assert tokenizer("Rain", "falls.").input_ids == [
        BOS,
        *split(tokenizer, "Rain"),
        BOS,
        *split(tokenizer, "falls."),
    ]


@given(st.text(max_size=60))
@example("  two  spaces ")
@example("tab\tand\r\nlines\n\n")
@example("naïve, 東京, עברית, 🦊🏽")
@example("\x00\ufeff\ud7ff\U0010ffff")
@example("a ,b .c n't")
@settings(max_examples=300, deadline=None)
def test_any_text_is_split_without_an_unknown_token_and_comes_back_unchanged(tokenizer, text):
    ids = split(tokenizer, text)
    assert tokenizer.unk_token is None
    assert all(0 <= token < ENTRIES for token in ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text.replace(
        "<s>", ""
    ).replace("</s>", "")


@given(st.text(alphabet="0123456789", min_size=1, max_size=12), st.sampled_from(["", " ", "no", "-"]))
@settings(max_examples=100, deadline=None)
def test_every_digit_is_a_token_of_its_own(tokenizer, digits, before):
    ids = split(tokenizer, before + digits)
    assert tokenizer.convert_ids_to_tokens(ids[-len(digits) :]) == list(digits)
    assert not any(
        len(token) > 1 and any(c.isdigit() for c in token)
        for token in tokenizer.get_vocab()
        if token.isascii()
    )


# Training


@pytest.mark.parametrize("vocab_size", [258, 400])
def test_it_gets_exactly_as_many_entries_as_asked_for(vocab_size):
    tokenizer = train_tokenizer(TEXTS, vocab_size=vocab_size, model_max_length=64)
    assert len(tokenizer) == vocab_size
    assert tokenizer.model_max_length == 64
    assert tokenizer.decode(split(tokenizer, "été 🦊")) == "été 🦊"


@pytest.mark.parametrize("vocab_size", [257, 5000])
def test_a_vocabulary_that_the_texts_do_not_make_is_refused(vocab_size):
    with pytest.raises(
        RopepatchError, match=rf"make a vocabulary of \d+ entries, not of {vocab_size}"
    ) as caught:
        train_tokenizer(TEXTS, vocab_size=vocab_size, model_max_length=64)
    assert "258 for bytes and special tokens" in caught.value.hint
