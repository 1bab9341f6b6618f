"""Tables of cells, as data; `ropepatch.report` and cards print them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from pandas import DataFrame


class Cell(NamedTuple):
    """One value.

    Args:
        text: What is read.
        detail: What stands below or behind it, smaller: an interval, a standard error.
        value: By which a column is sorted; None comes last.
        best: Whether it is the best of its column.
    """

    text: str
    detail: str = ""
    value: float | str | None = None
    best: bool = False

    @property
    def line(self) -> str:
        """Text and detail on one line."""
        if not self.detail:
            return self.text
        return f"{self.text} {self.detail}" if self.detail[0] == "±" else f"{self.text} ({self.detail})"


MISSING = Cell("–")


class Table(NamedTuple):
    """Cells below heads.

    Args:
        caption: What it shows.
        heads: The name of each column and what stands below it.
        rows: Their first `labels` cells say what they are about.
        labels: How many those are.
        across: Whether the columns are the methods; else the rows are.
    """

    caption: str
    heads: list[tuple[str, str]]
    rows: list[list[Cell]]
    labels: int = 1
    across: bool = False

    def column(self, number: int) -> dict[str, Cell]:
        """A column by the names of its rows."""
        return {row[0].text: row[number] for row in self.rows}

    def with_methods_across(self) -> Table:
        """The same with the methods side by side, for pages that are longer than wide."""
        if self.across:
            return self
        heads = [("", ""), *((row[0].text, "") for row in self.rows)]
        names = [" ".join(filter(None, head)) for head in self.heads[1:]]
        rows = [
            [Cell(name, value=name), *(row[number] for row in self.rows)]
            for number, name in enumerate(names, start=1)
        ]
        return Table(self.caption, heads, rows, across=True)


def enumeration(words: Sequence[str]) -> str:
    """Words as a sentence lists them: a, b and c."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def data_frame(rows: Iterable[dict[str, Any]]) -> DataFrame:
    """A pandas frame of rows."""
    try:
        from pandas import DataFrame
    except ImportError as error:
        raise RopepatchError("a frame needs pandas", hint="pip install pandas") from error
    return DataFrame(list(rows))
