"""Commands from functions: an option for each argument, with help from the docstring.

The signature of a public function is read from its file, because importing it takes seconds.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any

import rich.box
from cyclopts import App, Group, Parameter
from cyclopts.help import DefaultFormatter, PanelSpec
from docstring_parser import DocstringStyle
from docstring_parser import parse as parse_docstring

from ropepatch import HOME
from ropepatch.errors import arguments_written, in_python
from ropepatch.files import PACKAGE

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
app.register_install_completion_command(
    help="Install shell completion for commands, options and names."
)

ONLY_IN_PYTHON = {"say", "progress", "command", "card", "api", "repair"}
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
    *(
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
    ),
    *(
        "dry_run",
        "private",
        "engine",
        "show",
        "copy",
        "fold_attention",
        "quiet",
        "as_json",
    ),
}
GROUPS = Group("Usual options", sort_key=1), Group("Further options", sort_key=2)
Run = Callable[..., int | None]


def command(
    group: Group, examples: str, verb: str = "", *, name: str | None = None
) -> Callable[[Run], Run]:
    """Make a command of a function, which gets the user's arguments for a public function (the verb).

    Its own arguments come last, or replace those of the verb with the same name. It returns the exit code.
    """

    def register(run: Run) -> Run:
        parameters, description, meanings = _merged(run, verb)
        called_as = name or run.__name__
        ordered = sorted(parameters, key=lambda one: not _is_positional(one))
        names = {one.name: _written(one) for one in ordered}
        signature = inspect.Signature(
            [
                _parameter(
                    one, called_as, _in_options(meanings.get(one.name, ""), names)
                )
                for one in ordered
            ]
        )

        def called(*arguments: Any, **options: Any) -> int | None:
            given = signature.bind(*arguments, **options).arguments
            with arguments_written(partial(written, names)):
                return run(**given)

        called.__signature__ = signature  # type: ignore[attr-defined]
        called.__annotations__ = {
            one.name: one.annotation for one in signature.parameters.values()
        }
        epilogue = f"Examples:\n{examples}"
        app.command(
            called,
            name=called_as,
            group=group,
            help=_in_options(description, names),
            help_epilogue=epilogue,
        )
        return run

    return register


def _merged(run: Run, verb: str) -> tuple[list[inspect.Parameter], str, dict[str, str]]:
    """The parameters of a command and its verb, what they do, and the meaning of each parameter."""
    own = inspect.signature(run).parameters
    merged: dict[str, inspect.Parameter] = {}
    descriptions, meanings = [], dict(MEANINGS)
    if verb:
        of_verb, docstring = read_signature(verb)
        merged |= {one.name: one for one in of_verb if one.name not in ONLY_IN_PYTHON}
        descriptions.append(docstring)
    descriptions.append(inspect.getdoc(run) or "")
    for one in own.values():
        if one.kind is not one.VAR_KEYWORD:
            merged[one.name] = one
    if merged.pop("parameters", None):  # of a method, by name
        merged["settings"] = inspect.Parameter(
            "settings",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation="list[str] | None",
        )
    parts = []
    for docstring in descriptions:
        parsed = parse_docstring(docstring, DocstringStyle.GOOGLE)
        parts += [parsed.short_description, parsed.long_description]
        meanings |= {
            one.arg_name: " ".join((one.description or "").split())
            for one in parsed.params
        }
    text = "\n\n".join(part for part in parts if part)
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return list(merged.values()), "\n\n".join(paragraphs), meanings


def read_signature(verb: str) -> tuple[list[inspect.Parameter], str]:
    """The parameters of a public function and its docstring, from its file."""
    file = PACKAGE.joinpath(*HOME[verb].split(".")[1:]).with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    function = next(
        node
        for node in reversed(tree.body)
        if isinstance(node, ast.FunctionDef) and node.name == verb
    )
    arguments = function.args
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    required = [None] * (len(arguments.args) - len(arguments.defaults))
    found = list(
        _parameters(arguments.args, [*required, *arguments.defaults], positional)
    )
    found += _parameters(
        arguments.kwonlyargs, arguments.kw_defaults, inspect.Parameter.KEYWORD_ONLY
    )
    if arguments.kwarg:
        found.append(
            inspect.Parameter(arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD)
        )
    return found, ast.get_docstring(function) or ""


def _parameters(
    arguments: list[ast.arg], defaults: list[ast.expr | None], kind: Any
) -> Iterator[inspect.Parameter]:
    for argument, default in zip(arguments, defaults, strict=True):
        annotation = (
            "" if argument.annotation is None else ast.unparse(argument.annotation)
        )
        value = inspect.Parameter.empty
        if default is not None:
            value = _literal(default)
        yield inspect.Parameter(
            argument.arg, kind, default=value, annotation=annotation
        )


def _literal(default: ast.expr) -> Any:
    """A default; None for an object, which only Python can pass."""
    try:
        return ast.literal_eval(default)
    except ValueError:
        return None


def written(names: Mapping[str, str], name: str, value: str = "") -> str:
    """An argument as typed on the command line; ``names`` has the options by argument."""
    option = names.get(name) or names.get(f"{name}s")  # `method` of --methods
    if option is None and value and "settings" in names:  # a parameter of a method
        option, value = names["settings"], f"{name}={value}"
    if option is None and value:  # an option of another command
        option = f"--{name.replace('_', '-')}"
    return f"{option} {value}".rstrip() if option else in_python(name, value)


def _in_options(text: str, names: Mapping[str, str]) -> str:
    """A text of a docstring with arguments as typed on the command line."""
    for name, option in names.items():
        text = text.replace(f"`{name}`", option)
    return text


def _is_positional(one: inspect.Parameter) -> bool:
    return one.kind is not one.KEYWORD_ONLY and (
        one.default is one.empty or one.name in POSITIONAL
    )


def _written(one: inspect.Parameter) -> str:
    """An argument as typed on the command line, without a value."""
    if _is_positional(one):
        return one.name.upper()
    return NAMES.get(one.name, (f"--{one.name.replace('_', '-')}",))[0]


def _parameter(one: inspect.Parameter, command: str, meaning: str) -> inspect.Parameter:
    """An argument as a parameter of cyclopts."""
    kind, option, default = _kind(str(one.annotation)), _written(one), one.default
    options: dict[str, Any] = {
        "help": meaning,
        "show_default": kind is not bool and bool(default),
    }
    if one.default is False or kind == list[str]:
        options["negative"] = ()
    if kinds := COMPLETED.get(command if one.name == "name" else one.name):
        options["completer"] = partial(_complete, kinds)
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
    nodes = ast.walk(ast.parse(annotation, mode="eval"))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    if "bool" in names:
        return bool
    if names & {"list", "Iterable", "Sequence"}:
        return list[str]
    return {"int": int, "float": float}.get("".join(names), str)


# Completion


def _complete(kinds: tuple[str, ...], context: Any) -> list[str]:
    from ropepatch.settings import shipped_names

    names: list[str] = []
    for kind in kinds:
        names += _classes(kind) if kind in REGISTRIES else shipped_names(kind)
    return names


def _classes(package: str) -> Iterator[str]:
    """The names of a registry, read from its files."""
    for file in sorted((PACKAGE / package).glob("*.py")):
        yield from re.findall(
            r'^    name = "([\w-]+)"$', file.read_text("utf-8"), re.MULTILINE
        )


REGISTRIES = ("scaling", "attention", "encodings")
COMPLETED = {
    "method": REGISTRIES[:2],
    "methods": REGISTRIES[:2],
    "encodings": REGISTRIES[2:],
    "recipe": ("recipes",),
    "recipes": ("recipes",),
    "suites": ("eval/suites",),
    "suite": ("eval/suites",),
}
