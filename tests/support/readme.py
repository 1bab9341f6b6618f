"""Reading the README, and rewriting its generated blocks: ROPEPATCH_UPDATE=1 make test."""

import os
import re
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def updating() -> bool:
    """Whether generated blocks are rewritten instead of compared."""
    return os.environ.get("ROPEPATCH_UPDATE") == "1"


def block(name: str, file: Path = README) -> str:
    """The text between `<!-- name -->` and `<!-- /name -->`."""
    return re.search(_marked(name), file.read_text(encoding="utf-8"), re.DOTALL)[2]


def write_block(name: str, text: str, file: Path = README) -> None:
    """Replace the text of a block."""
    old = file.read_text(encoding="utf-8")
    new = re.sub(_marked(name), lambda match: f"{match[1]}{text}\n{match[3]}", old, flags=re.DOTALL)
    file.write_text(new, encoding="utf-8")


def check_block(name: str, text: str, file: Path = README) -> None:
    """A block is this text, or becomes it where blocks are rewritten."""
    if updating():
        write_block(name, text, file)
    assert block(name, file) == text


def _marked(name: str) -> str:
    return rf"(<!-- {name} -->\n)(.*?)\n?(<!-- /{name} -->)"
