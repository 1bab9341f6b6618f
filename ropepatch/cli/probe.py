"""`ropepatch probe`."""

from __future__ import annotations

from typing import Annotated

import typer

from ropepatch.cli.arguments import AsJson, Quiet, Revision
from ropepatch.cli.listing import print_text

EXAMPLES = """\b
Examples:
  ropepatch probe http://localhost:8000
  ropepatch probe http://localhost:8080 ./llama-2-7b-yarn-32k --json"""


def probe(
    server: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="A server with OpenAI's completions API.",
        ),
    ],
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="[CHECKPOINT]",
            help="What it serves: a folder or a Hub id; the server's own name of it if not given.",
        ),
    ] = None,
    name: Annotated[
        str, typer.Option("--model", help="The model's name at the server; the first one if not given.")
    ] = "",
    save_reading: Annotated[
        bool, typer.Option("--save-reading", help="Read CHECKPOINT, and write its reading.json anew.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds for one answer.")] = 600.0,
    revision: Revision = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Tell whether a server computes the rope of an extended checkpoint: exit 0 it does, 1 not, 2 no answer.

    It is asked for the next token after growing parts of the text of reading.json, which `extend` writes. A
    key is read from ROPEPATCH_API_KEY.
    """
    from ropepatch.pipeline.running import bar, no_bar, say_on_stderr
    from ropepatch.probing import probe as ask

    with (no_bar if quiet else bar)("asking") as advance:
        probed = ask(
            server,
            checkpoint,
            model=name,
            revision=revision,
            save_reading=save_reading,
            timeout=timeout,
            say=(lambda line: None) if quiet else say_on_stderr,
            progress=advance,
        )
    print(probed.to_json()) if as_json else print_text(str(probed))
    if not probed.is_right:
        raise typer.Exit(1)
