"""What a task of evaluation is: its settings, its measurement, and how its results are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import FLOOR, Comparison
from ropepatch.evaluation.results import Result, Row
from ropepatch.evaluation.table import MISSING, Cell, Drawing, Metric, Table
from ropepatch.settings import Length, Settings, relative_length

Column = Callable[["Row"], Cell]
Advance = Callable[[int, int | None], None]
Say = Callable[[str], None]
Tables = dict[str, "list[Row]"]


class Measurement(Protocol):
    """A task made ready for one model and one target."""

    @property
    def task(self) -> Task:
        """Its settings."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """All that decides what is measured, for the result."""
        ...

    @property
    def floor_tables(self) -> Tables | None:
        """What no model can beat, where that is known."""
        ...

    def run(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        keep: Path | None,
        advance: Advance,
        say: Say = lambda line: None,
    ) -> Tables:
        """The tables of the result.

        Args:
            model: What is measured.
            tokenizer: The tokenizer of the model.
            keep: A folder for what is done so far, from which an interrupted measurement goes on; or None.
            advance: Called with how much is done and how much there is, None where that is not known.
            say: Takes a line on what is known so far, of a measurement that takes long.
        """
        ...


class Task(Settings):
    """A task of evaluation: its fields are its settings in a suite, the rest is what becomes of its results.

    A task whose results have the table ``by_length`` names its `columns` and has its tables in the terminal,
    the report and on cards; other tables, figures and sentences are its own methods.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    columns: ClassVar[Mapping[str, Column]] = {}  # by caption: a cell from a row of ``by_length``
    greater_is_better: ClassVar[bool] = True
    ranks: ClassVar[Literal["loss", "retrieval"] | None] = None  # what a ranking of scalings takes from it
    identity: ClassVar[tuple[str, ...]] = ()  # parameters that tell measurements apart, quoted in summaries
    quoted: ClassVar[tuple[str, ...]] = ()  # of a row, in summaries
    derived: ClassVar[tuple[str, ...]] = ("lengths",)  # parameters that follow from model and target

    def prepare(
        self, model: str, tokenizer: PreTrainedTokenizerBase, *, trained: int, to: int
    ) -> Measurement:
        """What the task needs beside the model.

        Args:
            model: The name that the user gave it.
            tokenizer: The tokenizer of the model.
            trained: The context it was trained on, in tokens.
            to: The target, in tokens.

        Raises:
            RopepatchError: What the task needs is not there or does not fit.
        """
        raise NotImplementedError

    def with_text(self, text: str, field: str, split: str) -> Task:
        """The same on another text, where the task reads one; see `PerplexityTask`."""
        return self

    def limited(self, limit: int) -> Task:
        """The same with at most so many pieces of text, keys per length and depth, or documents of a task."""
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """As a suite has it: with its name."""
        written = super().__get_pydantic_json_schema__(core, handler)
        written["properties"] = {"task": {"const": cls.name}} | written["properties"]
        written["required"] = ["task", *written.get("required", [])]
        return written

    @classmethod
    def reads(cls, parameters: Mapping[str, Any]) -> Mapping[int, float] | None:
        """How many rows of how many tokens a measurement reads; None where that is not known."""
        return None

    @classmethod
    def questions(cls, result: Result) -> list[Row]:
        """Of a task that ranks by retrieval: the share of each kind by length, and the chance of guessing."""
        return []

    @classmethod
    def setup(cls, comparison: Comparison) -> str:
        """What was measured, in a few words."""
        return f"{cls.title} at {comparison.target:,} tokens"

    @classmethod
    def method(cls, parameters: Mapping[str, Any]) -> str:
        """How it was measured, in sentences."""
        return ""

    @classmethod
    def tables(cls, comparison: Comparison) -> list[Table]:
        """All tables of a comparison."""
        if not comparison.lengths():
            return []
        return [cls.by_length(comparison, caption, cell) for caption, cell in cls.columns.items()]

    @classmethod
    def short_tables(cls, comparison: Comparison) -> list[Table]:
        """Those that a terminal shows."""
        return cls.tables(comparison)

    @classmethod
    def outcome(cls, comparison: Comparison) -> dict[str, dict[str, Cell]]:
        """The cells of every method at the greatest length, by caption."""
        return {table.caption: table.column(-1) for table in cls.tables(comparison) if not table.across}

    @classmethod
    def drawings(cls, comparison: Comparison) -> list[Drawing]:
        """The figures that the results allow."""
        return []

    @classmethod
    def best(cls, rows: Mapping[str, Row]) -> str:
        """The name of the best of some rows of one length."""
        cell = next(iter(cls.columns.values()))

        def value(name: str) -> float:
            return float(cell(rows[name]).value or 0.0)

        return (max if cls.greater_is_better else min)(rows, key=value)

    @classmethod
    def sentence(cls, comparison: Comparison, length: int, rows: Mapping[str, Row], *, best: bool) -> str:
        """What came out at a length.

        Args:
            comparison: What the rows are from.
            length: In tokens.
            rows: By what each is called in a sentence, the most important first.
            best: Whether the first is the best of several.
        """
        caption, cell = next(iter(cls.columns.items()))
        figures = "; ".join(f"{name}, {cell(row).line}" for name, row in rows.items())
        return f"{caption} at {length:,} tokens: {figures}."

    @classmethod
    def remarks(cls, comparison: Comparison, length: int) -> list[str]:
        """Further sentences on a comparison at a length."""
        return []

    @classmethod
    def quotation(cls, comparison: Comparison, result: Result) -> dict[str, Any] | list[Row]:
        """A result in few numbers: at the trained context and at the target, or the next length below."""
        rows: Mapping[int, Row] = {row["length"]: row for row in result.tables["by_length"]}
        return {
            str(max(within)): cls.quote(rows[max(within)])
            for bound in (comparison.trained, comparison.target)
            if (within := [length for length in rows if length <= bound])
        }

    @classmethod
    def quote(cls, row: Row) -> Row:
        """What a summary quotes of a row."""
        return {key: row[key] for key in cls.quoted if key in row}

    @classmethod
    def metrics(cls, comparison: Comparison, name: str) -> list[Metric]:
        """What the Hub lists of one result of a comparison, at the greatest length up to the target."""
        last = comparison.last(name)
        metric = None if last is None else cls.metric(comparison.parameters, *last)
        return [] if metric is None else [metric]

    @classmethod
    def metric(cls, parameters: Mapping[str, Any], length: int, row: Row) -> Metric | None:
        """What the Hub lists of a row of ``by_length``."""
        return None

    @classmethod
    def by_length(cls, comparison: Comparison, caption: str, cell: Column) -> Table:
        """A row for every method and the floor, a column for every length."""
        lengths = comparison.lengths()
        cells = {length: cls.marked(comparison.at(length), cell) for length in lengths}
        floor = {} if comparison.floor is None else comparison.floor.tables
        bounds = {row["length"]: cell(row)._replace(detail="") for row in floor.get("by_length", ())}
        rows = [
            [Cell(name, value=name), *(cells[length].get(name, MISSING) for length in lengths)]
            for name in comparison.results
        ]
        if bounds:
            rows.append([Cell(FLOOR, value=FLOOR), *(bounds.get(length, MISSING) for length in lengths)])
        return Table(caption, [("Method", ""), *((f"{length:,}", "tokens") for length in lengths)], rows)

    @classmethod
    def marked(cls, rows: Mapping[str, Row], cell: Column) -> dict[str, Cell]:
        """A cell for every row, the best of several marked."""
        cells = {name: cell(row) for name, row in rows.items()}
        values = [cell.value for cell in cells.values() if isinstance(cell.value, float)]
        best = (max if cls.greater_is_better else min)(values, default=None)
        if best is None or values.count(best) == len(values):
            return cells
        return {name: cell._replace(best=cell.value == best) for name, cell in cells.items()}


def doublings(trained: int, to: int) -> list[int]:
    """L/2, L, 2L ... the target, in tokens."""
    lengths = [min(trained // 2, to)]
    while lengths[-1] < to:
        lengths.append(min(2 * lengths[-1], to))
    return lengths


def resolved(lengths: Sequence[Length] | None, trained: int, to: int) -> list[int]:
    """The lengths of a task in tokens, ascending; doublings up to the target where it names none.

    Raises:
        RopepatchError: One is below 2 tokens or beyond the target.
    """
    if lengths is None:
        return doublings(trained, to)
    tokens = sorted({relative_length(length, trained) for length in lengths})
    if tokens[0] < 2:
        raise RopepatchError(
            f"lengths must be at least 2 tokens, got {tokens[0]}", hint="the first is never scored"
        )
    if tokens[-1] > to:
        raise RopepatchError(
            f"lengths go to {tokens[-1]}, beyond the target of {to}", hint=f"--to {tokens[-1]}"
        )
    return tokens
