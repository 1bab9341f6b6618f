"""The small files of one checkpoint, without asking transformers, which refuses some of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ropepatch.model.checks.findings import CONFIG, Edit, Key, Keys, edited, shown
from ropepatch.model.config import GLOBAL_LAYERS, ORIGINAL
from ropepatch.model.rotary import SEQUENCE, stated_window

THETA_KEYS = ("rope_theta", "rotary_emb_base")  # the second is GPT-NeoX's
WINDOW_KEYS = ("max_position_embeddings", "n_positions")
# Up to this ratio to the window of pretraining a window counts as left behind: Qwen3's 40960 beside 32768.
LEFT_BEHIND = 1.25
MAX_CONFIG_NUMBER = 1e40  # beyond this a number is damage; ropepatch writes 1e30 for a frequency of zero


def number(value: Any) -> float | None:
    """A finite number as a float; None for anything else, booleans too."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_CONFIG_NUMBER:
        return None
    return float(value)


def positive(value: Any) -> float | None:
    """A finite number above 0."""
    finite = number(value)
    return finite if finite and finite > 0 else None


@dataclass(frozen=True)
class Stated:
    """One rope as config.json states it: in `rope_parameters`, in `rope_scaling`, or in both.

    Args:
        case: The checkpoint.
        objects: The JSON objects that describe it, by their paths, the one of `rope_parameters` first.
        layer_type: The layers it is for; None where there is one rope.
    """

    case: Case = field(repr=False, compare=False)
    objects: dict[Keys, dict[str, Any]]
    layer_type: str | None = None

    @cached_property
    def values(self) -> dict[str, Any]:
        """All keys of its objects; of two values the first that is not null."""
        values: dict[str, Any] = {}
        for stated in self.objects.values():
            values |= {key: value for key, value in stated.items() if values.get(key) is None}
        return values

    @property
    def kind(self) -> str | None:
        """The rope type, under either name of the key; None if none is named."""
        kind = self.values.get("rope_type", self.values.get("type"))
        return kind if kind is None or isinstance(kind, str) else shown(kind)

    @property
    def scaled(self) -> bool:
        """Whether its type changes the frequencies."""
        return self.kind not in (None, "default", "mrope", "axial")

    @property
    def original(self) -> float | None:
        """The window of pretraining; a value at the top wins, as in transformers 5."""
        return positive(self.case.stated.get(ORIGINAL)) or self.positive(ORIGINAL)

    def number(self, key: str) -> float | None:
        """The number under a key."""
        return number(self.values.get(key))

    def positive(self, key: str) -> float | None:
        """The number above 0 under a key."""
        return positive(self.values.get(key))

    def at(self, *names: str) -> Key:
        """One of its keys, the first of these names that it has; in all of its objects if it has none.

        A key is edited in all objects that have it.
        """
        name = next((name for name in names if name in self.values), names[-1])
        holders = {path: stated for path, stated in self.objects.items() if name in stated} or self.objects
        first, *twins = sorted(holders, key=lambda path: holders[path].get(name) is None)
        return Key(CONFIG, (*first, name), self.values.get(name), tuple((*path, name) for path in twins))


@dataclass(frozen=True)
class Case:
    """One checkpoint or adapter folder.

    Args:
        name: As the user gave it.
        folder: Where its files are.
        files: The content of those of its JSON files that matter here and can be read, by name.
        unreadable: Why the others cannot be read, by name.
        record: The content of ropepatch.json, as far as it is sound.
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
        """The description of the language model in config.json."""
        stated: dict[str, Any] = self.raw[self.prefix[0]] if self.prefix else self.raw
        return stated

    @property
    def model_type(self) -> str:
        """The architecture, in transformers' words."""
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
        """The ropes in rope_parameters, which transformers 5 writes and nothing else."""
        return self._ropes_in("rope_parameters")

    @cached_property
    def older(self) -> tuple[Stated, ...]:
        """The ropes in rope_scaling, all that readers older than transformers 5 know."""
        return self._ropes_in("rope_scaling")

    @property
    def newest(self) -> Stated | None:
        """The newer description that older keys repeat, if there is one."""
        return next((rope for rope in self.newer if rope.layer_type in (None, GLOBAL_LAYERS)), None)

    @property
    def pairs(self) -> list[tuple[Stated, Stated]]:
        """The ropes that stand in both generations of keys: the newer and the older description."""
        return [
            (new, old)
            for new in self.newer
            for old in self.older
            if old.layer_type == new.layer_type
            or (old.layer_type is None and new.layer_type == GLOBAL_LAYERS)
        ]

    @cached_property
    def ropes(self) -> tuple[Stated, ...]:
        """Every rope once, whose two descriptions are one where they name the same type."""
        ropes, joined = list(self.newer), []
        for new, old in self.pairs:
            if (new.kind or "default") == (old.kind or "default") and new in ropes:
                ropes[ropes.index(new)] = replace(new, objects=new.objects | old.objects)
                joined.append(old)
        return (*ropes, *(old for old in self.older if old not in joined))

    @cached_property
    def window_key(self) -> str:
        """The name of the window."""
        return next((key for key in WINDOW_KEYS if key in self.stated), WINDOW_KEYS[0])

    @cached_property
    def window(self) -> float | None:
        """The window that config.json states, in tokens."""
        return positive(self.stated.get(self.window_key))

    @cached_property
    def theta(self) -> Key:
        """The older key of the base."""
        return self.at(next((key for key in THETA_KEYS if key in self.stated), THETA_KEYS[0]))

    def reach(self) -> float | None:
        """The tokens that the scaled model reads.

        An extended window says it; a factor may be larger than it needs. Qwen leaves its window as it was
        before scaling, so that only the factor says it.
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
        """The number of rotary pairs; None where the sizes do not tell."""
        sizes = ("hidden_size", "num_attention_heads", "qk_rope_head_dim", "head_dim")
        hidden, heads, rotated, head = (positive(self.stated.get(key)) for key in sizes)
        head = rotated or head or (hidden // heads if hidden and heads else None)
        shares = [rope.values.get("partial_rotary_factor") for rope in self.ropes]
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
    def recorded(self) -> tuple[Edit, ...]:
        """The changes after which config.json says what ropepatch recorded of it."""
        changes: dict[str, Any] = self.record.get("config_changes", {})
        return tuple(edit for name, value in changes.items() for edit in self.at(name).set(value))

    @property
    def changed(self) -> list[str]:
        """The keys of which config.json says something else than ropepatch recorded."""
        changes: dict[str, Any] = self.record.get("config_changes", {})
        return [name for name, value in changes.items() if self.stated.get(name) != value]

    def with_edits(self, edits: Iterable[Edit]) -> Case:
        """The same checkpoint after changes."""
        files = dict(self.files)
        for edit in edits:
            files[edit.file] = edited(files.get(edit.file, {}), edit.path, edit.value)
        return replace(self, files=files)
