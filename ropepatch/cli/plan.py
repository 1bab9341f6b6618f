"""`ropepatch plan`."""

from __future__ import annotations

from typing import Annotated

import typer

from ropepatch.cli.arguments import AsJson, Model, Revision, Settings, parse_settings
from ropepatch.errors import RopepatchError

EXAMPLES = """\b
Examples:
  ropepatch plan ./llama-2-7b --to 32k
  ropepatch plan ./llama-2-7b --to 32k --method ntk-by-parts --set beta=16
  ropepatch plan ./llama-2-7b --method fitted.json
  ropepatch plan ./llama-2-7b --to 16k --json"""


def plan(
    model: Model,
    to: Annotated[
        str | None, typer.Option(help="The target context, e.g. 32k; that of a scaling file if not given.")
    ] = None,
    method: Annotated[
        str, typer.Option(help="See `ropepatch methods`; or a scaling file, e.g. fitted.json.")
    ] = "yarn",
    settings: Settings = None,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Show what an extension would change, from the configuration alone."""
    from ropepatch.extension.planning import plan as make_plan
    from ropepatch.scaling.file import is_scaling_file
    from ropepatch.settings import parse_length

    parameters = parse_settings(method, settings)
    if to is None and not is_scaling_file(method):
        raise RopepatchError("--to is missing", hint="--to 32k")
    target = None if to is None else parse_length(to)
    extension_plan = make_plan(model, to=target, method=method, revision=revision, **parameters)
    print(extension_plan.to_json() if as_json else extension_plan)
