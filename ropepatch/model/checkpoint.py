"""What a plan is made from: config.json as transformers reads it, a checkpoint, a model in memory."""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

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
    is_stock,
    other_tables,
    read_rope,
    stock_table,
    switches,
)
from ropepatch.model.source import check_no_adapter, download, locate
from ropepatch.model.weights import Weights, fingerprint, read_headers
from ropepatch.scaling.rope import Frequencies, Rope
from ropepatch.settings import Length, number_of, relative_length, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_CONFIG = 4_000_000  # bytes; published ones have about 10,000
# The `longrope` frequencies up to the original context length
UP_TO_SWITCH = "up to the switch"


class StatedRope(ABC):
    """RoPE parameters as a file states them, and the original length that a user gives instead.

    Attributes:
        original: The original context length that the user gave instead of the file's.
        file_name: The file that states them.
    """

    original: Length | None
    file_name: ClassVar[str]

    @property
    @abstractmethod
    def model_type(self) -> str:
        """The architecture."""

    @property
    @abstractmethod
    def stated_length(self) -> int:
        """The context length in the file, in tokens."""

    @property
    @abstractmethod
    def stated_rope(self) -> Rope:
        """The RoPE parameters by the file."""

    @abstractmethod
    def held(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the current values of some keys, where set."""

    @property
    def layer_type(self) -> str | None:
        """The type of the layers that are scaled, if RoPE differs by layer type."""
        return None

    @property
    def local_rope(self) -> LocalRope | None:
        """The local layers that use the one RoPE."""
        return None

    @property
    def tied_yarn(self) -> dict[str, Any] | None:
        """The parameters of a YaRN whose factor also changes the softmax scale."""
        return None

    @cached_property
    def rope(self) -> Rope:
        """The RoPE parameters, with the original context length that the user gave."""
        if (window := self.original_window) is None:
            return self.stated_rope
        return self.stated_rope.model_copy(update={ORIGINAL: window})

    @cached_property
    def window(self) -> int:
        """L, the context length in tokens that RoPE is scaled from."""
        return self.rope.original_max_position_embeddings

    @cached_property
    def reach(self) -> int:
        """The current context length in tokens; more than L if RoPE is scaled from L anew."""
        stated = self.tied_yarn
        return int(stated["factor"] * stated[ORIGINAL]) if stated else self.window

    @cached_property
    def original_window(self) -> int | None:
        """The L that the user gave, in tokens; None if it equals that of the file.

        Raises:
            RopepatchError: If it is not a length, or RoPE is already scaled.
        """
        if self.original is None:
            return None
        stated = self.stated_rope.original_max_position_embeddings
        try:
            window = relative_length(self.original, stated)
        except RopepatchError as error:
            message = f"{argument('original')} must be a number of tokens, got {shown(self.original)}"
            raise RopepatchError(message, hint=error.hint) from error
        if window == stated:
            return None
        if self.stated_rope.is_scaled:
            raise RopepatchError(
                f"{argument('original')} is {window}, but this model is already scaled to {stated} tokens",
                hint=f"drop {argument('original')}, or extend the checkpoint it was made from",
            )
        return window

    def in_tokens(self, to: Length | None) -> int:
        """Return a target length in tokens, also for a multiple of the current length.

        Raises:
            RopepatchError: If it is not a length.
        """
        if to is None:
            raise RopepatchError(
                f"{argument('to')} is missing",
                hint=f"{argument('to', '32k')}, or {argument('to', '4x')} for four times the original length",
            )
        length = number_of(to)
        if isinstance(length, str):
            return relative_length(length, self.reach)
        if isinstance(length, int) and abs(length) < 2**63:
            return length
        message = f"{argument('to')} must be a whole number of tokens, got {shown(to)}"
        raise RopepatchError(message, hint=argument("to", 32_768))

    def target(self, to: Length | None, name: str) -> int:
        """Return the target length in tokens of the model ``name``; it must exceed the current length."""
        if (target := self.in_tokens(to)) > self.reach:
            return target
        stating, shorter = self._stating_reach()
        raise RopepatchError(
            f"{name} already covers {self.reach} tokens{stating}; nothing to extend to {target}",
            hint=f"{argument('to')} is the target context, e.g. {argument('to', 4 * self.reach)}{shorter}",
        )

    def _stating_reach(self) -> tuple[str, str]:
        """Return which key states the current length, and a hint to a shorter original one."""
        return "", ""


@dataclass(frozen=True, eq=False)
class Config(StatedRope):
    """A config.json as stock transformers reads it: all that a plan needs of a model.

    Args:
        raw: The content of config.json.
        original: The original context length that the user gave instead.
        custom: The configuration class of a model in memory with custom code.
        known_site: The rotary module, where it is known without building the model.
        scaled_rope: RoPE parameters to plan from instead of those that config.json gives.
    """

    raw: dict[str, Any]
    original: Length | None = None
    custom: type[PreTrainedConfig] | None = None
    known_site: RotarySite | None = None
    scaled_rope: Rope | None = None
    file_name = "config.json"

    @classmethod
    def of(
        cls, model: nn.Module | PreTrainedConfig, original: Length | None = None
    ) -> Self:
        """Return the configuration of a model in memory, wrapped or not.

        Raises:
            RopepatchError: If it has no supported RoPE.
        """
        if isinstance(model, PreTrainedConfig):
            return cls(model.to_dict(), original)
        base = base_model(model)
        custom = None if is_stock(base) else type(base.config)
        unlocated = cls(base.config.to_dict(), original, custom)
        _ = (
            unlocated.text
        )  # an unsupported configuration is reported before its rotary module
        config = replace(unlocated, known_site=find_rotary(base))
        _ = config.rope
        return config

    def changed(self, keys: Mapping[str, Any]) -> Self:
        """Return the configuration with other keys in the language model's part.

        Keys that the top level repeats stay unchanged: transformers 5 rejects scaled RoPE there.
        """
        stated = {**self.stated, **keys}
        return self.read_from(
            stated if self.section is None else self.raw | {self.section: stated}
        )

    def read_from(self, raw: dict[str, Any]) -> Self:
        """Return another config.json of the same model."""
        return replace(self, raw=raw, known_site=self.site)

    # What config.json says

    @property
    def kind(self) -> Kind:
        """The kind of checkpoint, by its model type."""
        return kind_of(self.raw)

    @cached_property
    def whole(self) -> PreTrainedConfig:
        """The configuration as transformers parses it."""
        return load_config(self.raw, self.custom)

    @cached_property
    def text(self) -> PreTrainedConfig:
        """The configuration of the language model; for text-only models the whole."""
        config = text_config(self.whole)
        check_rope_types(config)
        return config

    @cached_property
    def section(self) -> str | None:
        """The key of the language model's part of config.json; None for the top level."""
        name = part_of(self.whole)
        exists = name is None or isinstance(self.raw.get(name), dict)
        return name if exists or not describes_at_top(self.raw) else None

    @property
    def is_part(self) -> bool:
        """Whether the language model is part of a multimodal model."""
        return self.text is not self.whole

    @cached_property
    def stated(self) -> dict[str, Any]:
        """The language model's part of config.json, with all defaults if it is absent."""
        if self.section is None:
            return self.raw
        part = self.raw.get(self.section)
        if isinstance(part, dict):
            return part
        full: dict[str, Any] = json.loads(self.text.to_json_string(use_diff=False))
        return full

    def held(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the current values of some keys, where set, and `rope_parameters`."""
        kept = {key: self.stated[key] for key in keys if key in self.stated}
        return copy.deepcopy(kept | {"rope_parameters": self.text.rope_parameters})

    # The model that it describes

    @cached_property
    def skeleton(self) -> PreTrainedModel:
        """The model on the meta device, without memory for its weights."""
        return blueprint(self.whole)

    @cached_property
    def model_type(self) -> str:
        """The architecture, as transformers names it."""
        return str(self.text.model_type)

    @cached_property
    def stated_length(self) -> int:
        """The context length in config.json, in tokens."""
        return int(self.text.max_position_embeddings)

    @property
    def head_dim(self) -> int:
        """The dimension of a head."""
        return head_dim_of(self.text)

    @property
    def key_value_heads(self) -> int:
        """The number of key and value heads."""
        return key_value_heads_of(self.text)

    @cached_property
    def rotates_partly(self) -> bool:
        """Whether some dimensions of each head do not rotate."""
        return self.rope.rotary_dim < self.head_dim or hasattr(
            self.text, "qk_nope_head_dim"
        )

    @cached_property
    def is_quantised(self) -> bool:
        """Whether it describes quantised weights."""
        return quantization_of(self.whole) is not None

    @property
    def auto_class(self) -> str:
        """The name of the auto class that loads the model."""
        return str(auto_class(self.raw["model_type"]).__name__)

    # RoPE

    @cached_property
    def site(self) -> RotarySite:
        """The rotary module."""
        _ = self.text
        return self.known_site or find_rotary(self.skeleton)

    @cached_property
    def layer_type(self) -> str | None:
        """The type of the layers that are scaled, if RoPE differs by layer type."""
        return self.site.layer_type

    @cached_property
    def rope_parameters(self) -> dict[str, Any]:
        """The current `rope_parameters`, of the scaled layer type."""
        return self.site.of(self.text.rope_parameters)

    @cached_property
    def local_rope(self) -> LocalRope | None:
        """The local layers that use this RoPE; None for custom code, and if RoPE differs by layer type."""
        if self.custom or self.layer_type is not None:
            return None
        return local_rope(self.text)

    def _stating_reach(self) -> tuple[str, str]:
        if self.original_window:
            return " (original)", ""
        keys = "max_position_embeddings", SEQUENCE
        stating = (key for key in keys if getattr(self.text, key, None) == self.reach)
        known = trained_on(self.text)
        shorter = (
            f"; published ones were trained on {argument('original', known)}"
            if known
            else ""
        )
        return (
            f" ({next(stating, 'factor x original_max_position_embeddings')})",
            shorter,
        )

    @cached_property
    def stated_rope(self) -> Rope:
        """The RoPE parameters by config.json."""
        if self.scaled_rope is not None:
            return self.scaled_rope
        rope = read_rope(self.text, self.site)
        check_table_rules(self.text, self.site)
        if stated := self.tied_yarn:
            return Rope(rope.rotary_dim, stated["rope_theta"], stated[ORIGINAL])
        return rope

    @cached_property
    def tied_yarn(self) -> dict[str, Any] | None:
        """The `rope_parameters` of YaRN if its factor also changes the softmax scale; else None.

        No rope type can express a further scaling of these, so YaRN is applied to L with a larger factor.
        """
        stated = self.rope_parameters
        if (
            stated.get("mscale_all_dim")
            and stated["rope_type"] == "yarn"
            and self.model_type in TIED
        ):
            return stated
        return None

    @cached_property
    def frequencies(self) -> Frequencies:
        """The frequencies that stock transformers computes: the reference for all others.

        For a `longrope` with two lists, those beyond the switch.
        """
        return stock_table(self.text, self.site, beyond_switch=True)

    @cached_property
    def other_frequencies(self) -> dict[str, list[float]]:
        """The other frequencies and attention factors: of unscaled layer types, and up to a switch."""
        others = (
            other_tables(self.text, self.site) if self.layer_type is not None else {}
        )
        if switches(self.rope_parameters):
            others[UP_TO_SWITCH] = stock_table(self.text, self.site).inv_freq.tolist()
        return others


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A folder, or the files of a Hub id; files are read once, when needed.

    Args:
        folder: The folder.
        name: The name that the user gave; empty for a folder that ropepatch has written.
        revision: The commit of a checkpoint from the Hub.
        original: The original context length that the user gave instead of config.json's.
    """

    folder: Path
    name: str = ""
    revision: str | None = None
    original: Length | None = None

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

    def complete(self, include: Sequence[str] = ()) -> Self:
        """Return the checkpoint with weights and all files downloaded, including those of ``include``.

        Raises:
            RopepatchError: If they cannot be downloaded.
        """
        if self.revision is not None:
            download(self.name, self.revision, include=include)
        return self

    def check_unchanged(self) -> None:
        """Raise a `RopepatchError` if config.json has changed since it was read."""
        if read_json(self.folder / "config.json") != self.config.raw:
            raise changed_since(self.name)

    @cached_property
    def config(self) -> Config:
        """The content of config.json.

        Raises:
            RopepatchError: If it cannot be read or is implausibly large.
        """
        check_no_adapter(self.folder, self.name)
        file = self.folder / "config.json"
        if file.is_file() and (size := file.stat().st_size) > MOST_CONFIG:
            raise RopepatchError(
                f"{file} has {size / 1e6:.0f} MB, expected at most {MOST_CONFIG / 1e6:.0f}",
                hint="copy it again from where the checkpoint came from",
            )
        return Config(read_json(file), self.original)

    @property
    def raw(self) -> dict[str, Any]:
        """The content of config.json."""
        return self.config.raw

    @property
    def kind(self) -> Kind:
        """The kind of checkpoint, by its model type."""
        return self.config.kind

    @cached_property
    def swapped(self) -> Swapped:
        """The record of a swapped position encoding."""
        return read_swapped(self.folder)

    @property
    def positions(self) -> dict[str, Any]:
        """The JSON-ready encoding or position remapping that replaces RoPE; empty for RoPE."""
        if self.kind == "swapped":
            return {
                "encoding": {
                    "encoding": self.swapped.encoding,
                    "parameters": self.swapped.parameters,
                }
            }
        if self.kind == "mapped":
            described = saved_remapping(self.raw)
            return {KEY: {key: described[key] for key in ("name", "parameters")}}
        return {}

    @cached_property
    def stock(self) -> Config:
        """The stock architecture and RoPE of these weights, without remapping or swapped encoding."""
        if self.kind == "swapped":
            own = {
                "model_type": self.swapped.model_type,
                "architectures": self.swapped.architectures,
            }
            return replace(self.config, raw=self.raw | own)
        if self.kind == "mapped":
            return replace(self.config, raw=without_remapping(self.raw))
        return self.config

    @cached_property
    def weights(self) -> Weights:
        """The weights by their headers; see `read_headers`."""
        return read_headers(self.folder, self.raw)

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the weights."""
        return fingerprint(self.weights)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer."""
        return load_tokenizer(self.folder, self.stock.whole)

    def load(
        self,
        dtype: torch.dtype | None = None,
        device_map: str | dict[str, str] | None = None,
        quantization: Any = None,
        config: Config | None = None,
    ) -> PreTrainedModel:
        """Load the model with stock transformers, in eval mode, under the name that the user gave.

        Args:
            dtype: The dtype of the weights; None for that of the checkpoint.
            device_map: Where each layer is placed.
            quantization: How to quantise the weights.
            config: Another configuration than that of config.json, which transformers reads itself.

        Raises:
            RopepatchError: If it has a position remapping or a swapped encoding, its weights do not fit
                config.json, or the dtype does not support computation.
        """
        raw = self.raw if config is None else config.raw
        given = None if config is None else copy.deepcopy(config.whole)
        model = load_model(
            self.folder, raw, given, dtype, device_map, quantization, self.name
        )
        if self.name:
            model.config.name_or_path = self.name
            model.config._commit_hash = self.revision
        return model


@dataclass(frozen=True, eq=False)
class InMemory:
    """A model in memory, or a configuration.

    Args:
        name: The name of the checkpoint that it was loaded from, or of its class.
        revision: The commit of that checkpoint.
        config: Its configuration.
    """

    name: str
    revision: str | None
    config: Config

    @classmethod
    def of(
        cls, model: nn.Module | PreTrainedConfig, original: Length | None = None
    ) -> Self:
        """Take a model, wrapped or not, or a configuration.

        Raises:
            RopepatchError: If it has no supported RoPE.
        """
        base: Any = model if isinstance(model, PreTrainedConfig) else base_model(model)
        config = base if isinstance(base, PreTrainedConfig) else base.config
        revision = None if base is config else getattr(config, "_commit_hash", None)
        return cls(
            str(config.name_or_path or type(base).__name__),
            revision,
            Config.of(base, original),
        )

    def complete(self, include: Sequence[str] = ()) -> Checkpoint:
        """Find the checkpoint by its name, with its weights and all its files.

        Raises:
            RopepatchError: If it is not found, cannot be downloaded, has custom code or another RoPE.
        """
        if self.config.custom is not None:
            raise RopepatchError(
                f"{self.name} has code of its own, and stock transformers loads no checkpoint of it",
                hint="patch and measure it in memory; to save, plan a checkpoint folder that needs no code",
            )
        revision = None if Path(self.name).is_dir() else self.revision
        original = self.config.original
        return Checkpoint.find(
            self.name, revision, original=original, weights=True, include=include
        )


def changed_since(name: str) -> RopepatchError:
    """Make the error of a checkpoint that changed after it was planned."""
    return RopepatchError(f"{name} changed since it was planned", hint="plan it again")
