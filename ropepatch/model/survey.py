"""What a configuration says of a model's rope."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from ropepatch.errors import RopepatchError
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.config import blueprint, check_rope_types, load_config, text_config
from ropepatch.model.legacy import check_agreement
from ropepatch.model.rotary import (
    RotarySite,
    base_model,
    check_table_rules,
    find_rotary,
    float32_on_cpu,
    is_stock,
    read_rope,
)
from ropepatch.model.softmax import ties_softmax
from ropepatch.scaling.rope import Rope

TEXT_PARTS = ("text_config", "decoder", "generator")  # where transformers looks for the language model


@dataclass(frozen=True)
class Survey:
    """What a configuration says of a model's rope.

    Args:
        raw: The content of config.json.
        section: The part of it that describes the language model, of a model with several parts.
        config: That part (or all), as transformers reads it.
        site: Where the rotary module is.
        rope: The rope now.
        own_config: The class of the configuration, of a model in memory with code of its own.
    """

    raw: dict[str, Any] = field(compare=False)
    section: str | None
    config: PreTrainedConfig = field(compare=False)  # it follows from `raw`
    site: RotarySite
    rope: Rope
    own_config: type[PreTrainedConfig] | None = field(default=None, compare=False)

    @property
    def stated(self) -> dict[str, Any]:
        """What config.json itself says of the language model; see `stated_in`."""
        return self.stated_in(self.raw)

    def stated_in(self, raw: dict[str, Any]) -> dict[str, Any]:
        """The description of the language model in a config.json: in full where that leaves its part out."""
        if self.section is None:
            return raw
        part = raw.get(self.section)
        if isinstance(part, dict):
            return part
        full: dict[str, Any] = json.loads(self.config.to_json_string(use_diff=False))
        return full

    @property
    def head_dim(self) -> int:
        """The dimensions of one head."""
        config: Any = self.config
        size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return size

    @cached_property
    def ties_softmax(self) -> bool:
        """Whether attention multiplies its softmax scale by `mscale_all_dim`, as DeepSeek's does."""
        return ties_softmax(load_config(self.raw, self.own_config), self.site)

    @property
    def rotates_partly(self) -> bool:
        """Whether some dimensions of each head do not rotate."""
        return self.rope.rotary_dim < self.head_dim or hasattr(self.config, "qk_nope_head_dim")


@float32_on_cpu()
def survey(raw: dict[str, Any], model: nn.Module | None = None) -> Survey:
    """Survey a config.json, through its model where that is loaded, with the classes that it has.

    Raises:
        RopepatchError: If the configuration contradicts itself, or its architecture is not supported.
    """
    own = None if model is None or is_stock(model) else type(base_model(model).config)
    whole = load_config(raw, own)
    config = text_config(whole)
    check_rope_types(config)
    section = next((name for name in TEXT_PARTS if getattr(whole, name, None) is config), None)
    site = find_rotary(blueprint(whole) if model is None else model)
    rope = read_rope(config, site)
    check_table_rules(config, site)
    if rope.is_scaled and site.of(config.rope_parameters).get("mscale_all_dim") and ties_softmax(whole, site):
        raise RopepatchError(
            f"{config.model_type} ties its softmax scale to the rope scaling it already has (mscale_all_dim)",
            hint="start from the unscaled base checkpoint",
        )
    return Survey(raw, section, config, site, rope, own)


def survey_checkpoint(checkpoint: Checkpoint, *, swapped: bool = False) -> Survey:
    """Survey the config.json of a checkpoint; if `swapped` is allowed, for the rope it had before."""
    raw = checkpoint.stock_raw if swapped else checkpoint.raw
    check_agreement(raw)
    return survey(raw)
