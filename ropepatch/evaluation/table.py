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
        detail: A smaller text behind it: an interval.
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
        return f"{self.text} ({self.detail})" if self.detail else self.text


MISSING = Cell("–")


class Table(NamedTuple):
    """Cells below heads.

    Args:
        caption: The caption.
        heads: The name of each column.
        rows: The cells by row; the first `labels` of each name the row.
        labels: The number of cells that name a row.
    """

    caption: str
    heads: list[str]
    rows: list[list[Cell]]
    labels: int = 1


def data_frame(rows: Iterable[dict[str, Any]]) -> DataFrame:
    """A pandas frame of rows."""
    try:
        from pandas import DataFrame
    except ImportError as error:
        raise RopepatchError(
            "a frame needs pandas", hint="pip install pandas"
        ) from error
    return DataFrame(list(rows))
