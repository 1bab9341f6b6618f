"""Attention maps: whether transformers computes with the map that was saved, and by code that is ours.

The code is read, never run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ropepatch.attention import make_map
from ropepatch.attention.mapping import check_mappable
from ropepatch.encodings.loading import load_checkpoint
from ropepatch.errors import RopepatchError
from ropepatch.extension.map_code import GENERATE, map_changes, map_code, other_code, sha256
from ropepatch.extension.verification import available_bytes
from ropepatch.model.checkpoint import CODE, KEY, Checkpoint, base_type, kind_of, saved_map, without_map
from ropepatch.model.checks.case import Case
from ropepatch.model.checks.findings import CONFIG, Finding, Key, shown
from ropepatch.model.config import blueprint, load_config
from ropepatch.model.rotary import SEQUENCE
from ropepatch.model.source import check_inside
from ropepatch.model.survey import Survey, survey
from ropepatch.model.weights import Weights

AGAIN = "copy it again from where the checkpoint came from, or write the checkpoint again"


def map_findings(case: Case) -> Iterator[Finding]:
    """What is wrong with an attention map and its code."""
    key = Key(CONFIG, (KEY,), case.raw.get(KEY))
    if kind_of(case.raw) != "mapped":
        if key.value is not None:
            problem = (
                f"config.json has a map, and the model_type {case.model_type}, whose classes know of none"
            )
            yield key.finding("map-not-read", problem, "write the model_type that the checkpoint came with")
        return
    try:
        described = saved_map(case.raw)
        distances = make_map(described["name"], **described["parameters"])
        fitted = distances.fitted(described["window"], described["target"])
        surveyed = survey(_stock(case.raw))
        expected = map_changes(surveyed, fitted, described["target"], _layers(described, surveyed))
        saved, code = expected[KEY], map_code(base_type(case.raw), surveyed.site.path)
    except (RopepatchError, KeyError) as error:
        yield key.finding("map-unknown", f"the map, or the architecture under it: {error}", AGAIN)
        return
    recorded = case.record.get("config_changes", {}).get(KEY)
    recorded = recorded if isinstance(recorded, dict) else {}
    for name, value in (recorded or saved | {"target": case.window}).items():
        if described.get(name, ...) != value:
            at = Key(CONFIG, (KEY, name), described.get(name))
            problem = (
                f"{at} is {shown(at.value) if name in described else 'missing'}, expected {shown(value)}"
            )
            yield at.finding("map-wrong", problem, AGAIN, fix=at.set(value) if recorded else ())
    if described["window"] >= described["target"]:
        yield key.finding("map-wrong", f"its window {described['window']} is not below its target", AGAIN)
    try:
        check_mappable(blueprint(load_config(_stock(case.raw))), described["window"])
    except RopepatchError as error:
        yield key.finding("map-wrong", str(error), AGAIN)
    named = Key(CONFIG, ("auto_map",), case.raw.get("auto_map"))
    if named.value != expected["auto_map"]:
        problem = f"auto_map does not name the classes of {CODE}"
        yield named.finding("map-without-code", problem, f"write {expected['auto_map']}")
    yield from _of_file(case, sha256(code.encode()))
    try:
        others = other_code(case.folder, [GENERATE] * (case.folder / GENERATE).exists())
    except RopepatchError:  # of a damaged file, which has a finding of its own
        others = []
    for name in others:
        yield Key(name, ("auto_map",) * (name != GENERATE)).finding(
            "map-other-code",
            f"{name} brings code beside that of the map",
            "read it first, or take it out; ropepatch.load reads the checkpoint without it",
        )


def loaded_map(checkpoint: Checkpoint, weights: Weights) -> Iterator[Finding]:
    """A map that the loaded model does not bear out, such as one of other layers; only where it fits."""
    if checkpoint.kind == "mapped" and 2 * weights.num_bytes <= available_bytes():
        try:
            load_checkpoint(checkpoint)
        except RopepatchError as error:
            yield Key(CONFIG, (KEY,), checkpoint.raw.get(KEY)).finding("map-wrong", str(error), AGAIN)


def _stock(raw: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the stock model under a map, which reads L tokens."""
    sizes = {"max_position_embeddings", *({SEQUENCE} & raw.keys())}
    return without_map(raw) | dict.fromkeys(sizes, saved_map(raw)["window"])


def _layers(described: dict[str, Any], surveyed: Survey) -> list[int] | None:
    """The layers that are mapped, as far as they can be; only the loaded model tells which must be."""
    count, layers = surveyed.config.num_hidden_layers, described.get("layers")
    return [n for n in range(count) if n in layers] or [*range(count)] if isinstance(layers, list) else None


def _of_file(case: Case, ours: str) -> Iterator[Finding]:
    path, file = case.folder / CODE, Key(CODE, ("sha256",))
    if not path.exists():
        yield file.finding("map-without-code", f"{CODE} is missing", AGAIN)
        return
    try:
        check_inside(path, case.folder)
        here = sha256(path.read_bytes())
    except (RopepatchError, OSError) as error:
        yield file.finding("map-code-changed", str(error), AGAIN)
        return
    known = case.record.get("code", {}).get(CODE)
    if here not in (ours, known) and known is not None:
        problem = f"{CODE} is not the one that ropepatch.json names"
        yield file.finding("map-code-changed", problem, f"do not load it with trust; {AGAIN}", value=here)
    elif here != ours:
        yield file.finding(
            "map-code-unknown",
            f"{CODE} is not the one that this ropepatch writes"
            + (", and no record names it" if known is None else "; another version may have written it"),
            "read it first; ropepatch.load reads the checkpoint without it",
            value=here,
        )
