"""The base of all records in `ropepatch.json`: of an extension, and of a swapped position encoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
)

from ropepatch.errors import RopepatchError
from ropepatch.settings import shown

FILE = "ropepatch.json"
VERSION: Final = 1  # of the layout; older records have no version
MAX_RECORDED = (
    2**63
)  # of numbers: larger ones are implausible, and may overflow a float

Text = StrictStr
Whole = Annotated[StrictInt, Field(ge=0, lt=MAX_RECORDED)]
Tokens = Annotated[StrictInt, Field(ge=1, lt=MAX_RECORDED)]
Number = (
    Annotated[StrictInt, Field(gt=-MAX_RECORDED, lt=MAX_RECORDED)]
    | Annotated[StrictFloat, Field(allow_inf_nan=False)]
)
Keys = dict[Text, Any]  # free-form values


class Part(BaseModel):
    """A record, or an object within one; unlike settings it keeps unknown keys."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    def to_dict(self) -> dict[str, Any]:
        """Return the given keys, JSON-ready."""
        return self.model_dump(exclude_unset=True)


Kind = TypeVar("Kind", bound=Part)


def validated(
    kind: type[Kind], content: Mapping[str, Any], hint: str, file: str = FILE
) -> Kind:
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
        raise refused(
            content, first["loc"], hint, missing=missing, file=file
        ) from error


def refused(
    content: Any,
    path: tuple[int | str, ...],
    hint: str,
    *,
    missing: bool = False,
    file: str = FILE,
) -> RopepatchError:
    """Make the error of an invalid key of a record.

    Args:
        content: The record.
        path: The path of the key, which may include types that pydantic tried.
        hint: The hint.
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
    return RopepatchError(
        f"{file} has an invalid {'.'.join(names)}, got {got}", hint=hint
    )
