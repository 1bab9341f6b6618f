"""What a user writes, read once: lengths, YAML, seeds and all settings; errors in one line."""

from __future__ import annotations

import hashlib
import inspect
import re
import reprlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any, Self, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from ropepatch.errors import RopepatchError
from ropepatch.files import check_regular

_short = reprlib.Repr()  # aliases make a short YAML file hold an endless value
_short.maxlevel, _short.maxstring, _short.maxother = 2, 100, 100


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice; YAML forbids it, PyYAML takes the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.MarkedYAMLError(None, None, f"{key.value} is given twice", key.start_mark)
                seen.add((key.tag, key.value))
        return node


def read_yaml(path: Path, what: str) -> Any:
    """What a YAML file holds; ``what`` says in errors what it should be.

    Raises:
        RopepatchError: No such file, a pipe or a device, no YAML, a tag that is not of plain YAML, or a key
            that is given twice.
    """
    check_regular(path)
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except Exception as error:  # PyYAML passes on what int(), datetime() and others say to a hostile value
        reason = shorten(str(error) or type(error).__name__, 300)
        raise RopepatchError(f"{path} is not a {what}: {reason}", hint="name a YAML file") from error


def refuse_unknown(names: Iterable[object], choices: Iterable[str], what: str) -> None:
    """Refuse a name that is none of the choices; the hint is the nearest of them, or all.

    Raises:
        RopepatchError: A name that is none of them.
    """
    choices = list(choices)
    for name in names:
        if name not in choices:
            raise RopepatchError(f"unknown {what} {shown(name)}", hint=_nearest(name, choices))


TOKENS = r"([0-9]{1,12})([kKmM]?)"
MULTIPLE = r"([0-9]{1,6}(?:\.[0-9]{1,3})?)x"  # of the trained context
UNITS = {"": 1, "k": 1024, "m": 1024**2}


def parse_length(text: str) -> int:
    """Tokens, from `4096`, `32k` or `1m`.

    Raises:
        RopepatchError: If the text is none of these.
    """
    match = re.fullmatch(TOKENS, text.strip())
    if not match or int(match[1]) == 0:
        raise RopepatchError(f"{text!r} is not a length in tokens", hint="write 4096, 32k (32 x 1024) or 1m")
    return int(match[1]) * UNITS[match[2].lower()]


def parse_lengths(text: str) -> list[int]:
    """Lengths separated by commas, ascending and each once."""
    return sorted({parse_length(part) for part in text.split(",")})


def relative_length(text: str | int, trained: int) -> int:
    """Tokens, from what `parse_length` takes or from a multiple of the trained context: `4x`, `1.5x`.

    Raises:
        RopepatchError: If the text is none of these.
    """
    match = re.fullmatch(MULTIPLE, str(text).strip())
    return round(float(match[1]) * trained) if match else parse_length(str(text))


def short_length(tokens: int) -> str:
    """The opposite of `parse_length`: 32768 as 32k."""
    for unit, size in reversed(UNITS.items()):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def seed_of(*parts: object) -> int:
    """A 64-bit seed for the draw that ``parts`` describe; the same on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


def expected(words: str) -> WrapValidator:
    """In `Annotated`: what people call the type, for "KEY must be WORDS, got VALUE"."""

    def check(value: Any, fits: ValidatorFunctionWrapHandler) -> Any:
        try:
            fits(value)
        except (ValidationError, RopepatchError):
            raise PydanticCustomError("unfit", "unfit", {"words": words}) from None
        return value  # as it was written: 2 stays 2 where 2.0 would do

    return WrapValidator(check)


class OneOf:
    """In `Annotated`: a text that is one of these names."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """What pydantic asks for."""
        return core_schema.literal_schema(self.names)


def _some_tokens(length: int | str) -> int | str:
    if relative_length(length, 10**6) == 0:
        raise RopepatchError("no token")
    return length


Entry = TypeVar("Entry")
Several = Annotated[tuple[Entry, ...], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1), expected("a text")]
Count = Annotated[int, Field(gt=0), expected("a whole number above 0")]
Whole = Annotated[int, Field(ge=0), expected("a whole number from 0")]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False), expected("a number above 0")]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False), expected("a number from 0")]
Share = Annotated[float, Field(ge=0, le=1), expected("a share from 0 to 1")]
PartShare = Annotated[float, Field(ge=0, lt=1), expected("a share from 0 to below 1")]
Length = Annotated[
    Annotated[int, Field(gt=0)] | Annotated[str, Field(pattern=f"^({TOKENS}|{MULTIPLE})$")],
    AfterValidator(_some_tokens),
    expected("a length in tokens (4096, 32k or 4x)"),
]
UNKNOWN_FIELD = "unexpected_keyword_argument"  # of a dataclass, by pydantic's type of error
WORDS = {  # where a type has no words of its own, by pydantic's type of error
    "bool_type": "true or false",
    "dataclass_type": "a mapping",
    "dict_type": "a mapping",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_attributes_type": "a mapping",
    "model_type": "a mapping",
    "string_type": "a text",
    "too_short": "of at least one entry",
    "tuple_type": "a list",
    "union_tag_not_found": "a mapping that says which of several it is",
}


class Settings(BaseModel):
    """What a user writes: each value of its declared type to the letter, and no key that is unknown.

    What does not fit is a `RopepatchError` that names its place, from YAML, JSON or Python alike. Lists
    become tuples. What a key means stands in the docstring alone: the JSON Schema takes it from there.

    Example::

        class Source(Settings):  # with a docstring and its Args
            text: Text
            weight: Amount = 1.0
            window: Length | None = None

            def check(self) -> None:  # what no single value tells
                if self.window is None and self.weight != 1:
                    raise RopepatchError("weight without window")

        Source.from_yaml(Path("source.yaml")).model_copy(update={"window": "32k"})
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise refusal(error, type(self), values) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # nested ones keep their place

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """The settings that a mapping holds.

        Raises:
            RopepatchError: No mapping, a key that is unknown or missing, or a value that does not fit.
        """
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise refusal(error, cls, obj) from None

    @classmethod
    def from_yaml(cls, file: Path) -> Self:
        """The settings of a YAML file.

        Raises:
            RopepatchError: No such file, no YAML, or as in `model_validate`, with the name of the file.
        """
        content = read_yaml(file, noun(cls))
        try:
            return cls.model_validate(content)
        except RopepatchError as error:
            raise RopepatchError(f"{file}: {error}", hint=error.hint) from error

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """The same but for these values, which are checked as all are."""
        values = {key: getattr(self, key) for key in type(self).model_fields}
        return type(self)(**values | dict(update or {}))

    def check(self) -> None:
        """Raise a `RopepatchError` where values do not fit together."""

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        required = [key for key, field in cls.model_fields.items() if field.is_required()]
        for key in [*content, *required]:
            if key not in cls.model_fields or key not in content:
                fault = "absent" if key in required else "unknown"
                raise PydanticCustomError(fault, fault, {"key": (key,), "keys": list(cls.model_fields)})
        return {key: tuple(value) if isinstance(value, list) else value for key, value in content.items()}

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        try:
            self.check()
        except RopepatchError as error:
            raise PydanticCustomError("together", "together", {"error": error}) from error
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """What pydantic asks for, with the meaning of every key."""
        written = handler.resolve_ref_schema(handler(core))
        written["description"] = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
        texts = meanings(cls)
        for key, value in written.get("properties", {}).items():
            value.pop("title", None)
            value.update({"description": texts[key]} if key in texts else {})
        return written


