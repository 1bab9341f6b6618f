"""Documents are tokenised to disk once, and cached tokens equal those of a fresh read."""

import json
import os
import pickle
import tracemalloc
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from letters import BOS, VOCABULARY, letter_tokenizer
from transformers import ByT5Tokenizer

from ropepatch.data import tokens
from ropepatch.data.texts import Texts
from ropepatch.data.tokens import TokenStore, tokenised, tokenizer_digest
from ropepatch.errors import RopepatchError

LINES = ["abc", "d", "efgh", "ab", "hgfedcba"]
BOTH = {"bos_token": "<s>", "eos_token": "</s>"}
LETTERS = letter_tokenizer(**BOTH)


def ids_of(text):
    return [BOS, *(VOCABULARY[letter] for letter in text)]


def tokenise(
    source, tokenizer=LETTERS, *, tokens=10**6, trained=8, vocabulary=10, **settings
):
    text = Texts(text=str(source), **settings)
    sizes = {"trained": trained, "vocabulary": vocabulary, "tokens": tokens}
    return tokenised(text, tokenizer, **sizes)


def documents(store):
    starts = store.starts.tolist()
    assert (starts[0], starts[-1]) == (0, len(store))
    return [store.ids(a, b).tolist() for a, b in pairwise(starts)]


