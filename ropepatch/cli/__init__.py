"""The command line. Each command is one file and imports what is heavy when it runs."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from itertools import chain
from types import ModuleType
from typing import Any, NoReturn

import typer
import typer.core

from ropepatch.cli import (
    compare,
    demo,
    doctor,
    encodings,
    evaluate,
    explore,
    export,
    extend,
    fit,
    methods,
    plan,
    plot,
    probe,
    push,
    recipes,
    suites,
)
from ropepatch.cli.usage import Command, UsageError, told
from ropepatch.errors import RopepatchError

GROUPS = {  # with a line for each, of at most 60 characters
    "Make": {
        extend: "Write a checkpoint with a longer context",
        fit: "Learn the frequencies of a target from text",
        export: "Write a checkpoint for engines that ignore its attention factor",
        push: "Publish a checkpoint with its card on the Hub",
    },
    "Measure": {
        evaluate: "Perplexity by length, retrieval, or a whole suite",
        compare: "Rank methods on a model, training-free",
        plot: "Draw results as figures or a report",
        demo: "See it all on the bundled model, in a minute",
    },
    "Look before": {
        plan: "Show what an extension would change; no weights read",
        doctor: "Find what is wrong with a checkpoint's rope",
        probe: "Tell whether a server computes a checkpoint's rope",
        explore: "Show as a page why a rope fails, and what mends it",
    },
    "List": {
        methods: "Scalings and attention maps, for --method",
        encodings: "Position encodings, for `ropepatch.swap`",
        recipes: "Trainings, for `extend --recipe`",
        suites: "Measurements, for `eval --suite` and `extend --eval`",
    },
}


class _Grouped(typer.core.TyperGroup):
    """Lists the commands under their headings."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading, commands in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(_name(command), words) for command, words in commands.items()])


def _name(command: ModuleType) -> str:
    return "eval" if command is evaluate else command.__name__.rpartition(".")[2]


app = typer.Typer(
    name="ropepatch",
    cls=_Grouped,
    help="Give a LLaMA-family checkpoint a longer context; stock transformers loads the result.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
for _command in chain.from_iterable(GROUPS.values()):
    _function = vars(_command)[_command.__name__.rpartition(".")[2]]  # each module has a function of its name
    app.command(_name(_command), cls=Command, epilog=_command.EXAMPLES)(_function)


def _version(wanted: bool) -> None:
    if wanted:
        from ropepatch import __version__

        print(__version__)
        raise typer.Exit


@app.callback(
    epilog="MODEL is a checkpoint folder, a Hub id, or tiny, the checkpoint that comes with ropepatch. "
    "Lengths read 32k = 32 x 1024 tokens."
)
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def _refuse(error: RopepatchError) -> NoReturn:
    print(f"{_coloured('error:', RED)} {error}", file=sys.stderr)
    if error.hint:
        print(f"{_coloured('hint:', CYAN)} {error.hint}", file=sys.stderr)
    sys.exit(2)


RED, CYAN = 31, 36


def _coloured(word: str, colour: int) -> str:
    """For stderr; plain in a pipe, on a terminal without colours, and where NO_COLOR is set."""
    shown = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{colour}m{word}\x1b[0m" if shown else word


def main() -> None:
    """Run the command line: exit 0 done, 2 user error, 130 interrupted."""
    # An exit, not a death: so that nothing half-written stays.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # Greek letters on an ASCII terminal
    try:
        code = app(prog_name="ropepatch", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code)
    except UsageError as error:
        if not sys.argv[1:]:  # which is answered with the help
            error.show()
            sys.exit(error.exit_code)
        _refuse(told(error))
    except RopepatchError as error:
        _refuse(error)
    except BrokenPipeError:
        # Whoever read us, `head` say, has gone.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "free some space" if full else "look at that path" if named else None
        _refuse(RopepatchError(f"{named}{error.strerror or error}", hint=hint))
