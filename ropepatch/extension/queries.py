"""The query projections of a model, into which an attention factor can be folded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel

from ropepatch.model.config import Config


def query_layers(model: PreTrainedModel, config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the decoder's attention modules whose RoPE is scaled and that have a query projection."""
    kinds = dict(enumerate(getattr(config.text, "layer_types", None) or ()))
    # Some audio encoders number their layers as well
    language_model = config.site.path.rpartition(".")[0]
    for path, module in model.named_modules():
        index = (
            getattr(module, "layer_idx", None)
            if path.startswith(language_model)
            else None
        )
        scaled = index is not None and config.layer_type in (None, kinds.get(index))
        if scaled and hasattr(module, "q_proj") and hasattr(module, "k_proj"):
            yield path, module


def folds_attention(config: Config) -> bool:
    """Return whether `export --fold-attention` can fold an attention factor into the query weights."""
    if config.is_quantised or config.rotates_partly:
        return False
    layers = [
        getattr(module, "q_norm", None) or module.q_proj
        for _, module in query_layers(config.skeleton, config)
    ]
    return bool(layers) and all(
        getattr(layer, "weight", None) is not None for layer in layers
    )
