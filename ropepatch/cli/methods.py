"""`ropepatch methods`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ropepatch.cli.arguments import AsJson, complete
from ropepatch.cli.catalogue import Entry, entries, find_entry
from ropepatch.cli.descriptions import describe_method
from ropepatch.cli.listing import REQUIRED, paragraphs, print_table, print_text
from ropepatch.files import json_text

EXAMPLES = """\b
Examples:
  ropepatch methods
  ropepatch methods yarn
  ropepatch methods self-extend
  ropepatch methods fitted.json"""

MAP = "attention map"
HEADS = {"scaling": "frequencies", MAP: "D = m − n is read as"}  # of the tables


def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="One method, with its parameters; or a scaling file.",
            autocompletion=complete("methods"),
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the scaling methods and the attention maps, or describe one."""
    rope = ""
    if name is None:
        chosen = list(entries("methods").values())
    elif name.endswith(".json"):
        entry, rope = _read(name)
        chosen = [entry]
    else:
        chosen = [find_entry("method", name)]
    if as_json:
        print(json_text(chosen))
    elif name is None:
        for number, (kind, head) in enumerate(HEADS.items()):
            print("\n" * number, end="")
            of_kind = [one for one in chosen if one["kind"] == kind]
            rows = [(one["method"], one["formula"], one["paper"], one["saved_as"]) for one in of_kind]
            print_table((kind, head, "source", "saved as"), rows)
    else:
        (one,) = chosen
        head = f"{rope}{one['method']} ({one['paper']}): {one['formula']}"
        print_text(f"{head}\n\n{paragraphs(one['help'])}")
        print(f"\nsaved as: {one['saved_as']}")
        for parameter, default in one["parameters"].items():
            print_text(f"  --set {parameter}={_shown(default, one['kind'])}")


def _read(name: str) -> tuple[Entry, str]:
    """The scaling of a file, and a line that says for which rope it is."""
    from ropepatch.scaling.file import read_scaling

    file = read_scaling(name)
    window, rope = file.rope.original_max_position_embeddings, file.rope
    line = (
        f"{name}: {window} -> {file.target} tokens, rotary_dim {rope.rotary_dim}, "
        f"rope_theta {rope.rope_theta:g}\n"
    )
    return describe_method(file.scaling), line


def _shown(default: Any, kind: str) -> str:
    """A default as --set takes it."""
    if default is None and kind == MAP:
        return "VALUE (if not given, from L, the trained context, and N, the target)"
    if default == REQUIRED:
        return "VALUE (required)"
    if isinstance(default, list | tuple) and isinstance(default[0], list | tuple):
        return f"VALUE (of {len(default)} layers, in the file)"
    if isinstance(default, list | tuple):
        return ",".join(map(str, default))
    return str(default).lower() if default is None or isinstance(default, bool) else str(default)
