"""The JSON files of one checkpoint, parsed without transformers, which rejects some of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ropepatch.model.architectures import GLOBAL_LAYERS
from ropepatch.model.checks.findings import CONFIG, Edit, Key, Keys, edited, shown
from ropepatch.model.config import ORIGINAL
from ropepatch.model.rotary import SEQUENCE, stated_window

THETA_KEYS = ("rope_theta", "rotary_emb_base")  # the second is GPT-NeoX's
WINDOW_KEYS = ("max_position_embeddings", "n_positions")
# Up to this ratio of max_position_embeddings to the original length the former was not raised: Qwen3 has
# 40960 and 32768.
LEFT_BEHIND = 1.25
MAX_CONFIG_NUMBER = 1e40  # beyond this a number is damage; ropepatch writes 1e30 for a frequency of zero


def number(value: Any) -> float | None:
    """Return a finite number as a float; None for anything else, including booleans."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_CONFIG_NUMBER:
        return None
    return float(value)


def positive(value: Any) -> float | None:
    """Return a finite number above 0; None for anything else."""
    finite = number(value)
    return finite if finite and finite > 0 else None


@dataclass(frozen=True)
class Stated:
    """One set of RoPE parameters in config.json: in `rope_parameters`, in `rope_scaling`, or in both.

    Args:
        case: The checkpoint.
        objects: The JSON objects that describe it, by their paths, the one of `rope_parameters` first.
        layer_type: The layers that use it; None if all layers do.
    """

    case: Case = field(repr=False, compare=False)
    objects: dict[Keys, dict[str, Any]]
    layer_type: str | None = None

    @cached_property
    def values(self) -> dict[str, Any]:
        """All keys of its objects; the first value that is not null wins."""
        values: dict[str, Any] = {}
        for stated in self.objects.values():
            values |= {key: value for key, value in stated.items() if values.get(key) is None}
        return values

    @property
    def kind(self) -> str | None:
        """The RoPE type, under either name of the key; None if missing."""
        kind = self.values.get("rope_type", self.values.get("type"))
        return kind if kind is None or isinstance(kind, str) else shown(kind)

    @property
    def scaled(self) -> bool:
        """Whether its type changes the frequencies."""
        return self.kind not in (None, "default", "mrope", "axial")

    @property
    def original(self) -> float | None:
        """The original context length; a value at the top level wins, as in transformers 5."""
        return positive(self.case.stated.get(ORIGINAL)) or self.positive(ORIGINAL)

    def number(self, key: str) -> float | None:
        """The number under a key."""
        return number(self.values.get(key))

    def positive(self, key: str) -> float | None:
        """The number above 0 under a key."""
        return positive(self.values.get(key))

    def at(self, *names: str) -> Key:
        """Return the first of these keys that it has, else the last one, to be added to all its objects."""
        name = next((name for name in names if name in self.values), names[-1])
        holders = {path: stated for path, stated in self.objects.items() if name in stated} or self.objects
        first, *twins = sorted(holders, key=lambda path: holders[path].get(name) is None)
        return Key(CONFIG, (*first, name), self.values.get(name), tuple((*path, name) for path in twins))


