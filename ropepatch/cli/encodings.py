"""`ropepatch encodings`."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, asdict, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropepatch.cli.arguments import AsJson
from ropepatch.cli.listing import REQUIRED, print_table
from ropepatch.files import json_text

if TYPE_CHECKING:
    from ropepatch.encodings.encoding import Encoding
    from ropepatch.gallery.properties import Property

EXAMPLES = """\b
Examples:
  ropepatch encodings
  ropepatch encodings --properties
  ropepatch encodings alibi"""

COUNTS = ("parameters", "per_token", "per_pair")  # properties that are numbers
WIDTH = 140  # of the table of properties, which no narrower one holds


def encodings(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One encoding, with its parameters.")
    ] = None,
    properties: Annotated[
        bool, typer.Option("--properties", help="Measure what holds of each on a small model.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the position encodings that `ropepatch.swap` puts into a model, or describe one."""
    from ropepatch.encodings.registry import ENCODINGS, find_encoding

    chosen = [find_encoding(name)] if name else list(ENCODINGS.values())
    if as_json:
        print(json_text([_described(kind, properties) for kind in chosen]))
    elif name:
        _print_one(chosen[0], properties)
    elif properties:
        _print_properties(chosen)
    else:
        rows = [(kind.name, kind.family, kind.formula, kind.paper) for kind in chosen]
        print_table(("encoding", "family", "scores", "source"), rows)


def _described(kind: type[Encoding], properties: bool) -> dict[str, Any]:
    from ropepatch.gallery.properties import properties_of

    described = {
        "encoding": kind.name,
        "family": kind.family,
        "formula": kind.formula,
        "paper": kind.paper,
        "parameters": {
            field.name: REQUIRED if field.default is MISSING else field.default for field in fields(kind)
        },
        "help": inspect.getdoc(kind),
    }
    return described | ({"properties": asdict(properties_of(kind))} if properties else {})


def _print_one(kind: type[Encoding], properties: bool) -> None:
    from ropepatch.gallery.properties import MEANINGS, properties_of

    described = _described(kind, False)
    print(f"{kind.name} ({kind.paper}): {kind.formula}\n\n{described['help']}")
    settings = "".join(
        f", {parameter}={'...' if default == REQUIRED else repr(default)}"
        for parameter, default in described["parameters"].items()
    )
    print(f"\nropepatch.swap(model, {kind.name!r}{settings})")
    if properties:
        measured = properties_of(kind)
        rows = [
            (_title(name), _word(one), _number(one), MEANINGS[name])
            for name, one in measured.findings().items()
        ]
        rows += [(_title(name), "", f"{getattr(measured, name):,}", MEANINGS[name]) for name in COUNTS]
        print()
        print_table(("property", "", "number", "meaning"), rows, width=WIDTH)


def _print_properties(kinds: list[type[Encoding]]) -> None:
    from ropepatch.gallery.identity_model import SHAPE
    from ropepatch.gallery.properties import MEANINGS, properties_of

    rows = []
    for kind in kinds:
        measured = properties_of(kind)
        words = map(_word, measured.findings().values())
        rows.append([kind.name, *words, *(f"{getattr(measured, count):,}" for count in COUNTS)])
    print_table(("encoding", *map(_title, MEANINGS)), rows, width=WIDTH, numbers=len(COUNTS))
    print()
    print_table(("", ""), [(_title(name), meaning) for name, meaning in MEANINGS.items()], width=WIDTH)
    print(
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
