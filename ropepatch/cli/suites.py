"""`ropepatch suites`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropepatch.cli.arguments import AsJson, complete
from ropepatch.cli.listing import print_table
from ropepatch.files import json_text

EXAMPLES = """\b
Examples:
  ropepatch suites
  ropepatch suites demo
  ropepatch suites demo > mine.yaml"""


def suites(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="One suite, or a YAML file.", autocompletion=complete("suites")),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the suites that `eval` and `extend --eval` measure, or print one."""
    from ropepatch.settings import SUITES, find_shipped, read_yaml, shipped_names

    files = {
        known: find_shipped(known, SUITES, "suite") for known in ([name] if name else shipped_names(SUITES))
    }
    if as_json:
        print(json_text([{"suite": known} | read_yaml(file, "suite") for known, file in files.items()]))
    elif name:
        read_yaml(files[name], "suite")
        print(files[name].read_text(encoding="utf-8"), end="")
    else:
        print_table(("suite", "measures"), [(known, _comment(file)) for known, file in files.items()])


def _comment(file: Path) -> str:
    """What a suite says of itself, below the line that names its schema."""
    return file.read_text(encoding="utf-8").splitlines()[1].removeprefix("# ")
