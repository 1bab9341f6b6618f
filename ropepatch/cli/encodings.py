"""`ropepatch encodings`."""

from __future__ import annotations

from typing import Annotated

import typer

from ropepatch.cli.arguments import AsJson, complete
from ropepatch.cli.catalogue import entries, find_entry
from ropepatch.cli.listing import REQUIRED, paragraphs, print_table, print_text
from ropepatch.files import json_text

EXAMPLES = """\b
Examples:
  ropepatch encodings
  ropepatch encodings alibi"""


def encodings(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="One encoding, with its parameters.",
            autocompletion=complete("encodings"),
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the position encodings that `ropepatch.swap` puts into a model, or describe one."""
    chosen = [find_entry("encoding", name)] if name else list(entries("encodings").values())
    if as_json:
        print(json_text(chosen))
    elif name:
        one = chosen[0]
        print_text(f"{one['encoding']} ({one['paper']}): {one['formula']}\n\n{paragraphs(one['help'])}")
        settings = "".join(
            f", {parameter}={'...' if default == REQUIRED else repr(default)}"
            for parameter, default in one["parameters"].items()
        )
        print(f"\nropepatch.swap(model, {one['encoding']!r}{settings})")
    else:
        rows = [(one["encoding"], one["family"], one["formula"], one["paper"]) for one in chosen]
        print_table(("encoding", "family", "scores", "source"), rows)
