"""Records from before they had a version: facts that were told in sentences alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ropepatch.model.record_file import VERSION

SWITCH = re.compile(r"--[a-z-]+ \d+")


def upgraded(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a record with a field for every fact; it may be damaged."""
    new = {"version": VERSION} | dict(content)
    if isinstance(engines := new.get("engines"), list):
        new["engines"] = [_with_switches(engine) for engine in engines]
    if isinstance(verified := new.get("verified"), dict) and isinstance(verified.get("logits"), str):
        new["verified"] = _comparison(verified["logits"]) | verified
    if isinstance(earlier := new.get("earlier"), dict):
        new["earlier"] = upgraded(earlier)
    return new


def _with_switches(engine: Any) -> Any:
    if not (isinstance(engine, dict) and isinstance(engine.get("note"), str)) or "switches" in engine:
        return engine
    served = engine.get("reads") != "no"
    return engine | {"switches": SWITCH.findall(engine["note"]) if served else []}


def _comparison(logits: str) -> dict[str, Any]:
    """Whether the logits were compared, and their difference, from `within 3.1e-07` and the like."""
    if logits == "equal":
        return {"compared": True, "difference": 0.0}
    number = re.match(r"within (\d\.\d+e[-+]\d+)\b", logits)
    return {
        "compared": not logits.startswith("not compared"),
        "difference": float(number[1]) if number else None,
    }
