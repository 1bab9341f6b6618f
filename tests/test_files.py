"""Reading and writing files: devices are rejected unopened, and failed writes leave nothing."""

import errno
import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from checkpoint_folders import largest_file
from made_results import scoring

from ropepatch import RopepatchError, explore, files
from ropepatch.cli.parameters import parse_settings
from ropepatch.data.sources import local_files, stream_documents
from ropepatch.evaluation.results import read_result
from ropepatch.extension.writing import small_files
from ropepatch.files import (
    absent,
    check_regular,
    check_resumed,
    check_space,
    from_here,
    json_text,
    new_folder,
    parse_json,
    read_json,
    whole_file,
    write_json,
)
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.weights import read_headers
from ropepatch.publishing.card.writing import write_card
from ropepatch.report.page import write_report
from ropepatch.training.recipe import Recipe

NOT_REGULAR = "is a pipe, a socket or a device, expected a regular file"
SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
READERS = {
    "json": ("config.json", read_json),
    "index": (INDEX, lambda file: read_headers(file.parent)),
    "set": ("x.json", lambda file: parse_settings("custom", [f"divisors={file}"])),
    "txt": ("a.txt", stream_documents),
    "parquet": ("a.parquet", stream_documents),
    "local files": ("a.txt", local_files),
    "card": ("README.md", lambda file: write_card(file.parent)),
    "templates": (
        "additional_chat_templates/a.jinja",
        lambda file: small_files(file.parents[1]),
    ),
    "recipe": ("recipe.yaml", Recipe.from_yaml),
    "result": ("result.json", read_result),
}


@pytest.mark.parametrize("reader", READERS)
def test_no_reader_opens_a_device(reader, tmp_path):
    """/dev/null is empty, so a reader that opens it ends with another error."""
    name, read = READERS[reader]
    (tmp_path / "out").mkdir()
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to("/dev/null")
    with pytest.raises(RopepatchError, match=NOT_REGULAR) as caught:
        read(tmp_path / name)
    assert caught.value.hint


def test_pipes_sockets_and_devices_are_rejected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("file").write_text("text")
    Path("zero").symlink_to("/dev/zero")
    Path("link").symlink_to("file")
    Path("dangling").symlink_to("nowhere")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        for name in ("pipe", "zero", "/dev/zero", "socket"):
            with pytest.raises(RopepatchError, match=NOT_REGULAR):
                check_regular(Path(name))
    for name in ("file", "link", "dangling", "missing", ".", "n" * 5000, "a\0b"):
        check_regular(Path(name))


@pytest.mark.parametrize(
    "text",
    ["NaN", "-Infinity", "1e999", "9" * 400, "[" * 100_000, r'{"\uDFff": 1}'],
)
def test_json_that_cannot_be_written_again_is_rejected(text, tmp_path):
    with pytest.raises(
        ValueError, match=r"not JSON|too large a number|too deep|surrogates"
    ):
        parse_json(text)
    (tmp_path / "ropepatch.json").write_text(f'{{"x": {text}}}')
    with pytest.raises(RopepatchError, match=r"cannot read .*ropepatch\.json"):
        read_json(tmp_path / "ropepatch.json")
    sound = r'["\ud83d\ude00", 1e300, -7, 0.1]'
    assert parse_json(sound) == ["\U0001f600", 1e300, -7, 0.1]


def test_infinity_in_config_json_is_read_as_by_transformers(tmp_path):
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    content = read_json(tmp_path / "config.json")
    assert content == {"time_step_limit": [0.0, float("inf")]}
    write_json(tmp_path / "generation_config.json", content)
    assert read_json(tmp_path / "generation_config.json") == content


def test_json_output_is_ascii_and_reads_back_the_same():
    hostile = "a\x1b\x7f\x9b\u202e\ud800\U000e0001 é\U0001f600"
    text = json_text({hostile: [hostile]}, indent=None)
    assert (text.isascii(), text.isprintable()) == (True, True)
    assert json.loads(text) == {hostile: [hostile]}


