"""Weight files are judged by their headers and indexes; what is unsound is named."""

import errno
import json
import os
import struct
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoint_folders import edit_json, write_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import ropepatch
from ropepatch import RopepatchError
from ropepatch.extension.writing import check_room
from ropepatch.model import weights as weights_module
from ropepatch.model.weights import INDEX, SINGLE, Weights, check_fit, clone_files, fingerprint, read_headers


@pytest.fixture
def single(tmp_path) -> Path:
    return write_checkpoint(tmp_path / "single")


@pytest.fixture
def sharded(tmp_path) -> Path:
    return write_checkpoint(tmp_path / "sharded", max_shard_size="10KB")


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def place(folder: Path, tensor: str, name: object) -> None:
    index = json.loads((folder / INDEX).read_text())
    edit_json(folder / INDEX, weight_map=index["weight_map"] | {tensor: name})


def test_the_headers_give_the_shape_of_every_tensor(single, sharded):
    expected = {name: tuple(tensor.shape) for name, tensor in load_file(single / SINGLE).items()}
    assert read_headers(single).shapes == expected
    assert read_headers(sharded).shapes == expected


def test_the_files_are_the_index_and_every_shard_once(sharded):
    weights = read_headers(sharded)
    assert weights.files == (sharded / INDEX, *shards(sharded))
    assert weights.num_bytes == sum(file.stat().st_size for file in weights.files)


def test_a_file_that_this_memory_cannot_map_is_refused_in_one_line(single, monkeypatch):
    def under_a_limit(file, framework):
        raise MemoryError

    monkeypatch.setattr(weights_module, "safe_open", under_a_limit)
    with pytest.raises(RopepatchError, match="Cannot allocate memory"):
        read_headers(single)
    (finding,) = ropepatch.diagnose(single, measure=False).findings
    assert finding.code == "weights-damaged"


def test_a_terabyte_of_weights_is_judged_by_its_header(tmp_path):
    """The file is sparse: reading it would take minutes."""
    size = 1 << 40
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (tmp_path / SINGLE).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    weights = read_headers(tmp_path)
    assert weights.shapes == {"w": (size,)}
    with pytest.raises(RopepatchError, match=r"needs 1099\.5 GB"):  # the copy has no holes
        check_room(weights, tmp_path)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "config.json", ["x.safetensors"]]
)
def test_an_index_that_names_anything_but_a_file_beside_it_is_refused(sharded, name):
    write_checkpoint(sharded.parent / "elsewhere")
    (sharded.parent / "elsewhere" / SINGLE).rename(sharded.parent / "x.safetensors")
    place(sharded, "model.norm.weight", name)
    with pytest.raises(RopepatchError, match="beside it") as caught:
        read_headers(sharded)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model.pt"])
def test_pickles_alone_are_refused_with_the_reason(single, name):
    (single / SINGLE).rename(single / name)
    with pytest.raises(RopepatchError, match="as a pickle") as caught:
        read_headers(single)
    assert name in str(caught.value)
    assert "save_pretrained" in caught.value.hint


def test_a_pickle_beside_safetensors_does_not_matter(single):
    (single / "pytorch_model.bin").write_bytes(b"never opened")
    assert read_headers(single).files == (single / SINGLE,)


@pytest.fixture
def both(sharded) -> Path:
    """The shards of one model, and beside them all weights of another in one file."""
    other = {name: tensor + 1 for name, tensor in stock_weights(sharded).items()}
    save_file(other, sharded / SINGLE, {"format": "pt"})
    return sharded


def stock_weights(folder: Path) -> dict[str, torch.Tensor]:
    weights = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True).state_dict()
    return {name: tensor.clone() for name, tensor in weights.items()}


def test_of_two_sets_of_weights_those_are_read_that_stock_transformers_loads(both):
    """modeling_utils.py of transformers 5.4 to 5.24, _get_resolved_checkpoint_files."""
    loaded, weights = stock_weights(both), read_headers(both)
    assert weights.files == (both / SINGLE,)
    stored = {name: load_file(entry.file)[name] for name, entry in weights.tensors.items()}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items())
    before = fingerprint(weights)
    save_file({name: tensor + 1 for name, tensor in stored.items()}, both / SINGLE, {"format": "pt"})
    assert fingerprint(read_headers(both)) != before


def test_of_two_sets_of_weights_that_one_is_extended_that_stock_transformers_loads(both, tmp_path):
    out = ropepatch.extend(both, tmp_path / "out", to="4x", method="linear").folder
    assert [file.name for file in out.glob("*.safetensors*")] == [SINGLE]
    loaded, extended = stock_weights(both), stock_weights(out)
    assert all(torch.equal(extended[name], tensor) for name, tensor in loaded.items())


