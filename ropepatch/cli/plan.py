"""`ropepatch plan`."""

from __future__ import annotations

from typing import Annotated

import typer

from ropepatch.cli.arguments import AsJson, Model, Revision, Settings, parse_settings
from ropepatch.lengths import parse_length

EXAMPLES = """\b
Examples:
  ropepatch plan ./llama-2-7b --to 32k
  ropepatch plan ./llama-2-7b --to 32k --method ntk-by-parts --set beta=16
  ropepatch plan ./llama-2-7b --to 16k --json"""


def plan(
    model: Model,
    to: Annotated[str, typer.Option(help="The target context, e.g. 32k.")],
    method: Annotated[str, typer.Option(help="See `ropepatch methods`.")] = "yarn",
    settings: Settings = None,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Show what an extension would change, from the configuration alone."""
    parameters = parse_settings(method, settings)
    target = parse_length(to)

    from ropepatch.planning import plan as make_plan

    made = make_plan(model, to=target, method=method, revision=revision, **parameters)
    print(made.to_json() if as_json else made)
