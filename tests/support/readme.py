"""README and the pages of the site: their code, and the blocks that tests generate."""

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCUMENTS = (README, *sorted((ROOT / "docs").rglob("*.md")))


def updating():
    """Whether tests rewrite generated blocks instead of comparing them."""
    return os.environ.get("ROPEPATCH_UPDATE") == "1"


def code_blocks(language):
    """The code blocks of every document."""
    fence = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return {file: fence.findall(file.read_text(encoding="utf-8")) for file in DOCUMENTS}


def commands():
    """The lines of all bash blocks, without comments and without repetitions."""
    blocks = (block for blocks in code_blocks("bash").values() for block in blocks)
    lines = (
        line for block in blocks for line in block.replace("\\\n", " ").splitlines()
    )
    return list(
        dict.fromkeys(
            line for line in (line.split(" #")[0].strip() for line in lines) if line
        )
    )


def page_of(name):
    """The document that contains a block."""
    return next(
        file
        for file in DOCUMENTS
        if re.search(_marked(name), file.read_text("utf-8"), re.DOTALL)
    )


def block(name):
    """The text between `<!-- name -->` and `<!-- /name -->`."""
    return re.search(
        _marked(name), page_of(name).read_text(encoding="utf-8"), re.DOTALL
    )[2]


def write_block(name, text):
    """Replace the text of a block."""
    old = page_of(name).read_text(encoding="utf-8")
    new = re.sub(
        _marked(name),
        lambda match: f"{match[1]}{text}\n{match[3]}",
        old,
        flags=re.DOTALL,
    )
    page_of(name).write_text(new, encoding="utf-8")


def _marked(name):
    return rf"(<!-- {name} -->\n)(.*?)\n?(<!-- /{name} -->)"
