import gzip
import io
import json
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
from hub_server import Hub, run_elsewhere, serving
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ropepatch.data.sources import local_files, stream_documents
from ropepatch.errors import RopepatchError

SUFFIXES = ["txt", "txt.gz", "jsonl", "jsonl.gz", "json"]

fuzzed = settings(
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def read(source, **options):
    return list(stream_documents(source, **options))


def write(file, content):
    file.write_bytes(
        gzip.compress(content, mtime=0) if file.suffix == ".gz" else content
    )
    return file


def write_lines(file, *rows):
    return write(file, b"".join(json.dumps(row).encode() + b"\n" for row in rows))


@pytest.fixture(scope="module")
def dataset_of():
    import datasets

    datasets.disable_progress_bars()
    return datasets.Dataset.from_dict


# text files


@fuzzed
@given(
    st.lists(
        st.sampled_from(
            ["<|endoftext|>", "<|endof", "text|>", "a", "é", " ", "\n", "\r\n", "\r"]
        )
    )
)
@example(["\r\n", "a", "\r", "b"])
def test_streaming_a_text_file_equals_splitting_the_whole_file(tmp_path, pieces):
    text = "".join(["start ", *pieces])
    whole = io.StringIO(text, newline=None).read()  # line ends as in Python's text mode
    expected = [part.strip() for part in whole.split("<|endoftext|>") if part.strip()]
    assert read(write(tmp_path / "a.txt", text.encode())) == expected


@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
def test_a_byte_order_mark_is_dropped_only_at_the_beginning(tmp_path, suffix):
    file = write(
        tmp_path / f"a.{suffix}", "\ufeffone\n\ufefftwo<|endoftext|>zwölf".encode()
    )
    assert read(file) == ["one\n\ufefftwo", "zwölf"]


# JSON lines


def test_each_json_line_gives_its_field_or_its_token_ids(tmp_path):
    largest = [0, 2**31 - 1]
    blank = b'\xef\xbb\xbf\n{"text": ""}\r\n  \n{"text": " \\n"}\n{"input_ids": []}\n'
    rows = [{"text": " a<|endoftext|>b\n", "body": "c"}, {"input_ids": largest}]
    for suffix in ("jsonl", "jsonl.gz", "json"):
        file = write_lines(tmp_path / f"a.{suffix}", *rows)
        assert read(file) == [" a<|endoftext|>b\n", largest]
        assert read(file, field="body") == ["c", largest]
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    assert read(write(tmp_path / "b.jsonl", blank + lines)) == read(file)


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        (b'{"text": "a"', " is not JSON", "each line must be an object"),
        (b"[" * 200_000, " is not JSON", "each line must be an object"),
        (b'["text"]', " must be a JSON object, got", "such as"),
        (b'{"body": "c"}', " has no field 'text', nor input_ids", "it has"),
        (b'{"text": [1, "a"]}', ": text must be a text or a list", "name the field"),
        (b'{"text": [true]}', ": text must be a text or a list", "name the field"),
    ],
)
def test_an_invalid_line_is_named_with_its_fault(tmp_path, line, message, hint):
    file = write(tmp_path / "a.jsonl", b'\n{"text": "fine"}\n' + line + b"\n")
    place = rf"a\.jsonl, line 3{message}"
    with pytest.raises(RopepatchError, match=place) as caught:
        read(file)
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_invalid_utf_8_is_named_with_file_and_byte(tmp_path, suffix):
    file = write(
        tmp_path / f"a.{suffix}", b'{"text": "caf\xc3\xa9"}\r\n{"text": "caf\xe9"}\n'
    )
    with pytest.raises(
        RopepatchError, match=rf"cannot read .*/a\.{suffix}: .*byte 0xe9"
    ) as caught:
        read(file)
    assert f"iconv -f latin1 -t utf-8 a.{suffix}" in caught.value.hint


# folders


def test_a_folder_gives_all_its_document_files_in_sorted_order(tmp_path):
    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "2.txt", b"second")
    write_lines(tmp_path / "b" / "3.jsonl.gz", {"text": "third"}, {"input_ids": [4]})
    write(tmp_path / "b" / "4.txt", b" \n")
    write(tmp_path / "c.txt.gz", b"fifth")
    write_lines(tmp_path / "a.jsonl", {"text": "first"})
    for name in ("config.json", "notes.md", "z.parquet"):
        write(tmp_path / name, b"not a document")
    (tmp_path / "folder.txt").mkdir()
    assert read(tmp_path) == ["first", "second", "third", [4], "fifth"]


# missing sources


ABSENT = ["/no/where", "../where", "nowhere", "no/where/now", "no/a.jsonl.gz", "no/"]
ABSENT += [Path("owner/name")]  # a Path cannot be an id
NO_NAMES = ["a" * 5000, "a\0b", "~nobody_of_that_name/a.txt"]


@pytest.mark.parametrize("source", ABSENT + NO_NAMES)
def test_missing_paths_that_cannot_be_hub_ids_raise_an_error(source):
    for look in (stream_documents, local_files):
        with pytest.raises(RopepatchError, match=r"no such file|cannot look") as caught:
            look(source)
        assert "owner/name" in caught.value.hint


def test_local_paths_precede_hub_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "owner" / "name").mkdir(parents=True)
    write(tmp_path / "owner" / "name" / "a.txt", b"local")
    assert read("owner/name") == read("~/owner/name/a.txt") == ["local"]


# hostile input


@settings(fuzzed, max_examples=40)
@given(st.binary(max_size=60), st.sampled_from(["txt", "jsonl", "parquet", "csv"]))
def test_arbitrary_bytes_give_documents_or_one_error(tmp_path, content, suffix):
    file = write(tmp_path / f"a.{suffix}", content)
    with suppress(RopepatchError):
        assert all(map(str.strip, read(file)))


