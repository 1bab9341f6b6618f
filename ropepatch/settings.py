"""Parsing and validation of user input: lengths, YAML, seeds, settings, registries; errors in one line."""

from __future__ import annotations

import hashlib
import re
import reprlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Protocol, Self, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from ropepatch.errors import RopepatchError, argument
from ropepatch.files import check_regular, shipped

_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother = 2, 100, 100


class _Loader(yaml.SafeLoader):
    """A loader of YAML 1.2 that rejects duplicate keys, and aliases, which can multiply without end."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  # as PyYAML declares it

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(
                problem="aliases are not read", problem_mark=mark
            )
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"{key.value} is given twice"
                    raise yaml.MarkedYAMLError(
                        problem=problem, problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return node


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes each text that YAML 1.1 or 1.2 reads as something else."""


# The core schema of YAML 1.2, section 10.3.2, without 0o17 and 0x1F. In that of 1.1, 1:30 is 90, 017 is 15,
# 2e-5 is a text and `no` is false.
for _tag, _pattern in {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}.items():
    for _yaml in (_Loader, _Dumper):
        _yaml.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})\\Z"), None
        )
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))


def parse_yaml(text: str) -> Any:
    """Parse plain YAML 1.2 without aliases.

    Raises:
        yaml.YAMLError: If it is not YAML, or has an alias.
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
    except Exception as error:  # PyYAML passes on errors of int() and others
        reason = getattr(error, "strerror", None) or str(error)
        raise RopepatchError(
            f"{path} is not a {what}: {shorten(reason, 300)}",
            hint="name a YAML file; in it a value that holds a colon or a bracket needs quotes",
        ) from error


def refuse_unknown(
    names: Iterable[object],
    choices: Iterable[str],
    what: str,
    other_names: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise a `RopepatchError` for a name that is not among the choices; the hint is the nearest, or all.

    Args:
        names: The names.
        choices: The known names.
        what: Their kind in messages, such as "method".
        other_names: The choices that other names stand for, only for the hint.
    """
    choices = list(choices)
    for name in names:
        if name in choices:
            continue
        meant = name
        if isinstance(name, str):
            meant = other_names.get(name.lower(), name.lower())
        hint = nearest(meant, choices) or f"known: {', '.join(choices)}"
        raise RopepatchError(f"unknown {what} {shown(name)}", hint=hint)


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


# Names, lengths and seeds

HUB_NAME = r"[A-Za-z0-9][\w.-]*"  # of an owner or a repository, in ASCII
TOKENS = r"([0-9]{1,12})([kKmM]?)"
MULTIPLE = r"([0-9]{1,6}(?:\.[0-9]{1,3})?)x"  # of the original length
UNITS = {"": 1, "k": 1024, "m": 1024**2}


def parse_length(text: str) -> int:
    """Parse a number of tokens: `4096`, `32k` or `1m`."""
    match = re.fullmatch(TOKENS, text.strip())
    if not match or int(match[1]) == 0:
        raise RopepatchError(
            f"{text!r} is not a length in tokens",
            hint="write 4096, 32k (32 x 1024), 1m, or 4x of the original",
        )
    return int(match[1]) * UNITS[match[2].lower()]


def relative_length(text: str | int, trained: int) -> int:
    """Parse a number of tokens as `parse_length`, or a multiple of the original length: `4x`, `1.5x`."""
    written = text if isinstance(text, str) else shown(number_of(text))
    match = re.fullmatch(MULTIPLE, written.strip())
    if not match:
        return parse_length(written)
    return round(float(match[1]) * trained) or parse_length("0")  # raises


def listed(values: Any) -> list[Any]:
    """Return the entries of a list or of comma-separated texts; any other value as a list of one."""
    if isinstance(values, str):
        return [value.strip() for value in values.split(",")]
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


def named_in(names: Iterable[str]) -> Any:
    """Return a field for JSON Schemas, in `Annotated`: a text that is one of these names."""
    return Field(json_schema_extra={"enum": [*names]})


def _check_length(length: Any) -> Any:
    """Raise a ValueError unless `relative_length` parses the value."""
    try:
        relative_length(length, 10**6)
    except RopepatchError:
        raise ValueError(
            "Input should be a length in tokens (4096, 32k or 4x)"
        ) from None
    return length