def test_weights_that_config_json_names_are_what_stock_transformers_loads_and_refused(both):
    edit_json(both / "config.json", transformers_weights=INDEX)
    assert stock_weights(both)["lm_head.weight"].sum() != load_file(both / SINGLE)["lm_head.weight"].sum()
    with pytest.raises(RopepatchError, match=f"names {INDEX!r} as its weights .*, expected {SINGLE!r}"):
        read_headers(both)
    edit_json(both / "config.json", transformers_weights=SINGLE)
    assert read_headers(both).files == (both / SINGLE,)
    (both / SINGLE).rename(both / "other.safetensors")
    (both / INDEX).unlink()
    edit_json(both / "config.json", transformers_weights="other.safetensors")
    with pytest.raises(RopepatchError, match=r"names 'other\.safetensors' as its weights"):
        read_headers(both)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_a_precision_that_no_model_computes_in_is_refused_by_its_name(single, name):
    with pytest.raises(RopepatchError, match=f"no model computes in {name}") as caught:
        ropepatch.load(single, dtype=name)
    assert caught.value.hint == "dtype is float32, bfloat16 or float16"


def test_weights_without_any_tensor_are_foreign(single):
    save_file({}, single / SINGLE)
    with pytest.raises(RopepatchError, match=r"they hold no tensor, expected names like lm_head\.weight"):
        check_fit(read_headers(single), {"lm_head.weight": (48, 32), "model.norm.weight": (32,)})


def test_names_that_the_loader_renames_are_left_to_it(single):
    weights = read_headers(single)
    newer = {name.replace("lm_head", "newer_head"): shape for name, shape in weights.shapes.items()}
    check_fit(weights, newer | {"model.one_more": (7,)})


def test_files_larger_than_a_block_are_copied_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(weights_module, "BLOCK", 1000)
    files = tuple(tmp_path / f"{name}.safetensors" for name in "ab")
    for file in files:
        save_file({"w": torch.arange(3333, dtype=torch.uint8)}, file)
    (tmp_path / "copy").mkdir()
    seen = []
    monkeypatch.setattr(weights_module, "_reflink", lambda origin, target: False)
    clone_files(files, tmp_path / "copy", link=False, progress=lambda *bytes_: seen.append(bytes_))
    assert all((tmp_path / "copy" / file.name).read_bytes() == file.read_bytes() for file in files)
    size = files[0].stat().st_size
    done = [begin + copied for begin in (0, size) for copied in (*range(1000, size, 1000), size, size)]
    assert seen == [(number, 2 * size) for number in done]


def test_a_tensor_that_config_json_asks_for_is_missed_unless_it_is_another_ones_copy(single):
    weights = read_headers(single)
    expected = weights.shapes | {"model.copy.weight": (4, 4)}
    with pytest.raises(RopepatchError, match=r"1 missing keys, for instance model\.copy\.weight"):
        check_fit(weights, expected)
    check_fit(weights, expected, frozenset({"model.copy.weight"}))


def print_of(*files: Path) -> str:
    return fingerprint(Weights(files, {}))


@pytest.fixture
def three_mib(tmp_path) -> Path:
    """A file longer than what the fingerprint reads at one time."""
    (tmp_path / SINGLE).write_bytes(bytes(3 << 20))
    return tmp_path / SINGLE


def other_byte(file: Path, at: int) -> Path:
    content = bytearray(file.read_bytes())
    content[at] = 1
    file.write_bytes(content)
    return file


def longer(file: Path) -> Path:
    file.write_bytes(bytes(4 << 20))
    return file


@pytest.mark.parametrize(
    "change",
    [
        *(partial(other_byte, at=at) for at in (0, 3 << 19, (3 << 20) - 1)),
        longer,
        lambda file: file.rename(file.with_name("other.safetensors")),
    ],
    ids=["first byte", "middle byte", "last byte", "length", "name"],
)
def test_the_fingerprint_tells(three_mib, change):
    (three_mib.parent / "first").write_bytes(b"a")
    before = print_of(three_mib.parent / "first", three_mib)
    assert print_of(three_mib.parent / "first", change(three_mib)) != before


def test_weights_that_are_closed_to_us_are_not_called_missing(single, monkeypatch):
    """Root may read anything, so the system's refusal is played."""
    opened = Path.open

    def closed(path: Path, *words, **options):
        if path.name == SINGLE:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *words, **options)

    monkeypatch.setattr(Path, "open", closed)
    with pytest.raises(RopepatchError, match=f"cannot read {single / SINGLE}: Permission denied"):
        read_headers(single)
