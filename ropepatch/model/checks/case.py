"""What the small files of one checkpoint say, without asking transformers, which refuses some of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ropepatch.model.checks.findings import CONFIG, Edit, Key, Keys, edited, shown
from ropepatch.model.rotary import SEQUENCE, stated_window

DEFAULT_THETA = 10_000.0
THETA_KEYS = ("rope_theta", "rotary_emb_base")  # the second is GPT-NeoX's
WINDOW_KEYS = ("max_position_embeddings", "n_positions")
ORIGINAL = "original_max_position_embeddings"
WITH_ORIGINAL = ("yarn", "longrope", "llama3")  # the types that need the window of pretraining
FIRST_LAYERS = "full_attention"  # those that the older keys describe, where ropes differ by layer
# Up to this ratio to the window of pretraining a window counts as left behind: Qwen3's 40960 beside 32768.
LEFT_BEHIND = 1.25
LARGEST = 1e40  # beyond this a number is damage; ropepatch writes 1e30 for a pair that stands still


def number(value: Any) -> float | None:
    """A finite number as a float; None for anything else, booleans too."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        return None
    return float(value)


def positive(value: Any) -> float | None:
    """A finite number above 0."""
    finite = number(value)
    return finite if finite and finite > 0 else None


@dataclass(frozen=True)
class Block:
    """One JSON object that describes a rope: `rope_scaling`, `rope_parameters`, or one layer type of these.

    Args:
        path: Where it is in config.json.
        values: What it says.
        layer_type: The layers it is for; None where there is one rope.
    """

    path: Keys
    values: dict[str, Any]
    layer_type: str | None = None

    @property
    def kind(self) -> str | None:
        """The rope type, under either name of the key; None if none is named."""
        kind = self.values.get("rope_type", self.values.get("type"))
        return kind if kind is None or isinstance(kind, str) else shown(kind)

    @property
    def scaled(self) -> bool:
        """Whether its type changes the frequencies."""
        return self.kind not in (None, "default", "mrope", "axial")

    def number(self, key: str) -> float | None:
        """The number under a key."""
        return number(self.values.get(key))

    def at(self, name: str) -> Key:
        """One of its keys."""
        return Key(CONFIG, (*self.path, name), self.values.get(name))


