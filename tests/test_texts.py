import logging
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.texts import read_documents, token_ids, windows

BOS, EOS = 0, 1
VOCABULARY = {"<s>": BOS, "</s>": EOS, **{letter: 2 + i for i, letter in enumerate("abcdefgh")}}


def letter_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """One token per letter; its own post-processing would put <s> in front of every text."""
    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="</s>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=4, **special)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return letter_tokenizer(bos_token="<s>", eos_token="</s>")


def ids_of(text: str) -> list[int]:
    return [VOCABULARY[letter] for letter in text]


# read_documents


def test_a_file_is_split_at_every_marker_and_empty_documents_are_dropped(tmp_path):
    file = tmp_path / "stories.txt"
    file.write_text(
        "one\n\nstill one\n<|endoftext|>\ntwo<|endoftext|>three\n<|endoftext|>\n \n<|endoftext|>\n"
    )
    assert read_documents(file) == ["one\n\nstill one", "two", "three"]


def test_a_folder_is_read_in_sorted_order_and_in_depth(tmp_path):
    (tmp_path / "a").mkdir()
    for name in ("b.txt", "a/z.txt", "a/y.txt", "a/notes.md"):
        (tmp_path / name).write_text(name)
    assert read_documents(tmp_path) == ["a/y.txt", "a/z.txt", "b.txt"]


def test_a_byte_order_mark_and_windows_line_ends_leave_no_trace(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert read_documents(tmp_path) == ["one\ntwo"]


def test_a_file_that_is_not_utf8_is_named_with_the_offset_of_the_bad_byte(tmp_path):
    file = tmp_path / "latin.txt"
    file.write_bytes(b"x\r\n" * 10_000 + b"caf\xe9 au lait")
    with pytest.raises(RopepatchError, match=r"latin\.txt is not UTF-8 text: byte 0xe9 at offset 30003"):
        read_documents(tmp_path)


def test_a_missing_path_is_an_error(tmp_path):
    with pytest.raises(RopepatchError, match=r"no such file or folder: .*nowhere"):
        read_documents(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [None, "", " \n<|endoftext|>\n"])
def test_no_text_is_an_error(tmp_path, content):
    if content is not None:
        (tmp_path / "blank.txt").write_text(content)
    with pytest.raises(RopepatchError, match="no text in"):
        read_documents(tmp_path)


def test_the_shared_stories_are_as_many_as_their_readme_says(shared: Path):
    assert len(read_documents(shared / "texts" / "tinystories")) == 2316


# token_ids


def test_a_text_gets_the_beginning_token_once_and_nothing_else(tokenizer):
    (ids,) = token_ids(tokenizer, ["abc"])
    assert ids.tolist() == [BOS, *ids_of("abc")]


def test_a_tokenizer_without_a_beginning_token_adds_none():
    (ids,) = token_ids(letter_tokenizer(eos_token="</s>"), ["abc"])
    assert ids.tolist() == ids_of("abc")


def test_texts_and_ids_mix_and_keep_their_order(tokenizer):
    mixed = token_ids(tokenizer, ["ab", [5, 6], "c"])
    assert [ids.tolist() for ids in mixed] == [[BOS, *ids_of("ab")], [5, 6], [BOS, *ids_of("c")]]


def test_a_text_without_a_tokenizer_is_an_error():
    with pytest.raises(RopepatchError, match="tokenizer is None"):
        token_ids(None, ["abc"])


def test_one_text_in_place_of_a_list_is_an_error(tokenizer):
    with pytest.raises(RopepatchError, match="must be a list of documents, got one text"):
        token_ids(tokenizer, "abc")


# windows


def test_windows_cover_the_stream_once_and_drop_the_remainder(tokenizer):
    stream = [BOS, *ids_of("abcde"), BOS, *ids_of("fgh"), BOS, *ids_of("a")]  # 12 tokens
    assert windows(tokenizer, ["abcde", "fgh", "a"], length=4, count=None) == [
        stream[0:4],
        stream[4:8],
        stream[8:12],
    ]
    assert windows(tokenizer, ["abcde", "fgh", "a"], length=5, count=None) == [stream[0:5], stream[5:10]]


def test_every_document_is_preceded_by_the_beginning_token(tokenizer):
    (window,) = windows(tokenizer, ["ab", "c"], length=5, count=None)
    assert window == [BOS, *ids_of("ab"), BOS, *ids_of("c")]


def test_the_end_token_stands_in_for_a_missing_beginning_token():
    (window,) = windows(letter_tokenizer(eos_token="</s>"), ["ab", "c"], length=5, count=None)
    assert window == [EOS, *ids_of("ab"), EOS, *ids_of("c")]


def test_a_tokenizer_with_neither_token_joins_the_bare_texts():
    (window,) = windows(letter_tokenizer(), ["ab", "c"], length=3, count=None)
    assert window == ids_of("abc")


@pytest.mark.parametrize(
    ("count", "expected"), [(1, [0]), (2, [0, 5]), (3, [0, 3, 6]), (10, list(range(10)))]
)
def test_windows_are_spread_evenly_over_the_stream(count, expected):
    text = "".join("abcdefgh"[i % 8] * 3 for i in range(10))  # ten windows, each of its own letter
    chosen = windows(letter_tokenizer(), [text], length=3, count=count)
    everything = windows(letter_tokenizer(), [text], length=3, count=None)
    assert chosen == [everything[i] for i in expected]


@pytest.mark.parametrize("count", [None, 1, 3])
def test_too_little_text_is_an_error_that_says_how_much_there_is(tokenizer, count):
    with pytest.raises(RopepatchError, match="too short for a window of 7 tokens: it has 6"):
        windows(tokenizer, ["abc", "d"], length=7, count=count)


def test_a_text_of_fewer_windows_than_asked_for_gives_those_it_has(tokenizer):
    everything = windows(tokenizer, ["abc", "d"], length=3, count=None)
    assert len(everything) == 2
    assert windows(tokenizer, ["abc", "d"], length=3, count=24) == everything


@pytest.mark.parametrize(("length", "count"), [(0, None), (4, 0), (-1, 1)])
def test_lengths_and_counts_below_one_are_errors(tokenizer, length, count):
    with pytest.raises(RopepatchError, match="must be at least 1"):
        windows(tokenizer, ["abc"], length=length, count=count)


def test_texts_longer_than_the_model_reads_are_split_without_a_warning(tokenizer):
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        windows(tokenizer, ["abcdefgh" * 4], length=32, count=1)
        assert not records
        tokenizer("abcdefgh")  # the warning exists, and our call has not used it up
        assert "longer than the specified maximum" in records[0].getMessage()
    finally:
        logger.removeHandler(handler)
