"""The two kinds of checkpoints that stock transformers must refuse, by their config.json.

One that is saved with a position remapping has a model type of its own, and code beside the weights that
transformers runs where a user trusts it; ropepatch reads the remapping out of config.json and never runs the
code. One whose position encoding is swapped has a model type that nobody knows; `ropepatch.json` names its
own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ropepatch.errors import RopepatchError
from ropepatch.files import read_json, write_json
from ropepatch.model.record_file import FILE, VERSION, Part, Text, validated
from ropepatch.settings import shown

CODE = "modeling_position_remapping.py"  # beside the weights, for transformers
REMAPPED = "-position-remapping"  # the end of the model_type of a checkpoint with a position remapping
KEY = "position_remapping"  # in config.json
NEEDS_ROPEPATCH = "needs_ropepatch"  # the model_type of a checkpoint whose position encoding is swapped

Kind = Literal["stock", "mapped", "swapped"]


def kind_of(raw: dict[str, Any]) -> Kind:
    """The kind of a checkpoint by its config.json."""
    if raw.get("model_type") == NEEDS_ROPEPATCH:
        return "swapped"
    return "mapped" if str(raw.get("model_type")).endswith(REMAPPED) else "stock"


def check_stock(raw: dict[str, Any]) -> None:
    """Refuse the config.json of a checkpoint that has no rope of its own to read or to scale."""
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
    """Read the remapping: `name`, `parameters`, the `window` L before it and the `target` N, in tokens."""
    described = raw.get(KEY)
    kinds = {"name": str, "parameters": dict, "window": int, "target": int}
    if not isinstance(described, dict) or any(type(described.get(key)) is not kinds[key] for key in kinds):
        raise RopepatchError(
            f"config.json has an invalid {KEY}, got {shown(described)}",
            hint="copy it again from where the checkpoint came from",
        )
    return described


def base_type(raw: dict[str, Any]) -> str:
    """The architecture whose classes a remapping builds on."""
    return str(raw["model_type"]).removesuffix(REMAPPED)


def without_map(raw: dict[str, Any]) -> dict[str, Any]:
    """config.json for the stock architecture, whose classes the remapping builds on."""
    saved_remapping(raw)
    others = {key: value for key, value in raw.items() if key not in ("auto_map", KEY)}
    return others | {"model_type": base_type(raw)}


# A swapped encoding


class Swapped(Part):
    """The record of a checkpoint whose position encoding is swapped.

    Args:
        version: Of the layout.
        needs_ropepatch: Why, in a sentence: no other library loads it rightly.
        encoding: The name of the encoding that its weights go with.
        parameters: Those of the encoding.
        model_type: That of config.json before, which now names one that transformers refuses.
        architectures: The same.
    """

    version: Literal[1]
    needs_ropepatch: Text
    encoding: Text
    parameters: dict[Text, Any]
    model_type: Text
    architectures: list[Text]


def read_swapped(folder: Path) -> Swapped:
    """The record of a swapped position encoding."""
    content = {"version": VERSION} | read_json(folder / FILE)
    hint = "put config.json, ropepatch.json and the weights of the same checkpoint together"
    return validated(Swapped, content, hint)


def write_swapped(folder: Path, encoding: str, parameters: Mapping[str, Any]) -> None:
    """Mark a folder that transformers has written as one with a swapped encoding."""
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
