"""Commands from functions: an option for each argument, with help from the docstring.

The signature of a public function is read from its file, because importing it takes seconds.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import rich.box
from cyclopts import App, Group, Parameter
from cyclopts.help import DefaultFormatter, PanelSpec

from ropepatch import HOME
from ropepatch.errors import arguments_written, in_python

app = App(
    name="ropepatch",
    help="Extend the context length of RoPE checkpoints; stock transformers loads the result.",
    help_epilogue="MODEL is a checkpoint folder, a Hub id, or tiny, the bundled model. A length is a "
    "number of tokens, 32k for 32 x 1024, or 4x the original length.",
    help_flags=["--help", "-h"],
    version_flags=["--version"],
    version=lambda: __import__("ropepatch").__version__,
    help_format="plaintext",
    help_formatter=DefaultFormatter(
        panel_spec=PanelSpec(box=rich.box.SIMPLE, padding=(0, 0))
    ),
    result_action="return_value",
)


PACKAGE = Path(__file__).parents[1]
ONLY_IN_PYTHON = {"say", "progress", "command"}
POSITIONAL = {"model", "checkpoint", "name", "file"}  # also where they may be left out
NAMES: dict[str, tuple[str, ...]] = {  # options with another name than their argument
    "settings": ("--set",),
    "engine": ("--for",),
    "methods": ("--methods", "--method"),
    "quiet": ("--quiet", "-q"),
    "as_json": ("--json",),
    "show": ("--open",),
}
PLACEHOLDERS = {"engine": "ENGINE", "settings": "NAME=VALUE"}
MEANINGS = {  # options of many commands
    "quiet": "Print only warnings and results; no progress.",
    "as_json": "Print JSON.",
    "settings": "A parameter of the method; see `ropepatch methods NAME`.",
}
USUAL = {
    "to",
    "method",
    "methods",
    "settings",
    "recipe",
    "text",
    "suite",
    "lengths",
    "out",
    "report",
    "fix",
    "dry_run",
    "private",
    "engine",
    "show",
    "copy",
    "fold_attention",
    "quiet",
    "as_json",
}
GROUPS = Group("Usual options", sort_key=1), Group("Further options", sort_key=2)
Run = Callable[..., int | None]


def command(
    group: Group, examples: str, verb: str = "", *, name: str | None = None
) -> Callable[[Run], Command]:
    """Make a command of a function, which gets the user's arguments for a public function (the verb).

    Its own arguments come last, or replace those of the verb with the same name. It returns the exit code.
    """

    def register(run: Run) -> Command:
        made = Command(run, verb, name or run.__name__)
        app.command(  # by its path: cyclopts asks only the command that runs for its signature
            f"{run.__module__}:{run.__name__}",
            name=made.name,
            group=group,
            help=made.description,
            usage=made.usage,
            help_epilogue=f"Examples:\n{examples}",
        )
        return made

    return register


class Command:
    """What cyclopts calls.

    Args:
        run: The function of the command.
        verb: The public function that it calls; empty for none.
        name: The command.
    """

    def __init__(self, run: Run, verb: str, name: str) -> None:
        self.run, self.verb, self.name = run, verb, name

    def __call__(self, *arguments: Any, **options: Any) -> int | None:
        """Run the command with the words that cyclopts has parsed."""
        given = self.__signature__.bind(*arguments, **options).arguments
        with arguments_written(partial(written, self.names)):
            return self.run(**given)

    @property
    def description(self) -> str:
        """What it does: what the verb does, and what the command adds."""
        texts = [
            re.split(r"\n\n(?:Args|Returns|Raises):", docstring)[0]
            for docstring in self.docstrings
        ]
        paragraphs = "\n\n".join(filter(None, texts)).split("\n\n")
        joined = [" ".join(paragraph.split()) for paragraph in paragraphs]
        return self.in_options("\n\n".join(joined))

    @property
    def usage(self) -> str | None:
        """The usage with a name for what may be left out, which cyclopts calls ARGS; None without any."""
        places = [one for one in self.parameters if _is_positional(one)]
        if all(one.default is one.empty for one in places):
            return None
        names = [
            _written(one) if one.default is one.empty else f"[{_written(one)}]"
            for one in places
        ]
        return f"Usage: ropepatch {self.name} [OPTIONS] {' '.join(names)}"

    @cached_property
    def docstrings(self) -> list[str]:
        """The docstrings of the verb and of the function."""
        own = inspect.getdoc(self.run) or ""
        return [inspect.cleandoc(source_of(self.verb)[1]), own] if self.verb else [own]

    @cached_property
    def parameters(self) -> list[inspect.Parameter]:
        """The arguments of the verb and of the function."""
        merged: dict[str, inspect.Parameter] = {}
        if self.verb:
            for one in read_parameters(self.verb):
                if one.name not in ONLY_IN_PYTHON:
                    merged[one.name] = one
        for one in inspect.signature(self.run).parameters.values():
            if one.kind is not one.VAR_KEYWORD:
                merged[one.name] = one
        if merged.pop("parameters", None):  # of a method, by name
            merged["settings"] = inspect.Parameter(
                "settings",
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation="list[str] | None",
            )
        return sorted(merged.values(), key=lambda one: not _is_positional(one))

    @cached_property
    def names(self) -> dict[str, str]:
        """The arguments as typed on the command line."""
        return {one.name: _written(one) for one in self.parameters}

    def in_options(self, text: str) -> str:
        """Return a text of a docstring with arguments as typed on the command line."""
        return re.sub(r"`(\w+)`", lambda word: self.names.get(word[1], word[0]), text)

    @cached_property
    def __signature__(self) -> inspect.Signature:
        from docstring_parser import DocstringStyle, parse

        meanings = dict(MEANINGS)
        for docstring in self.docstrings:
            for one in parse(docstring, DocstringStyle.GOOGLE).params:
                meanings[one.arg_name] = " ".join((one.description or "").split())
        return inspect.Signature(
            [
                _parameter(one, self.in_options(meanings.get(one.name, "")))
                for one in self.parameters
            ]
        )

    @property
    def __annotations__(self) -> dict[str, Any]:  # type: ignore[override]
        parameters = self.__signature__.parameters.values()
        return {one.name: one.annotation for one in parameters}


def source_of(verb: str) -> tuple[str, str]:
    """Return a public function up to its docstring, and its docstring, from its file."""
    file = PACKAGE.joinpath(*HOME[verb].split(".")[1:]).with_suffix(".py")
    pattern = rf'^(def {verb}\(.*?:\n    )"""(.*?)"""$'
    found = re.search(pattern, file.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1], found[2]


def read_parameters(verb: str) -> Iterable[inspect.Parameter]:
    """Return the parameters of a public function, without importing what their defaults need."""
    # None for what only Python can pass
    made: dict[str, Any] = defaultdict(lambda: None)
    header = f"from __future__ import annotations\n{source_of(verb)[0]}..."
    exec(header, {}, made)
    return inspect.signature(made[verb]).parameters.values()


def written(names: Mapping[str, str], name: str, value: str = "") -> str:
    """An argument as typed on the command line; ``names`` has the options by argument."""
    option = names.get(name) or names.get(f"{name}s")  # `method` of --methods
    if option is None and value and "settings" in names:  # a parameter of a method
        option, value = names["settings"], f"{name}={value}"
    if option is None and value:  # an option of another command
        option = f"--{name.replace('_', '-')}"
    return f"{option} {value}".rstrip() if option else in_python(name, value)


def _is_positional(one: inspect.Parameter) -> bool:
    return one.kind is not one.KEYWORD_ONLY and (
        one.default is one.empty or one.name in POSITIONAL
    )


def _written(one: inspect.Parameter) -> str:
    """An argument as typed on the command line, without a value."""
    if _is_positional(one):
        return one.name.upper()
    return NAMES.get(one.name, (f"--{one.name.replace('_', '-')}",))[0]


def _parameter(one: inspect.Parameter, meaning: str) -> inspect.Parameter:
    """An argument as a parameter of cyclopts."""
    kind, option, default = _kind(str(one.annotation)), _written(one), one.default
    options: dict[str, Any] = {
        "help": meaning,
        "show_default": kind is not bool and bool(default),
    }
    if one.default is False or kind == list[str]:
        options["negative"] = ()
    if not _is_positional(one):
        options["name"] = NAMES.get(one.name, option)
        options["group"] = (
            GROUPS[0] if one.name in USUAL or default is one.empty else GROUPS[1]
        )
    if kind is not bool:
        options["metavar"] = PLACEHOLDERS.get(
            one.name, "N" if kind is int else option.split("-")[-1].upper()
        )
    if isinstance(default, tuple):
        if default:
            options["show_default"] = lambda _: ",".join(one.default)
        default = None
    return one.replace(
        kind=one.POSITIONAL_ONLY if _is_positional(one) else one.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[
            kind | None if default is None else kind, Parameter(**options)
        ],
    )


def _kind(annotation: str) -> Any:
    """The type that cyclopts parses a word into; if Python allows several, text."""
    names = set(re.findall(r"\w+", annotation)) - {"None"}
    if "bool" in names:
        return bool
    if names & {"list", "Iterable", "Sequence"}:
        return list[str]
    return {"int": int, "float": float}.get("".join(names), str)