@pytest.mark.parametrize("damage", [lambda whole: whole[:-3], lambda whole: whole[:12]])
def test_a_damaged_gzip_file_raises_one_error(tmp_path, damage):
    write(tmp_path / "a.txt", b"one")
    whole = gzip.compress(b"one\n" * 1000, mtime=0)
    (tmp_path / "b.txt.gz").write_bytes(damage(whole))
    with pytest.raises(RopepatchError, match=r"cannot read .*b\.txt\.gz"):
        read(tmp_path)


# streaming


@pytest.mark.parametrize("suffix", ["txt", "jsonl.gz"])
def test_streaming_needs_no_memory_for_the_whole_file(tmp_path, suffix):
    story = "Once upon a time. " * 2000  # 36 kB
    if suffix == "txt":
        write(tmp_path / "a.txt", f"{story}\n<|endoftext|>\n".encode() * 500)
    else:
        write_lines(tmp_path / f"a.{suffix}", *[{"text": story}] * 500)
    next(stream_documents(tmp_path))  # imports datasets
    tracemalloc.start()
    try:
        count = sum(1 for _ in stream_documents(tmp_path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 500
    assert peak < 200 * len(story)


# saved datasets and tables


def test_a_saved_dataset_gives_its_texts_or_token_ids(tmp_path, dataset_of):
    for form in (None, "torch"):
        columns = {"text": ["one", "", "two"], "input_ids": [[1, 2], [3], []]}
        dataset_of(columns).with_format(form).save_to_disk(tmp_path / f"{form}")
        assert read(tmp_path / f"{form}") == ["one", "two"]
        assert read(tmp_path / f"{form}", field="input_ids") == [[1, 2], [3]]


def test_a_missing_split_row_or_column_is_named(tmp_path, dataset_of):
    import datasets

    splits = {name: dataset_of({"text": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "splits")
    assert read(tmp_path / "splits", split="train") == ["train"]
    dataset_of({"text": ["one", None, "two"]}).save_to_disk(tmp_path / "set")
    for name, options, message in (
        ("splits", {"split": "dev"}, "has no split 'dev'"),
        ("set", {"field": "body"}, "row 0 has no field 'body', nor input_ids"),
        ("set", {}, "row 1: text must be a text or a list of token ids, got None"),
    ):
        with pytest.raises(RopepatchError, match=f"{name}.* {message}"):
            read(tmp_path / name, **options)


def test_parquet_and_csv_files_give_the_named_column(tmp_path, dataset_of):
    table = dataset_of({"text": ["one", "two"], "id": [1, 2]})
    table.to_parquet(tmp_path / "odd [1]*.parquet")
    assert read(tmp_path / "odd [1]*.parquet") == ["one", "two"]
    file = write(tmp_path / "a.csv", b'id,story\n1,"one, and\nmore"\n2,\n3,NA\n')
    assert read(file, field="story") == ["one, and\nmore", "NA"]


# the Hub

READ = """
import json, sys, time
from itertools import islice
from ropepatch.errors import RopepatchError
from ropepatch.data.sources import stream_documents
time.sleep = lambda seconds: None  # the Hub's client waits between attempts
for source, options, count in json.loads(sys.argv[1]):
    try:
        print(json.dumps(list(islice(stream_documents(source, **options), count))))
    except RopepatchError as error:
        print(json.dumps({"error": str(error), "hint": error.hint}))
"""
NAME = "someone/letters"
REQUESTS = (
    (NAME, {}, 1),
    (NAME, {"split": "train", "field": "title"}, None),
    (f"{NAME}:tokens", {}, None),
    (f"{NAME}:dead", {}, None),
    ("someone/else", {}, None),
    (NAME, {"split": "dev"}, None),
)
CARD = """---
configs:
- config_name: texts
  default: true
  data_files: [{split: train, path: train-*}, {split: test, path: test-*}]
- {config_name: tokens, data_files: [{split: test, path: tokens/*}]}
- {config_name: dead, data_files: [{split: test, path: dead/*}]}
---
"""


def test_a_hub_dataset_is_streamed_and_failures_raise_one_error(tmp_path, dataset_of):
    folder = tmp_path / "hub"
    dataset_of({"text": ["no"], "title": ["A"]}).to_parquet(folder / "train-0.parquet")
    for part in range(2):
        dataset_of({"text": ["one", "two"], "title": ["B", "C"]}).to_parquet(
            folder / f"test-{part}.parquet"
        )
        ids = dataset_of({"input_ids": [[part, 1], [part, 2]], "other": [0, 0]})
        for config in ("tokens", "dead"):
            ids.to_parquet(folder / config / f"test-{part}.parquet")
    (folder / "README.md").write_text(CARD)
    hub = Hub(f"datasets/{NAME}", folder)
    hub.fail("", "dead/test-1.parquet", 500)
    with serving(hub):
        first, train, tokens, *failed = run_elsewhere(
            READ, json.dumps(REQUESTS), home=tmp_path, hub=hub
        )
    assert (first, train, tokens) == (["one"], ["A"], [[0, 1], [0, 2], [1, 1], [1, 2]])
    assert "test-0.parquet" in hub.downloaded
    assert "test-1.parquet" not in hub.downloaded
    reasons = ("", "doesn't exist on the Hub", "Bad split: dev")
    for result, (name, *_), reason in zip(failed, REQUESTS[3:], reasons, strict=True):
        where = f"cannot read {name.partition(':')[0]} from the Hub: "
        assert result["error"].startswith(where)
        assert reason in result["error"]
        assert "check id, config, split and network" in result["hint"]
