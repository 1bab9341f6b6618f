"""Traits of an architecture that matter to whoever extends it, as far as config.json tells them."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedConfig

from ropepatch.model.architectures import LOCAL_ONLY, NORMALISED


def remarks(config: PreTrainedConfig) -> Iterator[str]:
    """Yield what to know before such a model is extended, a sentence each."""
    yield from (row.reason for row in (LOCAL_ONLY, NORMALISED) if config.model_type in row)
    sliding = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if sliding and not getattr(config, "layer_types", None):
        yield f"sliding_window = {sliding} stays: tokens farther apart than that never attend to each other"
