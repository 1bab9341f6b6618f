"""`--method auto`: what stands for a method is chosen by measuring."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ropepatch.cli.running import device, progress
from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from ropepatch.fitting.choosing import Choice


def resolve_auto(
    model: str,
    to: int,
    *,
    text: str | None,
    field: str,
    split: str,
    revision: str | None,
    settings: list[str] | None = None,
    out: Path | None = None,
) -> Choice:
    """What `--method auto` stands for, which is a method; the table goes to stderr.

    Where no scaling is seen to help, that is said and the command ends with exit code 1.

    Args:
        model: As the user gave it.
        to: The target, in tokens.
        text: What is read to rank and to fit, with its `field` and `split`; None for the tales of tiny.
        field: Of the text's documents.
        split: Of its sets.
        revision: Of a Hub id.
        settings: What the user set beside it, which is refused.
        out: A folder for what is measured and fitted, which an interrupted command finds there.

    Raises:
        RopepatchError: No text, settings, several processes, or what `choose` refuses.
    """
    from ropepatch.fitting.choosing import choose
    from ropepatch.report.terminal import print_ranking

    if settings:
        raise RopepatchError(
            "--set beside --method auto, which sets the parameters itself",
            hint="name the method, or leave it out",
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RopepatchError(
            "--method auto measures in one process",
            hint="`ropepatch compare` before, and --method NAME with what it recommends",
        )
    choice = choose(
        model,
        to=to,
        text=text,
        field=field,
        split=split,
        out=out,
        revision=revision,
        device=device(),
        progress=announced,
    )
    print_left_out(choice.left_out)
    print_ranking(choice.ranking, choice.results, on_stderr=True)
    if choice.method is None:
        raise typer.Exit(1)
    return choice


def print_left_out(left_out: Mapping[str, str]) -> None:
    """What took no part in a ranking, and why, on stderr."""
    for name, reason in left_out.items():
        print(f"warning: without {name}: {reason}", file=sys.stderr)


@contextmanager
def announced(name: str) -> Iterator[Callable[[int, int | None], None]]:
    """A bar on stderr, and a line that stays."""
    print(name, file=sys.stderr, flush=True)
    with progress(name) as advance:
        yield advance
