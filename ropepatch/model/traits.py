"""Traits of an architecture that matter to whoever extends it, as far as config.json tells them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from ropepatch.errors import RopepatchError
from ropepatch.model.architectures import LOCAL_ONLY, NORMALISED
from ropepatch.model.config import blueprint

MANY = 3  # of the four, from which on they are known to do harm together
SHORT_WINDOW = 4096  # tokens; OlmPool's models were trained on 4k or 8k
LOCAL_LAYERS = ("sliding_attention", "chunked_attention")
HARM = (
    "OlmPool (arXiv:2608.10296): in 7B models extended alike, one of the four does little, three or more "
    "cost up to 47 % of what they reach, and short-context loss does not show it"
)
_NORM = re.compile(r"(q|k|qk|query|key)_(layer_?)?norm")


def hard_to_extend(config: PreTrainedConfig, window: float) -> list[str]:
    """Which of OlmPool's four features a model has, if it has so many that they are known to do harm.

    They are normalised queries and keys, keys and values that several query heads share, layers that see a
    sliding window, and a short window of pretraining. Where the norms of a block stand, which OlmPool varies
    too, is not counted. What config.json does not tell is not known: the window before an extension by a
    larger base, or in how far the layers slid while the model was trained.

    Args:
        config: Of the language model.
        window: Its window of pretraining, in tokens.

    Returns:
        The features in words; none if they are fewer than `MANY`.
    """
    heads, keys = (_whole(getattr(config, f"num_{kind}_heads", 0)) for kind in ("attention", "key_value"))
    features = [
        *([f"{heads} query heads on {keys} of keys and values"] * (0 < keys < heads)),
        *(["layers that see a sliding window"] * slides(config)),
        *([f"a window of {window:.0f} tokens"] * (window <= SHORT_WINDOW)),
    ]
    if len(features) >= MANY - 1:  # the structure is built only where it can decide
        with suppress(RopepatchError):  # which says where it matters what cannot be built
            features = ["normalised queries and keys"] * _normalises(blueprint(config)) + features
    return features if len(features) >= MANY else []


def slides(config: PreTrainedConfig) -> bool:
    """Whether some layers see a sliding window only, and one that is not longer than the whole."""
    sees, reads = _whole(_window_of_all(config)), _whole(getattr(config, "max_position_embeddings", None))
    if sees and reads and sees > reads:  # Phi-4-mini's
        return False
    kinds = getattr(config, "layer_types", None)
    return any(kind in LOCAL_LAYERS for kind in kinds) if isinstance(kinds, list) else sees > 0


def remarks(config: PreTrainedConfig, window: int) -> Iterator[str]:
    """What to know before such a model is extended, a sentence each."""
    yield from (row.reason for row in (LOCAL_ONLY, NORMALISED) if config.model_type in row)
    sliding = _window_of_all(config)
    if sliding and not getattr(config, "layer_types", None):
        yield f"sliding_window = {sliding} stays: tokens farther apart than that never attend to each other"
    if features := hard_to_extend(config, window):
        yield f"{', '.join(features)}: {len(features)} of four features that add up ({HARM})"


def _window_of_all(config: PreTrainedConfig) -> Any:
    return getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None


def _whole(value: Any) -> int:
    """A count; 0 for what is none, as config.json may hold anything."""
    return value if isinstance(value, int) else 0


def _normalises(model: nn.Module) -> bool:
    """Whether a module that is named as one that normalises queries or keys does something."""
    return any(
        _NORM.fullmatch(name.rpartition(".")[2]) and not isinstance(module, nn.Identity)
        for name, module in model.named_modules()
    )
