import hashlib
import logging
from functools import partial
from pathlib import Path

import pytest
import torch
from letters import BOS, EOS, VOCABULARY, letter_tokenizer
from tokenizers import Tokenizer, processors
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from ropepatch.data import texts
from ropepatch.data.texts import cut_windows, digest, first_documents, read_documents, token_ids
from ropepatch.errors import RopepatchError


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Its own post-processing would put <s> in front of every text."""
    tokenizer = letter_tokenizer(bos_token="<s>", eos_token="</s>", model_max_length=4)
    first = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.backend_tokenizer.post_processor = first
    return tokenizer


def ids_of(text: str) -> list[int]:
    return [VOCABULARY[letter] for letter in text]


# read_documents


def test_texts_of_json_lines_are_read_and_token_ids_are_refused(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n{"text": "two"}\n')
    assert read_documents(tmp_path) == ["one", "two"]
    file.write_text('{"text": "one"}\n{"input_ids": [2]}\n')
    with pytest.raises(RopepatchError, match="holds token ids, expected texts"):
        read_documents(tmp_path)


# token_ids


def test_a_text_gets_the_beginning_token_once_if_there_is_one_and_it_is_wanted(tokenizer):
    bare = letter_tokenizer(eos_token="</s>")
    for splitter, options, first in ((tokenizer, {}, [BOS]), (tokenizer, {"bos": False}, []), (bare, {}, [])):
        ids, empty = token_ids(splitter, ["abc", ""], **options)
        assert ids.tolist() == [*first, *ids_of("abc")]
        assert (empty.tolist(), empty.dtype) == (first, torch.long)


def test_more_documents_than_are_split_at_one_time_keep_their_order(tokenizer, monkeypatch):
    monkeypatch.setattr(texts, "CHARACTERS", 3)
    documents = ["a", [5], "b", "c", [6], [7], [8], "d"]
    expected = [[BOS, 2], [5], [BOS, 3], [BOS, 4], [6], [7], [8], [BOS, 5]]
    assert [ids.tolist() for ids in token_ids(tokenizer, iter(documents))] == expected


@pytest.mark.parametrize("cut", [token_ids, partial(cut_windows, length=1, count=None)])
def test_a_text_without_a_tokenizer_and_one_text_in_place_of_a_list_are_errors(tokenizer, cut):
    with pytest.raises(RopepatchError, match="tokenizer is None"):
        cut(None, ["abc"])
    with pytest.raises(RopepatchError, match="must be a list of documents, got one text"):
        cut(tokenizer, "abc")


@pytest.mark.parametrize(
    "wrong",
    [
        *(None, 5, {"a": 1}, [None], torch.tensor(5), [[5, 6]], torch.tensor([[5, 6]])),
        *([0.5, 1.7], torch.ones(2), [True, 3], [-1, 2], [2**31]),
    ],
)
def test_what_is_neither_text_nor_token_ids_is_refused_by_its_number(tokenizer, wrong):
    with pytest.raises(RopepatchError, match=r"documents\[1\] must be a text or a list of token ids, got"):
        token_ids(tokenizer, ["a", wrong])


# first_documents


@pytest.mark.parametrize(
    ("documents", "options", "expected"),
    [
        (
            ["abcd", "ab", [2, 3], [7, 6, 5, 4], "efgh", "bbbb"],
            {"count": 4},
            [[BOS, 2, 3], [BOS, 2, 3], [7, 6, 5], [BOS, 6, 7]],
        ),
        (["ab", "abc", "cdef"], {"count": 2, "bos": False}, [ids_of("abc"), ids_of("cde")]),
    ],
)
def test_the_first_documents_that_are_long_enough_are_cut_to_length(tokenizer, documents, options, expected):
    read = first_documents(tokenizer, documents, length=3, **options)
    assert [ids.tolist() for ids in read] == expected


@pytest.mark.parametrize(("count", "left"), [(1, ["a", "ddd", "eee", "fff"]), (2, ["eee", "fff"])])
def test_no_document_is_read_beyond_the_last_one_taken(tokenizer, count, left):
    stream = iter(["a", "b", "abc", "a", "ddd", "eee", "fff"])
    first_documents(tokenizer, stream, length=4, count=count)
    assert list(stream) == left


def test_fewer_documents_than_wanted_are_logged_and_without_a_count_all_are_taken(tokenizer, caplog):
    for count in (2, None):  # "bc" is of exactly the length
        assert len(first_documents(tokenizer, iter(["abc", "a", "bc"]), length=3, count=count)) == 2
        assert not caplog.records
    assert len(first_documents(tokenizer, ["abc", "a", "bc"], length=3, count=5)) == 2
    assert caplog.messages == ["only 2 of 3 documents have 3 tokens, wanted 5"]
    with pytest.raises(RopepatchError, match="no document has 9 tokens: the longest of 3 has 4"):
        first_documents(tokenizer, ["abc", "a", "bc"], length=9, count=1)


def test_a_document_that_was_cut_does_not_keep_its_rest_in_memory(tokenizer):
    (read,) = first_documents(None, [torch.arange(1000)], length=3, count=1)
    assert read.untyped_storage().nbytes() == 3 * 8


# windows


def windows(tokenizer, documents, **options) -> list[list[int]]:
    return [ids for _, ids in cut_windows(tokenizer, documents, **options)]


def test_windows_cover_the_stream_once_and_drop_the_remainder(tokenizer):
    documents = ["abcde", "fgh", "a"]
    stream = [BOS, *ids_of("abcde"), BOS, *ids_of("fgh"), BOS, *ids_of("a")]  # 12 tokens
    for length, begins in ((4, (0, 4, 8)), (5, (0, 5))):
        expected = [stream[begin : begin + length] for begin in begins]
        assert windows(tokenizer, documents, length=length, count=None) == expected


def test_token_ids_are_joined_as_they_are_and_a_text_follows_the_first_or_the_end_token(tokenizer):
    documents = [[5, 6, 7], torch.tensor([8, 9], dtype=torch.int32)]
    assert windows(None, iter(documents), length=2, count=None) == [[5, 6], [7, 8]]
    assert windows(tokenizer, [*documents, "a"], length=7, count=None) == [[5, 6, 7, 8, 9, BOS, 2]]
    only_end = letter_tokenizer(eos_token="</s>")
    assert windows(only_end, ["ab", "c"], length=5, count=None) == [[EOS, *ids_of("ab"), EOS, *ids_of("c")]]


@pytest.mark.parametrize(
    ("count", "expected"), [(1, [0]), (2, [0, 5]), (3, [0, 3, 6]), (10, range(10)), (24, range(10))]
)
def test_windows_are_spread_evenly_over_the_stream(count, expected):
    text = "".join("abcdefgh"[i % 8] * 3 for i in range(10))  # ten windows, each of its own letter
    chosen = windows(letter_tokenizer(), [text], length=3, count=count)
    everything = windows(letter_tokenizer(), [text], length=3, count=None)
    assert chosen == [everything[i] for i in expected]


@pytest.mark.parametrize(("length", "count"), [(0, None), (4, 0), (-1, 1)])
def test_lengths_and_counts_below_one_are_errors(tokenizer, length, count):
    for cut in (cut_windows, first_documents):
        with pytest.raises(RopepatchError, match="must be at least 1"):
            cut(tokenizer, ["abc"], length=length, count=count)


def test_texts_longer_than_the_model_reads_are_split_without_a_warning(tokenizer, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    cut_windows(tokenizer, ["abcdefgh" * 4], length=32, count=1)
    assert not caplog.messages
    tokenizer("abcdefgh")  # the warning exists, and our call has not used it up
    assert "longer than the specified maximum" in caplog.text


# digest


def test_a_tokenizer_that_fails_is_named_in_one_line():
    lacking = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="<unk>")))
    with pytest.raises(RopepatchError, match="the tokenizer cannot split a text: Exception: WordLevel error"):
        token_ids(lacking, ["b"])


def test_the_digest_is_that_of_the_lengths_and_ids_as_64_bit_numbers():
    numbers = [3, 1, 2, 70_000, 0, 1, 5]  # each length before its ids
    expected = hashlib.sha256(b"".join(number.to_bytes(8, "little") for number in numbers)).hexdigest()
    assert digest([[1, 2, 70_000], [], [5]]) == expected
    assert digest(iter([torch.tensor([1, 2, 70_000], dtype=torch.int32), [], [5]])) == expected


def test_a_line_of_a_text_that_is_called_like_a_file_here_is_text(tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a").touch()
    assert len(token_ids(tokenizer, ["once", "a", "a"])) == 3
    with pytest.raises(RopepatchError, match="is the name of a file"):
        token_ids(tokenizer, ["a", "once"])