@dataclass(frozen=True)
class Case:
    """One checkpoint or adapter folder.

    Args:
        name: The name that the user gave.
        folder: The folder with its files.
        files: The content of its readable JSON files, by name.
        unreadable: Why the other files cannot be read, by name.
        record: The valid content of ropepatch.json.
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
        """Where config.json describes the language model: at the top level, or in text_config."""
        text = self.raw.get("text_config")
        telling = {"rope_scaling", "rope_parameters", "rope_theta", "hidden_size", *WINDOW_KEYS}
        return ("text_config",) if isinstance(text, dict) and telling & text.keys() else ()

    @cached_property
    def stated(self) -> dict[str, Any]:
        """The description of the language model in config.json."""
        stated: dict[str, Any] = self.raw[self.prefix[0]] if self.prefix else self.raw
        return stated

    @property
    def model_type(self) -> str:
        """The architecture, as transformers names it."""
        return str(self.stated.get("model_type", self.raw.get("model_type")))

    def _ropes_in(self, name: str) -> tuple[Stated, ...]:
        whole, path = self.stated.get(name), (*self.prefix, name)
        if not isinstance(whole, dict):
            return ()
        if not {"rope_type", "type", "factor"} & whole.keys():
            by_layer = {key: value for key, value in whole.items() if isinstance(value, dict)}
            if by_layer:
                return tuple(Stated(self, {(*path, key): value}, key) for key, value in by_layer.items())
        return (Stated(self, {path: whole}),)

    @cached_property
    def newer(self) -> tuple[Stated, ...]:
        """The RoPE parameters in rope_parameters, which only transformers 5 writes."""
        return self._ropes_in("rope_parameters")

    @cached_property
    def older(self) -> tuple[Stated, ...]:
        """The RoPE parameters in rope_scaling, for programs older than transformers 5."""
        return self._ropes_in("rope_scaling")

    @property
    def newest(self) -> Stated | None:
        """The newer parameters that the older keys repeat, if there are any."""
        return next((rope for rope in self.newer if rope.layer_type in (None, GLOBAL_LAYERS)), None)

    @property
    def pairs(self) -> list[tuple[Stated, Stated]]:
        """The RoPE parameters given by both generations of keys, newer and older."""
        return [
            (new, old)
            for new in self.newer
            for old in self.older
            if old.layer_type == new.layer_type
            or (old.layer_type is None and new.layer_type == GLOBAL_LAYERS)
        ]

    @cached_property
    def ropes(self) -> tuple[Stated, ...]:
        """Every set of RoPE parameters once, merged where both generations name the same type."""
        ropes, joined = list(self.newer), []
        for new, old in self.pairs:
            if (new.kind or "default") == (old.kind or "default") and new in ropes:
                ropes[ropes.index(new)] = replace(new, objects=new.objects | old.objects)
                joined.append(old)
        return (*ropes, *(old for old in self.older if old not in joined))

    @cached_property
    def window_key(self) -> str:
        """The key of the context length."""
        return next((key for key in WINDOW_KEYS if key in self.stated), WINDOW_KEYS[0])

    @cached_property
    def window(self) -> float | None:
        """The context length that config.json states, in tokens."""
        return positive(self.stated.get(self.window_key))

    @cached_property
    def theta(self) -> Key:
        """The older key of the RoPE base."""
        return self.at(next((key for key in THETA_KEYS if key in self.stated), THETA_KEYS[0]))

    def reach(self) -> float | None:
        """Return the context length of the scaled model, in tokens.

        This is max_position_embeddings if it was extended. Qwen leaves it unchanged, so there it is the
        factor times the original length.
        """
        window = self.window or 0.0
        reaches = [window]
        for rope in self.ropes:
            factor, original = rope.positive("factor"), rope.original
            if rope.kind in ("yarn", "longrope") and factor and original and window <= LEFT_BEHIND * original:
                reaches.append(original * factor)
            elif rope.kind == "linear" and factor and window:
                reaches.append(stated_window(int(window), factor, self.stated.get(SEQUENCE)) or 0)
        return max(reaches) or None

    @cached_property
    def pair_count(self) -> int | None:
        """The number of rotary dimension pairs; None if the sizes are missing."""
        sizes = ("hidden_size", "num_attention_heads", "qk_rope_head_dim", "head_dim")
        hidden, heads, rotated, head = (positive(self.stated.get(key)) for key in sizes)
        head = rotated or head or (hidden // heads if hidden and heads else None)
        shares = [rope.values.get("partial_rotary_factor") for rope in self.ropes]
        shares += [self.stated.get("partial_rotary_factor"), self.stated.get("rotary_pct"), 1.0]
        share = next(filter(None, map(positive, shares)))
        return int(head * share) // 2 if head and math.isfinite(head * share) else None

    def at(self, name: str) -> Key:
        """Return a key of the language model in config.json."""
        return Key(CONFIG, (*self.prefix, name), self.stated.get(name))

    def companion(self, file: str, name: str) -> Key:
        """Return a top-level key of another JSON file."""
        return Key(file, (name,), self.files.get(file, {}).get(name))

    @property
    def recorded(self) -> tuple[Edit, ...]:
        """The edits that restore the values recorded in ropepatch.json."""
        changes: dict[str, Any] = self.record.get("config_changes", {})
        return tuple(edit for name, value in changes.items() for edit in self.at(name).set(value))

    @property
    def changed(self) -> list[str]:
        """The keys whose values differ from those recorded in ropepatch.json."""
        changes: dict[str, Any] = self.record.get("config_changes", {})
        return [name for name, value in changes.items() if self.stated.get(name) != value]

    def with_edits(self, edits: Iterable[Edit]) -> Case:
        """Return the same checkpoint after edits."""
        files = dict(self.files)
        for edit in edits:
            files[edit.file] = edited(files.get(edit.file, {}), edit.path, edit.value)
        return replace(self, files=files)
