"""`ropepatch encodings`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ropepatch.cli.arguments import AsJson, complete
from ropepatch.cli.catalogue import Entry, entries, find_entry
from ropepatch.cli.listing import REQUIRED, paragraphs, pieces, print_table, print_text, screen
from ropepatch.files import json_text

if TYPE_CHECKING:
    from ropepatch.gallery.properties import Properties, Property

EXAMPLES = """\b
Examples:
  ropepatch encodings
  ropepatch encodings --properties
  ropepatch encodings alibi"""

COUNTS = ("parameters", "per_token", "per_pair")  # properties that are numbers
WIDTH = 140  # of the table of properties in one piece


def encodings(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="One encoding, with its parameters.",
            autocompletion=complete("encodings"),
        ),
    ] = None,
    properties: Annotated[
        bool, typer.Option("--properties", help="Measure what holds of each on a small model.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the position encodings that `ropepatch.swap` puts into a model, or describe one."""
    chosen = [find_entry("encoding", name)] if name else list(entries("encodings").values())
    if as_json:
        measured = [{"properties": asdict(_measured(one))} if properties else {} for one in chosen]
        print(json_text([one | more for one, more in zip(chosen, measured, strict=True)]))
    elif name:
        _print_one(chosen[0], properties)
    elif properties:
        _print_properties(chosen)
    else:
        rows = [(one["encoding"], one["family"], one["formula"], one["paper"]) for one in chosen]
        print_table(("encoding", "family", "scores", "source"), rows)


def _measured(one: Entry) -> Properties:
    from ropepatch.encodings.registry import ENCODINGS
    from ropepatch.gallery.properties import properties_of

    return properties_of(ENCODINGS[one["encoding"]])


def _print_one(one: Entry, properties: bool) -> None:
    print_text(f"{one['encoding']} ({one['paper']}): {one['formula']}\n\n{paragraphs(one['help'])}")
    settings = "".join(
        f", {parameter}={'...' if default == REQUIRED else repr(default)}"
        for parameter, default in one["parameters"].items()
    )
    print(f"\nropepatch.swap(model, {one['encoding']!r}{settings})")
    if properties:
        from ropepatch.gallery.properties import MEANINGS

        measured = _measured(one)
        rows = [
            (_title(name), _word(one), _number(one), MEANINGS[name])
            for name, one in measured.findings().items()
        ]
        rows += [(_title(name), "", f"{getattr(measured, name):,}", MEANINGS[name]) for name in COUNTS]
        print()
        print_table(("property", "", "number", "meaning"), rows, width=screen(WIDTH))


def _print_properties(chosen: list[Entry]) -> None:
    from ropepatch.gallery.identity_model import SHAPE
    from ropepatch.gallery.properties import MEANINGS

    rows = []
    for one in chosen:
        measured = _measured(one)
        words = map(_word, measured.findings().values())
        rows.append([one["encoding"], *words, *(f"{getattr(measured, count):,}" for count in COUNTS)])
    width = screen(WIDTH)
    for headers, part in pieces(("encoding", *map(_title, MEANINGS)), rows, width):
        print_table(headers, part, width=width, numbers=sum(_title(name) in headers for name in COUNTS))
        print()
    print_table(("", ""), [(_title(name), meaning) for name, meaning in MEANINGS.items()], width=width)
    print_text(
        f"\nMeasured on {SHAPE.layers} layers of {SHAPE.heads} heads of {SHAPE.head_dim} dimensions, with a "
        f"window of {SHAPE.window} tokens and parameters as they are drawn.\n"
        "–: it carries nothing in a token, but between tokens, or nothing at all."
    )


def _title(name: str) -> str:
    return name.replace("_", " ")


def _word(measured: Property) -> str:
    return {True: "yes", False: "no", None: "–"}[measured.holds]


def _number(measured: Property) -> str:
    return "" if measured.number is None else f"{measured.number:.2g}"
