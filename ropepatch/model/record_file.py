"""`ropepatch.json`: what all records have in common, and the record of a swapped position encoding.

That of an extension is in `ropepatch.extension.record`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr, ValidationError

from ropepatch.errors import RopepatchError
from ropepatch.files import read_json, write_json
from ropepatch.model.mapped import is_mapped, mapped_attention, without_map
from ropepatch.settings import shown

FILE = "ropepatch.json"
VERSION: Final = 1  # of its layout; records from before it was written down have none
NEEDS_ROPEPATCH = "needs_ropepatch"  # the model_type in the config.json of a swapped position encoding
LARGEST = 2**63  # of numbers: greater ones are no number of tokens, and no float holds the greatest

Text = StrictStr
Whole = Annotated[StrictInt, Field(ge=0, lt=LARGEST)]
Tokens = Annotated[StrictInt, Field(ge=1, lt=LARGEST)]
Number = (
    Annotated[StrictInt, Field(gt=-LARGEST, lt=LARGEST)] | Annotated[StrictFloat, Field(allow_inf_nan=False)]
)


class Part(BaseModel):
    """A record, or an object within one; unlike settings it keeps the keys that it does not know."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    def to_dict(self) -> dict[str, Any]:
        """What was said, for JSON."""
        return self.model_dump(exclude_unset=True)


Kind = TypeVar("Kind", bound=Part)


def validated(kind: type[Kind], content: Mapping[str, Any], hint: str) -> Kind:
    """A record from the content of its file.

    Raises:
        RopepatchError: With the first key that is missing, or holds something else, and with the hint.
    """
    version = content.get("version", VERSION)
    if isinstance(version, int) and version > VERSION:
        raise RopepatchError(
            f"{FILE} is of version {version}, this ropepatch reads up to version {VERSION}",
            hint="pip install -U ropepatch",
        )
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise refused(content, first["loc"], hint, missing=first["type"] == "missing") from error


def refused(content: Any, path: tuple[int | str, ...], hint: str, *, missing: bool = False) -> RopepatchError:
    """The error that names a key of a record, and what it holds.

    Args:
        content: The record.
        path: The keys and positions that lead there, and perhaps the types that pydantic tried.
        hint: What to do.
        missing: Whether the last key is missing.
    """
    names, place = [], content
    for key in path:
        if missing and key == path[-1]:
            names.append(str(key))
        elif isinstance(place, dict) and key in place:
            names.append(str(key))
            place = place[key]
        elif isinstance(place, list | tuple) and isinstance(key, int):
            place = place[key]
    got = "nothing" if missing else shown(place)
    return RopepatchError(f"{FILE} says nothing usable of {'.'.join(names)}, got {got}", hint=hint)


class Swapped(Part):
    """The record of a checkpoint whose position encoding is swapped.

    Args:
        version: Of the layout.
        needs_ropepatch: Why, in a sentence: no other library loads it rightly.
        encoding: The name of the encoding that its weights go with.
        parameters: Those of the encoding.
        model_type: That of config.json before, which now names one that transformers refuses.
        architectures: The same.
    """

    version: Literal[1]
    needs_ropepatch: Text
    encoding: Text
    parameters: dict[Text, Any]
    model_type: Text
    architectures: list[Text]


def read_swapped(folder: Path) -> Swapped:
    """The record of a checkpoint whose position encoding is swapped.

    Raises:
        RopepatchError: If it is missing or damaged, with the key.
    """
    content = {"version": VERSION} | read_json(folder / FILE)
    return validated(
        Swapped, content, "put config.json, ropepatch.json and the weights of the same checkpoint together"
    )


def write_swapped(folder: Path, encoding: str, parameters: Mapping[str, Any]) -> None:
    """Say in a folder that transformers has written which encoding its model has.

    Its config.json then names a model type that transformers refuses.
    """
    config = read_json(folder / "config.json")
    record = Swapped(
        version=VERSION,
        needs_ropepatch="its position encoding is not its rope: load it by ropepatch.load",
        encoding=encoding,
        parameters=dict(parameters),
        model_type=config["model_type"],
        architectures=config["architectures"],
    )
    write_json(folder / FILE, record.to_dict())
    config |= {"model_type": NEEDS_ROPEPATCH, "architectures": ["NeedsRopepatch"]}
    write_json(folder / "config.json", config)


def needs_ropepatch(folder: Path) -> bool:
    """Whether a checkpoint folder holds a model whose position encoding is swapped."""
    return read_json(folder / "config.json").get("model_type") == NEEDS_ROPEPATCH


def swapped_encoding(folder: Path) -> dict[str, Any]:
    """What results say of a checkpoint with a swapped position encoding or a map; nothing of any other."""
    if not needs_ropepatch(folder):
        return mapped_attention(folder)
    record = read_swapped(folder)
    return {"encoding": {"encoding": record.encoding, "parameters": record.parameters}}


def read_config(folder: Path) -> dict[str, Any]:
    """config.json; of a model with a swapped position encoding or a map, with the model type that it had.

    Raises:
        RopepatchError: If the file, or ropepatch.json beside it, is missing, no JSON object or silent of it.
    """
    raw = read_json(folder / "config.json")
    if is_mapped(raw):
        return without_map(raw)
    if raw.get("model_type") == NEEDS_ROPEPATCH:
        record = read_swapped(folder)
        raw |= {"model_type": record.model_type, "architectures": record.architectures}
    return raw
