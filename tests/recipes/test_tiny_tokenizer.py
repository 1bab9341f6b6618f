"""The bundled tokenizer."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from ropepatch.data.tiny.grammar import BOS, EOS
from ropepatch.model.source import TINY


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def test_a_text_gets_the_beginning_token_unless_special_tokens_are_left_out(tokenizer):
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<s>", BOS)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("</s>", EOS)
    plain = tokenizer("Rain falls.", add_special_tokens=False).input_ids
    assert BOS not in plain
    assert tokenizer("Rain falls.").input_ids == [BOS, *plain]


@given(st.text(max_size=60))
@example("  two  spaces ")
@example("tab\tand\r\nlines\n\n")
@example("naïve, 東京, עברית, 🦊🏽")
@example("\x00\ufeff\ud7ff\U0010ffff")
@example("a ,b .c n't")
@settings(max_examples=300, deadline=None)
def test_any_text_is_split_without_an_unknown_token_and_comes_back_unchanged(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.unk_token is None
    assert all(0 <= token < 1024 for token in ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text.replace(
        "<s>", ""
    ).replace("</s>", "")
