"""The command line. Each command is one file and imports what is heavy when it runs."""

from __future__ import annotations

import io
import os
import signal
import sys

import typer

from ropepatch.cli import (
    compare,
    demo,
    doctor,
    encodings,
    evaluate,
    export,
    extend,
    fit,
    methods,
    plan,
    plot,
    push,
    recipes,
)
from ropepatch.errors import RopepatchError

app = typer.Typer(
    name="ropepatch",
    help="Give a LLaMA-family checkpoint a longer context; stock transformers loads the result.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
COMMANDS = extend, plan, evaluate, compare, fit, doctor, export, push, plot, methods, encodings, recipes, demo
for _command in COMMANDS:
    _name = _command.__name__.rpartition(".")[2]  # each module has a function of its name
    app.command("eval" if _name == "evaluate" else _name, epilog=_command.EXAMPLES)(vars(_command)[_name])


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


def main() -> None:
    """Run the command line: exit 0 done, 2 user error, 130 interrupted."""
    # An exit, not a death: so that nothing half-written stays.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # Greek letters on an ASCII terminal
    try:
        app()
        sys.stdout.flush()
    except RopepatchError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # Whoever read us, `head` say, has gone.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        print(
            f"error: {error.strerror or error}\nhint: check the disk that the output goes to", file=sys.stderr
        )
        sys.exit(2)
