"""The layout of `--help`."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions

UNWRAPPED = 100_000  # columns
QUOTED = re.compile(r"`[^`]*`")  # a command inside a text, which stays on one line
HARD_SPACE = "\u00a0"


class HelpText:
    """Help as plain text; each paragraph and each entry is wrapped once, to the width of the terminal.

    Commands to copy, the examples at the end, are never wrapped.
    """

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        """Print the line with the usage."""
        console.soft_wrap = True  # cyclopts prints the examples on this console
        self._print(console, f"Usage: {_plain(console, usage)}", hanging="    ")

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        """Print what the command does."""
        self._print(console, "\n" + _plain(console, description))

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print one section: commands, arguments or options."""
        if not panel.entries:
            return
        self._print(console, f"\n{panel.title}:")
        for entry in panel.entries:
            name = "  " + ", ".join(_names(entry, panel.format))
            text = " ".join([_plain(console, entry.description), *_notes(entry)]).strip()
            self._print(console, f"{name}: {text}", hanging="      ")

    def _print(self, console: Console, text: str, *, hanging: str = "") -> None:
        for line in text.split("\n"):
            wrapped = textwrap.fill(
                QUOTED.sub(_held_together, line),
                console.width,
                subsequent_indent=hanging,
                break_long_words=False,
                break_on_hyphens=False,
            )
            wrapped = wrapped.replace(HARD_SPACE, " ")
            console.print(wrapped, markup=False, highlight=False, emoji=False, soft_wrap=True)


def _held_together(quoted: re.Match[str]) -> str:
    return quoted[0].replace(" ", HARD_SPACE)


def _plain(console: Console, text: Any) -> str:
    """The words of a text of cyclopts, a paragraph a line."""
    if text is None:
        return ""
    unwrapped = console.options.update(width=UNWRAPPED)
    return "".join(segment.text for segment in console.render(text, unwrapped)).strip()


def _names(entry: HelpEntry, kind: str) -> tuple[str, ...]:
    if kind == "parameter":
        return entry.display_labels_with_metavar
    return entry.positive_names + entry.positive_shorts


def _notes(entry: HelpEntry) -> list[str]:
    """What follows the explanation of an option."""
    notes = []
    if entry.default is not None:
        notes.append(f"[default: {entry.default}]")
    if entry.required:
        notes.append("[required]")
    return notes
