"""Documents are tokenised to disk once, and cached tokens equal those of a fresh read."""

import json
import os
import pickle
import threading
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hub_server import COMMIT, Hub, run_elsewhere, serving
from hypothesis import given
from hypothesis import strategies as st
from letters import BOS, EOS, VOCABULARY, letter_tokenizer
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

from ropepatch.data import tokens
from ropepatch.data.texts import Texts
from ropepatch.data.tokens import Reading, TokenStore, tokenised, tokenizer_digest
from ropepatch.errors import RopepatchError

LINES = ["abc", "d", "efgh", "ab", "hgfedcba"]
BOTH = {"bos_token": "<s>", "eos_token": "</s>"}
LETTERS = letter_tokenizer(**BOTH)


def ids_of(text: str, first: list[int] | None = None) -> list[int]:
    return [*([BOS] if first is None else first), *(VOCABULARY[letter] for letter in text)]


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
    assert starts[-1] == len(store.tokens) == len(store)
    return [store.tokens[a:b].tolist() for a, b in pairwise(starts)]


def write_lines(file: Path, *rows: object) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "text.jsonl", *({"text": line, "body": line[::-1]} for line in LINES))


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


def entries(cache: Path) -> list[str]:
    """The files of all cache entries except their locks."""
    files = (file.relative_to(cache) for file in cache.rglob("*") if file.is_file() and file.name != ".lock")
    return sorted(map(str, files))


# documents


@pytest.mark.parametrize(
    ("special", "first"),
    [(BOTH, [BOS]), ({"eos_token": "</s>"}, [EOS]), ({}, [])],
    ids=["bos", "eos", "none"],
)
def test_each_document_follows_bos_or_eos_if_the_tokenizer_has_one(text, cache, special, first):
    store = tokenise(text, cache, letter_tokenizer(**special))
    assert documents(store) == [ids_of(line, first) for line in LINES]
    assert store.tokens.dtype == torch.int32


# documents that are left out


@pytest.mark.parametrize(
    ("minimum", "left"),
    [
        (3, ["abc", "efgh", "ab", "hgfedcba"]),
        ("0.5x", ["abc", "efgh", "hgfedcba"]),  # 4 tokens: half of the original length
    ],
)
def test_short_documents_are_left_out_and_counted(text, cache, minimum, left):
    store = tokenise(text, cache, min_tokens=minimum)
    assert documents(store) == list(map(ids_of, left))
    assert store.reading.short == len(LINES) - len(left)


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([], {"min_tokens": 10}, r"no document of .* has 10 tokens: the longest of 5 has 9"),
        ([{"input_ids": [1, 2]}, {"input_ids": [9, 3, 10]}], {}, "holds token id 10, expected 0 to 9"),
        (
            [{"input_ids": [1, 2]}, {"title": "a"}],
            {},
            r"text.jsonl, line 2 has no field 'text', nor input_ids",
        ),
    ],
    ids=["too short", "beyond the vocabulary", "a broken row"],
)
def test_an_unusable_source_raises_an_error_and_leaves_no_cache_files(text, cache, rows, settings, message):
    if rows:
        write_lines(text, *rows)
    with pytest.raises(RopepatchError, match=message):
        tokenise(text, cache, **settings)
    assert not entries(cache)


# the number of tokens


@pytest.mark.parametrize("wanted", [1, 4, 5, 6, 12, 23, 24])
def test_reading_stops_at_enough_tokens_and_larger_cache_entries_give_the_same(
    text, cache, monkeypatch, wanted
):
    tokenise(text, cache / "all")
    stream = iter(LINES)
    monkeypatch.setattr(tokens, "stream_documents", lambda *_, **__: stream)
    served, fresh = (tokenise(text, cache / name, tokens=wanted) for name in ("all", "fresh"))
    enough = (n for n in range(1, 6) if n == 5 or sum(len(line) + 1 for line in LINES[:n]) >= wanted)
    needed = LINES[: next(enough)]
    assert documents(served) == documents(fresh) == list(map(ids_of, needed))
    assert served.digest == fresh.digest
    assert list(stream) == LINES[len(needed) :]


