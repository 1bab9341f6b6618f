"""`ropepatch explore`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropepatch.cli.arguments import Revision
from ropepatch.cli.listing import print_text

EXAMPLES = """\b
Examples:
  ropepatch explore
  ropepatch explore ./llama-2-7b --out llama.html
  ropepatch explore tiny --open"""


def explore(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A checkpoint folder, a Hub id, or tiny, to start with; its config.json alone is read.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("explorer.html"),
    tiny: Annotated[
        bool, typer.Option("--tiny/--no-tiny", help="Let the bundled model read in the page; takes 2.7 MB.")
    ] = True,
    show: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    revision: Revision = None,
) -> None:
    """Write one HTML page that shows why a rope fails, and how each method mends it; it needs no network."""
    from ropepatch.gallery.explorer import explore as write_explorer

    file = write_explorer(model, out=out, tiny=tiny, revision=revision)
    print_text(str(out))
    if show:
        typer.launch(file.resolve().as_uri())
