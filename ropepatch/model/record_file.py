"""The base of all records in `ropepatch.json`: of an extension, and of a swapped position encoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr, ValidationError

from ropepatch.errors import RopepatchError
from ropepatch.settings import shown

FILE = "ropepatch.json"
VERSION: Final = 1  # of its layout; records from before it was written down have none
MAX_RECORDED = 2**63  # of numbers: greater ones are no number of tokens, and no float holds the greatest

Text = StrictStr
Whole = Annotated[StrictInt, Field(ge=0, lt=MAX_RECORDED)]
Tokens = Annotated[StrictInt, Field(ge=1, lt=MAX_RECORDED)]
Number = (
    Annotated[StrictInt, Field(gt=-MAX_RECORDED, lt=MAX_RECORDED)]
    | Annotated[StrictFloat, Field(allow_inf_nan=False)]
)
Keys = dict[Text, Any]  # which nothing executes, or prints one by one


class Part(BaseModel):
    """A record, or an object within one; unlike settings it keeps the keys that it does not know."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    def to_dict(self) -> dict[str, Any]:
        """The keys that were given, for JSON."""
        return self.model_dump(exclude_unset=True)


Kind = TypeVar("Kind", bound=Part)


def validated(kind: type[Kind], content: Mapping[str, Any], hint: str, file: str = FILE) -> Kind:
    """Parse the content of a record file; an error names the first key that is missing or wrong."""
    version = content.get("version", VERSION)
    if isinstance(version, int) and version > VERSION:
        raise RopepatchError(
            f"{file} has version {version}, this ropepatch supports up to version {VERSION}",
            hint="pip install -U ropepatch",
        )
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        missing = first["type"] == "missing"
        raise refused(content, first["loc"], hint, missing=missing, file=file) from error


def refused(
    content: Any, path: tuple[int | str, ...], hint: str, *, missing: bool = False, file: str = FILE
) -> RopepatchError:
    """The error that names a key of a record, and what it holds.

    Args:
        content: The record.
        path: The keys and positions that lead there, and perhaps the types that pydantic tried.
        hint: What to do.
        missing: Whether the last key is missing.
        file: The name of the record's file.
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
    return RopepatchError(f"{file} has an invalid {'.'.join(names)}, got {got}", hint=hint)