def write_lines(file, *rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def text(tmp_path):
    rows = ({"text": line, "body": line[::-1]} for line in LINES)
    return write_lines(tmp_path / "text.jsonl", *rows)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROPEPATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def sources_read(monkeypatch):
    """The sources that have been read, in order."""
    read, stream = [], tokens.stream_documents

    def recorded(source, **options):
        read.append(source)
        return stream(source, **options)

    monkeypatch.setattr(tokens, "stream_documents", recorded)
    return read


# documents


@pytest.mark.parametrize("wanted", [1, 4, 5, 24])
def test_reading_stops_at_enough_tokens(text, monkeypatch, wanted):
    stream = iter(LINES)
    monkeypatch.setattr(tokens, "stream_documents", lambda *_, **__: stream)
    found = documents(tokenise(text, tokens=wanted))
    left = list(stream)
    assert found == list(map(ids_of, LINES[: len(LINES) - len(left)]))
    assert sum(map(len, found[:-1])) < wanted <= sum(map(len, found)) or not left


def test_short_documents_between_long_ones_leave_no_gap(text, monkeypatch):
    monkeypatch.setattr(tokens, "ROWS", 2)  # several parts on disk
    left = list(map(ids_of, ["abc", "efgh", "hgfedcba"]))
    for minimum in (4, "0.5x"):  # of the original length
        store = tokenise(text, min_tokens=minimum)
        assert documents(store) == left
        assert store.report == "3 documents, 18 tokens"
    assert store.ids(2, 12).tolist() == [*left[0], *left[1], *left[2]][2:12]


def test_an_unusable_source_leaves_no_cache_files(text, cache):
    with pytest.raises(RopepatchError, match="has 10 tokens: the longest of 5 has 9"):
        tokenise(text, min_tokens=10)
    write_lines(text, {"input_ids": [1, 2]}, {"title": "a"})
    with pytest.raises(RopepatchError, match="line 2 has no field 'text', nor"):
        tokenise(text)
    assert not [*cache.rglob("*.arrow")]


def test_caching_tokens_needs_less_memory_than_the_tokens(text, monkeypatch):
    document = [5] * 5000
    monkeypatch.setattr(
        tokens, "stream_documents", lambda *_, **__: iter([document] * 500)
    )
    tokenise(text, tokens=10**4)  # imports datasets
    tracemalloc.start()
    try:
        store = tokenise(text, tokens=10**7)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(store) == 5 * 500_000  # 10 MB
    assert peak < 5 * 10**6
    assert len(pickle.dumps(store)) < 20_000


# the key of a cache entry


def test_a_second_request_for_the_same_source_uses_the_cache(
    text, sources_read, monkeypatch
):
    first = tokenise(text)
    monkeypatch.chdir(text.parent)
    others = {"weight": 3.0, "trained": 99, "vocabulary": 12}
    again = tokenise("text.jsonl", letter_tokenizer(**BOTH), **others)
    assert len(sources_read) == 1
    assert (documents(again), again.digest) == (documents(first), first.digest)


BOS_REMOVED = letter_tokenizer(**BOTH)  # with the same backend as `LETTERS`
BOS_REMOVED.bos_token = None
CHANGES = [
    {"field": "body"},
    {"split": "other"},
    {"min_tokens": 2},
    {"tokenizer": letter_tokenizer(VOCABULARY | {"a": 3, "b": 2}, **BOTH)},
    {"tokenizer": letter_tokenizer()},
    {"tokenizer": letter_tokenizer(bos_token="</s>")},
    {"tokenizer": BOS_REMOVED},
    {"tokenizer": letter_tokenizer(**BOTH, split_special_tokens=True)},
    {"tokenizer": ByT5Tokenizer(), "vocabulary": 400},
]


def test_settings_that_change_the_tokens_get_their_own_cache_entry(
    text, tmp_path, sources_read, monkeypatch
):
    plain = documents(tokenise(text))
    for number, change in enumerate(CHANGES, start=2):
        changed = documents(tokenise(text, **change))
        assert len(sources_read) == number, change
        with monkeypatch.context() as patch:
            patch.setenv("ROPEPATCH_CACHE", str(tmp_path / f"{number}"))
            assert changed == documents(tokenise(text, **change))
        sources_read.pop()
    assert documents(tokenise(text)) == plain
    assert len(sources_read) == len(CHANGES) + 1


def test_changed_files_and_a_new_cache_format_are_read_again(
    tmp_path, sources_read, monkeypatch
):
    folder = tmp_path / "texts"
    folder.mkdir()
    file = folder / "b.txt"
    file.write_text("b")
    tokenise(folder)
    (folder / "notes.md").write_text("no")
    tokenise(folder)
    assert len(sources_read) == 1
    later = file.stat().st_mtime_ns + 1
    for name, text in (("b.txt", "c"), ("b.txt", "cd"), ("a.txt", "a")):
        (folder / name).write_text(text)
        os.utime(folder / name, ns=(later, later))
        kept = documents(tokenise(folder))
        assert ids_of(text) in kept
    assert kept == [ids_of("a"), ids_of("cd")]
    monkeypatch.setattr(tokens, "FORMAT", tokens.FORMAT + 1)
    tokenise(folder)
    assert len(sources_read) == 5


def test_the_tokenizer_digest_ignores_padding_and_truncation_of_earlier_calls():
    tokenizer = letter_tokenizer(**BOTH, pad_token="</s>")
    before = tokenizer_digest(tokenizer)
    tokenizer(["ab", "abcdef"], padding="max_length", truncation=True, max_length=4)
    assert tokenizer.backend_tokenizer.padding is not None
    assert tokenizer_digest(tokenizer) == before


def test_an_entry_is_kept_by_revision_and_serves_offline(monkeypatch, caplog):
    hub = {"one": ["ab"], "two": ["cd"]}

    def tokens_at(revision):
        def dataset_info(*_, **__):
            if revision is None:
                raise OSError("no network")
            return SimpleNamespace(sha=revision)

        monkeypatch.setattr(tokens.HfApi, "dataset_info", dataset_info)
        monkeypatch.setattr(
            tokens, "stream_documents", lambda *_, **__: iter(hub[revision])
        )
        return documents(tokenise("someone/letters"))

    for _ in range(2):
        assert [tokens_at("one"), tokens_at("two")] == [[ids_of("ab")], [ids_of("cd")]]
        hub.clear()
    assert not caplog.messages
    assert tokens_at(None) == [ids_of("cd")]
    assert "cannot check the revision on the Hub" in caplog.text
    with pytest.raises(KeyError):  # the stream is asked
        tokenise("someone/else")


# errors


def test_cached_token_ids_are_checked_against_the_vocabulary(tmp_path):
    rows = [[1, 2], [3, 2], [9, 2, 3], [8]]
    file = write_lines(tmp_path / "a.jsonl", *({"input_ids": row} for row in rows))
    assert len(tokenise(file, vocabulary=10, tokens=8)) == 8
    with pytest.raises(RopepatchError, match="holds token id 9, expected 0 to 8"):
        tokenise(file, vocabulary=9, tokens=8)


def test_an_unwritable_cache_raises_one_error(text, monkeypatch):
    monkeypatch.setenv("ROPEPATCH_CACHE", str(text))
    with pytest.raises(RopepatchError, match="cannot cache the tokens of") as caught:
        tokenise(text)
    assert "ROPEPATCH_CACHE" in caught.value.hint


# TokenStore.piece


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_a_piece_contains_its_tokens_and_their_counts_per_document(lengths, data):
    split = torch.arange(sum(lengths)).split(lengths)
    owners = [number for number, ids in enumerate(split) for _ in ids]
    rows = Dataset.from_dict({"input_ids": [ids.tolist() for ids in split]})
    begin = data.draw(st.integers(0, len(owners) - 1))
    end = data.draw(st.integers(begin + 1, len(owners)))
    ids, parts = TokenStore.of("", rows).piece(begin, end)
    assert ids.tolist() == list(range(begin, end))
    assert ids.dtype == torch.long
    inside = owners[begin:end]
    assert list(parts) == [inside.count(owner) for owner in sorted(set(inside))]
