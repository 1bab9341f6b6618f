import gc
import gzip
import io
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hub_server import Hub, run_elsewhere, serving
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ropepatch.data import sources
from ropepatch.data.sources import local_files, stream_documents
from ropepatch.errors import RopepatchError

SUFFIXES = ["txt", "txt.gz", "jsonl", "jsonl.gz", "json"]

fuzzed = settings(
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def read(source: str | Path, **options: str) -> list[str | list[int]]:
    return list(stream_documents(source, **options))


def write(file: Path, content: bytes) -> Path:
    file.write_bytes(
        gzip.compress(content, mtime=0) if file.suffix == ".gz" else content
    )
    return file


def write_lines(file: Path, *rows: object) -> Path:
    return write(file, b"".join(json.dumps(row).encode() + b"\n" for row in rows))


@pytest.fixture(scope="module")
def dataset_of() -> Callable:
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


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "json"])
def test_each_json_line_gives_its_text_or_its_token_ids(tmp_path, suffix):
    rows = [{"text": " one\n", "id": 1}, {"input_ids": [5, 6]}, {"text": "two"}]
    assert read(write_lines(tmp_path / f"a.{suffix}", *rows)) == [
        " one\n",
        [5, 6],
        "two",
    ]


def test_token_ids_are_used_only_where_the_named_field_is_missing(tmp_path):
    largest = [0, 2**31 - 1]
    rows = [
        {"text": "a", "body": "b", "input_ids": [1]},
        {"text": "a", "input_ids": largest},
    ]
    file = write_lines(tmp_path / "a.jsonl", *rows)
    assert read(file, field="body") == ["b", largest]
    assert read(file) == ["a", "a"]
    assert read(file, field="input_ids") == [[1], largest]


def test_blank_lines_and_empty_documents_are_dropped_and_json_texts_stay_whole(
    tmp_path,
):
    lines = b'\xef\xbb\xbf\n{"text": ""}\r\n  \n{"text": " \\n"}\n{"input_ids": []}\n'
    file = write(tmp_path / "a.jsonl", lines + b'{"text": "a<|endoftext|>b"}')
    assert read(file) == ["a<|endoftext|>b"]


@pytest.mark.parametrize(
    ("lines", "message", "hint"),
    [
        (
            [b"text", b'{"text": "a"', b'{"text": "a"} {"text": "b"}', b"[" * 200_000],
            " is not JSON",
            "each line must be an object",
        ),
        ([b"null", b'"text"', b'["text"]'], " must be a JSON object, got", "such as"),
        (
            [b'{"title": "b", "body": "c"}'],
            " has no field 'text', nor input_ids",
            "it has ['title', 'body']",
        ),
        (
            [b'{"text": null}', b'{"text": [1, "a"]}', b'{"text": [true]}'],
            ": text must be a text or a list of token ids, got",
            "name the field",
        ),
    ],
    ids=["no JSON", "no object", "no such field", "neither text nor token ids"],
)
def test_the_error_about_an_invalid_line_names_the_file_line_and_fault(
    tmp_path, lines, message, hint
):
    for line in lines:
        file = write(tmp_path / "a.jsonl", b'\n{"text": "fine"}\n' + line + b"\n")
        with pytest.raises(
            RopepatchError, match=rf"a\.jsonl, line 3{message}"
        ) as caught:
            read(file)
        str(caught.value).encode()
        assert caught.value.hint.startswith(hint)


def test_the_error_about_half_a_surrogate_pair_names_its_line(tmp_path):
    file = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n{"text": "\\ud83d"}\n')
    with pytest.raises(
        RopepatchError,
        match=r"a\.jsonl, line 2: the text contains half of a surrogate pair",
    ):
        read(file)
    assert read(write(tmp_path / "b.jsonl", b'{"text": "\\ud83d\\ude00"}\n')) == [
        "\U0001f600"
    ]


def test_the_error_about_a_table_whose_path_datasets_would_take_apart_names_it(
    tmp_path,
):
    file = write(tmp_path / "zip::x.csv", b"text\na\n")
    with pytest.raises(
        RopepatchError,
        match=r"datasets cannot read .*zip::x\.csv: its path contains ::",
    ):
        read(file)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_error_about_invalid_utf_8_names_the_file_and_the_byte(tmp_path, suffix):
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