@dataclass(frozen=True)
class Case:
    """One checkpoint or adapter folder.

    Args:
        name: As the user gave it.
        folder: Where its files are.
        files: The content of those of its JSON files that matter here and can be read, by name.
        unreadable: Why the others cannot, by name.
        record: What ropepatch recorded of it, as far as its record is sound.
    """

    name: str
    folder: Path
    files: dict[str, dict[str, Any]]
    unreadable: dict[str, str]
    record: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def raw(self) -> dict[str, Any]:
        """The content of config.json."""
        return self.files.get(CONFIG, {})

    @cached_property
    def prefix(self) -> Keys:
        """Where config.json describes the language model: at the top, or in its text_config."""
        text = self.raw.get("text_config")
        telling = {"rope_scaling", "rope_parameters", "rope_theta", "hidden_size", *WINDOW_KEYS}
        return ("text_config",) if isinstance(text, dict) and telling & text.keys() else ()

    @cached_property
    def stated(self) -> dict[str, Any]:
        """What config.json says of the language model."""
        stated: dict[str, Any] = self.raw[self.prefix[0]] if self.prefix else self.raw
        return stated

    @property
    def model_type(self) -> str:
        """The architecture, in transformers' words."""
        return str(self.stated.get("model_type", self.raw.get("model_type")))

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Every description of a rope, the newer ones first."""
        return self.newer + self.older

    def _blocks(self, name: str) -> Iterator[Block]:
        whole = self.stated.get(name)
        if not isinstance(whole, dict):
            return
        path = (*self.prefix, name)
        flat = {"rope_type", "type", "factor"} & whole.keys()
        nested = {} if flat else {key: value for key, value in whole.items() if isinstance(value, dict)}
        for key, value in nested.items():
            yield Block((*path, key), value, key)
        if not nested:
            yield Block(path, whole)

    @cached_property
    def newer(self) -> tuple[Block, ...]:
        """The blocks that transformers 5 writes: all it writes."""
        return tuple(self._blocks("rope_parameters"))

    @cached_property
    def older(self) -> tuple[Block, ...]:
        """The blocks that readers older than transformers 5 read: all they read."""
        return tuple(self._blocks("rope_scaling"))

    @property
    def newest(self) -> Block | None:
        """The newer block that the older keys describe too."""
        return next((block for block in self.newer if block.layer_type in (None, FIRST_LAYERS)), None)

    @cached_property
    def window_key(self) -> str:
        """Under which name the window stands."""
        return next((key for key in WINDOW_KEYS if key in self.stated), WINDOW_KEYS[0])

    @cached_property
    def window(self) -> float | None:
        """The window that config.json states, in tokens."""
        return positive(self.stated.get(self.window_key))

    @cached_property
    def theta_key(self) -> str | None:
        """The older key of the base, if it is there."""
        return next((key for key in THETA_KEYS if key in self.stated), None)

    @cached_property
    def theta(self) -> float | None:
        """The base that the older key states."""
        return number(self.stated.get(self.theta_key)) if self.theta_key else None

    def original(self, block: Block) -> float | None:
        """The window of pretraining; a value at the top wins, as in transformers 5."""
        return positive(self.stated.get(ORIGINAL)) or positive(block.values.get(ORIGINAL))

    def reach(self) -> float | None:
        """How many tokens the scaled model reads.

        An extended window says it; a factor may be larger than it needs. Qwen leaves its window as it was
        before scaling, so that only the factor says it.
        """
        scaled = [
            original * factor
            for block in self.blocks
            if block.kind in ("yarn", "longrope")
            and (original := self.original(block))
            and (self.window or 0) <= LEFT_BEHIND * original
            and (factor := positive(block.values.get("factor")))
        ]
        linear = [
            stated_window(int(self.window), factor, self.stated.get(SEQUENCE)) or 0
            for block in self.blocks
            if block.kind == "linear" and self.window and (factor := positive(block.values.get("factor")))
        ]
        return max([*scaled, *linear, self.window or 0]) or None

    @cached_property
    def pairs(self) -> int | None:
        """The number of rotary pairs; None where the sizes do not tell."""
        sizes = ("hidden_size", "num_attention_heads", "qk_rope_head_dim", "head_dim")
        hidden, heads, rotated, head = (positive(self.stated.get(key)) for key in sizes)
        head = rotated or head or (hidden // heads if hidden and heads else None)
        shares = [block.values.get("partial_rotary_factor") for block in self.blocks]
        shares += [self.stated.get("partial_rotary_factor"), self.stated.get("rotary_pct"), 1.0]
        share = next(filter(None, map(positive, shares)))
        return int(head * share) // 2 if head and math.isfinite(head * share) else None

    def at(self, name: str) -> Key:
        """A key of the language model in config.json."""
        return Key(CONFIG, (*self.prefix, name), self.stated.get(name))

    def companion(self, file: str, name: str) -> Key:
        """A key at the top of one of the files beside config.json."""
        return Key(file, (name,), self.files.get(file, {}).get(name))

    @property
    def recorded(self) -> dict[str, Any]:
        """What ropepatch wrote into config.json, by its own record; empty if it did not."""
        changes: dict[str, Any] = self.record.get("config_changes", {})
        return changes

    def recorded_at(self, key: Key) -> float | None:
        """The number that ropepatch wrote for a key of the language model, by its own record."""
        value: Any = self.recorded
        for step in key.path[len(self.prefix) :]:
            value = value.get(step) if isinstance(value, dict) else None
        return number(value)

    def with_edits(self, edits: Iterable[Edit]) -> Case:
        """The same checkpoint after changes."""
        files = dict(self.files)
        for edit in edits:
            files[edit.file] = edited(files.get(edit.file, {}), edit.path, edit.value)
        return replace(self, files=files)
