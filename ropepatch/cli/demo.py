"""`ropepatch demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropepatch.cli.arguments import AsJson, Quiet
from ropepatch.cli.extend import extend

EXAMPLES = """\b
Examples:
  ropepatch demo
  ropepatch demo --out ./demo"""


def demo(
    out: Annotated[
        Path, typer.Option(help="The folder to make: the checkpoint, with its results and a report.")
    ] = Path("ropepatch-demo"),
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Extend the bundled checkpoint from 256 to 2048 tokens with YaRN, and measure it before and after.

    It is `ropepatch extend tiny --to 2k --eval demo`, without training or network: half a minute on two
    cores. The floor is the least possible loss, which is known of its tales.
    """
    extend("tiny", to="2k", suite="demo", out=out, quiet=quiet, as_json=as_json)