def noun(kind: type) -> str:
    """What people call an object of a class: a `PasskeyTemplate` is a passkey template."""
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", " ", kind.__name__).lower()


def meanings(kind: type) -> dict[str, str]:
    """The arguments of a class, and what its docstring says of each."""
    section = (inspect.getdoc(kind) or "").partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, flags=re.MULTILINE)
    return {key: " ".join(text.split()) for key, text in entries}


def shown(value: object) -> str:
    """A value for a message: short and on one line, whatever it is."""
    return " ".join(_short.repr(value).split())


def refusal(error: ValidationError, kind: type[Any], content: Any) -> RopepatchError:
    """The first thing in a content that pydantic refused, in one line and a hint.

    Args:
        error: What pydantic says.
        kind: The settings, or the dataclass, that the content should be.
        content: What was given.
    """
    # Unknown keys come first, which say most; pydantic's dataclasses put missing ones before them.
    first = max(error.errors(include_url=False), key=lambda one: one["type"] == UNKNOWN_FIELD)
    value, context, fault, steps = first["input"], first.get("ctx", {}), first["type"], first["loc"]
    if fault in (UNKNOWN_FIELD, "missing"):
        keys = [] if steps[1:] else [*inspect.signature(kind).parameters]  # of what is within, we have none
        context = {"key": steps[-1:], "keys": keys}
        fault, steps = "unknown" if fault == UNKNOWN_FIELD else "absent", steps[:-1]
    place, hint = _place(steps, content), None
    if fault == "together":
        together: RopepatchError = context["error"]
        return RopepatchError(f"{place}: {together}" if place else str(together), hint=together.hint)
    if fault in ("absent", "unknown"):
        (key,), keys = context["key"], context["keys"]
        whole = f"{place}.{key}" if place else key
        if fault == "unknown":
            return RopepatchError(f"unknown {noun(kind)} key {shown(whole)}", hint=_nearest(key, keys))
        hint = f"keys: {', '.join(keys)}" if keys else None
        return RopepatchError(f"a {noun(kind)} must have the key {whole}", hint=hint)
    words = context.get("words") or WORDS.get(fault, first["msg"])
    if choices := context.get("expected") or context.get("expected_tags"):
        names, value = re.findall("'([^']*)'", choices), context.get("tag", value)
        words, hint = f"one of {', '.join(names)}", _nearest(value, names)
    elif fault == "model_type" and not place:
        hint = f"keys: {', '.join(kind.model_fields)}"
    elif isinstance(value, str) and "number" in words:
        hint = "in YAML 2e-5 is a text, and so is what stands in quotes: write 2.0e-5"
    return RopepatchError(f"{place or f'a {noun(kind)}'} must be {words}, got {shown(value)}", hint=hint)


def _place(steps: tuple[int | str, ...], content: Any) -> str:
    """Where in a content: `data.sources[1].weight`; without the steps that pydantic takes within a union."""
    place = ""
    for step in steps:
        with suppress(KeyError, IndexError, TypeError):
            content = content[step]
            place += f".{step}" if str(step).isidentifier() else f"[{shown(step)}]"
    return place.removeprefix(".")


def _nearest(name: object, names: list[str]) -> str:
    close = get_close_matches(name, names, n=1) if isinstance(name, str) else []
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"
