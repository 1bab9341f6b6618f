"""Checkpoints that were saved with an attention map: what their config.json says, and which file is ours.

Their model type is one of their own, so that transformers refuses them without the file. ropepatch reads the
map out of config.json and never runs the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ropepatch.errors import RopepatchError
from ropepatch.files import read_json
from ropepatch.settings import shown

CODE = "modeling_attention_map.py"  # beside the weights, by which transformers computes with the map
MAPPED = "-attention-map"  # what the model_type of such a checkpoint ends in
KEY = "attention_map"  # in config.json
OURS = "auto_map", KEY  # which the checkpoint before had not


def is_mapped(raw: dict[str, Any]) -> bool:
    """Whether a config.json is that of a checkpoint with an attention map."""
    return str(raw.get("model_type")).endswith(MAPPED)


def base_type(raw: dict[str, Any]) -> str:
    """The architecture whose classes it builds on."""
    return str(raw["model_type"]).removesuffix(MAPPED)


def saved_map(raw: dict[str, Any]) -> dict[str, Any]:
    """The map of such a checkpoint: `name`, `parameters`, the `window` L before it and the `target` N.

    Raises:
        RopepatchError: If config.json does not say them.
    """
    described = raw.get(KEY)
    kinds = {"name": str, "parameters": dict, "window": int, "target": int}
    if not isinstance(described, dict) or any(type(described.get(key)) is not kinds[key] for key in kinds):
        raise RopepatchError(
            f"config.json says nothing usable of {KEY}, got {shown(described)}",
            hint="copy it again from where the checkpoint came from",
        )
    return described


def without_map(raw: dict[str, Any]) -> dict[str, Any]:
    """Its config.json for the stock architecture, which reads the same weights by the distances as they are.

    Raises:
        RopepatchError: If config.json does not say which map it has.
    """
    saved_map(raw)
    return {key: value for key, value in raw.items() if key not in OURS} | {"model_type": base_type(raw)}


def mapped_attention(folder: Path) -> dict[str, Any]:
    """What results say of a checkpoint with an attention map; nothing of any other."""
    raw = read_json(folder / "config.json")
    if not is_mapped(raw):
        return {}
    described = saved_map(raw)
    return {KEY: {key: described[key] for key in ("name", "parameters")}}


def map_refusal(raw: dict[str, Any]) -> RopepatchError:
    """Why nothing is put on top of the map."""
    described = saved_map(raw)
    return RopepatchError(
        f"this checkpoint has an attention map already ({described['name']} to {described['target']} tokens)",
        hint="ropepatch.load and `ropepatch eval` take it; start from the checkpoint it was made from",
    )
