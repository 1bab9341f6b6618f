"""Checks of weight files by their headers and indexes."""

import json
import os
import struct

import pytest
import torch
from checkpoint_folders import edit_json, write_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import ropepatch
from ropepatch import RopepatchError
from ropepatch.model import weights as weights_module
from ropepatch.model.weights import (
    INDEX,
    SINGLE,
    Weights,
    clone_files,
    fingerprint,
    read_headers,
)


@pytest.fixture
def single(tmp_path):
    return write_checkpoint(tmp_path / "single")


@pytest.fixture
def sharded(tmp_path):
    return write_checkpoint(tmp_path / "sharded", max_shard_size="10KB")


@pytest.fixture
def both(sharded):
    """The shards of one model and the single weight file of another."""
    other = {name: tensor + 1 for name, tensor in stock_weights(sharded).items()}
    save_file(other, sharded / SINGLE, {"format": "pt"})
    return sharded


def stock_weights(folder):
    weights = AutoModelForCausalLM.from_pretrained(
        folder, use_safetensors=True
    ).state_dict()
    return {name: tensor.clone() for name, tensor in weights.items()}


def same(one, other):
    return all(torch.equal(one[name], tensor) for name, tensor in other.items())


def refusal(folder):
    with pytest.raises(RopepatchError) as caught:
        read_headers(folder)
    assert caught.value.hint
    return str(caught.value)


def test_headers_list_every_tensor_and_file_once(single, sharded):
    (single / "pytorch_model.bin").write_bytes(b"never opened")
    expected = {
        name: tuple(tensor.shape) for name, tensor in load_file(single / SINGLE).items()
    }
    for folder, files in (
        (single, (single / SINGLE,)),
        (sharded, (sharded / INDEX, *sorted(sharded.glob("*.safetensors")))),
    ):
        weights = read_headers(folder)
        assert (weights.shapes, weights.files) == (expected, files)
        assert weights.num_bytes == sum(file.stat().st_size for file in files)


def test_a_terabyte_of_weights_is_checked_by_its_header(tmp_path):
    """The file is sparse: reading it would take minutes."""
    size = 1 << 40
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    ).encode()
    with (tmp_path / SINGLE).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    assert read_headers(tmp_path).shapes == {"w": (size,)}


# Errors


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "config.json",
        ["x.safetensors"],
    ],
)
def test_an_index_with_a_file_outside_its_folder_is_rejected(sharded, name):
    save_file({}, sharded.parent / "x.safetensors")
    index = json.loads((sharded / INDEX).read_text())
    edit_json(
        sharded / INDEX, weight_map=index["weight_map"] | {"model.norm.weight": name}
    )
    assert "weight_map of" in refusal(sharded)


# Two sets of weights


def test_of_two_sets_the_one_that_transformers_loads_is_extended(both, tmp_path):
    """modeling_utils.py of transformers 5.4 to 5.24, _get_resolved_checkpoint_files."""
    loaded, weights = stock_weights(both), read_headers(both)
    assert weights.files == (both / SINGLE,)
    stored = load_file(both / SINGLE)
    assert same(loaded, stored)
    out = ropepatch.extend(both, tmp_path / "out", to="4x", method="linear").folder
    assert [file.name for file in out.glob("*.safetensors*")] == [SINGLE]
    assert same(stock_weights(out), loaded)
    before = fingerprint(weights)
    save_file(
        {name: tensor + 1 for name, tensor in stored.items()},
        both / SINGLE,
        {"format": "pt"},
    )
    assert fingerprint(read_headers(both)) != before


# Copies


@pytest.mark.parametrize("clones", [True, False])
def test_files_larger_than_a_block_are_copied_completely(tmp_path, monkeypatch, clones):
    monkeypatch.setattr(weights_module, "COPY_BLOCK", 1000)
    files = tuple(tmp_path / f"{name}.safetensors" for name in "ab")
    for file in files:
        save_file({"w": torch.arange(3333, dtype=torch.uint8)}, file)
    (tmp_path / "copy").mkdir()
    if not clones:
        monkeypatch.delattr(os, "copy_file_range")
    clone_files(
        files,
        tmp_path / "copy",
        link=False,
        progress=None,
    )
    assert all(
        (tmp_path / "copy" / file.name).read_bytes() == file.read_bytes()
        for file in files
    )


def test_the_fingerprint_depends_on_bytes_length_and_name(
    tmp_path,
):
    """The files are longer than one sample."""
    size = 3 << 20

    def print_of(content, name=SINGLE):
        (tmp_path / "first").write_bytes(b"a")
        (tmp_path / name).write_bytes(content)
        return fingerprint(Weights((tmp_path / "first", tmp_path / name), {}))

    changed = [
        bytes(at) + b"1" + bytes(size - at - 1) for at in (0, size // 2, size - 1)
    ]
    prints = [
        print_of(bytes(size)),
        *map(print_of, changed),
        print_of(bytes(size + (1 << 20))),
    ]
    prints.append(print_of(bytes(size), "other.safetensors"))
    assert print_of(bytes(size)) == prints[0]
    assert len({*prints}) == 6
