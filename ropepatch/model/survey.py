"""A survey of config.json: the rope it describes."""

from __future__ import annotations

import copy
import json
import operator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Self

from torch import nn
from transformers import PreTrainedConfig

from ropepatch.errors import RopepatchError, argument
from ropepatch.model.architectures import TIED
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.checks import check_agreement
from ropepatch.model.config import (
    blueprint,
    check_rope_types,
    head_dim_of,
    load_config,
    text_config,
)
from ropepatch.model.rotary import (
    SEQUENCE,
    RotarySite,
    base_model,
    check_table_rules,
    find_rotary,
    float32_on_cpu,
    is_stock,
    read_rope,
)
from ropepatch.scaling.rope import Rope
from ropepatch.settings import Length, relative_length

TEXT_PARTS = ("text_config", "decoder", "generator")  # where transformers looks for the language model


@dataclass(frozen=True)
class Survey:
    """The rope of a model by its configuration.

    Args:
        raw: The content of config.json.
        section: The part of it that describes the language model, of a model with several parts.
        config: That part (or all), as transformers reads it.
        site: The rotary module.
        rope: The rope now.
        own_config: The configuration class of a model in memory with code of its own.
        original: The window the model was trained on, where a user states another than the configuration.
    """

    raw: dict[str, Any] = field(compare=False)
    section: str | None
    config: PreTrainedConfig = field(compare=False)  # it follows from `raw`
    site: RotarySite
    rope: Rope
    own_config: type[PreTrainedConfig] | None = field(default=None, compare=False)
    original: int | None = None

    def trained_on(self, window: int | None) -> Self:
        """The survey with another window L, in tokens, than the configuration says; None for its own.

        Raises:
            RopepatchError: If the rope is scaled already.
        """
        stated = self.rope.original_max_position_embeddings
        if window is None or window == stated:
            return self
        if self.rope.is_scaled:
            raise RopepatchError(
                f"original is {window}, but this rope is scaled already, to {stated} tokens",
                hint="leave original out, or start from the checkpoint it was scaled from",
            )
        rope = self.rope.model_copy(update={"original_max_position_embeddings": window})
        return replace(self, rope=rope, original=window)

    def target(self, to: Length | None, name: str) -> int:
        """The target in tokens, which must be beyond the window, of a model by its name in messages."""
        window = self.rope.original_max_position_embeddings
        try:
            target = relative_length(to, window) if isinstance(to, str) else operator.index(to)  # type: ignore[arg-type]
        except TypeError:
            message = f"to must be a whole number of tokens, got {to!r}"
            raise RopepatchError(message, hint="to=32_768") from None
        if target > window:
            return target
        keys = "max_position_embeddings", SEQUENCE
        stating = (key for key in keys if getattr(self.config, key, None) == window)
        source = "original" if self.original else next(stating, "factor x original_max_position_embeddings")
        raise RopepatchError(
            f"{name} already covers {window} tokens ({source}); nothing to extend to {target}",
            hint=f"{argument('to')} is the target context, e.g. {argument('to', 4 * window)}",
        )

    @property
    def stated(self) -> dict[str, Any]:
        """The description of the language model in config.json; see `stated_in`."""
        return self.stated_in(self.raw)

    def stated_in(self, raw: dict[str, Any]) -> dict[str, Any]:
        """The description of the language model in a config.json; in full where its part is left out."""
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
        return head_dim_of(self.config)

    @property
    def rotates_partly(self) -> bool:
        """Whether some dimensions of each head do not rotate."""
        return self.rope.rotary_dim < self.head_dim or hasattr(self.config, "qk_nope_head_dim")


@float32_on_cpu()
def survey(raw: dict[str, Any], model: nn.Module | None = None) -> Survey:
    """Survey a config.json, by its model and that model's classes where it is in memory."""
    own = None if model is None or is_stock(model) else type(base_model(model).config)
    whole = load_config(raw, own)
    config = text_config(whole)
    check_rope_types(config)
    section = next((name for name in TEXT_PARTS if getattr(whole, name, None) is config), None)
    site = find_rotary(blueprint(whole) if model is None else model)
    rope = read_rope(config, site)
    check_table_rules(config, site)
    if rope.is_scaled and site.of(config.rope_parameters).get("mscale_all_dim") and config.model_type in TIED:
        raise RopepatchError(
            f"{config.model_type} ties its softmax scale to the rope scaling it already has (mscale_all_dim)",
            hint="start from the unscaled base checkpoint",
        )
    return Survey(raw, section, config, site, rope, own)


def survey_checkpoint(checkpoint: Checkpoint, *, swapped: bool = False) -> Survey:
    """Survey the config.json of a checkpoint; if `swapped` is allowed, for the rope it had before."""
    raw = checkpoint.stock_raw if swapped else checkpoint.raw
    check_agreement(raw)
    surveyed = _survey_of(json.dumps(raw))
    return replace(surveyed, raw=raw, config=copy.deepcopy(surveyed.config))


@lru_cache(maxsize=8)
def _survey_of(text: str) -> Survey:
    """The survey of the text of a config.json, which builds the model without weights: once a process."""
    return survey(json.loads(text))
