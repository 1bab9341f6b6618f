"""Passkeys as a task: how many are found, by length and depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropepatch.data.templates import PasskeyTemplate, bundled, read_template
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import Comparison
from ropepatch.evaluation.grid import THRESHOLD
from ropepatch.evaluation.passkey import passkey, trial_prompt
from ropepatch.evaluation.results import Result, Row, passkey_by_length, passkey_cells
from ropepatch.evaluation.table import MISSING, Cell, Drawing, Metric, Table, enumeration
from ropepatch.evaluation.tasks.task import Advance, Column, Say, Tables, Task, resolved
from ropepatch.settings import Count, Length, Several, Share, Whole, expected


def share_cell(row: Row) -> Cell:
    """What was found of how many, with the interval of the share."""
    low, high = row["interval"]
    return Cell(f"{row['correct']}/{row['n']}", f"{low:.0%} to {high:.0%}", row["correct"] / row["n"])


def length_cell(row: Row) -> Cell:
    """The greatest length that was read well enough."""
    length = row["length"]
    return Cell(f"{length:,}", value=float(length)) if length else Cell("none", value=0.0)


class PasskeyTask(Task):
    """Ask for passkeys.

    Args:
        lengths: The lengths of the prompts, in tokens; None for L/2, L, 2L ... the target.
        depths: Where the key stands, from 0 to 1.
        trials: How many keys are asked for at each length and depth.
        seed: The seed from which the keys are drawn.
        template: A YAML file with the words; None for those that come with ropepatch.
        distractors: Further keys in the text that are not asked for.
        queries: How many of the keys are asked for, one after the other.
        threshold: The share found that counts as reading a length (RULER's 85.6 %).
    """

    name: ClassVar[str] = "passkey"
    title: ClassVar[str] = "Passkeys"
    columns: ClassVar[Mapping[str, Column]] = {"Passkeys found": share_cell}
    ranks: ClassVar[Literal["loss", "retrieval"] | None] = "retrieval"
    identity: ClassVar[tuple[str, ...]] = ("trials", "depths", "seed", "distractors", "queries")
    quoted: ClassVar[tuple[str, ...]] = ("correct", "n", "interval")

    lengths: Several[Length] | None = None
    depths: Several[Share] = (0.0, 0.25, 0.5, 0.75, 1.0)
    trials: Count = 4
    seed: Whole = 0
    template: Annotated[str, expected("a file")] | None = None
    distractors: Whole = 0
    queries: Count = 1
    threshold: Annotated[float, Field(gt=0, le=1), expected("a share above 0, at most 1")] = THRESHOLD

    def check(self) -> None:
        """Refuse more queries than there are keys."""
        if self.queries > 1 + self.distractors:
            raise RopepatchError(
                f"{self.queries} queries need as many keys, got {1 + self.distractors}",
                hint="raise distractors",
            )

    def prepare(
        self, model: str, tokenizer: PreTrainedTokenizerBase, *, trained: int, to: int
    ) -> PasskeyMeasurement:
        """The words, and the lengths at which the tokenizer can write a prompt.

        Raises:
            RopepatchError: A template that is none, or lengths at which no prompt can be written.
        """
        template = (
            read_template(Path(self.template)) if self.template else bundled(distractors=self.distractors)
        )
        lengths, reason = askable(self, template, tokenizer, resolved(self.lengths, trained, to))
        if reason is not None and (self.lengths is not None or not lengths):
            raise reason
        parameters = self.model_dump() | {"lengths": lengths, "template": template.model_dump()}
        return PasskeyMeasurement(self, lengths, template, parameters)

    def limited(self, limit: int) -> PasskeyTask:
        """The same with at most so many keys per length and depth."""
        return self.model_copy(update={"trials": min(limit, self.trials)})

    @classmethod
    def reads(cls, parameters: Mapping[str, Any]) -> dict[int, float]:
        """All its prompts."""
        return dict.fromkeys(parameters["lengths"], len(parameters["depths"]) * parameters["trials"])

    @classmethod
    def questions(cls, result: Result) -> list[Row]:
        """Passkeys; who guesses says any of the keys in the text."""
        others = result.parameters.get("distractors", 0)
        asked = {"kind": "passkey", "chance": 1 / (1 + others) if others else 0.0}
        return [row | asked | {"share": row["correct"] / row["n"]} for row in result.tables["by_length"]]

    @classmethod
    def setup(cls, comparison: Comparison) -> str:
        """How many keys, among how many others."""
        of = comparison.parameters
        others = f", {of['distractors']} others in the text" if of["distractors"] else ""
        return f"passkeys, {of['trials']} per depth{others}"

    @classmethod
    def method(cls, parameters: Mapping[str, Any]) -> str:
        """How many keys at which depths, and when one is found."""
        of = parameters
        depths = f" ({', '.join(f'{depth:.0%}' for depth in of['depths'])})" if "depths" in of else ""
        trials = f"{of['trials']:,} keys per" if "trials" in of else "Keys by"
        others = f", among {of['distractors']:,} other keys" if of.get("distractors") else ""
        seed = f", seed {of['seed']}" if "seed" in of else ""
        words = [
            f"{trials} length and depth{depths}{others}{seed}.",
            "A key is found if greedy decoding would say it to the last token.",
        ]
        if "threshold" in of:
            words.append(f"Effective length: the greatest at which at least {of['threshold']:.1%} are found.")
        return " ".join([*words, "Intervals: Wilson's, 95 %."])

    @classmethod
    def tables(cls, comparison: Comparison) -> list[Table]:
        """The keys found by length, and the effective length, where the results have it."""
        lengths = {name: length_cell(row) for name, (row,) in comparison.rows("effective_length").items()}
        tables = super().tables(comparison)
        if not lengths:
            return tables
        threshold = comparison.parameters.get("threshold")
        head = ("Effective length", "" if threshold is None else f"at {threshold:.1%}")
        return [
            table._replace(
                heads=[*table.heads, head],
                rows=[[*row, lengths.get(row[0].text, MISSING)] for row in table.rows],
            )
            for table in tables
        ]

    @classmethod
    def outcome(cls, comparison: Comparison) -> dict[str, dict[str, Cell]]:
        """The keys found at the greatest length, and the effective length."""
        outcome: dict[str, dict[str, Cell]] = {}
        last = len(comparison.lengths())
        for table in cls.tables(comparison):
            outcome["Passkeys"] = table.column(last)
            if len(table.heads) > last + 1:
                outcome["Effective length"] = table.column(last + 1)
        return outcome

    @classmethod
    def drawings(cls, comparison: Comparison) -> list[Drawing]:
        """A map of every method."""
        caption = "Passkeys found, by the length of the prompt and the depth of the key"
        return [Drawing("passkey", "cells", caption)] if comparison.rows("cells") else []

    @classmethod
    def sentence(cls, comparison: Comparison, length: int, rows: Mapping[str, Row], *, best: bool) -> str:
        """What each finds."""
        figures = [
            f"{name} finds {row['correct']:,} of {row['n']:,} (95 % interval {share_cell(row).detail})"
            for name, row in rows.items()
        ]
        return f"Of the passkeys at {length:,} tokens, {enumeration(figures)}."

    @classmethod
    def metric(cls, parameters: Mapping[str, Any], length: int, row: Row) -> Metric:
        """The share of the keys that the model says."""
        settings = {key: parameters[key] for key in cls.identity if parameters.get(key) is not None}
        text, name = ("passkey", "passkeys in generated text"), f"accuracy at {length:,} tokens"
        return Metric(text, "accuracy", name, row["correct"] / row["n"], {"length": length} | settings)


@dataclass(frozen=True, eq=False)
class PasskeyMeasurement:
    """Passkeys to ask for."""

    task: PasskeyTask
    lengths: Sequence[int]
    template: PasskeyTemplate
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
        """The keys found by length and depth."""
        grid = passkey(
            model,
            tokenizer,
            lengths=self.lengths,
            depths=self.task.depths,
            trials=self.task.trials,
            seed=self.task.seed,
            template=self.template,
            distractors=self.task.distractors,
            queries=self.task.queries,
            split=True,
            progress=advance,
        )
        effective = [{"length": grid.effective_length(self.task.threshold), "threshold": self.task.threshold}]
        return {
            "cells": passkey_cells(grid),
            "by_length": passkey_by_length(grid),
            "effective_length": effective,
        }


def askable(
    task: PasskeyTask, template: PasskeyTemplate, tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int]
) -> tuple[list[int], RopepatchError | None]:
    """The lengths at which the tokenizer can write a prompt, and why it cannot at the last of the others."""
    written: list[int] = []
    reason = None
    for length in lengths:
        try:
            trial_prompt(
                tokenizer,
                template,
                length=length,
                depth=0.5,
                trial=0,
                seed=task.seed,
                distractors=task.distractors,
                queries=task.queries,
            )
            written.append(length)
        except RopepatchError as error:
            reason = error
    return written, reason
