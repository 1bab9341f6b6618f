"""A config.json as it is written, and as stock transformers reads it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from ropepatch.doctor.findings import TOKENIZER, Edit, Keys, edited
from ropepatch.errors import RopepatchError
from ropepatch.model.architectures import GLOBAL_LAYERS
from ropepatch.model.config import (
    ORIGINAL,
    SEQUENCE,
    STATING,
    TEXT_PARTS,
    load_config,
    stated_window,
    text_config,
)

THETA_KEYS = ("rope_theta", "rotary_emb_base")  # the second is GPT-NeoX's
UNSCALED = (
    None,
    "default",
    "mrope",
    "axial",
)  # rope types that leave the frequencies unchanged
NEWER, OLDER = (
    "rope_parameters",
    "rope_scaling",
)  # of transformers 5, and of programs before it
# Up to this ratio of max_position_embeddings to the original length the former was not raised: Qwen3 has
# 40960 and 32768.
LEFT_BEHIND = 1.25
MAX_NUMBER = 1e40  # beyond this a number is damage; ropepatch writes 1e30 for a frequency of zero


def number(value: Any) -> float | None:
    """Return a finite number as a float; None for anything else, including booleans."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) <= MAX_NUMBER
    ):
        return None
    return float(value)


def positive(value: Any) -> float | None:
    """Return a finite number above 0; None for anything else."""
    finite = number(value)
    return finite if finite and finite > 0 else None


class Written(NamedTuple):
    """One object of RoPE parameters in config.json.

    Args:
        path: Its path.
        values: Its content.
        layer: The layer type that it is for; None for all layers.
    """

    path: Keys
    values: dict[str, Any]
    layer: str | None

    @property
    def kind(self) -> Any:
        """The rope type, under either name of the key; None if missing."""
        return self.values.get("rope_type", self.values.get("type"))

    @property
    def is_scaled(self) -> bool:
        """Whether its type changes the frequencies."""
        return self.kind not in UNSCALED


class Scaling(NamedTuple):
    """RoPE parameters as transformers reads them.

    Args:
        values: The parameters.
        layer: The layer type; None for all layers.
    """

    values: dict[str, Any]
    layer: str | None

    def number(self, key: str) -> float | None:
        """Return the number above 0 under a key."""
        return positive(self.values.get(key))


@dataclass(frozen=True)
class Facts:
    """What the rules look at.

    Args:
        raw: The content of config.json.
        tokenizer: The content of tokenizer_config.json, if there is one.
    """

    raw: dict[str, Any]
    tokenizer: dict[str, Any] = field(default_factory=dict)

    def with_edits(self, edits: Iterable[Edit]) -> Facts:
        """Return the same files after edits."""
        raw, tokenizer = self.raw, self.tokenizer
        for edit in edits:
            if edit.file == TOKENIZER:
                tokenizer = edited(tokenizer, edit.path, edit.value)
            else:
                raw = edited(raw, edit.path, edit.value)
        return Facts(raw, tokenizer)

    # As it is written

    @cached_property
    def prefix(self) -> Keys:
        """Where config.json describes the language model: at the top level, or in a part."""
        for name in TEXT_PARTS:
            part = self.raw.get(name)
            if isinstance(part, dict) and part.keys() & {"hidden_size", *STATING}:
                return (name,)
        return ()

    @cached_property
    def text(self) -> dict[str, Any]:
        """The description of the language model."""
        part: dict[str, Any] = self.raw[self.prefix[0]] if self.prefix else self.raw
        return part

    @property
    def model_type(self) -> str:
        """The architecture, as transformers names it."""
        return str(self.text.get("model_type", self.raw.get("model_type")))

    def _objects(self, name: str) -> list[Written]:
        whole, path = self.text.get(name), (*self.prefix, name)
        if not isinstance(whole, dict):
            return []
        if not whole.keys() & {"rope_type", "type", "factor"}:
            layers = {
                key: value for key, value in whole.items() if isinstance(value, dict)
            }
            if layers:
                return [
                    Written((*path, layer), values, layer)
                    for layer, values in layers.items()
                ]
        return [Written(path, whole, None)]

    @cached_property
    def newer(self) -> list[Written]:
        """The objects in rope_parameters, which only transformers 5 writes."""
        return self._objects(NEWER)

    @cached_property
    def older(self) -> list[Written]:
        """The objects in rope_scaling."""
        return self._objects(OLDER)

    @property
    def newest(self) -> Written | None:
        """The object in rope_parameters whose values the older keys repeat."""
        return next(
            (rope for rope in self.newer if rope.layer in (None, GLOBAL_LAYERS)), None
        )

    @property
    def pairs(self) -> list[tuple[Written, Written]]:
        """The objects of rope_parameters and rope_scaling for the same layers."""
        return [
            (new, old)
            for new in self.newer
            for old in self.older
            if new.layer == old.layer
            or (old.layer is None and new.layer == GLOBAL_LAYERS)
        ]

    @cached_property
    def theta_key(self) -> str:
        """The top-level key of the RoPE base."""
        return next((key for key in THETA_KEYS if key in self.text), THETA_KEYS[0])

    def at(self, key: str, layer: str | None = None) -> Keys:
        """Return where a RoPE parameter of a layer type is written, or should be."""
        objects = [
            rope for rope in (*self.older, *self.newer) if rope.layer in (None, layer)
        ]
        for rope in objects:
            if key in rope.values:
                return (*rope.path, key)
        if key in self.text or not objects:
            return (*self.prefix, key)
        return (*objects[0].path, key)

    def value(self, path: Keys) -> Any:
        """Return the value at a path of config.json; None if missing."""
        value: Any = self.raw
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    # As transformers reads it

    @cached_property
    def config(self) -> PreTrainedConfig | None:
        """The configuration of the language model; None if transformers rejects it."""
        try:
            return text_config(load_config(self.raw))
        except RopepatchError:
            return None

    @cached_property
    def scalings(self) -> list[Scaling]:
        """The RoPE parameters of each layer type."""
        every = getattr(self.config, "rope_parameters", None) or {}
        layers = {key: value for key, value in every.items() if isinstance(value, dict)}
        if layers:
            return [Scaling(values, layer) for layer, values in layers.items()]
        return [Scaling(every, None)] if every else []

    def scaled(self, *kinds: str) -> list[Scaling]:
        """Return the RoPE parameters of some rope types."""
        return [rope for rope in self.scalings if rope.values.get("rope_type") in kinds]

    @property
    def is_scaled(self) -> bool:
        """Whether any layer type has a scaling."""
        return any(
            rope.values.get("rope_type") not in UNSCALED for rope in self.scalings
        )

    @property
    def theta(self) -> float | None:
        """The largest RoPE base of the layer types."""
        return max(
            (theta for rope in self.scalings if (theta := rope.number("rope_theta"))),
            default=None,
        )

    @property
    def window(self) -> int | None:
        """The context length that config.json states, in tokens."""
        window = getattr(self.config, "max_position_embeddings", None)
        return window if type(window) is int and window > 0 else None

    @property
    def reach(self) -> int | None:
        """The context length of the scaled model: factor x original length if that was not written."""
        if self.window is None:
            return None
        reaches = [float(self.window)]
        for rope in self.scaled("yarn", "longrope", "linear"):
            factor, original = rope.number("factor"), rope.number(ORIGINAL)
            if factor and rope.values["rope_type"] == "linear":
                reaches.append(
                    stated_window(self.window, factor, self.text.get(SEQUENCE)) or 0
                )
            elif factor and original and self.window <= LEFT_BEHIND * original:
                reaches.append(factor * original)
        return int(max(reaches))
