import hashlib
import logging
from pathlib import Path

import pytest
import torch
from letters import BOS, EOS, VOCABULARY, letter_tokenizer
from tokenizers import Tokenizer, processors
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from ropepatch.data import texts
from ropepatch.data.texts import (
    cut_windows,
    digest,
    first_documents,
    stream_texts,
    token_ids,
)
from ropepatch.errors import RopepatchError


@pytest.fixture
def tokenizer():
    """A tokenizer whose own post-processor would put <s> before every text."""
    tokenizer = letter_tokenizer(bos_token="<s>", eos_token="</s>", model_max_length=4)
    first = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    tokenizer.backend_tokenizer.post_processor = first
    return tokenizer


def ids_of(text):
    return [VOCABULARY[letter] for letter in text]


# stream_texts


def test_stream_texts_yields_texts_and_rejects_token_ids(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n{"text": "two"}\n')
    assert list(stream_texts(tmp_path)) == ["one", "two"]
    file.write_text('{"text": "one"}\n{"input_ids": [2]}\n')
    with pytest.raises(RopepatchError, match="holds token ids, expected texts"):
        list(stream_texts(tmp_path))


# token_ids


def test_token_ids_begin_with_one_bos_if_requested(tokenizer):
    bare = letter_tokenizer(eos_token="</s>")
    for splitter, bos, first in (
        (tokenizer, True, [BOS]),
        (tokenizer, False, []),
        (bare, True, []),
    ):
        ids, empty = token_ids(splitter, ["abc", ""], bos=bos)
        assert ids.tolist() == [*first, *ids_of("abc")]
        assert (empty.tolist(), empty.dtype) == (first, torch.long)


def test_batched_tokenisation_keeps_the_order_of_the_documents(tokenizer, monkeypatch):
    monkeypatch.setattr(texts, "CHARACTERS", 3)
    documents = ["a", [5], "b", "c", [6], [7], [8], "d"]
    expected = [[BOS, 2], [5], [BOS, 3], [BOS, 4], [6], [7], [8], [BOS, 5]]
    assert [ids.tolist() for ids in token_ids(tokenizer, iter(documents))] == expected


@pytest.mark.parametrize(
    "wrong", [None, {"a": 1}, [[5, 6]], [0.5, 1.7], [-1, 2], [2**31]]
)
def test_the_error_about_an_invalid_document_names_its_index(tokenizer, wrong):
    with pytest.raises(
        RopepatchError, match=r"documents\[1\] must be a text or a list"
    ):
        token_ids(tokenizer, ["a", wrong])


def test_a_missing_tokenizer_and_a_single_text_raise_an_error(tokenizer):
    with pytest.raises(RopepatchError, match="tokenizer is None"):
        token_ids(None, ["abc"])
    with pytest.raises(RopepatchError, match="a list of documents, got one text"):
        token_ids(tokenizer, "abc")


# first_documents


def test_the_first_long_enough_documents_are_cut(tokenizer):
    stream = iter(["abcd", "ab", [2, 3], [7, 6, 5, 4], "efgh", "bbbb"])
    found = first_documents(tokenizer, stream, length=4, count=2)
    assert [ids.tolist() for ids in found] == [[BOS, 2, 3, 4], [7, 6, 5, 4]]
    assert list(stream) == ["efgh", "bbbb"]  # nothing more is read


def test_too_few_documents_are_a_warning_and_none_an_error(tokenizer, caplog):
    documents = ["abc", "a", "bc"]
    assert len(first_documents(tokenizer, documents, length=3, count=2)) == 2
    assert not caplog.records
    assert len(first_documents(tokenizer, documents, length=3, count=5)) == 2
    assert caplog.messages == ["only 2 of 3 documents have 3 tokens, wanted 5"]
    with pytest.raises(RopepatchError, match="9 tokens: the longest of 3 has 4"):
        first_documents(tokenizer, documents, length=9, count=1)


# windows


def windows(tokenizer, documents, length, count=None, **options):
    cut = cut_windows(tokenizer, documents, length=length, count=count, **options)
    return [ids for _, ids in cut]


def test_windows_cover_the_stream_once_and_drop_the_remainder(tokenizer):
    documents = ["abc", [5, 6], torch.tensor([8, 9], dtype=torch.int32), "a"]
    stream = [BOS, *ids_of("abc"), 5, 6, 8, 9, BOS, *ids_of("a")]
    for length, begins in ((3, (0, 3, 6)), (5, (0, 5))):
        expected = [stream[begin : begin + length] for begin in begins]
        assert windows(tokenizer, iter(documents), length=length) == expected


def test_each_window_begins_with_bos_where_a_family_needs_it(tokenizer):
    documents = ["abcde", "fgh", "a"]
    expected = [
        [BOS, *ids_of("abc")],
        [BOS, *ids_of("de"), BOS],
        [BOS, *ids_of("gh"), BOS],
    ]
    assert windows(tokenizer, documents, length=4, bos="window") == expected


def test_texts_are_joined_without_bos(tokenizer):
    both = [EOS, *ids_of("abc"), EOS, *ids_of("de")]
    for splitter in (tokenizer, letter_tokenizer(eos_token="</s>")):
        cut = windows(splitter, ["abc", "de"], length=7, bos="none")
        assert cut == [both]
    only_end = letter_tokenizer(eos_token="</s>")
    assert windows(only_end, ["abc", "de"], length=7) == [both]
    bare = windows(letter_tokenizer(), ["abc", "de"], length=5, bos="none")
    assert bare == [ids_of("abcde")]


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, [0]), (2, [0, 5]), (3, [0, 3, 6]), (10, range(10)), (24, range(10))],
)
def test_windows_are_spread_evenly_over_the_stream(count, expected):
    text = "".join(
        "abcdefgh"[i % 8] * 3 for i in range(10)
    )  # ten windows, each of its own letter
    chosen = windows(letter_tokenizer(), [text], length=3, count=count)
    everything = windows(letter_tokenizer(), [text], length=3)
    assert chosen == [everything[i] for i in expected]


def test_texts_longer_than_the_model_maximum_log_no_warning(
    tokenizer, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    cut_windows(tokenizer, ["abcdefgh" * 4], length=32, count=1)
    assert not caplog.messages
    tokenizer(
        "abcdefgh"
    )  # the tokenizer still logs its warning, so the call above did not
    assert "longer than the specified maximum" in caplog.text


# digest


def test_a_failing_tokenizer_raises_an_error_with_the_reason():
    lacking = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="<unk>"))
    )
    with pytest.raises(
        RopepatchError,
        match="the tokenizer cannot split a text: Exception: WordLevel error",
    ):
        token_ids(lacking, ["b"])


def test_the_digest_hashes_lengths_and_ids_as_64_bit_integers():
    numbers = [3, 1, 2, 70_000, 0, 1, 5]  # each length before its ids
    expected = hashlib.sha256(
        b"".join(number.to_bytes(8, "little") for number in numbers)
    ).hexdigest()
    assert digest([[1, 2, 70_000], [], [5]]) == expected
    assert (
        digest(iter([torch.tensor([1, 2, 70_000], dtype=torch.int32), [], [5]]))
        == expected
    )


def test_a_first_document_that_names_a_file_is_refused(
    tokenizer, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("a").touch()
    assert len(token_ids(tokenizer, ["once", "a", "a"])) == 3
    with pytest.raises(RopepatchError, match="is the name of a file"):
        token_ids(tokenizer, ["a", "once"])
