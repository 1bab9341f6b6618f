"""`ropepatch plan`."""

from __future__ import annotations

from typing import Annotated

import typer

from ropepatch.cli.arguments import (
    AsJson,
    Model,
    Original,
    Revision,
    Settings,
    a_length,
    a_method,
    complete,
    parse_settings,
)
from ropepatch.cli.listing import print_text
from ropepatch.errors import RopepatchError

EXAMPLES = """\b
Examples:
  ropepatch plan ./llama-2-7b --to 32k
  ropepatch plan ./llama-2-7b --to 32k --method ntk-by-parts --set beta=16
  ropepatch plan ./llama-2-7b --method fitted.json
  ropepatch plan ./qwen3-8b --to 128k --original 32k
  ropepatch plan ./llama-2-7b --to 16k --json"""


def plan(
    model: Model,
    to: Annotated[
        str | None,
        typer.Option(
            help="The target context: 32k, or 4x what it is; that of a scaling file if not given.",
            callback=a_length,
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="See `ropepatch methods`; or a scaling file, e.g. fitted.json.",
            callback=a_method,
            autocompletion=complete("methods"),
        ),
    ] = "yarn",
    original: Original = None,
    settings: Settings = None,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Show what an extension would change, from the configuration alone."""
    if to is None and not method.endswith(".json"):
        raise RopepatchError("--to is missing", hint="--to 32k is a length, --to 4x so many times today's")
    from ropepatch.extension.planning import plan as make_plan

    parameters = parse_settings(method, settings)
    extension_plan = make_plan(
        model, to=to, method=method, original=original, revision=revision, **parameters
    )
    print(extension_plan.to_json()) if as_json else print_text(str(extension_plan))
