"""The command line. Commands import heavy modules when they run."""

from __future__ import annotations

import errno
import io
import os
import re
import shlex
import signal
import sys
from pathlib import Path
from threading import Timer
from typing import Any, NoReturn

from cyclopts import CycloptsError, UnknownOptionError, UnusedCliTokensError

from ropepatch.cli import listing, look, make, measure
from ropepatch.cli.derive import app
from ropepatch.cli.streams import Output, safe_streams
from ropepatch.errors import LENGTHS, RopepatchError, is_out_of_memory

SCALINGS = {  # options of other tools whose value is a RoPE scaling or its factor
    "rope_scaling",
    "rope_parameters",
    "rope_type",
    "hf_overrides",
    "json_model_override_args",
    "factor",
    "rope_factor",
    "rope_scaling_factor",
    "rope_scaling_type",
    "rope_scale",
    "scale",
}
LESS_MEMORY = {  # hints of commands that need much
    "eval": "use shorter --lengths, or a --suite of shorter ones",
    "compare": "use a shorter --to",
    "extend": "use a shorter --to",
    "train": "in a copy of the recipe, set gradient_checkpointing: true or lower tokens_per_batch; "
    "--dry-run estimates the memory",
}
GROUPS = {one.GROUP.name: one for one in (make, measure, look, listing)}
# Commands whose work is a file
WRITING = {"extend", "train", "export", "push", "explore", "plot"}


def main() -> None:
    """Run the command line: exit 0 done, 1 a bad finding, 2 user error, 130 interrupted."""
    before, sys.unraisablehook = sys.unraisablehook, _again
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # Greek letters on an ASCII terminal
    try:
        with safe_streams() as (stdout, _):
            _run(stdout)
    finally:
        sys.unraisablehook = before


def _run(stdout: Output) -> NoReturn:
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
        _check_interpreter()
        _check_words(sys.argv[1:])
        code = app(sys.argv[1:], exit_on_error=False, print_error=False)
        if stdout.failure and sys.argv[1:2] and sys.argv[1] not in WRITING:
            reason = stdout.failure.strerror
            raise RopepatchError(
                f"cannot write to stdout: {reason}", hint="redirect it to another file"
            )
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
            _refuse(_out_of_memory(error))
        if not isinstance(error, OSError):
            raise
        named = f"{error.filename}: " if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "free some space" if full else "check that path" if named else None
        _refuse(RopepatchError(f"{named}{error.strerror or error}", hint=hint))


def _check_interpreter() -> None:
    """Raise a `RopepatchError` where no command can run."""
    try:
        Path.cwd()
    except OSError as error:
        message = f"the working folder cannot be used: {error.strerror or error}"
        raise RopepatchError(message, hint="cd to a folder that exists") from error
    if sys.flags.optimize >= 2:
        raise RopepatchError(
            "Python runs without docstrings (-OO), which transformers needs",
            hint="unset PYTHONOPTIMIZE",
        )


def _check_words(words: list[str]) -> None:
    """Raise a `RopepatchError` for a word that is not UTF-8."""
    if not all(map(str.isascii, words)):
        from ropepatch.files import check_name

        for word in words:
            check_name(word)


def _exit(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _again(unraisable: Any) -> None:
    """Send a signal again if Python dropped its exception, which happens in destructors."""
    numbers = {KeyboardInterrupt: signal.SIGINT, SystemExit: signal.SIGTERM}
    if number := numbers.get(unraisable.exc_type):
        Timer(0.1, os.kill, [os.getpid(), number]).start()
    else:
        sys.__unraisablehook__(unraisable)


def _out_of_memory(error: BaseException) -> RopepatchError:
    """An allocation that failed, as one line, and what needs less memory in this command."""
    command = next((word for word in sys.argv[1:] if word in LESS_MEMORY), "")
    size = re.search(
        r"tried to allocate (?:(\d+) bytes|([\d.]+ \w+))", str(error), re.IGNORECASE
    )
    tried = size and (size[2] or f"{int(size[1]) / 2**20:,.0f} MiB")
    said = f"out of memory: tried to allocate {tried}" if tried else "out of memory"
    return RopepatchError(said, hint=LESS_MEMORY.get(command, "free some memory"))


def _usage_error(error: CycloptsError) -> RopepatchError:
    """An error of cyclopts as one line and a hint."""
    from difflib import get_close_matches

    error.verbose = False
    words, _, advice = " ".join(str(error).split()).partition(". ")
    if isinstance(error, UnusedCliTokensError):
        words = f"unexpected {shlex.join(error.unused_tokens or ())}"
    command = " ".join(["ropepatch", *(error.command_chain or ())])
    # A suggestion, followed by a list of all words
    near, mark, _ = advice.partition("?")
    hint = f"{near[:1].lower()}{near[1:]}?" if mark else f"see `{command} --help`"
    if isinstance(error, UnknownOptionError):
        option = error.token.keyword or error.token.value
        # The dashes are alike
        if not get_close_matches(option.strip("-"), [near.rpartition("--")[2]]):
            hint = f"see `{command} --help`"
        hint = _pasted(option) or hint
    return RopepatchError(f"{words[:1].lower()}{words[1:].rstrip('.')}", hint=hint)


def _pasted(option: str) -> str | None:
    """The hint for an option of another tool."""
    name = option.lstrip("-").partition("=")[0].replace("-", "_")
    if name in LENGTHS:
        return "use --to for the target length"
    if name not in SCALINGS:
        return None
    return "use --to, such as 4x for a factor of 4, and --method, such as yarn"


def _refuse(error: RopepatchError) -> NoReturn:
    print(f"{_coloured('error:', RED)} {error}", file=sys.stderr)
    if error.hint:
        print(f"{_coloured('hint:', CYAN)} {error.hint}", file=sys.stderr)
    sys.exit(2)


RED, CYAN = 31, 36


def _coloured(word: str, colour: int) -> str:
    """A word for stderr; without colour in a pipe, on a dumb terminal, or if NO_COLOR is set."""
    shown = (
        sys.stderr.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") != "dumb"
    )
    return f"\x1b[{colour}m{word}\x1b[0m" if shown else word