ABSENT = [
    "/no/where",
    "./no",
    "../where",
    "nowhere",
    "no/where/now",
    "no/where.txt",
    "no/a.jsonl.gz",
    "no/",
]
ABSENT += [Path("owner/name")]  # a Path cannot be an id
NO_NAMES = ["a" * 5000, "a\0b", "~nobody_of_that_name/a.txt"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        *((name, f"no such file or folder: {name}") for name in ABSENT),
        *((name, "cannot look for|no such file") for name in NO_NAMES),
        ("", "the source is an empty name"),  # not the current folder
    ],
)
def test_missing_paths_that_cannot_be_hub_ids_raise_an_error(
    tmp_path, monkeypatch, source, message
):
    monkeypatch.chdir(write(tmp_path / "a.txt", b"text").parent)
    for look in (stream_documents, local_files):
        with pytest.raises(RopepatchError, match=message) as caught:
            look(source)
        assert "owner/name" in (caught.value.hint or "")


def test_local_paths_precede_hub_ids_and_the_home_folder_is_expanded(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "owner" / "name").mkdir(parents=True)
    write(tmp_path / "owner" / "name" / "a.txt", b"local")
    assert read("owner/name") == read("~/owner/name/a.txt") == ["local"]
    with pytest.raises(
        RopepatchError,
        match="owner/name is a path on this machine, which has no config",
    ):
        stream_documents("owner/name:config")


# hostile input


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # datasets leaves the file open
@pytest.mark.parametrize("suffix", ["txt", "parquet", "arrow", "csv"])
def test_arbitrary_bytes_give_documents_or_one_error(tmp_path, suffix):
    @settings(fuzzed, max_examples=100 if suffix == "txt" else 10)
    @given(st.binary(max_size=60), st.booleans())
    def check(content: bytes, packed: bool) -> None:
        file = tmp_path / f"a.{suffix}"
        file.write_bytes(
            gzip.compress(content, mtime=0)[: -3 if content else None]
            if packed
            else content
        )
        try:
            documents = read(file)
        except RopepatchError:
            return
        assert documents
        assert all(
            isinstance(document, str) and document.strip() for document in documents
        )

    check()
    gc.collect()


WHOLE = gzip.compress(b"one\n" * 1000, mtime=0)


@pytest.mark.parametrize(
    "damaged",
    [b"one", WHOLE[:-3], WHOLE[:10] + b"\xff" * 20, WHOLE[:-8] + b"\0" * 8, WHOLE[:12]],
)
def test_a_damaged_gzip_file_raises_one_error(tmp_path, damaged):
    write(tmp_path / "a.txt", b"one")
    (tmp_path / "b.txt.gz").write_bytes(damaged)
    with pytest.raises(RopepatchError, match=r"cannot read .*b\.txt\.gz"):
        read(tmp_path)


# streaming


