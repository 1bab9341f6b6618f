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
    scaling = raw.get("rope_scaling")
    older = {"rope_theta": raw.get("rope_theta")} | (scaling if isinstance(scaling, dict) else {})
    newer = _with_rope_type(parameters)
    if not any(isinstance(value, dict) for value in parameters.values()):
        for key, value in _with_rope_type(older).items():
            hint = "readers differ in which they follow: make them agree or drop one"
            _check_equal(key, value, "in the older keys", newer.get(key), hint)
    key = "original_max_position_embeddings"
    hint = "it is the window the model was pretrained with: make them agree or drop one"
    _check_equal(key, raw.get(key), "at the top level", parameters.get(key), hint)


def _check_equal(key: str, older: Any, where: str, newer: Any, hint: str) -> None:
    if None not in (older, newer) and older != newer:
        raise RopepatchError(
            f"config.json contradicts itself: {key} is {older!r} {where} and {newer!r} in rope_parameters",
            hint=hint,
        )


def _with_rope_type(parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters without `type`, the earlier name of `rope_type`."""
    kind = parameters.get("rope_type", parameters.get("type"))
    return {key: value for key, value in parameters.items() if key != "type"} | {"rope_type": kind}
