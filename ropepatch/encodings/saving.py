"""Checkpoints whose position encoding is swapped: only ropepatch loads them, and they say so.

Stock transformers would load such weights with the rope in place and answer nonsense. So config.json names a
model type that it refuses, and ropepatch.json says which one it was and which encoding the weights go with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from ropepatch.encodings.registry import make_encoding
from ropepatch.encodings.swapping import swap_encoding
from ropepatch.errors import RopepatchError
from ropepatch.folders import absent, new_folder
from ropepatch.source import NEEDS_ROPEPATCH, read_json
from ropepatch.stock import no_progress_bars
from ropepatch.weights import read_headers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ropepatch.encodings.encoding import Encoding

RECORD = "ropepatch.json"


def save_swapped(
    model: PreTrainedModel,
    encoding: Encoding,
    out: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Path:
    """Write a model with the encoding it has; `ropepatch.load` loads it again.

    Args:
        model: The model.
        encoding: The one it has.
        out: The folder to make.
        tokenizer: Saved beside it.

    Raises:
        RopepatchError: If the folder exists or cannot be written.
    """
    with new_folder(absent(out)) as partial:
        with no_progress_bars():
            model.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        config = json.loads((partial / "config.json").read_text(encoding="utf-8"))
        record = {
            "needs_ropepatch": "its position encoding is not its rope: load it by ropepatch.load",
            "encoding": encoding.name,
            "parameters": encoding.parameters(),
            "model_type": config["model_type"],
        }
        for name, content in ((RECORD, record), ("config.json", config | {"model_type": NEEDS_ROPEPATCH})):
            (partial / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return Path(out)


def swap_again(model: Any, folder: Path) -> None:
    """Give a model that was loaded from such a folder its encoding, with the folder's parameters.

    Raises:
        RopepatchError: If the record or the weights are not whole.
    """
    record = read_json(folder / RECORD)
    if not isinstance(record.get("encoding"), str) or not isinstance(record.get("parameters"), dict):
        raise RopepatchError(
            f"{folder / RECORD} does not say which encoding the weights go with", hint="copy it again"
        )
    with torch.random.fork_rng(devices=[]):  # what is drawn here is replaced
        swapped = swap_encoding(model, make_encoding(record["encoding"], **record["parameters"]))
    prefix = f"{swapped.path}.module."
    wanted = swapped.module.state_dict()
    found: dict[str, torch.Tensor] = {}
    for file in read_headers(folder).files:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as tensors:
                names = [name for name in tensors.keys() if name.startswith(prefix)]  # noqa: SIM118
                found |= {name.removeprefix(prefix): tensors.get_tensor(name) for name in names}
    if {name: value.shape for name, value in found.items()} != {
        name: value.shape for name, value in wanted.items()
    }:
        raise RopepatchError(
            f"the weights in {folder} are not those of {record['encoding']}: expected "
            f"{sorted(wanted) or 'no parameters'} at {prefix}*, got {sorted(found) or 'none'}",
            hint="put ropepatch.json and the weights of the same checkpoint together",
        )
    swapped.module.load_state_dict(found)