def test_a_too_small_cache_entry_is_read_again_unless_the_source_is_exhausted(text, cache, sources_read):
    few = tokenise(text, cache, tokens=5)
    more = tokenise(text, cache, tokens=12)
    assert (len(few), len(more), len(sources_read)) == (6, 14, 2)
    everything = tokenise(text, cache, tokens=1000)
    assert len(everything) == 23
    assert everything.reading.complete
    assert not few.reading.complete
    tokenise(text, cache, tokens=10**9)
    assert len(sources_read) == 3
    assert documents(few) == [ids_of("abc"), ids_of("d")]  # the memory map stays valid


def test_caching_tokens_needs_less_memory_than_the_tokens(tmp_path, cache, monkeypatch):
    (tmp_path / "a.txt").write_text("replaced by the stream below")
    document = [5] * 5000
    monkeypatch.setattr(tokens, "stream_documents", lambda *_, **__: iter([document] * 400))
    tracemalloc.start()
    try:
        store = tokenise(tmp_path, cache, tokens=10**7)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(store) == 2 * 10**6  # 8 MB
    assert peak < 10**6


# the key of a cache entry


def test_a_second_request_for_the_same_source_uses_the_cache(text, cache, sources_read, monkeypatch):
    first = tokenise(text, cache)
    monkeypatch.chdir(text.parent)
    again = tokenise("text.jsonl", cache, letter_tokenizer(**BOTH), weight=3.0, trained=99, vocabulary=12)
    assert len(sources_read) == 1
    assert (documents(again), again.digest) == (documents(first), first.digest)


BOS_REMOVED = letter_tokenizer(**BOTH)  # with the same backend as `LETTERS`
BOS_REMOVED.bos_token = None
OTHER_VOCABULARY = letter_tokenizer(VOCABULARY | {"a": 3, "b": 2}, **BOTH)
CHANGES: dict[str, dict] = {
    "field": {"field": "body"},
    "split": {"split": "other"},
    "minimum length": {"min_tokens": 2},
    "vocabulary": {"tokenizer": OTHER_VOCABULARY},
    "no BOS": {"tokenizer": letter_tokenizer()},
    "another BOS": {"tokenizer": letter_tokenizer(bos_token="</s>")},
    "BOS removed": {"tokenizer": BOS_REMOVED},
    "special tokens as text": {"tokenizer": letter_tokenizer(**BOTH, split_special_tokens=True)},
    "another class": {"tokenizer": ByT5Tokenizer(), "vocabulary": 400},
}


@pytest.mark.parametrize("change", CHANGES)
def test_settings_that_change_the_tokens_get_their_own_cache_entry(text, cache, sources_read, change):
    tokenise(text, cache)
    changed = tokenise(text, cache, **CHANGES[change])
    assert len(sources_read) == 2
    assert documents(changed) == documents(tokenise(text, cache / "other", **CHANGES[change]))
    tokenise(text, cache)
    assert len(sources_read) == 3  # the third is for the other folder; both entries of this one remain
    assert len(entries(cache)) == 6  # including those in `other`


