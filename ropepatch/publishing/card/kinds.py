"""What a record must hold for a card to be written from it: a stranger's may reach it, as the base's does."""

from __future__ import annotations

import reprlib
from keyword import iskeyword
from typing import TYPE_CHECKING, Any

from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from collections.abc import Mapping

NUMBER = int | float
TEXTS = (str, [str])  # one of these kinds
# An object by its keys, those with a question mark may be missing; a list by the kind of its elements.
RECORD: dict[str, Any] = {
    "model": str,
    "revision": str | None,
    "model_type": str,
    "method": str,
    "factor": NUMBER,
    "parameters": dict,
    "paper": str,
    "original_max_position_embeddings": int,
    "target": int,
    "layer_type?": str | None,
    "config_changes": {"rope_parameters?": dict},
    "engines": [{"engine": str, "reads": str, "note": str}],
    "warnings": [str],
    "versions": dict,
    "command?": str,
    "base?": {"license?": TEXTS, "license_name?": str, "license_link?": str, "language?": TEXTS},
    "verified?": {"logits?": str},
    "folded_attention_factor?": NUMBER,
    "adaptation?": {
        "steps": int,
        "tokens": int,
        "processes?": int,
        "seconds?": NUMBER,
        "device?": str,
        "gate?": {"base": NUMBER, "now": NUMBER, "increase": NUMBER, "most": NUMBER, "passed": bool},
    },
    "earlier?": {"method": str, "target": int},
}
LARGEST = 2**63  # of whole numbers: greater ones are no number of tokens, and no float holds the greatest


def check_record(record: Mapping[str, Any]) -> None:
    """Refuse a `ropepatch.json` that no card can be written from.

    Raises:
        RopepatchError: With the first value that is missing or of another kind, or a parameter that is no
            name: the card prints it as Python.
    """
    _check(record, RECORD, "")
    for key in ("original_max_position_embeddings", "target"):
        if record[key] < 1:
            _refuse(key, record[key])
    for name in record["parameters"]:
        if not name.isidentifier() or iskeyword(name):
            raise RopepatchError(
                f"ropepatch.json names a parameter {reprlib.repr(name)}, expected a plain name",
                hint="a card is written from what `ropepatch extend` wrote",
            )


def _check(value: Any, kind: Any, name: str) -> None:
    if isinstance(kind, tuple):
        kind = next((one for one in kind if _fits(value, one)), kind[0])
    if not _fits(value, kind):
        _refuse(name, value)
    if isinstance(kind, dict):
        for key, inner in kind.items():
            plain = key.removesuffix("?")
            if plain in value or plain == key:
                _check(value.get(plain, ...), inner, f"{name}.{plain}".lstrip("."))
    elif isinstance(kind, list):
        for element in value:
            _check(element, kind[0], name)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind, what is within it apart."""
    if isinstance(kind, dict | list):
        return isinstance(value, type(kind))
    small = not isinstance(value, int) or abs(value) < LARGEST
    return isinstance(value, kind) and small


def _refuse(name: str, value: Any) -> None:
    got = "nothing" if value is ... else reprlib.repr(value)
    raise RopepatchError(
        f"ropepatch.json says nothing usable of {name}, got {got}",
        hint="a card is written from what `ropepatch extend` wrote",
    )
