"""Documents are tokenised to disk once, and cached tokens equal those of a fresh read."""

import json
import os
import pickle
import threading
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from letters import BOS, VOCABULARY, letter_tokenizer
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

from ropepatch.data import tokens
from ropepatch.data.texts import Texts
from ropepatch.data.tokens import TokenStore, tokenised, tokenizer_digest
from ropepatch.errors import RopepatchError

LINES = ["abc", "d", "efgh", "ab", "hgfedcba"]
BOTH = {"bos_token": "<s>", "eos_token": "</s>"}
LETTERS = letter_tokenizer(**BOTH)


def ids_of(text: str, first: list[int] | None = None) -> list[int]:
    return [
        *([BOS] if first is None else first),
        *(VOCABULARY[letter] for letter in text),
    ]


def tokenise(
    source: Path | str,
    cache: Path,
    tokenizer: PreTrainedTokenizerBase = LETTERS,
    *,
    tokens: int = 10**6,
    trained: int = 8,
    vocabulary: int = 10,
    **settings: object,
) -> TokenStore:
    return tokenised(
        Texts(text=str(source), **settings),
        tokenizer,
        trained=trained,
        vocabulary=vocabulary,
        tokens=tokens,
        cache=cache,
    )


def documents(store: TokenStore) -> list[list[int]]:
    starts = store.starts.tolist()
    assert starts[0] == 0
    assert starts[-1] == len(store)
    return [store.ids(a, b).tolist() for a, b in pairwise(starts)]