MAX_NUMBER = 1e12  # of a number in a formula: beyond it powers overflow
Entry = TypeVar("Entry")
Several = Annotated[tuple[Entry, ...], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(strict=True, gt=0, lt=2**63)]
Whole = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
AboveOne = Annotated[Number, Field(gt=1)]
FromOne = Annotated[Number, Field(ge=1)]
Amount = Annotated[Number, Field(gt=0)]
Weight = Annotated[Number, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PartShare = Annotated[float, Field(ge=0, lt=1)]
Length = Annotated[int | str, BeforeValidator(_check_length)]


class Settings(BaseModel):
    """User input of declared types, validated strictly: no texts for numbers, no unknown keys.

    An invalid value raises the `RopepatchError` of `refusal`, for YAML, JSON and Python. Lists and arrays
    become tuples, and NumPy and torch numbers become Python's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise refusal(error, type(self), values) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # keeps the path of nested errors

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

    def model_copy(
        self, *, update: Mapping[str, Any] | None = None, deep: bool = False
    ) -> Self:
        """Copy with other values, which are validated."""
        values = dict(iter(self))  # not dict(self): a field may be called `keys`
        return type(self)(**values | dict(update or {}))

    def __str__(self) -> str:
        return repr(self)

    def check(self) -> None:
        """Raise a `RopepatchError` if values cannot be combined."""

    @classmethod
    def _refusal(cls, place: str, words: str, value: Any) -> RopepatchError:
        return RopepatchError(f"{place} must {words}, got {shown(value)}")

    @model_validator(mode="before")
    @classmethod
    def _read(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        return {key: _plain(value) for key, value in content.items()}

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        self.check()
        return self


# The errors of pydantic for unknown keys of models and dataclasses.
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument", "invalid_key")


def refusal(error: ValidationError, kind: type[Any], content: Any) -> RopepatchError:
    """Make a `RopepatchError` with one line and a hint from the errors of pydantic.

    Args:
        error: The errors.
        kind: The class, settings or a dataclass.
        content: The input.
    """
    errors = error.errors(include_url=False)
    # Pydantic reports missing keys before unknown ones, which explain more.
    first = next((one for one in errors if one["type"] in UNKNOWN), errors[0])
    steps, place = first["loc"], _place(first["loc"], content)
    if first["type"] in (*UNKNOWN, "missing"):
        keys = _keys(kind, within=len(steps) > 1)
        listed = f"keys: {', '.join(keys)}"
        if first["type"] == "missing":
            missing = f"{place}.{steps[-1]}".removeprefix(".")
            return RopepatchError(f"{noun(kind)} needs {missing}", hint=listed)
        hint = nearest(steps[-1], keys) or listed
        return RopepatchError(f"unknown {noun(kind)} key {shown(place)}", hint=hint)
    words: list[str] = []  # several for a union
    for one in errors:
        said = re.sub(
            r"^(Value error, )?\w+ should | or instance of \w+$", "", one["msg"]
        )
        if _place(one["loc"], content) == place and said not in words:
            words.append(said)
    expected = (
        " or ".join(words).replace("tuple", "list").replace("dictionary", "mapping")
    )
    of_kind = kind if issubclass(kind, Settings) else Settings
    return of_kind._refusal(place or noun(kind), expected, first["input"])


def _place(steps: tuple[int | str, ...], content: Any) -> str:
    """Format a location, `data.sources[1].weight`, without pydantic's own steps within a union."""
    place = ""
    for step in steps:
        with suppress(KeyError, IndexError, TypeError):
            content = content[step]
            place += f".{step}" if str(step).isidentifier() else f"[{shown(step)}]"
    return place.removeprefix(".")


def _keys(kind: type[Any], *, within: bool) -> list[str]:
    """Return the keys of settings, or of all settings within them."""
    schema = TypeAdapter(kind).json_schema()
    parts = schema.get("$defs", {}).values() if within else [schema]
    return [key for part in parts for key in part.get("properties", {})]


def nearest(name: object, names: Iterable[str]) -> str:
    """Return a hint with the most similar name, empty if none is similar."""
    close = get_close_matches(name, list(names), n=1) if isinstance(name, str) else []
    return f"did you mean {close[0]}?" if close else ""


def noun(kind: type) -> str:
    """Return the name of a class in messages: `PasskeyTemplate` is "passkey template", `YaRN` "yarn"."""
    if issubclass(kind, Named):
        return kind.name
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", " ", kind.__name__).lower()


def shown(value: object) -> str:
    """Shorten any value to one line of a message."""
    try:
        return " ".join(_short.repr(value).split())
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return f"{type(value).__name__} of too many digits"


def number_of(value: Any) -> Any:
    """Convert a number or array of NumPy or torch to Python's int, float or list; return other values."""
    with suppress(RuntimeError):  # a meta tensor, to be refused by its type
        if hasattr(value, "tolist"):
            return value.tolist()
    return value


def whole_number(name: str, value: Any) -> int:
    """Return a whole number as an int; the error names the argument."""
    number = number_of(value)
    if isinstance(number, int) and not isinstance(number, bool) and abs(number) < 2**63:
        return number
    raise RopepatchError(
        f"{argument(name)} must be a whole number, got {shown(value)}",
        hint=f"such as {argument(name, 64)}",
    )


def _plain(value: Any) -> Any:
    """Convert lists and arrays to tuples, and numbers of other libraries to Python's."""
    value = number_of(value)
    if type(value) not in (list, tuple):
        return value
    return tuple(number_of(item) for item in value)


class Named(Settings):
    """The parameters of a `Registry` entry, which users choose by name."""

    name: ClassVar[str]
    formula: ClassVar[str] = ""  # one line, for tables
    paper: ClassVar[str] = "–"
    listed_by: ClassVar[str]  # the command that lists the parameters
    # Fields of all entries, not counted as parameters
    common: ClassVar[tuple[str, ...]] = ()

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
    def refuse_unknown(cls, parameters: Iterable[object]) -> None:
        """Raise a `RopepatchError` for an unknown parameter; the hint suggests the nearest name."""
        known = cls.defaults()
        for parameter in parameters:
            if parameter not in known:
                raise RopepatchError(
                    f"{cls.name} has no parameter {shown(parameter)}",
                    hint=nearest(parameter, known) or cls._list(),
                )

    def parameters(self) -> dict[str, Any]:
        """Return the parameters by name."""
        return {key: getattr(self, key) for key in self.defaults()}

    def check(self) -> None:
        """Raise a `RopepatchError` if values cannot be combined or are out of range."""
        for key, value in self:
            within = not isinstance(value, int | float) or abs(value) <= MAX_NUMBER
            self._require(within, key, f"at most {MAX_NUMBER:g}")

    def _require(self, holds: bool, parameter: str, words: str) -> None:
        if not holds:
            raise self._refusal(parameter, f"be {words}", getattr(self, parameter))

    @classmethod
    def _refusal(cls, place: str, words: str, value: Any) -> RopepatchError:
        return RopepatchError(
            f"{cls.name}: {place} must {words}, got {shown(value)}", hint=cls._list()
        )

    @classmethod
    def _list(cls) -> str:
        return f"`{cls.listed_by} {cls.name}` lists its parameters"


class _HasName(Protocol):
    name: ClassVar[str]


Kind = TypeVar("Kind", bound=_HasName)


class Registry(dict[str, type[Kind]]):
    """Classes by the name that users type; third parties can add entries.

    Args:
        what: Their kind in messages, such as "method".
        kinds: The classes, in the order of lists.
        other_names: Other names, only for suggestions.
    """

    def __init__(
        self,
        what: str,
        kinds: Iterable[type[Kind]] = (),
        *,
        other_names: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__({kind.name: kind for kind in kinds})
        self.what, self.other_names = what, dict(other_names or {})

    def find(self, name: str) -> type[Kind]:
        """Look up a class; the error of an unknown name suggests the nearest one and lists all."""
        refuse_unknown([name], self, self.what, self.other_names)
        return self[name]

    def make(self, name: str, /, **parameters: Any) -> Kind:
        """Look up a class and make an instance."""
        return self.find(name)(**parameters)
