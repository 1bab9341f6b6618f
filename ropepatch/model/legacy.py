"""The older form of the same configuration: top-level `rope_theta` and `rope_scaling`.

transformers 4.x and mlx-lm read nothing else; transformers 5 lets it override `rope_parameters`, so the two
must agree.
"""

from __future__ import annotations

from typing import Any

from ropepatch.errors import RopepatchError
from ropepatch.model.architectures import NEOX_KEYS

# The last two are GPT-NeoX's names of rope_theta and partial_rotary_factor.
LEGACY_KEYS = ("rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_emb_base", "rotary_pct")


def legacy_keys(raw: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """The older keys that say what `parameters` (one flat `rope_parameters`) says.

    `rope_scaling` is None for the default type.
    """
    kind = parameters["rope_type"]
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"} | {"type": kind}
    keys = {"rope_theta": parameters["rope_theta"], "rope_scaling": None if kind == "default" else scaling}
    renamed = raw.get("model_type") in NEOX_KEYS
    if renamed or "rotary_emb_base" in raw:
        keys["rotary_emb_base"] = parameters["rope_theta"]
    if "partial_rotary_factor" in parameters:
        keys["rotary_pct" if renamed else "partial_rotary_factor"] = parameters["partial_rotary_factor"]
    return keys


def check_agreement(raw: dict[str, Any]) -> None:
    """Refuse a config.json whose older and newer keys say different things.

    Raises:
        RopepatchError: Naming the key and both values.
    """
    parameters = raw.get("rope_parameters")
    if not isinstance(parameters, dict):
        return
    older = raw.get("rope_scaling")
    older = _with_rope_type(
        {"rope_theta": raw.get("rope_theta")} | (older if isinstance(older, dict) else {})
    )
    newer = _with_rope_type(parameters)
    if not any(isinstance(value, dict) for value in parameters.values()):
        for key, value in older.items():
            stated = newer.get(key)
            if value is not None and stated is not None and value != stated:
                raise RopepatchError(
                    f"config.json contradicts itself: {key} is {value!r} in the older keys "
                    f"and {stated!r} in rope_parameters",
                    hint="readers differ in which they follow: make them agree or drop one",
                )
    nested = parameters.get("original_max_position_embeddings")
    top = raw.get("original_max_position_embeddings")
    if nested is not None and top is not None and nested != top:
        raise RopepatchError(
            f"config.json contradicts itself: original_max_position_embeddings is {top!r} at the top level "
            f"and {nested!r} in rope_parameters",
            hint="it is the window the model was pretrained with: make them agree or drop one",
        )


def _with_rope_type(parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters without `type`, the earlier name of `rope_type`."""
    kind = parameters.get("rope_type", parameters.get("type"))
    return {key: value for key, value in parameters.items() if key != "type"} | {"rope_type": kind}