def test_changed_files_and_a_new_cache_format_are_read_again(tmp_path, cache, sources_read, monkeypatch):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.txt").write_text("b")
    tokenise(folder, cache)
    (folder / "notes.md").write_text("no")
    tokenise(folder, cache)
    assert len(sources_read) == 1
    state = (folder / "b.txt").stat()
    for name, text in (("b.txt", "c"), ("b.txt", "cd"), ("a.txt", "a")):  # changed time, size, or name
        (folder / name).write_text(text)
        os.utime(folder / name, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
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


def test_cached_token_ids_are_checked_against_the_vocabulary_only_as_far_as_requested(tmp_path, cache):
    rows = [[1, 2], [3, 2], [9, 2, 3], [8]]
    file = write_lines(tmp_path / "a.jsonl", *({"input_ids": row} for row in rows))
    tokenise(file, cache)
    assert len(tokenise(file, cache, vocabulary=9, tokens=4)) == 4
    with pytest.raises(RopepatchError, match="holds token id 9, expected 0 to 8"):
        tokenise(file, cache, vocabulary=9)


# faults on disk


def damage(store: TokenStore) -> Iterator[None]:
    """Damage an entry in one way after the other; memory-mapped tokens stay valid."""
    meta, tokens = (store.folder / name for name in ("meta.json", "tokens.bin"))
    for file in (meta, tokens):
        content = file.read_bytes()
        for size in {0, 1, len(content) // 2, len(content) - 2}:
            file.unlink()
            file.write_bytes(content[:size])
            yield
    content = meta.read_text()
    for old, new in (('"short"', '"shirt"'), ('"lengths"', '"length"'), ("[4,", "[5,"), ("[4,", "[null,")):
        assert old in content
        meta.write_text(content.replace(old, new))
        yield
    tokens.unlink()
    yield


def test_a_damaged_cache_entry_is_read_again_with_a_warning(text, cache, sources_read, caplog):
    whole = tokenise(text, cache)
    for number, _ in enumerate(damage(whole), start=2):
        caplog.clear()
        again = tokenise(text, cache)
        assert (documents(again), again.digest, again.reading) == (
            documents(whole),
            whole.digest,
            whole.reading,
        )
        assert "is damaged" in caplog.text
        assert len(sources_read) == number


def test_a_growing_cache_entry_stays_readable_with_its_old_tokens(text, cache, monkeypatch):
    """For a process that reads, or a writer that is killed, between writing tokens.bin and meta.json."""
    few = tokenise(text, cache, tokens=5)
    sent, seen = pickle.dumps(few), list[TokenStore]()
    write_json = tokens.write_json

    def find_and_write(*arguments: object, **options: object) -> None:
        assert (few.folder / "tokens.bin").stat().st_size > 4 * len(few)
        seen.append(tokens.find(few.folder, 5))
        seen.append(pickle.loads(sent))
        assert tokens.find(few.folder, 7) is None
        write_json(*arguments, **options)

    monkeypatch.setattr(tokens, "write_json", find_and_write)
    tokenise(text, cache)
    assert [documents(store) for store in seen] == [documents(few)] * 2
    assert {store.digest for store in seen} == {few.digest}
    assert documents(pickle.loads(sent)) == documents(few)


def test_an_unwritable_cache_raises_one_error(text):
    with pytest.raises(RopepatchError, match=r"cannot cache the tokens of .* in .*: Not a dir") as caught:
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
        threading.Thread(target=lambda: stores.append(tokenise(text, cache)), daemon=True) for _ in range(2)
    ]
    both[0].start()
    assert begun.wait(60)
    both[1].start()
    resume.set()
    for thread in both:
        thread.join(60)
    assert [documents(store) for store in stores] == [list(map(ids_of, LINES))] * 2
    assert len(calls) == 1


def test_a_pickled_store_does_not_contain_its_tokens(tmp_path, cache):
    file = write_lines(tmp_path / "a.jsonl", *[{"input_ids": [i % 10] * 50} for i in range(400)])
    tokenise(file, cache)
    store = tokenise(file, cache, tokens=10_001)  # a part of the entry
    sent = pickle.dumps(store)
    there = pickle.loads(sent)
    assert len(sent) < 2000
    assert (documents(there), there.digest, there.report) == (documents(store), store.digest, store.report)


# TokenStore.piece


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_a_piece_contains_its_tokens_and_their_counts_per_document(lengths, data):
    owners = [document for document, length in enumerate(lengths) for _ in range(length)]
    starts = torch.tensor([sum(lengths[:count]) for count in range(len(lengths) + 1)])
    store = TokenStore(Path(), torch.arange(len(owners), dtype=torch.int32), starts, Reading("", 1, 0, True))
    begin = data.draw(st.integers(0, len(owners) - 1))
    end = data.draw(st.integers(begin + 1, len(owners)))
    ids, parts = store.piece(begin, end)
    assert ids.tolist() == list(range(begin, end))
    assert ids.dtype == torch.long
    inside = owners[begin:end]
    assert list(parts) == [inside.count(owner) for owner in sorted(set(inside))]


# the Hub

SCRIPT = """
import json, logging, sys
import datasets, torch
from transformers import AutoTokenizer
from pathlib import Path
from ropepatch.errors import RopepatchError
from ropepatch.data.texts import Texts
from ropepatch.data.tokens import tokenised
import time
time.sleep = lambda seconds: None  # the Hub's client waits between attempts
messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("ropepatch").addHandler(handler)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
for text, wanted in json.loads(sys.argv[2]):
    messages.clear()
    try:
        options = {"trained": 8, "vocabulary": 10, "cache": Path("cache")}
        store = tokenised(Texts(text=text), tokenizer, tokens=wanted, **options)
        revision = store.folder.name.rpartition("-")[2]
        answer = {"ids": store.tokens.tolist(), "revision": revision, "report": store.report}
    except RopepatchError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer | {"messages": list(messages)}))
"""
NAME = "someone/letters"


def tokenise_elsewhere(home: Path, hub: Hub, *requests: tuple[str, int], **variables: str) -> list[dict]:
    """Tokenise numbers of tokens of sources in a separate interpreter."""
    LETTERS.save_pretrained(home / "tokenizer")
    return run_elsewhere(SCRIPT, "tokenizer", json.dumps(requests), hub=hub, home=home, **variables)


@pytest.mark.slow
def test_a_hub_dataset_is_streamed_as_needed_and_cached_by_revision(tmp_path):
    import datasets

    datasets.disable_progress_bars()
    folder = tmp_path / "hub"
    folder.mkdir()
    for part in range(2):
        texts = {"text": ["ab", "", "cd"]}
        datasets.Dataset.from_dict(texts).to_parquet(folder / f"train-{part}.parquet")
    hub = Hub(f"datasets/{NAME}", folder)
    with serving(hub):
        (first, again) = tokenise_elsewhere(tmp_path, hub, (NAME, 6), (NAME, 5))
        assert first["ids"] == again["ids"] == ids_of("ab") + ids_of("cd")
        assert first["revision"] == COMMIT[:24]
        assert first["report"] == "2 documents, 6 tokens"
        assert "train-0.parquet" in hub.downloaded
        assert "train-1.parquet" not in hub.downloaded

        datasets.Dataset.from_dict({"text": ["ef"]}).to_parquet(folder / "train-0.parquet")
        hub.change(f"datasets/{NAME}", **{"train-0.parquet": (folder / "train-0.parquet").read_bytes()})
        hub.fail("", "train-1.parquet", 500)
        (changed, failed) = tokenise_elsewhere(tmp_path, hub, (NAME, 3), (NAME, 6))
        assert changed["ids"] == ids_of("ef")
        assert failed["error"].startswith(f"cannot read {NAME} from the Hub: ")

        hub.requests.clear()
        (kept, more, other) = tokenise_elsewhere(
            tmp_path, hub, (NAME, 3), (NAME, 4), ("someone/else", 1), HF_HUB_OFFLINE="1"
        )
        assert not hub.requests
        assert kept["ids"] == ids_of("ef")  # the entry cached last
        assert "cannot check the revision on the Hub" in kept["messages"][0]
        assert "OfflineModeIsEnabled" in more["error"]
        assert "OfflineModeIsEnabled" in other["error"]
