"""Long texts are tokenised in pieces: only a few tokens around the cuts may differ from the whole text."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizer_makes import TOKENIZERS
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ropepatch.data import texts
from ropepatch.data.texts import first_documents, token_ids


@pytest.fixture(scope="module")
def tokenizers(shared):
    folders = {
        name: shared / "checkpoints" / name
        for name in ("stories-260k", "babyllama-361")
    }
    loaded = {
        name: AutoTokenizer.from_pretrained(folder) for name, folder in folders.items()
    }
    return loaded | {name: TOKENIZERS[name]() for name in ("bundled", "gpt2")}


NAMES = ["bundled", "stories-260k", "babyllama-361", "gpt2"]
WORDS = ["a", "b", "aa", "Once", "'s", "don't", "42", ".", "é", "e\u0301", "中文", "🙂"]
GAPS = ["", " ", "  ", "\n", "\n\n", " \n", "\t", "\r\n", "\u00a0", "\u3000"]


def split_small(tokenizer, text):
    """The tokens of a text in small pieces, those of the whole text, and the number of pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "PIECE", 8)
        split, again = token_ids(tokenizer, [text, text], bos=False)
        pieces = len(list(texts._long(tokenizer, text)))
    assert torch.equal(split, again)
    return (
        split.tolist(),
        tokenizer(text, add_special_tokens=False)["input_ids"],
        pieces,
    )


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.sampled_from(WORDS), st.sampled_from([" ", "\n"])), max_size=60
    )
)
@example(parts=[("Once", " ")] * 60)
@example(parts=[("Once", "\n")] * 60)
def test_text_cut_at_spaces_has_the_tokens_of_the_whole(name, parts, tokenizers):
    split, whole, pieces = split_small(tokenizers[name], "".join(map("".join, parts)))
    assert split == whole
    assert len(parts) < 60 or pieces > 15


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.sampled_from(WORDS), st.sampled_from(GAPS)), max_size=60
    )
)
@example(parts=[("中文", "")] * 60)
@example(parts=[("\0", "")] * 60)
def test_cutting_any_text_keeps_its_characters(name, parts, tokenizers):
    tokenizer, text = tokenizers[name], "".join(map("".join, parts))
    split, whole, pieces = split_small(tokenizer, text)
    assert tokenizer.decode(split) == tokenizer.decode(whole)
    assert abs(len(split) - len(whole)) <= 2 * pieces


def test_a_newline_stays_with_the_full_stop_before_it():
    model = models.BPE(
        vocab={"a": 0, ".": 1, "\n": 2, ".\n": 3}, merges=[(".", "\n")]
    )  # as Qwen's
    split, whole, pieces = split_small(
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model)), "aa.\n" * 20
    )
    assert split == whole == [0, 0, 3] * 20
    assert pieces > 5


def test_only_the_needed_part_of_a_long_document_is_tokenised(tokenizers, monkeypatch):
    monkeypatch.setattr(texts, "PIECE", 2**12)
    tokenizer = tokenizers["bundled"]
    text = "Ann has a red ball. " * 2000  # 40 kB
    characters = []
    encode = type(tokenizer)._encode_plus

    def counting(self, text, *args, **kwargs):
        characters.append(sum(map(len, text)) if isinstance(text, list) else len(text))
        return encode(self, text, *args, **kwargs)

    monkeypatch.setattr(type(tokenizer), "_encode_plus", counting)
    (ids,) = first_documents(tokenizer, [text], length=100, count=1)
    assert len(ids) == 100
    assert sum(characters) < 2**14
    characters.clear()
    long, short, last = token_ids(tokenizer, [text, "Ann", text], length=100)
    assert len(long) >= 100 <= len(last)
    assert len(short) < 10
    assert sum(characters) < 2**15
