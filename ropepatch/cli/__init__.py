"""The command line. Commands import heavy modules when they run."""

from __future__ import annotations

import errno
import io
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from cyclopts import CycloptsError, UnusedCliTokensError

from ropepatch.cli import listing, look, make, measure  # noqa: F401  # they add the commands
from ropepatch.cli.derive import app
from ropepatch.cli.streams import printable_logs
from ropepatch.errors import RopepatchError, is_out_of_memory

LESS_MEMORY = (
    "use shorter lengths; in a copy of a recipe, set gradient_checkpointing: true"
)


def main() -> None:
    """Run the command line: exit 0 done, 1 a bad finding, 2 user error, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # Greek letters on an ASCII terminal
    while (unused := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # else a library would print into the next file that is opened
    os.close(unused)
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115  # until the end
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115  # as above
    with printable_logs():
        _run()


def _run() -> NoReturn:
    try:
        # Exit on SIGTERM, and on SIGHUP when the terminal closes, so that cleanup removes incomplete files.
        # What the caller ignores, as nohup does, stays ignored.
        handlers: dict[int, Any] = {
            getattr(signal, "SIGHUP", signal.SIGTERM): _exit,
            signal.SIGTERM: _exit,
            signal.SIGINT: signal.default_int_handler,
        }
        for number, handler in handlers.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)
        if "--install-completion" in sys.argv:  # its import takes time
            app.register_install_completion_command()
        code = app(sys.argv[1:], exit_on_error=False, print_error=False)
        sys.stdout.flush()
        sys.exit(code if sys.argv[1:] else 2)
    except CycloptsError as error:
        _refuse(_usage_error(error))
    except RopepatchError as error:
        _refuse(error)
    except KeyboardInterrupt:  # while the command line is parsed
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        # The reader of the pipe, such as `head`, has closed it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (RuntimeError, MemoryError, OSError) as error:
        if is_out_of_memory(error):
            _refuse(RopepatchError("out of memory", hint=LESS_MEMORY))
        if not isinstance(error, OSError):
            raise
        named = f"{error.filename}: " if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "free some space" if full else "check that path" if named else None
        _refuse(RopepatchError(f"{named}{error.strerror or error}", hint=hint))


def _exit(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _usage_error(error: CycloptsError) -> RopepatchError:
    """An error of cyclopts as one line and a hint."""
    error.verbose = False
    words, _, advice = " ".join(str(error).split()).partition(". ")
    if isinstance(error, UnusedCliTokensError):
        words = f"unexpected {shlex.join(error.unused_tokens or ())}"
    command = " ".join(["ropepatch", *(error.command_chain or ())])
    # A suggestion, followed by a list of all words
    near, mark, _ = advice.partition("?")
    hint = f"{near[:1].lower()}{near[1:]}?" if mark else f"see `{command} --help`"
    return RopepatchError(f"{words[:1].lower()}{words[1:].rstrip('.')}", hint=hint)


def _refuse(error: RopepatchError) -> NoReturn:
    from rich.text import Text

    from ropepatch.columns import PLAIN, Console

    console = Console(stderr=True, soft_wrap=True, **PLAIN)
    console.print(Text("error:", "red"), str(error))
    if error.hint:
        console.print(Text("hint:", "cyan"), error.hint)
    sys.exit(2)
