"""Tasks of lm-eval as one task: their scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import digest, token_ids
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import Comparison
from ropepatch.evaluation.results import Result, Row
from ropepatch.evaluation.table import MISSING, Cell, Metric, Table
from ropepatch.evaluation.tasks.task import Advance, Say, Tables, Task
from ropepatch.files import shipped
from ropepatch.settings import Count, Several, Text

HUB_METRICS = {"acc": "accuracy"}  # what the Hub calls a metric of lm-eval, where it has another name for it


def score_cell(row: Row) -> Cell:
    """A score with its standard error."""
    if row["value"] is None:
        return MISSING
    error = row.get("stderr")
    detail = f"± {error:.2g}" if isinstance(error, int | float) else ""
    return Cell(f"{row['value']:.4g}", detail, float(row["value"]))


class LmEvalTask(Task):
    """Run tasks of lm-eval.

    Args:
        tasks: The names of the tasks: those of `eval/tasks` or of the harness.
        metadata: What is passed to the tasks; `max_seq_lengths` is the target if it is not set.
        limit: How many documents of each task are read; None for all.
    """

    name: ClassVar[str] = "lm-eval"
    title: ClassVar[str] = "lm-eval"
    identity: ClassVar[tuple[str, ...]] = ("tasks", "limit", "max_length")
    quoted: ClassVar[tuple[str, ...]] = ("task", "metric", "value", "stderr", "n")
    derived: ClassVar[tuple[str, ...]] = ("digest", "metadata", "max_length")

    tasks: Several[Text]
    metadata: dict[str, Any] = Field(default_factory=dict)
    limit: Count | None = None

    def prepare(
        self, model: str, tokenizer: PreTrainedTokenizerBase, *, trained: int, to: int
    ) -> LmEvalMeasurement:
        """What the tasks are given.

        Raises:
            RopepatchError: lm-eval is not installed, or no such text.
        """
        if find_spec("lm_eval") is None:
            raise RopepatchError("tasks of lm-eval need lm-eval", hint='pip install "ropepatch[eval]"')
        metadata = {"max_seq_lengths": [to]} | self.metadata
        parameters = self.model_dump() | {"metadata": metadata, "max_length": to}
        if "text" in metadata:
            parameters["digest"] = digest(token_ids(tokenizer, stream_documents(metadata["text"])))
        return LmEvalMeasurement(self, to, parameters)

    def with_text(self, text: str, field: str, split: str) -> LmEvalTask:
        """The same, for tasks that read a text."""
        return self.model_copy(update={"metadata": self.metadata | {"text": text}})

    def limited(self, limit: int) -> LmEvalTask:
        """The same with at most so many documents of each task."""
        return self.model_copy(update={"limit": min(limit, self.limit or limit)})

    @classmethod
    def method(cls, parameters: Mapping[str, Any]) -> str:
        """How many documents."""
        limit = f", {parameters['limit']:,} documents each" if parameters.get("limit") else ""
        return f"Tasks of lm-eval{limit}; value ± standard error."

    @classmethod
    def tables(cls, comparison: Comparison) -> list[Table]:
        """A row per task and metric."""
        scores = {
            name: {(row["task"], row["metric"]): row for row in rows}
            for name, rows in comparison.rows("scores").items()
        }
        keys = list(dict.fromkeys(key for rows in scores.values() for key in rows))
        rows = [
            [
                *(Cell(part, value=part) for part in key),
                *(score_cell(rows[key]) if key in rows else MISSING for rows in scores.values()),
            ]
            for key in keys
        ]
        heads = [("Task", ""), ("Metric", ""), *((name, "") for name in scores)]
        return [Table("Scores", heads, rows, labels=2, across=True)] if rows else []

    @classmethod
    def quotation(cls, comparison: Comparison, result: Result) -> list[Row]:
        """All scores."""
        return [cls.quote(row) for row in result.tables["scores"]]

    @classmethod
    def metrics(cls, comparison: Comparison, name: str) -> list[Metric]:
        """Every score that is a number."""
        metrics = []
        for row in comparison.results[name].tables["scores"]:
            if row["value"] is not None:
                settings = {key: row[key] for key in ("version", "n", "stderr") if row.get(key) is not None}
                kind = str(HUB_METRICS.get(row["metric"], row["metric"]))
                metrics.append(Metric((row["task"],) * 2, kind, row["metric"], row["value"], settings))
        return metrics


@dataclass(frozen=True, eq=False)
class LmEvalMeasurement:
    """Tasks of lm-eval."""

    task: LmEvalTask
    to: int
    parameters: Mapping[str, Any]
    floor_tables = None

    def run(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        keep: Path | None,
        advance: Advance,
        say: Say = lambda line: None,
    ) -> Tables:
        """Their scores."""
        from ropepatch.evaluation.harness import run_tasks

        scores = run_tasks(
            model,
            tokenizer,
            self.task.tasks,
            include_path=shipped("eval/tasks"),
            metadata=self.parameters["metadata"],
            limit=self.task.limit,
            max_length=self.to,
        )
        return {"scores": scores}
