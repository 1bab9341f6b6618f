"""What a command line that cannot be read is told, and what stands for a value in the help."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any

import typer
import typer.core

from ropepatch.errors import RopepatchError

UsageError: Any = typer.BadParameter.__base__  # of typer's own click, or of click, as typer's version has it
STANDS_FOR = {
    **dict.fromkeys(("to", "lengths", "stride"), "TOKENS"),
    **dict.fromkeys(("out", "report", "fix"), "PATH"),
    **dict.fromkeys(("windows", "documents", "haystacks", "keys", "steps", "seed", "limit"), "N"),
    **dict.fromkeys(("minutes",), "NUMBER"),
    **dict.fromkeys(("method", "methods", "init"), "METHOD"),
    "text": "TEXT",
    "field": "KEY",
    "suite": "SUITE",
    "revision": "REV",
}
OTHER_NAMES = {"evaluate": "eval", "settings": "set", "out": "fix"}  # of an argument, as an option
ARGUMENT = re.compile(r"`(\w+)(?:=([^`]+))?`")  # in a message: `to`, `to=32k`


class Command(typer.core.TyperCommand):
    """A command whose help says plainly what its values are, and whose errors name its options."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for parameter in self.params:
            if isinstance(parameter, typer.core.TyperArgument):
                parameter.display_type_rich = lambda ctx: ""  # type: ignore[method-assign]
            elif not parameter.metavar and not getattr(parameter, "is_flag", False):
                parameter.metavar = STANDS_FOR.get(parameter.name or "", "NAME")

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an error that names arguments, as in Python, names its options instead."""
        try:
            return super().invoke(ctx)
        except RopepatchError as error:
            error.args = (self._with_options(str(error)),)
            error.hint = error.hint and self._with_options(error.hint)
            raise

    def _with_options(self, text: str) -> str:
        options = {name for one in self.params for name in one.opts if name.startswith("--")}
        arguments = {one.name: one.metavar for one in self.params if one.param_type_name == "argument"}

        def spelled(match: re.Match[str]) -> str:
            name, value = match.groups()
            for one in (name, OTHER_NAMES.get(name, name)):
                option = f"--{one.replace('_', '-')}"
                if option in options:
                    return f"{option} {value}" if value else option
            return arguments.get(name) or match[0]

        return ARGUMENT.sub(spelled, text)


def told(error: Any) -> RopepatchError:
    """What typer refuses, in a line and a hint."""
    context, parameter = error.ctx, getattr(error, "param", None)
    see = f"see `{context.command_path if context else 'ropepatch'} --help`"
    said, _, advice = error.format_message().partition(". ")
    if said.startswith("No such option"):
        bare = {  # the dashes that all have make none alike; an argument goes by what stands for it
            name.lstrip("-"): name if name.startswith("-") else one.metavar
            for one in context.command.params
            for name in one.opts
        }
        near = get_close_matches(error.option_name.lstrip("-"), bare, n=1)
        return RopepatchError(
            f"no such option {error.option_name}", hint=f"did you mean {bare[near[0]]}?" if near else see
        )
    if said.startswith("Missing") and parameter is not None:
        name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar
        return RopepatchError(f"{name} is missing", hint=f"{_within(parameter.help)}; {see}")
    has_target = context is not None and any("--to" in one.opts for one in context.command.params)
    if has_target and (length := re.search(r"extra argument.* \((\d+[kKmM]?|[\d.]+x)\)$", said)):
        return RopepatchError(_within(said), hint=f"a length is an option: --to {length[1]}; {see}")
    return RopepatchError(_within(said), hint=_within(advice) or see)


def _within(sentence: str) -> str:
    """A sentence as it stands behind a colon."""
    return f"{sentence[:1].lower()}{sentence[1:].rstrip('.')}"
