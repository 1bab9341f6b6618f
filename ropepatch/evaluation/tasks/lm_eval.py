"""Tasks of lm-eval as one task: their scores."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field
from transformers import PreTrainedTokenizerBase

from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import digest, token_ids
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.results import Row
from ropepatch.evaluation.tasks.task import Advance, Measurement, Task
from ropepatch.files import shipped
from ropepatch.settings import Count, Several, Text

NORMAL = 1.959964  # standard errors from a mean to the ends of its 95 % interval


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
    derived: ClassVar[tuple[str, ...]] = ("digest", "metadata", "max_length")

    tasks: Several[Text]
    metadata: dict[str, Any] = Field(default_factory=dict)
    limit: Count | None = None

    def prepare(
        self, model: str, tokenizer: PreTrainedTokenizerBase, *, trained: int, to: int
    ) -> Measurement:
        """What the tasks are given."""
        if find_spec("lm_eval") is None:
            raise RopepatchError("tasks of lm-eval need lm-eval", hint='pip install "ropepatch[eval]"')
        metadata = {"max_seq_lengths": [to]} | self.metadata
        parameters = self.model_dump() | {"metadata": metadata, "max_length": to}
        if "text" in metadata:
            parameters["digest"] = digest(token_ids(tokenizer, stream_documents(metadata["text"])))

        def run(model: Any, tokenizer: Any, keep: Path | None, advance: Advance) -> list[Row]:
            from ropepatch.evaluation.harness import run_tasks

            options: dict[str, Any] = {"metadata": metadata, "limit": self.limit, "max_length": to}
            return [
                _row(score)
                for score in run_tasks(
                    model, tokenizer, self.tasks, include_path=shipped("eval/tasks"), **options
                )
            ]

        return Measurement(self, parameters, run)

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
        return f"Tasks of lm-eval{limit}; intervals: 95 %, from its standard errors."


def _row(score: Mapping[str, Any]) -> Row:
    """A score, with the interval of lm-eval's standard error."""
    value, error = score["value"], score["stderr"]
    reach = None if value is None or error is None else NORMAL * error
    return Row(
        measure=score["metric"],
        at={"task": score["task"], "version": score["version"]},
        value=value,
        low=None if reach is None else value - reach,
        high=None if reach is None else value + reach,
        n=score["n"] or 0,
    )
