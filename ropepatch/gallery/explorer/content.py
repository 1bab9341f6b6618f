"""The content of an explorer page: methods, remappings, models and measurements."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from ropepatch.attention import REMAPPINGS
from ropepatch.files import read_text
from ropepatch.model.checkpoint import TINY, Checkpoint
from ropepatch.model.config import SCALING_KEYS
from ropepatch.scaling import METHODS

PRESETS = Path(__file__).parents[1] / "presets.json"
MEASURED = Path(__file__).with_name("measured.json")  # written by docs/tables.py
BASE = 500_000.0  # of abf, as in Llama 2 Long


def methods() -> dict[str, dict[str, Any]]:
    """Return the descriptions and defaults of the methods that need only a factor, or a base."""
    return {
        name: _described(kind) | {"composing": dict(kind.composing)}
        for name, kind in METHODS.items()
        if kind.required() in ([], ["rope_theta"])
    }


def remappings() -> dict[str, dict[str, Any]]:
    """Return the descriptions and defaults of the position remappings."""
    return {name: _described(kind) for name, kind in REMAPPINGS.items()}


def _described(kind: Any) -> dict[str, Any]:
    types = {key: field.annotation for key, field in kind.model_fields.items()}
    defaults = {key: value for key, value in kind.defaults().items() if key != "log_n"}
    return {
        "formula": kind.formula,
        "paper": kind.paper,
        "saved_as": kind.saved_as,
        "words": (kind.__doc__ or "").partition("\n")[0],
        "parameters": {
            key: BASE if value is ... else value for key, value in defaults.items()
        },
        "choices": {
            key: get_args(types[key])
            for key in defaults
            if get_origin(types[key]) is Literal
        },
    }


@cache
def presets() -> list[dict[str, Any]]:
    """Return the models of the page, tiny first: names, sources and configurations."""
    known: list[dict[str, Any]] = json.loads(read_text(PRESETS))
    return [entry_of("tiny", title="tiny, the bundled model"), *known]


def entry_of(
    model: str, *, title: str | None = None, revision: str | None = None
) -> dict[str, Any]:
    """Return the entry of a checkpoint: its config.json and its parsed RoPE."""
    source = Checkpoint.find(model, revision)
    # Pages are shared
    shown = source.name if source.revision else source.folder.resolve().name
    shown = "tiny" if source.folder == TINY else shown
    return {
        "name": Path(shown).name,
        "title": title or shown,
        "model": shown,
        "source": "its config.json",
        "config": _rope_part(source),
        "rope": rope_entry(source),
    }


def rope_entry(source: Checkpoint) -> dict[str, Any]:
    """Return the RoPE parameters by the names that the page uses."""
    rope = source.config.rope
    return {
        "dim": rope.rotary_dim,
        "theta": rope.rope_theta,
        "window": rope.original_max_position_embeddings,
        "carried": None if rope.carried is None else list(rope.carried),
        "factor": rope.carried_attention_factor,
    }


def _rope_part(source: Checkpoint) -> dict[str, Any]:
    """Return the RoPE part of config.json."""
    config: Any = source.config.text
    part = {
        "rope_parameters": config.rope_parameters,
        "max_position_embeddings": config.max_position_embeddings,
    }
    return part if source.config.section is None else {source.config.section: part}


def content(model: str | None, *, revision: str | None = None) -> dict[str, Any]:
    """Return the JSON data of a page, without tiny's weights; a named model comes first."""
    own = [] if model in (None, "tiny") else [entry_of(str(model), revision=revision)]
    names = {entry["name"] for entry in own}
    return {
        "methods": methods(),
        "remappings": remappings(),
        "models": [*own, *(entry for entry in presets() if entry["name"] not in names)],
        "chosen": own[0]["name"] if own else "tiny" if model else "llama-2-7b",
        "measured": json.loads(read_text(MEASURED)),
        "scaling_keys": sorted(SCALING_KEYS),
    }
