"""What a task of evaluation is: its settings and its measurement, whose rows are all that becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.results import Row
from ropepatch.settings import Length, Settings, relative_length

Advance = Callable[[int, int | None], None]


@dataclass(frozen=True, eq=False)
class Measurement:
    """A task made ready for one model and one target.

    Args:
        task: Its settings.
        parameters: All that decides what is measured, for the result.
        run: Gives the rows of the result. It takes the model; its tokenizer; a folder from which an
            interrupted measurement resumes, or None; and what is called with how much is done and how much
            there is.
        floor: Rows that no model can beat, where they are known.
    """

    task: Task
    parameters: Mapping[str, Any]
    run: Callable[[PreTrainedModel, PreTrainedTokenizerBase, Path | None, Advance], list[Row]]
    floor: list[Row] | None = None


class Task(Settings):
    """A task of evaluation: its fields are its settings in a suite.

    Its rows, with what they are at, make all tables, figures and sentences (`ropepatch.report`).
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    identity: ClassVar[tuple[str, ...]] = ()  # parameters that tell measurements apart, quoted in summaries
    derived: ClassVar[tuple[str, ...]] = ("lengths",)  # parameters that follow from model and target

    def prepare(
        self, model: str, tokenizer: PreTrainedTokenizerBase, *, trained: int, to: int
    ) -> Measurement:
        """What the task needs beside the model, trained on ``trained`` tokens, for a target of ``to``."""
        raise NotImplementedError

    def with_text(self, text: str, field: str, split: str) -> Task:
        """The same on another text, where the task reads one; see `PerplexityTask`."""
        return self

    def limited(self, limit: int) -> Task:
        """The same with at most so many pieces of text, haystacks, or documents of a task."""
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
        """How many sequences of how many tokens a measurement reads; None where that is not known."""
        return None

    @classmethod
    def method(cls, parameters: Mapping[str, Any]) -> str:
        """How it was measured, in sentences."""
        return ""


def doublings(trained: int, to: int) -> list[int]:
    """L/2, L, 2L ... the target, in tokens."""
    lengths = [min(trained // 2, to)]
    while lengths[-1] < to:
        lengths.append(min(2 * lengths[-1], to))
    return lengths


def resolved(lengths: Sequence[Length] | None, trained: int, to: int) -> list[int]:
    """The lengths of a task in tokens, ascending; doublings up to the target where it names none."""
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
