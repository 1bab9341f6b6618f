"""Parsing and validation of user input: lengths, YAML, seeds, settings, registries; errors in one line."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import reprlib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from numbers import Number as AnyNumber
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any, ClassVar, Protocol, Self, TypeVar

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

from ropepatch.errors import LENGTHS, RopepatchError, argument
from ropepatch.files import check_regular, read_json, shipped

_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother = 2, 100, 100


MAX_NODES = 100_000  # of a YAML text; an alias counts as all that it stands for


class _Loader(yaml.SafeLoader):
    """A loader of YAML 1.2 that rejects duplicate keys, and aliases that multiply without end."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  # as PyYAML declares it

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.total = 0  # nodes so far
        self.sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        before, is_alias = self.total, self.check_event(yaml.AliasEvent)
        node: yaml.Node = super().compose_node(parent, index)  # type: ignore[assignment]  # None at no call
        if not is_alias:
            self.total += 1
            self.sizes[node] = self.total - before
        elif node in self.sizes:
            self.total += self.sizes[node]
        else:
            raise yaml.MarkedYAMLError(None, None, "a value contains itself", node.start_mark)
        if self.total > MAX_NODES:
            problem = f"it holds more than {MAX_NODES:,} values, with those that aliases repeat"
            raise yaml.MarkedYAMLError(None, None, problem, node.start_mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.MarkedYAMLError(None, None, f"{key.value} is given twice", key.start_mark)
                seen.add((key.tag, key.value))
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        digits = self.construct_scalar(node)
        return int(digits, 0 if digits.startswith(("0o", "0x")) else 10)


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes each text that YAML 1.1 or 1.2 reads as something else."""


# The core schema of YAML 1.2, section 10.3.2. In that of 1.1, 1:30 is 90, 017 is 15, and `no` is false.
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
):
    for _yaml in (_Loader, _Dumper):
        _yaml.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})\\Z"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def parse_yaml(text: str) -> Any:
    """Parse plain YAML 1.2 of a bounded number of values.

    Raises:
        yaml.YAMLError: If it is not YAML, or too large with its aliases.
        ValueError: If a value does not have the type that it states.
        RecursionError: If it is nested too deep.
    """
    return yaml.load(text, Loader=_Loader)


def yaml_text(content: Any) -> str:
    """Format JSON-ready data as YAML."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_yaml(path: Path, what: str) -> Any:
    """Parse a file of `parse_yaml`; ``what`` names its kind in errors."""
    check_regular(path)
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark, error.problem or "no YAML"
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        hint = "correct that line; a value that holds a colon or a bracket needs quotes"
        raise RopepatchError(f"{path} is not a {what}: {shorten(problem, 300)}{where}", hint=hint) from error
    except Exception as error:  # PyYAML passes on errors of int() and others
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise RopepatchError(
            f"{path} is not a {what}: {shorten(reason, 300)}", hint="name a YAML file"
        ) from error


def refuse_unknown(names: Iterable[object], choices: Iterable[str], what: str) -> None:
    """Raise a `RopepatchError` for a name that is not among the choices; the hint is the nearest, or all."""
    choices = list(choices)
    for name in names:
        if name not in choices:
            raise RopepatchError(f"unknown {what} {shown(name)}", hint=_nearest_or_all(name, choices))


# Bundled YAML files

SUITES, RECIPES = "eval/suites", "recipes"
ENDINGS = (".yaml", ".yml")


def shipped_names(folder: str) -> list[str]:
    """Return the names of the bundled YAML files in a folder."""
    return sorted(file.stem for file in shipped(folder).glob("*.yaml"))


def name_of(named: str) -> str:
    """Return the name of a bundled file, or of a path without its suffix."""
    return Path(named).stem if named.endswith(ENDINGS) else named


def find_shipped(name: str, folder: str, what: str) -> Path:
    """Find a bundled YAML file by name, or return a path; ``what`` names its kind in errors."""
    if name.endswith(ENDINGS):
        return Path(name)
    refuse_unknown([name], shipped_names(folder), what)
    return shipped(folder) / f"{name}.yaml"


def check_keys(name: str, folder: str, what: str) -> None:
    """Check the keys of a file of `find_shipped` against the bundled schema.

    This is fast; importing the class that validates the rest takes seconds.
    """
    file, schema = find_shipped(name, folder, what), read_json(shipped(folder) / f"{what}.schema.json")
    content = read_yaml(file, what)
    try:
        _check_mapping(schema, schema, content, what)
    except RopepatchError as error:
        raise RopepatchError(f"{file}: {error}", hint=error.hint) from error


def _check_mapping(
    schema: dict[str, Any], part: dict[str, Any], content: Any, what: str, at: str = ""
) -> None:
    """Compare the keys of a mapping, and of those within it, with a part of a schema."""
    kinds = [one for one in part.get("anyOf", [part]) if "$ref" in one]
    if len(kinds) == 1:
        part = schema["$defs"][kinds[0]["$ref"].rpartition("/")[2]]
    if not isinstance(content, dict) or part.get("additionalProperties") is not False:
        return
    known = part["properties"]
    for key in (*content, *part.get("required", ())):
        if key not in known:
            hint = _nearest_or_all(key, [*known])
            raise RopepatchError(f"unknown {what} key {shown(f'{at}{key}')}", hint=hint)
        if key not in content:
            hint = f"keys: {', '.join(known)}"
            raise RopepatchError(f"a {what} must have the key {at}{key}", hint=hint)
    for key, value in content.items():
        _check_mapping(schema, known[key], value, what, f"{at}{key}.")


# Names, lengths and seeds

HUB_NAME = r"[A-Za-z0-9][\w.-]*"  # of an owner or a repository, in ASCII
TOKENS = r"([0-9]{1,12})([kKmM]?)"
MULTIPLE = r"([0-9]{1,6}(?:\.[0-9]{1,3})?)x"  # of the original length
UNITS = {"": 1, "k": 1024, "m": 1024**2}


def parse_length(text: str) -> int:
    """Parse a number of tokens: `4096`, `32k` or `1m`."""
    match = re.fullmatch(TOKENS, text.strip())
    if not match or int(match[1]) == 0:
        plain = re.sub(r"[\s,_]|(?<=[kKmM])[bB]$", "", text).lower()
        near = re.fullmatch(f"{TOKENS}|{MULTIPLE}", plain) and plain != text and plain.strip("0.xkm")
        hint = f"did you mean {plain}?" if near else "write 4096, 32k (32 x 1024), 1m, or 4x of the original"
        raise RopepatchError(f"{text!r} is not a length in tokens", hint=hint)
    return int(match[1]) * UNITS[match[2].lower()]


def relative_length(text: str | int, trained: int) -> int:
    """Parse a number of tokens as `parse_length`, or a multiple of the original length: `4x`, `1.5x`."""
    written = text if isinstance(text, str) else shown(number_of(text))
    match = re.fullmatch(MULTIPLE, written.strip())
    if not match:
        return parse_length(written)
    return round(float(match[1]) * trained) or parse_length("0")  # raises


OTHER_TYPES = {"default": "none", "su": "longrope"}  # RoPE types with another name here


def as_target(value: str = "") -> tuple[str, str]:
    """Return the target and method of a RoPE scaling or a factor; the defaults are 4x and yarn."""
    rope: Any = value
    for read in (ast.literal_eval, json.loads):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            rope = read(value)
    while isinstance(rope, dict):
        inner = next((rope[key] for key in ("rope_scaling", "rope_parameters") if rope.get(key)), None)
        if not isinstance(inner, dict):
            break
        rope = inner
    named = isinstance(rope, str) and re.fullmatch(r"[a-z][\w-]*", rope)
    stated = rope if isinstance(rope, dict) else {"rope_type": rope} if named else {"factor": rope}
    kind, factor = stated.get("rope_type", stated.get("type", "yarn")), stated.get("factor", 4)
    number = factor if isinstance(factor, int | float) and 1 < factor < 1e6 else 4
    return f"{number:g}x", OTHER_TYPES.get(kind, kind) if isinstance(kind, str) else "yarn"


def listed(values: Any) -> list[Any]:
    """Return the entries of a list or of comma-separated texts; any other value as a list of one.

    The name of an existing JSON file may contain commas.
    """
    if isinstance(values, str):
        is_file = values.endswith(".json") and Path(values).expanduser().is_file()
        return [values] if is_file else [value.strip() for value in values.split(",")]
    if isinstance(values, dict) or not isinstance(values, Iterable):
        return [values]
    entries = []
    for value in values:
        entries += listed(value) if isinstance(value, str) else [value]
    return entries


def short_length(tokens: int) -> str:
    """Format a length, as `parse_length` parses it: 32768 as 32k."""
    for unit, size in reversed(UNITS.items()):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def seed_of(*parts: object) -> int:
    """Compute a 64-bit seed from ``parts``, the same on every machine and in every process."""
    return int(key_of(parts)[:16], 16)


def key_of(value: object) -> str:
    """Hash the repr of a value to 64 hexadecimal digits, the same in every process."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


def expected(words: str) -> WrapValidator:
    """In `Annotated`: the type in words, for "KEY must be WORDS, got VALUE"."""

    def check(value: Any, fits: ValidatorFunctionWrapHandler) -> Any:
        try:
            fits(value)
        except (ValidationError, RopepatchError):
            raise PydanticCustomError("unfit", "unfit", {"words": words}) from None
        return value  # unconverted: 2 stays an int

    return WrapValidator(check)


class OneOf:
    """In `Annotated`: a text that is one of these names."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Make the core schema of pydantic."""
        return core_schema.literal_schema(self.names)


def _some_tokens(length: int | str) -> int | str:
    if relative_length(length, 10**6) == 0:
        raise RopepatchError("no token")
    return length


Divisors = Annotated[  # in the range in which every frequency fits float32
    tuple[Annotated[float, Field(ge=1e-30, le=1e30)], ...],
    Field(min_length=1),
    expected("a tuple of numbers from 1e-30 to 1e30"),
]
MAX_NUMBER = 1e12  # of a number in a formula: beyond it powers overflow
Entry = TypeVar("Entry")
Several = Annotated[tuple[Entry, ...], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1), expected("a text")]
Count = Annotated[int, Field(gt=0, lt=2**63), expected("a whole number above 0")]
Whole = Annotated[int, Field(ge=0, lt=2**63), expected("a whole number from 0")]
Number = Annotated[float, Field(allow_inf_nan=False), expected("a finite number")]
AboveOne = Annotated[float, Field(gt=1, allow_inf_nan=False), expected("a number above 1")]
FromOne = Annotated[float, Field(ge=1, allow_inf_nan=False), expected("a number from 1")]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False), expected("a number above 0")]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False), expected("a number from 0")]
Share = Annotated[float, Field(ge=0, le=1), expected("a share from 0 to 1")]
PartShare = Annotated[float, Field(ge=0, lt=1), expected("a share from 0 to below 1")]
Length = Annotated[
    Annotated[int, Field(gt=0)] | Annotated[str, Field(pattern=f"^({TOKENS}|{MULTIPLE})$")],
    AfterValidator(_some_tokens),
    expected("a length in tokens (4096, 32k or 4x)"),
]
UNKNOWN_FIELD = "unexpected_keyword_argument"  # pydantic's type of error for a dataclass
WORDS = {  # for types without `expected`, by pydantic's type of error
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
    """User input of declared types, validated strictly: no conversions, no unknown keys.

    An invalid value raises a `RopepatchError` that names its key, for YAML, JSON and Python. Lists become
    tuples, and NumPy and torch numbers become Python's. JSON Schemas contain the texts of the docstrings.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise refusal(error, type(self), values) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # keeps the path of nested errors

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Remove annotations from the signature that `help` shows."""
        bare = [one.replace(annotation=one.empty) for one in inspect.signature(cls).parameters.values()]
        cls.__signature__ = inspect.Signature(bare)

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Validate a mapping."""
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise refusal(error, cls, obj) from None

    @classmethod
    def from_yaml(cls, file: Path) -> Self:
        """Read and validate a YAML file; errors name it."""
        content = read_yaml(file, noun(cls))
        try:
            return cls.model_validate(content)
        except RopepatchError as error:
            raise RopepatchError(f"{file}: {error}", hint=error.hint) from error

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy with other values, which are validated."""
        values = dict(iter(self))  # not dict(self): a field may be called `keys`
        return type(self)(**values | dict(update or {}))

    def __str__(self) -> str:
        return repr(self)

    def check(self) -> None:
        """Raise a `RopepatchError` if values cannot be combined."""

    @classmethod
    def _check_keys(cls, keys: Collection[Any]) -> None:
        """Raise an error for unknown keys, and for missing keys without a default."""
        required = [key for key, field in cls.model_fields.items() if field.is_required()]
        for key in [*keys, *required]:
            if key not in cls.model_fields or key not in keys:
                fault = "absent" if key in required else "unknown"
                raise PydanticCustomError(fault, fault, {"key": (key,), "keys": list(cls.model_fields)})

    @model_validator(mode="before")
    @classmethod
    def _read(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        cls._check_keys(content)
        return {key: _plain(value) for key, value in content.items()}

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        try:
            self.check()
        except RopepatchError as error:
            raise PydanticCustomError("together", "together", {"error": error}) from error
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Add the meaning of every key to the JSON Schema."""
        written = handler.resolve_ref_schema(handler(core))
        written["description"] = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
        texts = meanings(cls)
        for key, value in written.get("properties", {}).items():
            value.pop("title", None)
            value.update({"description": texts[key]} if key in texts else {})
        return written


def noun(kind: type) -> str:
    """Return a class name in words: `PasskeyTemplate` as "passkey template"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", " ", kind.__name__).lower()


def meanings(kind: type) -> dict[str, str]:
    """Parse the Args section of a docstring."""
    section = (inspect.getdoc(kind) or "").partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, flags=re.MULTILINE)
    return {key: " ".join(text.split()) for key, text in entries}


def shown(value: object) -> str:
    """Shorten any value to one line of a message."""
    try:
        return " ".join(_short.repr(value).split())
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return f"{type(value).__name__} of too many digits"


def number_of(value: Any) -> Any:
    """Convert a number or array of another library to Python's int, float or list.

    Any other value, and a number that has no such value, is returned unchanged, to be refused by its type.
    """
    try:
        if hasattr(value, "tolist"):  # of NumPy or torch
            return value.tolist()
        if isinstance(value, AnyNumber) and not isinstance(value, int | float | complex):
            return float(value)  # type: ignore[arg-type]  # Fraction, Decimal
    except (RuntimeError, TypeError, ValueError, OverflowError):  # a meta tensor, a signalling NaN, 10**400
        pass
    return value


def whole_number(name: str, value: Any) -> int:
    """Return a whole number of any library as an int; the error names the argument."""
    number = number_of(value)
    if isinstance(number, int) and not isinstance(number, bool) and abs(number) < 2**63:
        return number
    raise RopepatchError(
        f"{argument(name)} must be a whole number, got {shown(value)}", hint=f"such as {argument(name, 64)}"
    )


def positive_number(name: str, value: Any) -> float:
    """Return a finite number above 0 of any library as a float; the error names the argument."""
    number = number_of(value)
    if isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < 1e300:
        return float(number)
    raise RopepatchError(
        f"{argument(name)} must be a number above 0, got {shown(value)}", hint=f"such as {argument(name, 64)}"
    )


def _plain(value: Any) -> Any:
    """Convert lists and arrays to tuples, and numbers of other libraries to Python's."""
    value = number_of(value)
    if type(value) not in (list, tuple):
        return value
    return tuple(number_of(item) for item in value)


def refusal(error: ValidationError, kind: type[Any], content: Any) -> RopepatchError:
    """Make a `RopepatchError` with one line and a hint from the first error of pydantic.

    Args:
        error: The errors.
        kind: The class, settings or a dataclass.
        content: The input.
    """
    # Unknown keys are the most helpful; pydantic's dataclasses report missing ones before them.
    first = max(error.errors(include_url=False), key=lambda one: one["type"] == UNKNOWN_FIELD)
    value, context, fault, steps = first["input"], first.get("ctx", {}), first["type"], first["loc"]
    if fault in (UNKNOWN_FIELD, "missing"):
        keys = [] if steps[1:] else [*inspect.signature(kind).parameters]  # not known for nested classes
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
            return RopepatchError(f"unknown {noun(kind)} key {shown(whole)}", hint=_nearest_or_all(key, keys))
        hint = f"keys: {', '.join(keys)}" if keys else None
        return RopepatchError(f"a {noun(kind)} must have the key {whole}", hint=hint)
    words = context.get("words") or WORDS.get(fault, first["msg"])
    if choices := context.get("expected") or context.get("expected_tags"):
        names, value = re.findall("'([^']*)'", choices), context.get("tag", value)
        words, hint = f"one of {', '.join(names)}", _nearest_or_all(value, names)
    elif fault == "model_type" and not place:
        hint = f"keys: {', '.join(kind.model_fields)}"
    elif isinstance(value, str) and "number" in words and value.lstrip("+-.")[:1].isdigit():
        hint = "what stands in quotes is a text: leave them out"
    if own := getattr(kind, "_refusal", None):
        refused: RopepatchError = own(place, words, value)
        return refused
    return RopepatchError(f"{place or f'a {noun(kind)}'} must be {words}, got {shown(value)}", hint=hint)


def _place(steps: tuple[int | str, ...], content: Any) -> str:
    """Format a location, `data.sources[1].weight`, without pydantic's own steps within a union."""
    place = ""
    for step in steps:
        with suppress(KeyError, IndexError, TypeError):
            content = content[step]
            place += f".{step}" if str(step).isidentifier() else f"[{shown(step)}]"
    return place.removeprefix(".")


def _nearest(name: object, names: Iterable[str]) -> str:
    close = get_close_matches(name, list(names), n=1) if isinstance(name, str) else []
    return f"did you mean {close[0]}?" if close else ""


def _nearest_or_all(name: object, names: list[str]) -> str:
    return _nearest(name, names) or f"known: {', '.join(names)}"


class Named(Settings):
    """The parameters of a `Registry` entry, which users choose by name."""

    name: ClassVar[str]
    formula: ClassVar[str] = ""  # one line, for tables
    paper: ClassVar[str] = "–"
    listed_by: ClassVar[str]  # the command that lists the parameters
    common: ClassVar[tuple[str, ...]] = ()  # fields of all entries, not counted as parameters

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the default of every parameter; `...` if there is none."""
        return {
            key: ... if field.is_required() else field.default
            for key, field in cls.model_fields.items()
            if key not in cls.common
        }

    @classmethod
    def required(cls) -> list[str]:
        """Return the names of the parameters without a default."""
        return [key for key, default in cls.defaults().items() if default is ...]

    @classmethod
    def refuse_unknown(cls, parameters: Iterable[object], *, arguments: Iterable[str] = ()) -> None:
        """Raise a `RopepatchError` for an unknown parameter; the hint suggests the nearest name."""
        known = cls.defaults()
        for parameter in parameters:
            if parameter not in known:
                listed = f"its parameters: {', '.join(known)}" if known else "it has none"
                near = _nearest(parameter, [*known, *arguments])
                if not near and parameter in LENGTHS:
                    near = f"the target length is {argument('to')};"
                raise RopepatchError(
                    f"{cls.name} has no parameter {shown(parameter)}", hint=f"{near} {listed}".strip()
                )

    def parameters(self) -> dict[str, Any]:
        """Return the parameters by name."""
        return {key: getattr(self, key) for key in self.defaults()}

    def check(self) -> None:
        """Raise a `RopepatchError` if values cannot be combined or are out of range."""
        for key, value in self:
            within = not isinstance(value, int | float) or abs(value) <= MAX_NUMBER
            self._require(within, key, f"at most {MAX_NUMBER:g}")

    @classmethod
    def _check_keys(cls, keys: Collection[Any]) -> None:
        if not hasattr(cls, "name"):
            raise RopepatchError(f"{cls.__name__} has no name", hint='write name = "..." in the class')
        cls.refuse_unknown(key for key in keys if key not in cls.common)
        if missing := [key for key in (*cls.common, *cls.required()) if key not in keys]:
            raise RopepatchError(f"{cls.name} needs {', '.join(missing)}", hint=cls._list())

    def _require(self, holds: bool, parameter: str, words: str) -> None:
        if not holds:
            raise self._refusal(parameter, words, getattr(self, parameter))

    @classmethod
    def _refusal(cls, parameter: str, words: str, value: Any) -> RopepatchError:
        return RopepatchError(
            f"{cls.name}: {parameter} must be {words}, got {shown(value)}", hint=cls._list()
        )

    @classmethod
    def _list(cls) -> str:
        return f"`{cls.listed_by} {cls.name}` lists its parameters"


class _HasName(Protocol):
    name: ClassVar[str]


Kind = TypeVar("Kind", bound=_HasName)
Choice = TypeVar("Choice")


class Registry(dict[str, type[Kind]]):
    """Classes by the name that users type; third parties can add entries.

    Args:
        what: Their kind in messages, such as "method".
        kinds: The classes, in the order of lists.
        other_names: Other names, only for suggestions.
    """

    def __init__(
        self, what: str, kinds: Iterable[type[Kind]] = (), *, other_names: Mapping[str, str] | None = None
    ) -> None:
        super().__init__({kind.name: kind for kind in kinds})
        self.what, self.other_names = what, dict(other_names or {})

    def __repr__(self) -> str:
        facts = {
            name: [getattr(kind, fact, "") for fact in ("formula", "paper")] for name, kind in self.items()
        }
        return "\n".join(f"{name}: {'; '.join(filter(None, of_one))}" for name, of_one in facts.items())

    def find(self, name: str) -> type[Kind]:
        """Look up a class; the error of an unknown name suggests the nearest one and lists all."""
        return find_named(name, self, self.what, self.other_names)

    def make(self, name: str, /, **parameters: Any) -> Kind:
        """Look up a class and make an instance."""
        kind: Any = self.find(name)
        made: Kind = kind(**parameters)
        return made


def find_named(name: str, choices: Mapping[str, Choice], what: str, other_names: Mapping[str, str]) -> Choice:
    """Look up a name; the error of an unknown one suggests the nearest and lists all."""
    listed = f"{what}s: {', '.join(choices)}"
    if not isinstance(name, str):
        raise RopepatchError(f"{what} must be a name, got {shown(name)}", hint=listed)
    if name not in choices:
        near = _nearest(other_names.get(name.lower(), name.lower()), choices)
        raise RopepatchError(f"unknown {what} {name!r}", hint=f"{near} {listed}".strip())
    return choices[name]
