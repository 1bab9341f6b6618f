"""Reading the README, and rewriting its generated blocks: ROPEPATCH_UPDATE=1 make test."""

import os
import re
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def updating() -> bool:
    """Whether generated blocks are rewritten instead of compared."""
    return os.environ.get("ROPEPATCH_UPDATE") == "1"


def block(name: str) -> str:
    """The text between `<!-- name -->` and `<!-- /name -->`."""
    return re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", README.read_text(encoding="utf-8"), re.DOTALL)[1]


def write_block(name: str, text: str) -> None:
    """Replace the text of a block."""
    old = README.read_text(encoding="utf-8")
    marked = rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)"
    new = re.sub(marked, lambda match: match[1] + text + match[2], old, flags=re.DOTALL)
    README.write_text(new, encoding="utf-8")
