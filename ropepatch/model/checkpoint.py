"""Checkpoints: folders, files from the Hub, or models in memory."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ropepatch.errors import RopepatchError, argument
from ropepatch.files import read_json
from ropepatch.model.architectures import TIED, LocalRope, local_rope, trained_on
from ropepatch.model.config import (
    ORIGINAL,
    auto_class,
    blueprint,
    check_rope_types,
    describes_at_top,
    head_dim_of,
    key_value_heads_of,
    load_config,
    part_of,
    quantization_of,
    text_config,
)
from ropepatch.model.kinds import (
    KEY,
    Kind,
    Swapped,
    kind_of,
    read_swapped,
    saved_remapping,
    without_remapping,
)
from ropepatch.model.loading import load_model, load_tokenizer
from ropepatch.model.rotary import (
    SEQUENCE,
    RotarySite,
    base_model,
    check_table_rules,
    find_rotary,
    float32_on_cpu,
    is_stock,
    other_tables,
    read_rope,
    stock_table,
    switches,
)
from ropepatch.model.source import check_no_adapter, download, locate
from ropepatch.model.stated_rope import StatedRope
from ropepatch.model.weights import Weights, fingerprint, read_headers
from ropepatch.scaling import YaRN
from ropepatch.scaling.method import Method
from ropepatch.scaling.rope import Frequencies, Rope
from ropepatch.settings import Length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_CONFIG = 4_000_000  # bytes; published ones have about 10,000
UP_TO_SWITCH = "up to the switch"  # the `longrope` frequencies up to the original context length


@dataclass(frozen=True, eq=False)
class Checkpoint(StatedRope):
    """A folder, the files of a Hub id, or a model in memory; files are read once, when needed.

    Args:
        place: The folder; None for a model in memory.
        name: The name that the user gave; empty for a folder that ropepatch has written.
        revision: The commit of a checkpoint from the Hub.
        original: The original context length that the user gave instead of config.json's.
        stated_raw: The content of config.json if it is not read from the folder.
        own_config: The configuration class of a model in memory with custom code.
    """

    place: Path | None
    name: str = ""
    revision: str | None = None
    original: Length | None = None
    stated_raw: dict[str, Any] | None = field(default=None, repr=False)
    own_config: type[PreTrainedConfig] | None = None
    file_name = "config.json"

    @classmethod
    def find(
        cls,
        model: str | Path,
        revision: str | None = None,
        *,
        original: Length | None = None,
        weights: bool = False,
        include: Sequence[str] = (),
    ) -> Self:
        """Find a folder, or download a Hub id: config.json only, or everything including weights.

        Raises:
            RopepatchError: If there is no such model, or it cannot be downloaded.
        """
        place = locate(model, revision, weights=weights, include=include)
        return cls(place.folder, place.name, place.revision, original)

    @classmethod
    def of(cls, model: nn.Module | PreTrainedConfig, original: Length | None = None) -> Self:
        """Make a checkpoint of a model in memory, wrapped or not, or of a configuration.

        Raises:
            RopepatchError: If it has no supported RoPE.
        """
        if isinstance(model, PreTrainedConfig):
            name = str(model.name_or_path or type(model).__name__)
            return cls(None, name, original=original, stated_raw=model.to_dict())
        base = base_model(model)
        config: Any = base.config
        commit = getattr(config, "_commit_hash", None)
        own = None if is_stock(base) else type(config)
        name = str(config.name_or_path or type(base).__name__)
        checkpoint = cls(None, name, commit, original, config.to_dict(), own)
        _ = checkpoint.config
        vars(checkpoint)["site"] = find_rotary(base)
        _ = checkpoint.rope
        return checkpoint

    @property
    def folder(self) -> Path:
        """The folder.

        Raises:
            RopepatchError: If the model is in memory.
        """
        if self.place is None:
            raise RopepatchError(f"{self.name} is in memory, not in a folder", hint="name the checkpoint")
        return self.place

    def complete(self, include: Sequence[str] = ()) -> Self:
        """Return the checkpoint with weights and all files downloaded, including those of ``include``.

        For a model in memory, this finds the checkpoint by its name.

        Raises:
            RopepatchError: If it is not found, cannot be downloaded, or has custom code.
        """
        here = self._complete
        if include and here.revision is not None:
            download(here.name, here.revision, include=include)
        return here

    @cached_property
    def _complete(self) -> Self:
        if self.own_config is not None:
            raise RopepatchError(
                f"{self.name} has code of its own, and stock transformers loads no checkpoint of it",
                hint="patch and measure it in memory; to save, plan a checkpoint folder that needs no code",
            )
        if self.place is None:
            revision = None if Path(self.name).is_dir() else self.revision
            return self.find(self.name, revision, original=self.original, weights=True)
        if self.revision is not None:
            download(self.name, self.revision)
        return self

    def check_unchanged(self) -> None:
        """Raise a `RopepatchError` if config.json has changed since it was read."""
        if self.place is not None and read_json(self.place / "config.json") != self.raw:
            raise self.changed_since()

    def changed_since(self) -> RopepatchError:
        """Make the error of a checkpoint that changed after it was planned."""
        return RopepatchError(f"{self.name} changed since it was planned", hint="plan it again")

    # config.json

    @cached_property
    def raw(self) -> dict[str, Any]:
        """The content of config.json.

        Raises:
            RopepatchError: If it cannot be read or is implausibly large.
        """
        if self.stated_raw is not None:
            return self.stated_raw
        check_no_adapter(self.folder, self.name)
        file = self.folder / "config.json"
        if file.is_file() and (size := file.stat().st_size) > MOST_CONFIG:
            raise RopepatchError(
                f"{file} has {size / 1e6:.0f} MB, expected at most {MOST_CONFIG / 1e6:.0f}",
                hint="copy it again from where the checkpoint came from",
            )
        return read_json(file)

    @property
    def kind(self) -> Kind:
        """The kind of checkpoint, by its model type."""
        return kind_of(self.raw)

    @cached_property
    def swapped(self) -> Swapped:
        """The record of a swapped position encoding."""
        return read_swapped(self.folder)

    @property
    def positions(self) -> dict[str, Any]:
        """The JSON-ready encoding or position remapping that replaces RoPE; empty for RoPE."""
        if self.kind == "swapped":
            return {"encoding": {"encoding": self.swapped.encoding, "parameters": self.swapped.parameters}}
        if self.kind == "mapped":
            described = saved_remapping(self.raw)
            return {KEY: {key: described[key] for key in ("name", "parameters")}}
        return {}

    @cached_property
    def stock(self) -> Checkpoint:
        """The same weights with the stock architecture and RoPE, without remapping or swapped encoding."""
        if self.kind == "swapped":
            own = {"model_type": self.swapped.model_type, "architectures": self.swapped.architectures}
            return self.with_config(self.raw | own)
        return self.with_config(without_remapping(self.raw)) if self.kind == "mapped" else self

    def with_config(self, raw: dict[str, Any]) -> Checkpoint:
        """Return the same weights and rotary module with another config.json."""
        other = replace(self, stated_raw=raw)
        if "site" in vars(self):
            vars(other)["site"] = self.site
        return other

    # The model that config.json describes

    @cached_property
    def whole_config(self) -> PreTrainedConfig:
        """The configuration as transformers parses it."""
        return load_config(self.raw, self.own_config)

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The configuration of the language model; for text-only models the whole."""
        config = text_config(self.whole_config)
        check_rope_types(config)
        return config

    @cached_property
    def section(self) -> str | None:
        """The key of the language model's part of config.json; None for the top level."""
        name = part_of(self.whole_config)
        exists = name is None or isinstance(self.raw.get(name), dict)
        return name if exists or not describes_at_top(self.raw) else None

    @property
    def is_part(self) -> bool:
        """Whether the language model is part of a multimodal model."""
        return self.config is not self.whole_config

    @property
    def stated(self) -> dict[str, Any]:
        """The language model's part of config.json; see `stated_in`."""
        return self.stated_in(self.raw)

    def stated_in(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the language model's part of a config.json, with all defaults if it is absent."""
        if self.section is None:
            return raw
        part = raw.get(self.section)
        if isinstance(part, dict):
            return part
        full: dict[str, Any] = json.loads(self.config.to_json_string(use_diff=False))
        return full

    def changed(self, changes: dict[str, Any], raw: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return config.json, or another like it, with changes in the language model's part.

        Keys that the top level repeats stay unchanged: transformers 5 rejects scaled RoPE there.
        """
        content = self.raw if raw is None else raw
        stated = self.stated_in(content) | changes
        return stated if self.section is None else content | {self.section: stated}

    @cached_property
    def skeleton(self) -> PreTrainedModel:
        """The model on the meta device, without memory for its weights."""
        return blueprint(self.whole_config)

    @property
    def head_dim(self) -> int:
        """The dimension of a head."""
        return head_dim_of(self.config)

    @property
    def key_value_heads(self) -> int:
        """The number of key and value heads."""
        return key_value_heads_of(self.config)

    @property
    def rotates_partly(self) -> bool:
        """Whether some dimensions of each head do not rotate."""
        return self.rope.rotary_dim < self.head_dim or hasattr(self.config, "qk_nope_head_dim")

    # RoPE

    @property
    def model_type(self) -> str:
        """The architecture, as transformers names it."""
        return str(self.config.model_type)

    @property
    def stated_length(self) -> int:
        """The context length in config.json, in tokens."""
        return int(self.config.max_position_embeddings)

    @property
    def layer_type(self) -> str | None:
        """The type of the layers that are scaled, if RoPE differs by layer type."""
        return self.site.layer_type

    def held(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the current values of some keys, where set, and `rope_parameters`."""
        kept = {key: self.stated[key] for key in keys if key in self.stated}
        return copy.deepcopy(kept | {"rope_parameters": self.config.rope_parameters})

    def check_method(self, method: Method) -> None:
        """Raise a `RopepatchError` for another method than YaRN if YaRN also scales the softmax."""
        if (stated := self.tied_yarn) and not isinstance(method, YaRN):
            raise RopepatchError(
                f"{method.name} cannot extend {self.model_type}: YaRN's factor, {stated['factor']:g}, "
                "also scales its softmax (mscale_all_dim)",
                hint=f"use {argument('method', 'yarn')}, which replaces the factor",
            )

    @cached_property
    def site(self) -> RotarySite:
        """The rotary module."""
        _ = self.config
        return find_rotary(self.skeleton)

    @cached_property
    def local_rope(self) -> LocalRope | None:
        """The local layers that use this RoPE; None for custom code, and if RoPE differs by layer type."""
        if self.own_config or self.site.layer_type is not None:
            return None
        return local_rope(self.config)

    @cached_property
    def _stated_rope(self) -> Rope:
        """The RoPE parameters by config.json."""
        config, site = self.config, self.site
        with float32_on_cpu():
            rope = read_rope(config, site)
            check_table_rules(config, site)
        if stated := self.tied_yarn:
            return Rope(rope.rotary_dim, stated["rope_theta"], stated[ORIGINAL])
        return rope

    @cached_property
    def tied_yarn(self) -> dict[str, Any] | None:
        """The `rope_parameters` of YaRN if its factor also changes the softmax scale; else None.

        No rope type can express a further scaling of these, so YaRN is applied to L with a larger factor.
        """
        stated = self.site.of(self.config.rope_parameters)
        tied = self.config.model_type in TIED and stated.get("mscale_all_dim")
        return stated if tied and stated["rope_type"] == "yarn" else None

    @property
    def reach(self) -> int:
        """The current context length in tokens; more than L if RoPE is scaled from L anew."""
        stated = self.tied_yarn
        return int(stated["factor"] * stated[ORIGINAL]) if stated else self.window

    def with_rope(self, rope: Rope) -> Self:
        """Return the checkpoint with other RoPE parameters than those of config.json."""
        other = copy.copy(self)
        vars(other).pop("_complete", None)
        vars(other)["rope"] = rope
        return other

    def frequencies(self) -> Frequencies:
        """Compute the frequencies with stock transformers: the reference for all others.

        For a `longrope` with two lists, those beyond the switch.
        """
        return stock_table(self.config, self.site, beyond_switch=True)

    def other_frequencies(self) -> dict[str, list[float]]:
        """Return the other frequencies and attention factors: of unscaled layer types, and up to a switch."""
        others = other_tables(self.config, self.site)
        if switches(self.site.of(self.config.rope_parameters)):
            others[UP_TO_SWITCH] = stock_table(self.config, self.site).inv_freq.tolist()
        return others

    def target(self, to: Length | None) -> int:
        """Return the target length in tokens, which must exceed the current one."""
        if (target := self.in_tokens(to)) > self.reach:
            return target
        keys = "max_position_embeddings", SEQUENCE
        stating = (key for key in keys if getattr(self.config, key, None) == self.reach)
        source = (
            "original" if self.original_window else next(stating, "factor x original_max_position_embeddings")
        )
        known = None if self.original_window else trained_on(self.config)
        shorter = f"; published ones were trained on {argument('original', known)}" if known else ""
        raise RopepatchError(
            f"{self.name} already covers {self.reach} tokens ({source}); nothing to extend to {target}",
            hint=f"{argument('to')} is the target context, e.g. {argument('to', 4 * self.reach)}{shorter}",
        )

    # Weights

    @cached_property
    def weights(self) -> Weights:
        """The weights by their headers; see `read_headers`."""
        return read_headers(self.folder, self.raw)

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the weights."""
        return fingerprint(self.weights)

    @property
    def auto_class(self) -> str:
        """The name of the auto class that loads the model."""
        return str(auto_class(self.stock.raw["model_type"]).__name__)

    @property
    def is_quantised(self) -> bool:
        """Whether config.json describes quantised weights."""
        return quantization_of(self.stock.whole_config) is not None

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer."""
        return load_tokenizer(self.folder, self.stock.whole_config)

    def load(
        self,
        dtype: torch.dtype | None = None,
        device_map: str | dict[str, str] | None = None,
        quantization: Any = None,
    ) -> PreTrainedModel:
        """Load the model with stock transformers, in eval mode, under the name that the user gave.

        Raises:
            RopepatchError: If it has a position remapping or a swapped encoding, its weights do not fit
                config.json, or the dtype does not support computation.
        """
        config = None if self.stated_raw is None else copy.deepcopy(self.whole_config)
        model = load_model(self.folder, self.raw, config, dtype, device_map, quantization, self.name)
        if self.name:
            model.config.name_or_path = self.name
            model.config._commit_hash = self.revision
        return model
