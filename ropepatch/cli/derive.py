"""Commands from signatures: an option for each argument of a function, with help from its docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any

from cyclopts import App, Group, Parameter

from ropepatch.cli.help import HelpText
from ropepatch.errors import arguments_written, in_python
from ropepatch.files import PACKAGE

app = App(
    name="ropepatch",
    help="Extend the context length of RoPE checkpoints; stock transformers loads the result.",
    help_epilogue="MODEL is a checkpoint folder, a Hub id, or tiny, the bundled\n"
    "model. A length is a number of tokens, 32k for 32 x 1024, or\n"
    "4x the original length.",
    help_flags=["--help", "-h"],
    version_flags=["--version"],
    version=lambda: __import__("ropepatch").__version__,
    help_format="plaintext",
    help_formatter=HelpText(),
    result_action="return_value",
)
app.register_install_completion_command(help="Install shell completion for commands, options and names.")

ONLY_IN_PYTHON = {"say", "progress", "show", "command", "record", "work", "card", "api", "repair"}
ARGUMENTS = {"model", "checkpoint", "name", "file"}  # positional, although they may be left out
NAMES: dict[str, tuple[str, ...]] = {  # options with another name than their argument
    "evaluate": ("--eval",),
    "settings": ("--set",),
    "engine": ("--for",),
    "methods": ("--methods", "--method"),
    "quiet": ("--quiet", "-q"),
    "as_json": ("--json",),
    "show": ("--open",),
}
PLACEHOLDERS = {"engine": "ENGINE", "evaluate": "SUITE", "push": "REPO", "settings": "NAME=VALUE"}
COMMON = (  # options of many commands
    "    quiet: Print only warnings and results; no progress.",
    "    as_json: Print JSON.",
)
NAMED = re.compile(r"`(\w+)(?:=([^`]+))?`")  # an argument in a text: `to`, `to=32k`
Run = Callable[..., int | None]


def command(
    group: Group, examples: str, verb: Callable[..., Any] | None = None, *, name: str | None = None
) -> Callable[[Run], Run]:
    """Make a command of a function, which gets the user's arguments for a function of `api` (the verb).

    Its own arguments come last, or replace those of the verb with the same name. It returns the exit code.
    """

    def register(run: Run) -> Run:
        own = {
            key: one for key, one in inspect.signature(run).parameters.items() if one.kind != one.VAR_KEYWORD
        }
        of_verb = inspect.signature(verb).parameters if verb else {}
        merged = {key: own.get(key, one) for key, one in of_verb.items() if key not in ONLY_IN_PYTHON} | own
        if merged.pop("parameters", None):  # any others, by name
            merged.setdefault("settings", _SETTINGS)
        called_as = name or run.__name__
        names = {key: _option(one) for key, one in merged.items()}
        ordered = sorted(merged.values(), key=lambda one: not _is_argument(one))
        signature = inspect.Signature([_parameter(one, names[one.name], called_as) for one in ordered])

        def called(*arguments: Any, **options: Any) -> int | None:
            given = signature.bind(*arguments, **options).arguments
            with arguments_written(partial(written, names)):
                return run(**given)

        called.__signature__ = signature  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
        spelled = partial(NAMED.sub, lambda match: written(names, match[1], match[2] or ""))
        called.__doc__ = spelled(_text(run, verb))
        app.command(called, name=called_as, group=group, help_epilogue=f"Examples:\n{examples}")
        return run

    return register


def written(names: dict[str, str], name: str, value: str = "") -> str:
    """An argument as typed on the command line; ``names`` has the options by argument."""
    option = names.get(name) or names.get(f"{name}s")  # `method` of --methods
    if option is None and value and "settings" in names:  # a parameter of a method
        option, value = names["settings"], f"{name}={value}"
    if option is None and value:  # an option of another command
        option = f"--{name.replace('_', '-')}"
    return f"{option} {value}".rstrip() if option else in_python(name, value)


def _text(run: Run, verb: Callable[..., Any] | None) -> str:
    """The docstring of a verb followed by that of the command, with the explanations of arguments last.

    What a docstring says after its arguments is for Python only.
    """
    parts = [(inspect.getdoc(one) or "").partition("\n\nArgs:\n") for one in (verb, run) if one]
    description = "\n\n".join(re.sub(r"(?<!\n)\n(?!\n)", " ", text) for text, _, _ in parts)
    arguments = "\n".join([*(text.partition("\n\n")[0] for _, _, text in parts), *COMMON])
    if "    settings:" not in arguments:
        arguments = arguments.replace("**parameters:", "settings:")
    return f"{description}\n\nArgs:\n" + re.sub(r"\n {5,}", " ", arguments)


_SETTINGS = inspect.Parameter(
    "settings", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Mapping[str, Any] | None"
)


def _is_argument(one: inspect.Parameter) -> bool:
    return one.kind != one.KEYWORD_ONLY and (one.default is one.empty or one.name in ARGUMENTS)


def _option(one: inspect.Parameter) -> str:
    """An argument as typed on the command line, without a value."""
    return (
        one.name.upper()
        if _is_argument(one)
        else NAMES.get(one.name, (f"--{one.name.replace('_', '-')}",))[0]
    )


def _parameter(one: inspect.Parameter, option: str, command: str) -> inspect.Parameter:
    """An argument of a verb as a parameter of cyclopts."""
    kind, shown = _kind(one), option.split("-")[-1].upper()
    options: dict[str, Any] = {"negative": () if one.default is False or kind == list[str] else None}
    if kinds := COMPLETED.get(command if one.name == "name" else one.name):
        options["completer"] = partial(_complete, kinds)
    if not _is_argument(one):
        options["name"] = NAMES.get(one.name, option)
    if kind is not bool:
        options["metavar"] = PLACEHOLDERS.get(one.name, "N" if kind is int else shown)
    default = one.default if one.default is one.empty or isinstance(one.default, str | int | float) else None
    options["show_default"] = kind is not bool and bool(one.default)
    if isinstance(one.default, tuple) and one.default:
        options["show_default"] = lambda _: ",".join(one.default)
    return one.replace(
        kind=one.POSITIONAL_ONLY if _is_argument(one) else one.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind if default is not None else kind | None, Parameter(**options)],
    )


def _kind(one: inspect.Parameter) -> Any:
    """The type that cyclopts parses a word into; if Python allows several, text."""
    written = str(one.annotation)
    if "bool" in written:
        return bool
    if any(part in written for part in ("list", "Iterable", "Sequence", "Mapping")):
        return list[str]
    return {"int": int, "float": float}.get(written.removesuffix(" | None"), str)


# Completion


def _complete(kinds: tuple[str, ...], context: Any) -> list[str]:
    from ropepatch.settings import shipped_names

    return [
        name for kind in kinds for name in (_classes(kind) if kind in REGISTRIES else shipped_names(kind))
    ]


def _classes(package: str) -> Iterable[str]:
    """The names of a registry, read from its files, because importing them takes seconds."""
    for file in sorted((PACKAGE / package).glob("*.py")):
        yield from re.findall(r'^    name(?:: .*)? = "([\w-]+)"$', file.read_text("utf-8"), re.MULTILINE)


REGISTRIES = ("scaling", "attention", "encodings")
COMPLETED = {
    "method": REGISTRIES[:2],
    "methods": REGISTRIES[:2],
    "encodings": REGISTRIES[2:],
    "recipe": ("recipes",),
    "recipes": ("recipes",),
    "suites": ("eval/suites",),
    "suite": ("eval/suites",),
    "evaluate": ("eval/suites",),
}
