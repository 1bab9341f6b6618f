"""README and the pages of the site: their code, and their blocks, which ROPEPATCH_UPDATE=1 rewrites."""

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCUMENTS = (README, *sorted((ROOT / "docs").rglob("*.md")))


def updating() -> bool:
    """Whether generated blocks are rewritten instead of compared."""
    return os.environ.get("ROPEPATCH_UPDATE") == "1"


def code_blocks(language: str) -> dict[Path, list[str]]:
    """The blocks of code of every document."""
    fence = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return {file: fence.findall(file.read_text(encoding="utf-8")) for file in DOCUMENTS}


def commands() -> list[str]:
    """The lines of all blocks of bash, without comments; a line that stands on several pages comes once."""
    blocks = (block for blocks in code_blocks("bash").values() for block in blocks)
    lines = (line for block in blocks for line in block.replace("\\\n", " ").splitlines())
    return list(dict.fromkeys(line for line in (line.split(" #")[0].strip() for line in lines) if line))


def block_names() -> set[str]:
    """The generated blocks of the documents."""
    return {
        name
        for file in DOCUMENTS
        for name in re.findall(r"^<!-- /([\w-]+) -->$", file.read_text(encoding="utf-8"), re.MULTILINE)
    }


def holders(name: str, file: Path | None = None) -> list[Path]:
    """The documents in which a block stands; or the file, where one is named."""
    if file is not None:
        return [file]
    found = [file for file in DOCUMENTS if re.search(_marked(name), file.read_text("utf-8"), re.DOTALL)]
    assert found, f"no document has the block {name}"
    return found


def block(name: str, file: Path | None = None) -> str:
    """The text between `<!-- name -->` and `<!-- /name -->`."""
    first, *_ = holders(name, file)
    return re.search(_marked(name), first.read_text(encoding="utf-8"), re.DOTALL)[2]


def write_block(name: str, text: str, file: Path | None = None) -> None:
    """Replace the text of a block wherever it stands."""
    for holder in holders(name, file):
        old = holder.read_text(encoding="utf-8")
        new = re.sub(_marked(name), lambda match: f"{match[1]}{text}\n{match[3]}", old, flags=re.DOTALL)
        holder.write_text(new, encoding="utf-8")


def check_block(name: str, text: str, file: Path | None = None) -> None:
    """A block is this text wherever it stands, or becomes it where blocks are rewritten."""
    if updating():
        write_block(name, text, file)
    for holder in holders(name, file):
        assert block(name, holder) == text, holder


def _marked(name: str) -> str:
    return rf"(<!-- {name} -->\n)(.*?)\n?(<!-- /{name} -->)"
