"""A checkpoint, or a model in memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ropepatch.errors import RopepatchError, argument
from ropepatch.files import read_json
from ropepatch.model.config import (
    KEY,
    Kind,
    saved_remapping,
    without_remapping,
)
from ropepatch.model.loading import load_model, load_tokenizer
from ropepatch.model.rotary import base_model
from ropepatch.model.source import check_no_adapter, download, locate
from ropepatch.model.weights import Weights, fingerprint, read_headers
from ropepatch.settings import Length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from safetensors import SafetensorError

from ropepatch.files import write_json
from ropepatch.model.config import NEEDS_ROPEPATCH, Config, no_progress_bars
from ropepatch.model.record_file import FILE, VERSION, Part, Text, validated

MOST_CONFIG = 4_000_000  # bytes; published ones have about 10,000
CODE = "modeling_position_remapping.py"  # in the checkpoint's folder, for transformers


class Swapped(Part):
    """The record of a checkpoint with a swapped position encoding.

    Args:
        version: Version of the layout.
        needs_ropepatch: Why other libraries cannot load it, in one sentence.
        encoding: The name of the encoding that its weights need.
        parameters: The parameters of the encoding.
        model_type: The original model_type; config.json contains one that transformers rejects.
        architectures: The original architectures.
    """

    version: Literal[1]
    needs_ropepatch: Text
    encoding: Text
    parameters: dict[Text, Any]
    model_type: Text
    architectures: list[Text]


def read_swapped(folder: Path) -> Swapped:
    """Read the record of a swapped position encoding."""
    content = {"version": VERSION} | read_json(folder / FILE)
    hint = "put config.json, ropepatch.json and the weights of the same checkpoint together"
    return validated(Swapped, content, hint)


def write_swapped(folder: Path, encoding: str, parameters: Mapping[str, Any]) -> None:
    """Mark a folder that transformers wrote as a checkpoint with a swapped encoding."""
    config = read_json(folder / "config.json")
    record = Swapped(
        version=VERSION,
        needs_ropepatch="its position encoding is not RoPE: load it with ropepatch.load",
        encoding=encoding,
        parameters=dict(parameters),
        model_type=config["model_type"],
        architectures=config["architectures"],
    )
    write_json(folder / FILE, record.to_dict())
    config |= {"model_type": NEEDS_ROPEPATCH, "architectures": ["NeedsRopepatch"]}
    write_json(folder / "config.json", config)


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


def code_of(folder: Path) -> dict[str, str]:
    """Return the name and sha256 of a folder's code for the record; empty without a file."""
    file = folder / CODE
    return (
        {CODE: hashlib.sha256(file.read_bytes()).hexdigest()} if file.is_file() else {}
    )


@contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Save a model without progress bars; report a file that cannot be written in one line."""
    try:
        with no_progress_bars():
            yield
    except SafetensorError as error:
        hint = f"make room, or choose another {argument('out')}"
        raise RopepatchError(f"cannot write {folder}: {error}", hint=hint) from error