@pytest.mark.parametrize("suffix", ["txt", "jsonl.gz"])
def test_streaming_needs_memory_for_documents_and_not_for_the_whole_file(
    tmp_path, suffix
):
    story = "Once upon a time. " * 2000  # 36 kB
    if suffix == "txt":
        write(tmp_path / "a.txt", f"{story}\n<|endoftext|>\n".encode() * 1200)
    else:
        write_lines(tmp_path / f"a.{suffix}", *[{"text": story}] * 1200)
    next(stream_documents(tmp_path))  # imports datasets
    tracemalloc.start()
    try:
        count = sum(1 for _ in stream_documents(tmp_path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 1200
    assert peak < 200 * len(story)  # the file has 1200 stories


# local_files


def test_local_files_lists_the_files_of_a_source_and_is_none_for_hub_ids(
    tmp_path, dataset_of
):
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    text = write(tmp_path / "folder" / "deep" / "a.txt", b"one")
    lines = write_lines(tmp_path / "folder" / "b.jsonl", {"text": "two"})
    write(tmp_path / "folder" / "notes.md", b"no")
    assert local_files(text) == [text]
    assert local_files(str(tmp_path / "folder")) == [lines, text]
    dataset_of({"text": ["one"]}).save_to_disk(tmp_path / "set")
    assert {file.suffix for file in local_files(tmp_path / "set") or []} == {
        ".arrow",
        ".json",
    }
    assert local_files("owner/name:config") is None


# saved datasets and tables


@pytest.mark.parametrize(
    ("columns", "options", "expected"),
    [
        ({"text": ["one", "", "two"], "id": [1, 2, 3]}, {}, ["one", "two"]),
        (
            {"input_ids": [[1, 2], [3]], "attention_mask": [[1, 1], [1]]},
            {},
            [[1, 2], [3]],
        ),
        ({"text": ["one"], "input_ids": [[1, 2]]}, {"field": "input_ids"}, [[1, 2]]),
    ],
    ids=["texts", "token ids", "the named field"],
)
def test_a_saved_dataset_gives_its_texts_or_token_ids_in_any_format(
    tmp_path, dataset_of, columns, options, expected
):
    form = "torch" if options else None
    dataset_of(columns).with_format(form).save_to_disk(tmp_path / "set")
    assert read(str(tmp_path / "set"), **options) == expected


def test_errors_about_saved_datasets_name_the_missing_split_row_or_column(
    tmp_path, dataset_of
):
    import datasets

    splits = {name: dataset_of({"text": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "splits")
    assert read(tmp_path / "splits") == ["test"]
    assert read(tmp_path / "splits", split="train") == ["train"]
    dataset_of({"text": ["one", None, "two"]}).save_to_disk(tmp_path / "set")
    for name, options, message, hint in (
        (
            "splits",
            {"split": "validation"},
            "has no split 'validation'",
            "it has train, test",
        ),
        (
            "set",
            {"field": "body"},
            "row 0 has no field 'body', nor input_ids",
            "it has ['text']",
        ),
        (
            "set",
            {},
            "row 1: text must be a text or a list of token ids, got None",
            "name the field",
        ),
    ):
        with pytest.raises(RopepatchError, match=f"{name}.* {message}") as caught:
            read(tmp_path / name, **options)
        assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize("name", ["a.parquet", "odd [1]*.parquet", "a.arrow"])
def test_parquet_and_arrow_files_give_their_documents(tmp_path, dataset_of, name):
    table = dataset_of({"text": ["one", "two"], "id": [1, 2]})
    if name == "a.arrow":
        table.save_to_disk(tmp_path / "set")
        (file,) = (tmp_path / "set").glob("*.arrow")
        file.rename(tmp_path / name)
    else:
        table.to_parquet(tmp_path / name)
    assert read(tmp_path / name) == ["one", "two"]


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # datasets leaves the file open
@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_csv_and_tsv_files_give_the_named_column(tmp_path, name):
    rows = 'id{0}story\n1{0}"one, and\nmore"\n2{0}\n3{0}NA\n'
    write(tmp_path / name, rows.format("\t" if "tsv" in name else ",").encode())
    assert read(tmp_path / name, field="story") == ["one, and\nmore", "NA"]
    with pytest.raises(RopepatchError, match="has no field 'text'"):
        read(tmp_path / name)
    gc.collect()


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


def test_a_hub_dataset_is_streamed_by_split_and_config_and_failures_raise_one_error(
    tmp_path, dataset_of
):
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
    reasons = (
        "",
        "doesn't exist on the Hub",
        "Bad split: dev. Available splits: ['train', 'test']",
    )
    for result, name, reason in zip(
        failed, (NAME, "someone/else", NAME), reasons, strict=True
    ):
        assert result["error"].startswith(f"cannot read {name} from the Hub: ")
        assert reason in result["error"]
        assert result["hint"].startswith(
            "no such path is here; check id, config, split and network"
        )


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
@pytest.mark.parametrize("row", [b"\0" * 3000, b"word\n" * 600])
def test_documents_above_the_size_limit_raise_an_error(
    name, row, tmp_path, monkeypatch
):
    monkeypatch.setattr(sources, "MAX_DOCUMENT", 1000)
    with pytest.raises(RopepatchError, match="document of more than 1,000 characters"):
        read(write(tmp_path / name, row))
