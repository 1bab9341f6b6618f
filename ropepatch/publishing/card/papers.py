"""The papers of the methods, for those who cite them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path


def address(paper: str) -> str | None:
    """Where a paper is on the web; None for one that is on no known site."""
    if match := re.fullmatch(r"arXiv:(\d{4}\.\d{4,5})", paper):
        return f"https://arxiv.org/abs/{match[1]}"
    return f"https://{paper}" if re.fullmatch(r"[a-z.]+\.[a-z]+/[\w/.-]+", paper) else None


@cache
def entries() -> dict[str, str]:
    """The entries of papers.bib, by the addresses of their papers."""
    text = Path(__file__).with_name("papers.bib").read_text(encoding="utf-8")
    return {one.rpartition(" {")[2].partition("}")[0]: one for one in text.strip().split("\n\n")}


def bibtex(paper: str) -> str | None:
    """The BibTeX entry of a method's `paper`; None where papers.bib has none."""
    return entries().get(address(paper) or "")


def entry(key: str, fields: dict[str, str]) -> str:
    """A BibTeX entry of something published on the web."""
    lines = [f"  {name:<13} = {{{value}}}," for name, value in fields.items()]
    return "\n".join([f"@misc{{{key},", *lines, "}"])
