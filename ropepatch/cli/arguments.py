"""How the words of a command line become values."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from ropepatch.cli.catalogue import entries, find_entry
from ropepatch.errors import RopepatchError
from ropepatch.files import read_text

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint folder, a Hub id, or tiny.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="A parameter of the method; repeatable. See `methods NAME`."
    ),
]
METHODS_OPTION = ("--method", "--methods")  # of the commands that measure several
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")]
Include = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB",
        help="Carry along what is no part of a checkpoint, such as 'examples/*'; may be repeated.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TextSource = Annotated[
    str | None,
    typer.Option(
        "--text",
        help="A text or JSONL file, a folder of them, a `datasets` id, or a set saved by `datasets`. "
        "tiny has tales of its own.",
    ),
]
TextField = Annotated[str, typer.Option("--field", help="The column or key of a document's text.")]
SPLIT = "Which part of a `datasets` id or a saved set is read"
TextSplit = Annotated[str, typer.Option("--split", help=f"{SPLIT}.")]
Device = Annotated[
    str | None,
    typer.Option(metavar="DEVICE", help="cpu, cuda or cuda:1, say; a GPU, if there is one, if not given."),
]
DType = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="float32, bfloat16 or float16; that of the weights, or the faster one on a CPU, if not given.",
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Measure at most so many pieces of text, haystacks, documents per lm-eval task.",
    ),
]
Seed = Annotated[int | None, typer.Option(min=0, help="Draw the haystacks from it.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Say nothing on the way but warnings; no progress bars.")
]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="A folder for the results; what it holds already is not measured again."),
]
Report = Annotated[Path | None, typer.Option("--report", help="Write an HTML file with tables and figures.")]


def complete(*kinds: str) -> Callable[[str], list[str]]:
    """For the shell, the names of these kinds that begin with what is typed so far."""

    def names(incomplete: str) -> list[str]:
        from ropepatch.settings import SUITES, shipped_names

        known = [
            name for kind in kinds for name in (shipped_names(SUITES) if kind == "suites" else entries(kind))
        ]
        return [name for name in known if name.startswith(incomplete)]

    return names


def early(check: Callable[[str], object]) -> Callable[[Any], Any]:
    """A callback that checks what was typed, each of several, before a command imports anything heavy."""

    def checked(value: Any) -> Any:
        for one in [] if value is None else [value] if isinstance(value, str) else value:
            check(one)
        return value

    return checked


@early
def a_length(text: str) -> None:
    """Refuse what is no length."""
    from ropepatch.settings import relative_length

    relative_length(text, trained=1)


@early
def some_lengths(texts: str) -> None:
    """Refuse what are no lengths, separated by commas."""
    from ropepatch.settings import relative_length

    for text in split_names([texts]):
        relative_length(text, trained=1)


Original = Annotated[
    str | None,
    typer.Option(
        "--original",
        metavar="TOKENS",
        help="The window the model was trained on, where config.json says another: 32k of Qwen3, "
        "whose says 40960.",
        callback=a_length,
    ),
]


@early
def a_method(name: str) -> None:
    """Refuse what is no method; files are left to who reads them."""
    if not name.endswith(".json") and name not in ("fit", "auto"):
        find_entry("method", name)


@early
def some_methods(names: str) -> None:
    """Refuse what are no methods, separated by commas; groups and files are left to who reads them."""
    for name in split_names([names]):
        if not name.endswith(".json") and name not in ("all", "maps", "fit", "auto"):
            find_entry("method", name)


@early
def a_recipe(name: str) -> None:
    """Refuse what is no recipe."""
    from ropepatch.settings import RECIPES, find_shipped

    find_shipped(name, RECIPES, "recipe")


@early
def a_suite(name: str) -> None:
    """Refuse what is no suite."""
    from ropepatch.settings import SUITES, find_shipped

    find_shipped(name, SUITES, "suite")


def split_names(values: list[str] | None) -> list[str]:
    """The names of an option that may be repeated, and hold several separated by commas."""
    return [name.strip() for value in values or [] for name in value.split(",")]


def feedback(quiet: bool) -> dict[str, Any]:
    """How a command speaks on the way, for the functions of `ropepatch.pipeline`."""
    from ropepatch.pipeline.running import bar, no_bar, say_on_stderr, warn_on_stderr

    return {"say": warn_on_stderr, "progress": no_bar} if quiet else {"say": say_on_stderr, "progress": bar}


def command_line() -> str:
    """The line that the user gave."""
    return shlex.join(["ropepatch", *sys.argv[1:]])


def parse_settings(method: str, settings: list[str] | None, *, learnable: bool = False) -> dict[str, Any]:
    """NAME=VALUE pairs as the types that the method's dataclass declares.

    Args:
        method: A name, or a scaling file, which holds every parameter.
        settings: The pairs.
        learnable: Whether `fit` and `auto` may stand for a method; `extend` checks what is set beside them.

    Raises:
        RopepatchError: If a pair has no `=`, its name is unknown or its value is of another type; or beside a
            scaling file; or the method is `fit` or `auto`.
    """
    from ropepatch.extension.planning import check_method, find_method
    from ropepatch.scaling.file import AUTO, FIT, is_scaling_file

    pairs = [_pair(setting) for setting in settings or []]
    if learnable and method in (FIT, AUTO):  # of the parameters of `fit`, the steps alone are a number
        return {name: int(text) if name == "steps" and text.isdecimal() else text for name, text in pairs}
    types = {} if is_scaling_file(method) else get_type_hints(find_method(method))
    parameters = {
        name: _value(method, name, text, types[name]) if name in types else text for name, text in pairs
    }
    check_method(method, parameters)
    return parameters


def _pair(setting: str) -> tuple[str, str]:
    name, equals, text = setting.partition("=")
    if not equals:
        raise RopepatchError(f"--set {setting} has no value", hint="write --set NAME=VALUE")
    return name, text


def _value(method: str, name: str, text: str, kind: Any) -> Any:
    if get_origin(kind) in (Union, UnionType):
        kinds = [option for option in get_args(kind) if option is not type(None)]
        return None if text.lower() in ("none", "null") else _value(method, name, text, kinds[0])
    if get_origin(kind) is Literal or kind is str:
        return text
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        if get_origin(kind) is tuple:
            is_file = text.endswith(".json")
            numbers = json.loads(read_text(Path(text))) if is_file else text.split(",")
            return tuple(map(float, numbers))
        return kind(text)
    except (ValueError, KeyError, TypeError, OSError) as error:
        words = {bool: "true or false", int: "a whole number", float: "a number"}
        expected = words.get(kind, "numbers separated by commas, or a JSON file with a list")
        raise RopepatchError(
            f"{name} must be {expected}, got {text!r}",
            hint=f"`ropepatch methods {method}` lists its parameters",
        ) from error


def parse_share(text: str) -> float:
    """A share from `2%` or `0.02`.

    Raises:
        RopepatchError: If the text is neither, or below 0, or 1 or more without a percent sign.
    """
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < (float("inf") if percent else 1):
        raise RopepatchError(f"{text!r} is not a share", hint="write 2% or 0.02")
    return share
