"""Retrieval as a task: what is found of several kinds of questions, by length, and how far that goes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropepatch.data.question_words import TEMPLATES
from ropepatch.data.questions import KINDS
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import Comparison
from ropepatch.evaluation.grid import THRESHOLD
from ropepatch.evaluation.processes import is_first_process, rank_and_ranks
from ropepatch.evaluation.results import Result, Row
from ropepatch.evaluation.retrieval import (
    MEAN,
    OWN,
    PLAIN,
    Grid,
    answered,
    chat_parts,
    effective_row,
    mean_row,
    share_row,
)
from ropepatch.evaluation.table import MISSING, Cell, Drawing, Metric, Table, enumeration
from ropepatch.evaluation.tasks.passkey import length_cell
from ropepatch.evaluation.tasks.task import Advance, Column, Say, Tables, Task, resolved
from ropepatch.files import read_json, write_json
from ropepatch.model.head import evaluating
from ropepatch.settings import Count, Length, OneOf, Several, Share, Whole, expected

KEPT = "found.json"  # what is done so far
PATIENCE = 20.0  # seconds without a number


def share_cell(row: Row) -> Cell:
    """The share found with its interval."""
    low, high = row["interval"]
    return Cell(f"{row['share']:.0%}", f"{low:.0%} to {high:.0%}", row["share"])


class RetrievalTask(Task):
    """Ask for what stands in a long text, in several kinds of questions.

    Args:
        kinds: Which; all if none are named. Their mean counts each the same.
        lengths: The lengths of the prompts, in tokens; None for L/4, L/2, L, 2L ... the target, without
            those that are too short for a kind.
        depths: Where the needle stands that is asked for, from 0 to 1.
        trials: Questions of each kind, length and depth.
        seed: The seed from which they are drawn.
        templates: The words of keys and filler, which the trials take in turn.
        form: Whether a prompt is plain text, or a turn in the model's own chat template.
    """

    name: ClassVar[str] = "retrieval"
    title: ClassVar[str] = "Retrieval"
    columns: ClassVar[Mapping[str, Column]] = {"Found, mean of all kinds": share_cell}
    ranks: ClassVar[Literal["loss", "retrieval"] | None] = "retrieval"
    identity: ClassVar[tuple[str, ...]] = ("kinds", "trials", "depths", "seed", "templates", "form")
    quoted: ClassVar[tuple[str, ...]] = ("share", "n", "interval")
    derived: ClassVar[tuple[str, ...]] = ("lengths", "chat")

    kinds: Several[Annotated[str, OneOf(KINDS)]] = tuple(KINDS)
    lengths: Several[Length] | None = None
    depths: Several[Share] = (0.0, 0.25, 0.5, 0.75, 1.0)
    trials: Count = 4
    seed: Whole = 0
    templates: Several[Annotated[str, OneOf(TEMPLATES)]] = ("village",)
    form: Annotated[Literal["plain", "chat"], expected("plain or chat")] = "plain"

    def check(self) -> None:
        """Refuse a kind that is named twice."""
        if len(set(self.kinds)) < len(self.kinds):
            raise RopepatchError(f"kinds must differ, got {list(self.kinds)}", hint="leave one out")

    def prepare(
        self, model: str, tokenizer: PreTrainedTokenizerBase, *, trained: int, to: int
    ) -> RetrievalMeasurement:
        """The lengths at which the tokenizer can write the prompts of each kind.

        Raises:
            RopepatchError: A kind that it can write at none of the lengths, or not at one that is named; or
                no chat template for the form.
        """
        chat = chat_parts(tokenizer) if self.form == "chat" else PLAIN
        grid = Grid(self.depths, self.trials, self.seed, self.templates, chat)
        lengths = resolved(self.lengths, trained, to)
        if self.lengths is None and trained // 4 < lengths[0]:
            lengths = [trained // 4, *lengths]
        least = {kind: self._least(tokenizer, grid, kind, lengths) for kind in self.kinds}
        asked = [length for length in lengths if length >= min(least.values())]
        parameters = self.model_dump() | {"lengths": asked, "chat": chat}
        return RetrievalMeasurement(self, grid, asked, least, parameters)

    def _least(
        self, tokenizer: PreTrainedTokenizerBase, grid: Grid, kind: str, lengths: Sequence[int]
    ) -> int:
        """The first of the lengths, ascending, at which all prompts of a kind can be written."""
        for length in lengths:
            try:
                grid.ask(tokenizer, kind, length)
                return length
            except RopepatchError as error:
                if self.lengths is not None or length == lengths[-1]:
                    hint = f"{error.hint}; or leave {kind} out of kinds" if error.hint else None
                    raise RopepatchError(
                        f"{kind} cannot be asked for: {error}", hint=hint or f"leave {kind} out of kinds"
                    ) from error
        raise AssertionError("there are lengths")

    def limited(self, limit: int) -> RetrievalTask:
        """The same with at most so many questions per kind, length and depth."""
        return self.model_copy(update={"trials": min(limit, self.trials)})

    @classmethod
    def reads(cls, parameters: Mapping[str, Any]) -> dict[int, float]:
        """All its prompts."""
        prompts = len(parameters["kinds"]) * len(parameters["depths"]) * parameters["trials"]
        return dict.fromkeys(parameters["lengths"], prompts)

    @classmethod
    def questions(cls, result: Result) -> list[Row]:
        """Every kind that this version knows."""
        rows = result.tables["by_kind"]
        return [row | {"chance": KINDS[row["kind"]].chance} for row in rows if row["kind"] in KINDS]

    @classmethod
    def setup(cls, comparison: Comparison) -> str:
        """How many kinds and questions."""
        of = comparison.parameters
        chat = ", in the chat template" if of["form"] == "chat" else ""
        kinds = f"{len(of['kinds'])} kind{'s' * (len(of['kinds']) > 1)}"
        return f"retrieval of {kinds}, {of['trials'] * len(of['depths'])} questions per length{chat}"

    @classmethod
    def method(cls, parameters: Mapping[str, Any]) -> str:
        """What is asked, what counts, and what guessing would find."""
        of = parameters
        kinds = "; ".join(
            f"{kind}: {KINDS[kind].title} (chance {KINDS[kind].chance:.2g})"
            for kind in of["kinds"]
            if kind in KINDS
        )
        form = "in the model's chat template" if of["form"] == "chat" else "as plain text"
        return (
            f"{of['trials'] * len(of['depths']):,} questions of each kind and length, {form}, "
            f"seed {of['seed']}. {kinds}. Chance: what is found by saying things that stand in the text "
            "without reading what is asked. An answer counts if greedy decoding would say it to the last "
            "token; of several in any order, each. Effective length: the greatest at which at least "
            f"{THRESHOLD:.1%} are found (RULER's rule), and the greatest with at least {OWN:.0%} of the "
            "model's own share at its shortest length. Intervals: Wilson's, 95 %, of as many prompts."
        )

    @classmethod
    def tables(cls, comparison: Comparison) -> list[Table]:
        """Of the mean and of every kind: the share found by length, and the effective lengths."""
        names = list(comparison.results)
        shares = _by_place(comparison.rows("by_kind")) | {
            (MEAN, length): comparison.at(length) for length in comparison.lengths()
        }
        effective = {
            (row["kind"], name): row
            for name, rows in comparison.rows("effective_length").items()
            for row in rows
        }
        rows = []
        for kind in (MEAN, *comparison.parameters["kinds"]):
            for length in sorted(length for of, length in shares if of == kind):
                cells = cls.marked(shares[kind, length], share_cell)
                rows.append(_row(kind, f"{length:,} tokens", names, cells))
            own = {name: effective[kind, name] for name in names if (kind, name) in effective}
            if own:
                shortest = min(row["shortest"] for row in own.values())
                captions = {
                    "length": f"effective length at {THRESHOLD:.1%}",
                    "own": f"effective length at {OWN:.0%} of its own at {shortest:,}",
                }
                for key, caption in captions.items():
                    reached = {name: length_cell({"length": row[key]}) for name, row in own.items()}
                    rows.append(_row(kind, caption, names, reached))
        heads = [("Kind", ""), ("", ""), *((name, "") for name in names)]
        return [Table("Share found", heads, rows, labels=2, across=True)] if len(rows) else []

    @classmethod
    def outcome(cls, comparison: Comparison) -> dict[str, dict[str, Cell]]:
        """The mean at the greatest length, and its effective lengths."""
        if not comparison.lengths():
            return {}
        last = comparison.at(comparison.lengths()[-1])
        means = {
            name: row
            for name, rows in comparison.rows("effective_length").items()
            for row in rows
            if row["kind"] == MEAN
        }
        return {
            "Retrieval": cls.marked(last, share_cell),
            f"Effective length at {THRESHOLD:.1%}": {
                name: length_cell({"length": row["length"]}) for name, row in means.items()
            },
            f"Effective length at {OWN:.0%} of its own": {
                name: length_cell({"length": row["own"]}) for name, row in means.items()
            },
        }

    @classmethod
    def drawings(cls, comparison: Comparison) -> list[Drawing]:
        """Maps of every method, by kind and by depth."""
        drawings = [
            Drawing("retrieval", "by_kind", "Share found, by the kind of question and the prompt's length"),
            Drawing(
                "retrieval-depth",
                "cells",
                "Share found, by the depth of what is asked for and the prompt's length; mean of the kinds "
                "that have a depth",
            ),
        ]
        return [drawing for drawing in drawings if comparison.rows(drawing.kind)]

    @classmethod
    def sentence(cls, comparison: Comparison, length: int, rows: Mapping[str, Row], *, best: bool) -> str:
        """What each finds."""
        figures = [
            f"{name} finds {row['share']:.0%} (95 % interval {share_cell(row).detail})"
            for name, row in rows.items()
        ]
        kinds = len(comparison.parameters["kinds"])
        return (
            f"Of what is asked for at {length:,} tokens, the mean of {kinds} kinds, {enumeration(figures)}."
        )

    @classmethod
    def metric(cls, parameters: Mapping[str, Any], length: int, row: Row) -> Metric:
        """The mean share of what is found."""
        settings = {key: parameters[key] for key in cls.identity if parameters.get(key) is not None}
        text, name = ("retrieval", "retrieval in generated text"), f"accuracy at {length:,} tokens"
        return Metric(text, "accuracy", name, row["share"], {"length": length} | settings)


@dataclass(frozen=True, eq=False)
class RetrievalMeasurement:
    """Questions to ask."""

    task: RetrievalTask
    grid: Grid
    lengths: Sequence[int]
    least: Mapping[str, int]  # the first length of each kind
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
        """The shares by kind, length and depth; the shortest prompts of all kinds are read first.

        What is found of each kind and length is said, and every `PATIENCE` seconds what is found so far.
        """
        file = None if keep is None else keep / KEPT
        found: dict[str, list[int]] = read_json(file) if file is not None and file.exists() else {}
        places = [
            (length, kind)
            for length in self.lengths
            for kind in self.task.kinds
            if length >= self.least[kind]
        ]
        trials, done = self.grid.trials, 0
        rank, ranks = rank_and_ranks(True)
        prompts = len(range(rank, len(self.grid.depths) * trials, ranks))  # of a place, by this process
        said, so_far = time.monotonic(), list[int]()

        def advanced(counts: Sequence[int], kind: str, length: int) -> None:
            nonlocal done, said
            done += len(counts)
            so_far.extend(counts)
            advance(done, len(places) * prompts)
            if time.monotonic() - said >= PATIENCE and len(so_far) < prompts:
                share = share_cell(share_row(so_far, KINDS[kind].wanted))
                say(f"{kind}, {length:,} tokens: {share.line} so far, {len(so_far)} of {prompts} questions")
                said = time.monotonic()

        by_kind, cells = [], []
        with evaluating(model), torch.inference_mode():
            for length, kind in places:
                so_far.clear()
                if (place := f"{kind} {length}") in found:
                    advanced(found[place][rank::ranks], kind, length)
                else:
                    asked = self.grid.ask(tokenizer, kind, length)
                    found[place] = answered(
                        model,
                        tokenizer,
                        asked,
                        force=KINDS[kind].forced,
                        split=True,
                        advance=partial(advanced, kind=kind, length=length),
                    )
                    if file is not None and is_first_process():
                        write_json(file, found)
                wanted = KINDS[kind].wanted
                row = {"kind": kind, "length": length, **share_row(found[place], wanted)}
                by_kind.append(row | {"found": found[place], "wanted": wanted})
                say(f"{kind}, {length:,} tokens: {share_cell(row).line}")
                said = time.monotonic()
                if KINDS[kind].placed:
                    cells += [
                        {"kind": kind, "length": length, "depth": depth}
                        | share_row(found[place][at * trials : (at + 1) * trials], wanted)
                        for at, depth in enumerate(self.grid.depths)
                    ]
        whole = [length for length in self.lengths if length >= max(self.least.values())]
        by_length = [
            {"length": length, **mean_row([row for row in by_kind if row["length"] == length])}
            for length in whole
        ]
        of_kinds = {MEAN: by_length} | {
            kind: [row for row in by_kind if row["kind"] == kind] for kind in self.task.kinds
        }
        return {
            "cells": cells,
            "by_kind": by_kind,
            "by_length": by_length,
            "effective_length": [effective_row(kind, rows) for kind, rows in of_kinds.items()],
        }


def _by_place(tables: Mapping[str, Sequence[Row]]) -> dict[tuple[str, int], dict[str, Row]]:
    """Rows of several results by kind and length, and by the name of the result."""
    places: dict[tuple[str, int], dict[str, Row]] = {}
    for name, rows in tables.items():
        for row in rows:
            places.setdefault((row["kind"], row["length"]), {})[name] = row
    return places


def _row(kind: str, place: str, names: Sequence[str], cells: Mapping[str, Cell]) -> list[Cell]:
    return [Cell(kind, value=kind), Cell(place, value=place), *(cells.get(name, MISSING) for name in names)]