@pytest.mark.parametrize("entrance", [absent, stream_documents, Checkpoint.find])
def test_a_file_name_that_is_not_utf_8_is_rejected(entrance, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(b"caf\xe9.txt")
    Path(name).write_text("text")
    with pytest.raises(RopepatchError, match=r"the name caf\\udce9.txt is not UTF-8"):
        entrance(name)


WRITERS = {"folder": new_folder, "file": whole_file}
KILLED = """
import os, pathlib, signal, sys
from ropepatch.files import new_folder, whole_file
with {writer}(pathlib.Path(sys.argv[1])) as partial:
    (partial / "half" if partial.is_dir() else partial).write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def write(partial, text):
    (partial / "file" if partial.is_dir() else partial).write_text(text)


@pytest.mark.parametrize("name", ["out", "é" * 127])
@pytest.mark.parametrize("kind", WRITERS)
def test_a_writer_removes_only_what_a_killed_one_left(kind, name, tmp_path):
    writer, out = WRITERS[kind], tmp_path / name
    code = KILLED.format(writer=writer.__name__)
    subprocess.run([sys.executable, "-c", code, str(out)], check=False)
    (left,) = tmp_path.iterdir()
    assert left.match(f".{name[:100]}.*.partial")
    others = {tmp_path / ".another.0123abcd.partial", tmp_path / f"{left.name}s"}
    for other in others:
        other.touch()
    with suppress(RopepatchError), writer(out) as first:
        assert {*tmp_path.iterdir()} == {first, *others}
        write(first, "first")
        with writer(out) as second:  # another process at the same time
            assert first.exists()
            write(second, "second")
    assert {*tmp_path.iterdir()} == {out, *others}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_failed_write_leaves_no_files(kind, tmp_path):
    place = tmp_path / ("new/parents/out" if kind == "folder" else "out")
    with suppress(KeyError), WRITERS[kind](place) as partial:
        write(partial, "half")
        raise KeyError
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RopepatchError("the real reason")]
)
def test_files_of_others_in_a_new_parent_are_kept(error, tmp_path):
    def fail():
        with new_folder(tmp_path / "new" / "out"):
            (tmp_path / "new" / "other").mkdir()
            raise error

    with pytest.raises(type(error)) as caught:
        fail()
    assert caught.value is error
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["other"]


PARTIAL = ".out.0123abcd.partial"


@pytest.mark.parametrize(
    ("number", "name", "message"),
    [
        (errno.EACCES, "model/x", "cannot read {place}/model/x: Permission denied"),
        (errno.EACCES, PARTIAL, "cannot write {place}/out: Permission denied"),
        (errno.ENOTEMPTY, PARTIAL, "{place}/out already exists"),
        (errno.ENOSPC, None, "cannot write {place}/out: No space left on device"),
        (errno.ENOSPC, "model/x", "cannot write {place}/out: No space left on device"),
    ],
)
def test_an_os_error_names_the_unreadable_file_or_the_output(
    number, name, message, tmp_path
):
    failure = OSError(number, os.strerror(number), name and str(tmp_path / name))
    with pytest.raises(RopepatchError) as caught, new_folder(tmp_path / "out"):
        raise failure
    assert str(caught.value) == message.format(place=tmp_path)
    assert "--link-weights" not in caught.value.hint


def test_the_error_of_an_unwritable_file_names_it(tmp_path):
    with (
        largest_file(10),
        pytest.raises(OSError, match="File too large") as caught,
        whole_file(tmp_path / "x.json") as partial,
    ):
        partial.write_bytes(bytes(99))
    assert caught.value.filename == str(tmp_path / "x.json")
    assert [*tmp_path.iterdir()] == []


NAMED = {  # output files with a name from the user, and their writers
    "explorer": ("e.html", lambda file: explore(out=file, tiny=False)),
    "report": (
        "r.html",
        lambda file: write_report([scoring("baseline", {("a", "b"): 0.5})], file),
    ),
}


@pytest.mark.parametrize("kind", NAMED)
def test_a_file_written_meanwhile_by_another_process_is_not_overwritten(
    kind, tmp_path, monkeypatch
):
    name, write = NAMED[kind]
    write_text = Path.write_text

    def meanwhile(partial, text, **options):
        write_text(tmp_path / name, "theirs")
        return write_text(partial, text, **options)

    monkeypatch.setattr(Path, "write_text", meanwhile)
    with pytest.raises((RopepatchError, FileExistsError), match="File exists"):
        write(tmp_path / name)
    (written,) = tmp_path.iterdir()
    assert written.read_text() == "theirs"


@pytest.mark.parametrize(
    ("earlier", "now", "differing"),
    [
        ({"lr": 1}, {"lr": 1, "lora": 8}, "lora"),
        ({"lr": 1, "lora": 8}, {"lr": 1}, "lora"),
        ({"lr": 1, "lora": 8, "steps": [3]}, {"lr": 2, "steps": (3,)}, "lr, lora"),
    ],
)
def test_resuming_with_other_settings_names_every_difference(earlier, now, differing):
    with pytest.raises(
        RopepatchError, match=f"^it is another's: it differs in {differing}\n"
    ):
        check_resumed("it is another's", earlier, now, hint="remove it")


def test_too_little_disk_space_raises_an_error(tmp_path):
    check_space("it", tmp_path, 1, hint="none")
    with pytest.raises(
        RopepatchError, match=r"it needs 1000000000\.000 GB, .* has .* free"
    ):
        check_space("it", tmp_path, 10**18, hint="none")


def test_an_output_folder_below_a_file_is_rejected(tmp_path):
    (tmp_path / "notes").write_text("")
    with pytest.raises(
        RopepatchError, match=r"cannot write .*/notes/a/out: Not a directory"
    ):
        files.absent(tmp_path / "notes" / "a" / "out")


def test_a_path_is_shown_relative_only_inside_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert from_here(tmp_path / "here" / "out" / "picture.png") == "out/picture.png"
    assert from_here(Path("out")) == "out"
    assert from_here(tmp_path / "out") == str(tmp_path / "out")
