"""`ropepatch encodings`."""

from __future__ import annotations

import inspect
import json
from dataclasses import MISSING, asdict, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ropepatch.cli.arguments import AsJson
from ropepatch.cli.methods import REQUIRED

if TYPE_CHECKING:
    from ropepatch.encodings.encoding import Encoding
    from ropepatch.gallery.properties import Finding

EXAMPLES = """\b
Examples:
  ropepatch encodings
  ropepatch encodings --properties
  ropepatch encodings alibi"""

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
        print(json.dumps([_described(kind, properties) for kind in chosen], indent=2, ensure_ascii=False))
    elif name:
        _print_one(chosen[0], properties)
    elif properties:
        _print_properties(chosen)
    else:
        table = _table("encoding", "family", "scores", "source")
        for kind in chosen:
            table.add_row(kind.name, kind.family, kind.formula, kind.paper)
        _console().print(table)


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
        table = _table("property", "", "number", "meaning")
        for name, finding in measured.findings().items():
            number = "" if finding.number is None else f"{finding.number:.2g}"
            table.add_row(_title(name), _word(finding), number, MEANINGS[name])
        for name in ("parameters", "per_token", "per_pair"):
            table.add_row(_title(name), "", f"{getattr(measured, name):,}", MEANINGS[name])
        print()
        _console(WIDTH).print(table)


def _print_properties(kinds: list[type[Encoding]]) -> None:
    from ropepatch.gallery.bench import SHAPE
    from ropepatch.gallery.properties import MEANINGS, properties_of

    counts = ("parameters", "per_token", "per_pair")
    table = _table("encoding", *(_title(name) for name in MEANINGS))
    for column in table.columns[-len(counts) :]:
        column.justify = "right"
    for kind in kinds:
        measured = properties_of(kind)
        table.add_row(
            kind.name,
            *(_word(finding) for finding in measured.findings().values()),
            *(f"{getattr(measured, count):,}" for count in counts),
        )
    console = _console(WIDTH)
    console.print(table)
    legend = _table("", "")
    legend.show_header = False
    for name, meaning in MEANINGS.items():
        legend.add_row(_title(name), meaning)
    console.print()
    console.print(legend)
    print(
        f"\nMeasured on {SHAPE.layers} layers of {SHAPE.heads} heads of {SHAPE.head_dim} dimensions, with a "
        f"window of {SHAPE.window} tokens and parameters as they are drawn.\n"
        "–: it carries nothing in a token, but between tokens, or nothing at all."
    )


def _table(*headers: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def _console(width: int | None = None) -> Console:
    return Console(highlight=False, markup=False, emoji=False, width=width)


def _title(name: str) -> str:
    return name.replace("_", " ")


def _word(finding: Finding) -> str:
    return {True: "yes", False: "no", None: "–"}[finding.holds]