def write_lines(file: Path, *rows: object) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_lines(
        tmp_path / "text.jsonl", *({"text": line, "body": line[::-1]} for line in LINES)
    )


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def sources_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that have been read, in order."""
    read: list[str] = []
    stream = tokens.stream_documents

    def recorded(source: str, **options: object) -> Iterator[str | list[int]]:
        read.append(source)
        return stream(source, **options)

    monkeypatch.setattr(tokens, "stream_documents", recorded)
    return read


def entries(cache: Path) -> list[Path]:
    """The files of tokens of all cache entries."""
    return sorted(cache.rglob("*.arrow"))


# documents


@pytest.mark.parametrize("wanted", [1, 4, 5, 12, 24])
def test_reading_stops_at_enough_tokens(text, cache, monkeypatch, wanted):
    stream = iter(LINES)
    monkeypatch.setattr(tokens, "stream_documents", lambda *_, **__: stream)
    found = documents(tokenise(text, cache, tokens=wanted))
    left = list(stream)
    assert found == list(map(ids_of, LINES[: len(LINES) - len(left)]))
    assert sum(map(len, found[:-1])) < wanted <= sum(map(len, found)) or not left


def test_short_documents_between_long_ones_leave_no_gap(text, cache, monkeypatch):
    monkeypatch.setattr(tokens, "ROWS", 2)  # several parts on disk
    left = ["abc", "efgh", "hgfedcba"]
    for minimum in (4, "0.5x"):  # of the original length
        store = tokenise(text, cache, min_tokens=minimum)
        assert documents(store) == list(map(ids_of, left))
        assert store.report == "3 documents, 18 tokens; 2 too short, left out"
    joined = [token for line in left for token in ids_of(line)]
    assert store.ids(2, 12).tolist() == joined[2:12]


def test_an_unusable_source_raises_an_error_and_leaves_no_cache_files(text, cache):
    with pytest.raises(RopepatchError, match="has 10 tokens: the longest of 5 has 9"):
        tokenise(text, cache, min_tokens=10)
    write_lines(text, {"input_ids": [1, 2]}, {"title": "a"})
    with pytest.raises(RopepatchError, match="line 2 has no field 'text', nor"):
        tokenise(text, cache)
    assert not entries(cache)


def test_caching_tokens_needs_less_memory_than_the_tokens(tmp_path, cache, monkeypatch):
    (tmp_path / "a.txt").write_text("replaced by the stream below")
    document = [5] * 5000
    monkeypatch.setattr(
        tokens, "stream_documents", lambda *_, **__: iter([document] * 1000)
    )
    tokenise(tmp_path, cache, tokens=10**4)  # imports datasets
    tracemalloc.start()
    try:
        store = tokenise(tmp_path, cache, tokens=10**7)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(store) == 5 * 10**6  # 20 MB
    assert peak < 5 * 10**6
    assert len(pickle.dumps(store)) < 20_000


# the key of a cache entry


def test_a_second_request_for_the_same_source_uses_the_cache(
    text, cache, sources_read, monkeypatch
):
    first = tokenise(text, cache)
    monkeypatch.chdir(text.parent)
    again = tokenise(
        "text.jsonl",
        cache,
        letter_tokenizer(**BOTH),
        weight=3.0,
        trained=99,
        vocabulary=12,
    )
    assert len(sources_read) == 1
    assert (documents(again), again.digest) == (documents(first), first.digest)


BOS_REMOVED = letter_tokenizer(**BOTH)  # with the same backend as `LETTERS`
BOS_REMOVED.bos_token = None
OTHER_VOCABULARY = letter_tokenizer(VOCABULARY | {"a": 3, "b": 2}, **BOTH)
CHANGES: list[dict[str, Any]] = [
    {"field": "body"},
    {"split": "other"},
    {"min_tokens": 2},
    {"tokenizer": OTHER_VOCABULARY},
    {"tokenizer": letter_tokenizer()},
    {"tokenizer": letter_tokenizer(bos_token="</s>")},
    {"tokenizer": BOS_REMOVED},
    {"tokenizer": letter_tokenizer(**BOTH, split_special_tokens=True)},
    {"tokenizer": ByT5Tokenizer(), "vocabulary": 400},
]


def test_settings_that_change_the_tokens_get_their_own_cache_entry(
    text, cache, sources_read
):
    plain = documents(tokenise(text, cache))
    for number, change in enumerate(CHANGES, start=2):
        changed = documents(tokenise(text, cache, **change))
        assert len(sources_read) == number, change
        assert changed == documents(tokenise(text, cache / f"{number}", **change))
        sources_read.pop()
    assert documents(tokenise(text, cache)) == plain
    assert len(sources_read) == len(CHANGES) + 1


def test_changed_files_and_a_new_cache_format_are_read_again(
    tmp_path, cache, sources_read, monkeypatch
):
    folder = tmp_path / "texts"
    folder.mkdir()
    file = folder / "b.txt"
    file.write_text("b")
    tokenise(folder, cache)
    (folder / "notes.md").write_text("no")
    tokenise(folder, cache)
    assert len(sources_read) == 1
    later = file.stat().st_mtime_ns + 1
    for name, text in (("b.txt", "c"), ("b.txt", "cd"), ("a.txt", "a")):
        (folder / name).write_text(text)
        os.utime(folder / name, ns=(later, later))
        kept = documents(tokenise(folder, cache))
        assert ids_of(text) in kept
    assert kept == [ids_of("a"), ids_of("cd")]
    monkeypatch.setattr(tokens, "FORMAT", tokens.FORMAT + 1)
    tokenise(folder, cache)
    assert len(sources_read) == 5


def test_the_tokenizer_digest_ignores_padding_and_truncation_of_earlier_calls():
    tokenizer = letter_tokenizer(**BOTH, pad_token="</s>")
    before = tokenizer_digest(tokenizer)
    tokenizer(["ab", "abcdef"], padding="max_length", truncation=True, max_length=4)
    assert tokenizer.backend_tokenizer.padding is not None
    assert tokenizer_digest(tokenizer) == before


# token ids outside the vocabulary


def test_cached_token_ids_are_checked_against_the_vocabulary(tmp_path, cache):
    rows = [[1, 2], [3, 2], [9, 2, 3], [8]]
    file = write_lines(tmp_path / "a.jsonl", *({"input_ids": row} for row in rows))
    assert len(tokenise(file, cache, vocabulary=10, tokens=8)) == 8
    with pytest.raises(RopepatchError, match="holds token id 9, expected 0 to 8"):
        tokenise(file, cache, vocabulary=9, tokens=8)


# faults on disk


def test_an_unwritable_cache_raises_one_error(text):
    with pytest.raises(
        RopepatchError, match=r"cannot cache the tokens of .* in .*"
    ) as caught:
        tokenise(text, text / "cache")
    assert "ROPEPATCH_CACHE" in (caught.value.hint or "")


# several threads and processes


def test_two_concurrent_requests_read_the_source_once(text, cache, monkeypatch):
    begun, resume = threading.Event(), threading.Event()
    stores: list[TokenStore] = []
    calls: list[object] = []

    def wait(*_: object, **__: object) -> Iterator[str]:
        calls.append(begun.set())
        assert resume.wait(60)
        yield from LINES

    monkeypatch.setattr(tokens, "stream_documents", wait)
    both = [
        threading.Thread(
            target=lambda: stores.append(tokenise(text, cache)), daemon=True
        )
        for _ in range(2)
    ]
    both[0].start()
    assert begun.wait(60)
    both[1].start()
    resume.set()
    for thread in both:
        thread.join(60)
    assert [documents(store) for store in stores] == [list(map(ids_of, LINES))] * 2
    assert len(calls) == 1


# TokenStore.piece


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_a_piece_contains_its_tokens_and_their_counts_per_document(lengths, data):
    owners = [
        document for document, length in enumerate(lengths) for _ in range(length)
    ]
    split = torch.arange(len(owners)).split(lengths)
    store = TokenStore.of(
        "", Dataset.from_dict({"input_ids": [ids.tolist() for ids in split]})
    )
    begin = data.draw(st.integers(0, len(owners) - 1))
    end = data.draw(st.integers(begin + 1, len(owners)))
    ids, parts = store.piece(begin, end)
    assert ids.tolist() == list(range(begin, end))
    assert ids.dtype == torch.long
    inside = owners[begin:end]
    assert list(parts) == [inside.count(owner) for owner in sorted(set(inside))]


# the Hub


def test_an_entry_is_kept_by_its_revision_on_the_hub_and_the_last_serves_without_network(
    cache, monkeypatch, caplog
):
    hub = {"one": ["ab"], "two": ["cd"]}

    def tokens_at(revision: str | None) -> list[list[int]]:
        def dataset_info(*_: object, **__: object) -> SimpleNamespace:
            if revision is None:
                raise OSError("no network")
            return SimpleNamespace(sha=revision)

        monkeypatch.setattr(tokens.HfApi, "dataset_info", dataset_info)
        monkeypatch.setattr(
            tokens, "stream_documents", lambda *_, **__: iter(hub[revision])
        )
        return documents(tokenise("someone/letters", cache))

    assert [tokens_at("one"), tokens_at("two")] == [[ids_of("ab")], [ids_of("cd")]]
    hub.clear()
    assert [tokens_at("one"), tokens_at("two")] == [[ids_of("ab")], [ids_of("cd")]]
    assert not caplog.messages
    assert tokens_at(None) == [ids_of("cd")]
    assert "cannot check the revision on the Hub" in caplog.text
    with pytest.raises(KeyError):  # the stream is asked
        tokenise("someone/else", cache)
