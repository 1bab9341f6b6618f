"""`ropepatch methods`."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Annotated, Any

import typer

from ropepatch.cli.arguments import AsJson
from ropepatch.cli.listing import REQUIRED, print_table
from ropepatch.files import json_text

EXAMPLES = """\b
Examples:
  ropepatch methods
  ropepatch methods yarn
  ropepatch methods fitted.json"""


def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One method, with its parameters; or a scaling file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the scaling methods, or describe one."""
    from ropepatch.scaling import METHODS, find_method
    from ropepatch.scaling.file import is_scaling_file, read_scaling

    file = read_scaling(name) if name and is_scaling_file(name) else None
    methods: list[Any] = [file.scaling] if file else [find_method(name)] if name else [*METHODS.values()]
    described, *_ = descriptions = [_described(method) for method in methods]
    if as_json:
        print(json_text(descriptions))
    elif name:
        if file:
            rope = file.rope
            print(f"{name}: {rope.original_max_position_embeddings} -> {file.target} tokens, ", end="")
            print(f"rotary_dim {rope.rotary_dim}, rope_theta {rope.rope_theta:g}")
        print(f"{described['method']} ({described['paper']}): {described['formula']}\n\n{described['help']}")
        print(f"\nsaved as: {described['saved_as']}")
        for parameter, default in described["parameters"].items():
            print(f"  --set {parameter}={_shown(default)}")
    else:
        rows = [(method.name, method.formula, method.paper, method.saved_as) for method in methods]
        print_table(("method", "frequencies", "source", "saved as"), rows)


def _described(method: Any) -> dict[str, Any]:
    """Of a method, with the defaults of its parameters, or of a scaling, with what they are."""
    return {
        "method": method.name,
        "formula": method.formula,
        "paper": method.paper,
        "saved_as": method.saved_as,
        "length_dependent": method.length_dependent,
        "parameters": {
            f.name: getattr(method, f.name, REQUIRED) for f in fields(method) if f.name != "factor"
        },
        "help": inspect.getdoc(method),
    }


def _shown(default: Any) -> str:
    """A default as --set takes it."""
    if default == REQUIRED:
        return "VALUE (required)"
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return str(default).lower() if default is None or isinstance(default, bool) else str(default)
