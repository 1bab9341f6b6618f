"""Tables of cells, as data; `ropepatch.report` and cards print them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from pandas import DataFrame


class Cell(NamedTuple):
    """One value.

    Args:
        text: Its text.
        detail: A smaller text below or behind it: an interval, a standard error.
        value: The sort key in its column; None comes last.
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
        caption: The caption.
        heads: The name of each column, and a second line below it.
        rows: The cells by row; the first `labels` of each name the row.
        labels: The number of cells that name a row.
        across: Whether the methods are the columns; else they are the rows.
    """

    caption: str
    heads: list[tuple[str, str]]
    rows: list[list[Cell]]
    labels: int = 1
    across: bool = False

    def column(self, number: int) -> dict[str, Cell]:
        """A column, by the names of the rows."""
        return {row[0].text: row[number] for row in self.rows}

    def with_methods_across(self) -> Table:
        """The table with the methods as columns, for pages that are longer than wide."""
        if self.across:
            return self
        heads = [("", ""), *((row[0].text, "") for row in self.rows)]
        names = [" ".join(filter(None, head)) for head in self.heads[1:]]
        rows = [
            [Cell(name, value=name), *(row[number] for row in self.rows)]
            for number, name in enumerate(names, start=1)
        ]
        return Table(self.caption, heads, rows, across=True)


def data_frame(rows: Iterable[dict[str, Any]]) -> DataFrame:
    """A pandas frame of rows."""
    try:
        from pandas import DataFrame
    except ImportError as error:
        raise RopepatchError("a frame needs pandas", hint="pip install pandas") from error
    return DataFrame(list(rows))
