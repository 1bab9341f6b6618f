"""The two kinds of checkpoints that stock transformers must reject, by their config.json.

A checkpoint with a position remapping has its own model type, and code in its folder, which transformers runs
with trust_remote_code. ropepatch takes the remapping from config.json and never runs the code. A checkpoint
with a swapped position encoding has an unknown model type; `ropepatch.json` contains the original one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ropepatch.errors import RopepatchError
from ropepatch.files import read_json, write_json
from ropepatch.model.record_file import FILE, VERSION, Part, Text, validated
from ropepatch.settings import shown

CODE = "modeling_position_remapping.py"  # in the checkpoint's folder, for transformers
REMAPPED = "-position-remapping"  # the suffix of the model_type of a checkpoint with a position remapping
KEY = "position_remapping"  # in config.json
# The model_type of a checkpoint with a swapped position encoding
NEEDS_ROPEPATCH = "needs_ropepatch"

Kind = Literal["stock", "mapped", "swapped"]


def kind_of(raw: dict[str, Any]) -> Kind:
    """Return the kind of a checkpoint, by its config.json."""
    if raw.get("model_type") == NEEDS_ROPEPATCH:
        return "swapped"
    return "mapped" if str(raw.get("model_type")).endswith(REMAPPED) else "stock"


def check_stock(raw: dict[str, Any]) -> None:
    """Raise a `RopepatchError` for a position remapping or a swapped encoding in config.json."""
    if kind_of(raw) == "mapped":
        described = saved_remapping(raw)
        raise RopepatchError(
            f"this checkpoint has a position remapping already "
            f"({described['name']} to {described['target']} tokens)",
            hint="ropepatch.load and `ropepatch eval` take it; start from the checkpoint it was made from",
        )
    if kind_of(raw) == "swapped":
        raise RopepatchError(
            "the position encoding of this checkpoint is swapped (see its ropepatch.json): it has no RoPE",
            hint="ropepatch.load and `ropepatch eval` take it; extend the checkpoint it was made from",
        )


# A position remapping


def saved_remapping(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the remapping: `name`, `parameters`, and in tokens the `window` L and the `target` N."""
    described = raw.get(KEY)
    kinds = {"name": str, "parameters": dict, "window": int, "target": int}
    if not isinstance(described, dict) or any(
        type(described.get(key)) is not kinds[key] for key in kinds
    ):
        raise RopepatchError(
            f"config.json has an invalid {KEY}, got {shown(described)}",
            hint="copy it again from where the checkpoint came from",
        )
    return described


def without_remapping(raw: dict[str, Any]) -> dict[str, Any]:
    """Return config.json for the stock architecture, without the remapping."""
    saved_remapping(raw)
    others = {key: value for key, value in raw.items() if key not in ("auto_map", KEY)}
    return others | {"model_type": str(raw["model_type"]).removesuffix(REMAPPED)}


def code_of(folder: Path) -> dict[str, str]:
    """Return the name and sha256 of a folder's code for the record; empty without a file."""
    file = folder / CODE
    return (
        {CODE: hashlib.sha256(file.read_bytes()).hexdigest()} if file.is_file() else {}
    )


# A swapped encoding


class Swapped(Part):
    """The record of a checkpoint with a swapped position encoding.

    Args:
        version: Version of the layout.
        needs_ropepatch: Why other libraries cannot load it, in one sentence.
        encoding: The name of the encoding that its weights need.
        parameters: The parameters of the encoding.
        model_type: The original model_type; config.json contains one that transformers rejects.
        architectures: The original architectures.
    """

    version: Literal[1]
    needs_ropepatch: Text
    encoding: Text
    parameters: dict[Text, Any]
    model_type: Text
    architectures: list[Text]


def read_swapped(folder: Path) -> Swapped:
    """Read the record of a swapped position encoding."""
    content = {"version": VERSION} | read_json(folder / FILE)
    hint = "put config.json, ropepatch.json and the weights of the same checkpoint together"
    return validated(Swapped, content, hint)


def write_swapped(folder: Path, encoding: str, parameters: Mapping[str, Any]) -> None:
    """Mark a folder that transformers wrote as a checkpoint with a swapped encoding."""
    config = read_json(folder / "config.json")
    record = Swapped(
        version=VERSION,
        needs_ropepatch="its position encoding is not RoPE: load it with ropepatch.load",
        encoding=encoding,
        parameters=dict(parameters),
        model_type=config["model_type"],
        architectures=config["architectures"],
    )
    write_json(folder / FILE, record.to_dict())
    config |= {"model_type": NEEDS_ROPEPATCH, "architectures": ["NeedsRopepatch"]}
    write_json(folder / "config.json", config)
