"""A checkpoint: what a user names as the model, found once and handed on."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ropepatch.errors import RopepatchError, argument
from ropepatch.files import read_json
from ropepatch.model.architectures import TIED, trained_on
from ropepatch.model.checks import check_agreement, config_errors
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
from ropepatch.model.kinds import KEY, Kind, Swapped, kind_of, read_swapped, saved_remapping, without_map
from ropepatch.model.layers import LocalRope, local_rope
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
from ropepatch.model.source import download, locate
from ropepatch.model.stated_rope import StatedRope
from ropepatch.model.weights import Weights, fingerprint, read_headers
from ropepatch.scaling.rope import Frequencies, Rope
from ropepatch.settings import Length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_CONFIG = 4_000_000  # bytes; published ones have some 10,000
UP_TO_SWITCH = "up to the switch"  # the table of a `longrope` for texts of its original window


@dataclass(frozen=True, eq=False)
class Checkpoint(StatedRope):
    """A folder, the files of a Hub id, or a model in memory; what it holds is read when needed, and once.

    Args:
        place: Its folder; None of a model in memory.
        name: As the user gave it; empty for a folder that ropepatch has written.
        revision: The commit, of a checkpoint from the Hub.
        original: The window that its user says it was trained on, where config.json says another.
        stated_raw: The content of config.json, where it is not read from the folder.
        own_config: The configuration class of a model in memory with code of its own.
    """

    place: Path | None
    name: str = ""
    revision: str | None = None
    original: Length | None = None
    stated_raw: dict[str, Any] | None = field(default=None, repr=False)
    own_config: type[PreTrainedConfig] | None = None

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
        """Find the folder of that name, or download a Hub id: config.json alone, or all with its weights.

        Raises:
            RopepatchError: If there is no such model, or it cannot be downloaded.
        """
        place = locate(model, revision, weights=weights, include=include)
        return cls(place.folder, place.name, place.revision, original)

    @classmethod
    def of(cls, model: nn.Module | PreTrainedConfig, original: Length | None = None) -> Self:
        """Take a model in memory, also within wrappers, or the configuration of one.

        Raises:
            RopepatchError: If it has no rope that can be read.
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
        """Its folder.

        Raises:
            RopepatchError: Of a model in memory.
        """
        if self.place is None:
            raise RopepatchError(f"{self.name} is in memory, not in a folder", hint="name the checkpoint")
        return self.place

    def complete(self, include: Sequence[str] = ()) -> Self:
        """The same with its weights and every file that counts, and those that ``include`` names, downloaded.

        A model in memory is found again by its name.

        Raises:
            RopepatchError: If it is not found, cannot be downloaded, or has code of its own.
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
        """Refuse a folder whose config.json has changed since it was read."""
        if self.place is not None and read_json(self.place / "config.json") != self.raw:
            raise self.changed_since()

    def changed_since(self) -> RopepatchError:
        """The error that a checkpoint is no longer the one of a plan."""
        return RopepatchError(f"{self.name} changed since it was planned", hint="plan it again")

    # config.json

    @cached_property
    def raw(self) -> dict[str, Any]:
        """The content of config.json.

        Raises:
            RopepatchError: If it cannot be read, or is so large that it is none.
        """
        if self.stated_raw is not None:
            return self.stated_raw
        file = self.folder / "config.json"
        if file.is_file() and (size := file.stat().st_size) > MOST_CONFIG:
            raise RopepatchError(
                f"{file} has {size / 1e6:.0f} MB, expected at most {MOST_CONFIG / 1e6:.0f}",
                hint="copy it again from where the checkpoint came from",
            )
        return read_json(file)

    @property
    def kind(self) -> Kind:
        """The kind of the checkpoint by its model type."""
        return kind_of(self.raw)

    @cached_property
    def swapped(self) -> Swapped:
        """The record of a swapped position encoding."""
        return read_swapped(self.folder)

    @property
    def positions(self) -> dict[str, Any]:
        """The JSON-ready encoding or position remapping that replaces the rope; empty for a rope."""
        if self.kind == "swapped":
            return {"encoding": {"encoding": self.swapped.encoding, "parameters": self.swapped.parameters}}
        if self.kind == "mapped":
            described = saved_remapping(self.raw)
            return {KEY: {key: described[key] for key in ("name", "parameters")}}
        return {}

    @cached_property
    def stock(self) -> Checkpoint:
        """The same weights under the stock architecture, with the rope as it was before map or encoding."""
        if self.kind == "swapped":
            own = {"model_type": self.swapped.model_type, "architectures": self.swapped.architectures}
            return self.with_config(self.raw | own)
        return self.with_config(without_map(self.raw)) if self.kind == "mapped" else self

    def with_config(self, raw: dict[str, Any]) -> Checkpoint:
        """The same weights and the same rotary module under another config.json."""
        other = replace(self, stated_raw=raw)
        if "site" in vars(self):
            vars(other)["site"] = self.site
        return other

    # The model that config.json describes

    @cached_property
    def whole_config(self) -> PreTrainedConfig:
        """The configuration, as transformers reads it."""
        with self._judged():
            return load_config(self.raw, self.own_config)

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The part of the configuration that describes the language model; of most models the whole."""
        config = text_config(self.whole_config)
        check_rope_types(config)
        return config

    @cached_property
    def section(self) -> str | None:
        """The key of the part of config.json that describes the language model; None where the top does."""
        name = part_of(self.whole_config)
        is_there = name is None or isinstance(self.raw.get(name), dict)
        return name if is_there or not describes_at_top(self.raw) else None

    @property
    def is_part(self) -> bool:
        """Whether the language model is a part of one that also sees or hears, say."""
        return self.config is not self.whole_config

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

    def changed(self, changes: dict[str, Any], raw: dict[str, Any] | None = None) -> dict[str, Any]:
        """config.json, or another like it, with changes in its description of the language model.

        What the top repeats of a part stays: transformers 5 refuses a scaled rope there.
        """
        whole = self.raw if raw is None else raw
        stated = self.stated_in(whole) | changes
        return stated if self.section is None else whole | {self.section: stated}

    @cached_property
    def skeleton(self) -> PreTrainedModel:
        """The model on the meta device, without memory for its weights."""
        with self._judged():
            return blueprint(self.whole_config)

    @contextmanager
    def _judged(self) -> Iterator[None]:
        """Where stock code fails on config.json, say what is wrong in the doctor's words, if it knows."""
        try:
            yield
        except RopepatchError as error:
            known = config_errors(self.raw) if error.__cause__ else ()
            if not known:
                raise
            raise RopepatchError(
                f"config.json: {known[0]}", hint="run `ropepatch doctor` for details"
            ) from error

    @property
    def head_dim(self) -> int:
        """The dimensions of one head."""
        return head_dim_of(self.config)

    @property
    def key_value_heads(self) -> int:
        """The heads of keys and values."""
        return key_value_heads_of(self.config)

    @property
    def rotates_partly(self) -> bool:
        """Whether some dimensions of each head do not rotate."""
        return self.rope.rotary_dim < self.head_dim or hasattr(self.config, "qk_nope_head_dim")

    # Its rope

    @cached_property
    def site(self) -> RotarySite:
        """The rotary module."""
        _ = self.config
        return find_rotary(self.skeleton)

    @cached_property
    def local_rope(self) -> LocalRope | None:
        """The layers that read their surroundings alone and rotate by this rope; not asked of own code."""
        return None if self.own_config else local_rope(self.skeleton, self.site)

    @cached_property
    def _stated_rope(self) -> Rope:
        """The rope by config.json."""
        if self.own_config is None:
            check_agreement(self.raw)
        config, site = self.config, self.site
        with float32_on_cpu():
            rope = read_rope(config, site)
            check_table_rules(config, site)
        if stated := self.tied_yarn:
            return Rope(rope.rotary_dim, stated["rope_theta"], stated[ORIGINAL])
        return rope

    @cached_property
    def tied_yarn(self) -> dict[str, Any] | None:
        """The `rope_parameters` of a YaRN whose factor the scale of the softmax follows, too; else None.

        No frequencies on top of it can be said to stock readers: YaRN is applied anew, by another factor.
        """
        stated = self.site.of(self.config.rope_parameters)
        tied = self.config.model_type in TIED and stated.get("mscale_all_dim")
        return stated if tied and stated["rope_type"] == "yarn" else None

    @property
    def reach(self) -> int:
        """The context that it reads now, in tokens; more than L where its rope is scaled anew from L."""
        stated = self.tied_yarn
        return int(stated["factor"] * stated[ORIGINAL]) if stated else self.window

    def with_rope(self, rope: Rope) -> Self:
        """The same with another rope than config.json states."""
        other = copy.copy(self)
        vars(other).pop("_complete", None)
        vars(other)["rope"] = rope
        return other

    def frequencies(self) -> Frequencies:
        """The frequencies that stock transformers computes from config.json: the judge of all others.

        Of a `longrope` that switches those beyond its switch.
        """
        return stock_table(self.config, self.site, beyond_switch=True)

    def other_frequencies(self) -> dict[str, list[float]]:
        """Those of the layer types that are not scaled, with their attention factors, and up to a switch."""
        others = other_tables(self.config, self.site)
        if switches(self.site.of(self.config.rope_parameters)):
            others[UP_TO_SWITCH] = stock_table(self.config, self.site).inv_freq.tolist()
        return others

    def target(self, to: Length | None) -> int:
        """The target in tokens, which must be beyond the window."""
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

    # Its weights

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
        """The name of the auto class that loads it."""
        return str(auto_class(self.stock.raw["model_type"]).__name__)

    @property
    def is_quantised(self) -> bool:
        """Whether config.json says that its weights are quantised."""
        return quantization_of(self.stock.whole_config) is not None

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer, with which nothing else happens than reading and writing text."""
        return load_tokenizer(self.folder, self.stock.whole_config)

    def load(
        self,
        dtype: torch.dtype | None = None,
        device_map: str | dict[str, str] | None = None,
        quantization: Any = None,
    ) -> PreTrainedModel:
        """The model by stock transformers, in eval mode, which names the checkpoint as its user did.

        Raises:
            RopepatchError: If it has a position remapping or a swapped encoding, its weights are not those of
                config.json, or nothing can be computed in the dtype.
        """
        config = None if self.stated_raw is None else copy.deepcopy(self.whole_config)
        model = load_model(self.folder, self.raw, config, dtype, device_map, quantization, self.name)
        if self.name:
            model.config.name_or_path = self.name
            model.config._commit_hash = self.revision
        return model
