"""What the installed transformers makes of a configuration."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ropepatch.errors import RopepatchError
from ropepatch.model.config import load_text_config


def configured(raw: dict[str, Any]) -> PreTrainedConfig | str:
    """The language model's part of a configuration as transformers reads it, or why it does not."""
    try:
        return load_text_config(raw)
    except RopepatchError as error:
        return str(error)


def keeps_no_head_dim(raw: dict[str, Any]) -> bool:
    """Whether transformers leaves the size of a head open, with which three rope types cannot compute."""
    config = configured(raw)
    if isinstance(config, str):
        return "head_dim" in config and "NoneType" in config
    return bool(getattr(config, "head_dim", 0) is None)


def same_rope(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether transformers reads the same rope from two configurations."""
    first, second = configured(before), configured(after)
    if isinstance(first, str) or isinstance(second, str):
        return False
    return bool(_plain(first.rope_parameters) == _plain(second.rope_parameters))


def _plain(parameters: Any) -> Any:
    """Parameters without `type`, the older name of `rope_type`."""
    if not isinstance(parameters, dict):
        return parameters
    return {key: _plain(value) for key, value in parameters.items() if key != "type"}
