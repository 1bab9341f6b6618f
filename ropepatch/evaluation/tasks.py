"""The tasks of a suite, made ready for one model and one target, and run on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ropepatch.data.sources import stream_documents
from ropepatch.data.templates import PasskeyTemplate, bundled, read_template
from ropepatch.data.texts import digest, first_documents, token_ids, windows
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.curves import LossCurve
from ropepatch.evaluation.passkey import passkey, trial_prompt
from ropepatch.evaluation.perplexity import perplexity
from ropepatch.evaluation.protocols import Disjoint, OnePass, Protocol, Sliding, Truncated
from ropepatch.evaluation.results import (
    Row,
    by_document,
    by_length,
    by_position,
    loss_row,
    passkey_by_length,
    passkey_cells,
)
from ropepatch.evaluation.suites import LmEvalTask, PasskeyTask, PerplexityTask, check_text
from ropepatch.files import shipped
from ropepatch.settings import Length, relative_length

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ropepatch.data.documents import Document as TinyDocument
    from ropepatch.evaluation.suites import Task

Tables = dict[str, list[Row]]
Advance = Callable[[int, int | None], None]

TALES = "held-out tales"  # what tiny reads where no text is given


@dataclass(frozen=True, eq=False)
class Reading:
    """Text to read, as token ids."""

    task: PerplexityTask
    pieces: Sequence[Tensor]  # of the same length
    lengths: Sequence[int]
    trained: int
    parameters: Mapping[str, Any]
    floor: LossCurve | None

    def run(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, keep: Path | None, advance: Advance
    ) -> Tables:
        """The losses by length, position and document."""
        options: dict[str, Any] = {"bos": self.task.bos, "split": True}

        def read(protocol: Protocol) -> LossCurve:
            return perplexity(
                model, tokenizer, self.pieces, protocol=protocol, keep=keep, progress=advance, **options
            )

        if self.task.protocol == "one-pass":
            curve = read(OnePass())
            tables = self.tables(curve)
            if self.task.gain and self.lengths[-1] > self.trained:
                limited = read(Sliding(self.trained, max(1, self.trained // 2)))
                beyond = [edge for edge in self.edges if edge >= self.trained]
                rows = by_position(curve.gain_over(limited), beyond)
                tables["gain"] = [{k: v for k, v in row.items() if k != "perplexity"} for row in rows]
            return tables
        curves = {length: read(self._protocol(length)) for length in self.lengths}
        return {
            "by_length": [
                {"length": length, **loss_row(curve.between(0, len(self.pieces[0]) + 1))}
                for length, curve in curves.items()
            ],
            "by_document": by_document(curves[self.lengths[-1]]),
        }

    def _protocol(self, window: int) -> Sliding | Truncated | Disjoint:
        if self.task.protocol == "sliding":
            assert self.task.stride is not None  # the task has checked it
            return Sliding(window, self.task.stride)
        return Truncated(window) if self.task.protocol == "truncated" else Disjoint(window)

    def tables(self, curve: LossCurve) -> Tables:
        """What one pass tells."""
        return {
            "by_length": by_length(curve, self.lengths),
            "by_position": by_position(curve, self.edges),
            "by_document": by_document(curve),
            "by_document_inside": by_document(curve, self.trained),
        }

    @property
    def floor_tables(self) -> Tables | None:
        """What no model can beat, where that is known."""
        return None if self.floor is None else self.tables(self.floor)

    @property
    def edges(self) -> list[int]:
        """Of the stretches of positions: half octaves around the trained context, from an 8th of it."""
        end = self.lengths[-1]
        marks = {round(self.trained * 2 ** (half / 2)) for half in range(-6, 100)}
        return [0, *sorted(mark for mark in marks if 1 < mark < end), end]


@dataclass(frozen=True, eq=False)
class Retrieval:
    """Pass keys to ask for."""

    task: PasskeyTask
    lengths: Sequence[int]
    template: PasskeyTemplate
    parameters: Mapping[str, Any]
    floor_tables = None

    def run(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, keep: Path | None, advance: Advance
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
            progress=advance,
        )
        effective = [{"length": grid.effective_length(self.task.threshold), "threshold": self.task.threshold}]
        return {
            "cells": passkey_cells(grid),
            "by_length": passkey_by_length(grid),
            "effective_length": effective,
        }


@dataclass(frozen=True, eq=False)
class Harness:
    """Tasks of lm-eval."""

    task: LmEvalTask
    to: int
    parameters: Mapping[str, Any]
    floor_tables = None

    def run(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, keep: Path | None, advance: Advance
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


Material = Reading | Retrieval | Harness


def prepare(task: Task, model: str, tokenizer: PreTrainedTokenizerBase, *, trained: int, to: int) -> Material:
    """What a task needs beside the model.

    Raises:
        RopepatchError: No such text, one that is too short, or a template that is none.
    """
    if isinstance(task, LmEvalTask):
        return _harness(task, tokenizer, to)
    lengths = _resolved(task.lengths, trained, to)
    if isinstance(task, PasskeyTask):
        return _retrieval(task, tokenizer, lengths)
    if task.stride is not None and task.lengths is None:
        lengths = [length for length in lengths if length > task.stride] or lengths[-1:]
    return _reading(task, model, tokenizer, lengths, trained)


def _harness(task: LmEvalTask, tokenizer: PreTrainedTokenizerBase, to: int) -> Harness:
    if find_spec("lm_eval") is None:
        raise RopepatchError("tasks of lm-eval need lm-eval", hint='pip install "ropepatch[eval]"')
    metadata = {"max_seq_lengths": [to]} | task.metadata
    parameters = asdict(task) | {"metadata": metadata, "max_length": to}
    if "text" in metadata:
        parameters["digest"] = digest(token_ids(tokenizer, stream_documents(metadata["text"])))
    return Harness(task, to, parameters)


def _retrieval(task: PasskeyTask, tokenizer: PreTrainedTokenizerBase, lengths: list[int]) -> Retrieval:
    template = read_template(Path(task.template)) if task.template else bundled(distractors=task.distractors)
    written, reason = askable(task, template, tokenizer, lengths)
    if reason is not None and (task.lengths is not None or not written):
        raise reason
    parameters = asdict(task) | {"lengths": written, "template": asdict(template)}
    return Retrieval(task, written, template, parameters)


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


def _reading(
    task: PerplexityTask,
    model: str,
    tokenizer: PreTrainedTokenizerBase,
    lengths: list[int],
    trained: int,
) -> Reading:
    whole = task.protocol in ("one-pass", "truncated")
    read = relative_length(task.read, trained) if task.read else lengths[-1] if whole else 2 * lengths[-1]
    if read < lengths[-1]:
        raise RopepatchError(f"read is {read} tokens, less than a window of {lengths[-1]}", hint="raise read")
    floor = None
    if task.text is None:
        tales = _tales(task, model, tokenizer, read)
        ids = [tale.ids for tale in tales]
        if task.protocol == "one-pass":
            floor = LossCurve(tuple(-tale.log_probs()[1:] for tale in tales))
    else:
        ids = _pieces(task, tokenizer, read)
    parameters = asdict(task) | {
        "text": task.text or TALES,
        "lengths": lengths,
        "read": read,
        "pieces": len(ids),
        "tokens": sum(map(len, ids)),
        "digest": digest(ids),
    }
    return Reading(task, ids, lengths, trained, parameters, floor)


def _tales(
    task: PerplexityTask, model: str, tokenizer: PreTrainedTokenizerBase, read: int
) -> list[TinyDocument]:
    check_text(task.text, model)
    if task.bos == "none":
        raise RopepatchError(
            "the tales of tiny begin with its beginning-of-sequence token", hint="give --text"
        )
    return held_out_tales(tokenizer, length=read, count=task.documents or task.windows or 24)


def _pieces(task: PerplexityTask, tokenizer: PreTrainedTokenizerBase, read: int) -> list[Tensor]:
    """Pieces of a text, all of the same length, which counts the token that `bos` puts before them."""
    assert task.text is not None
    documents = stream_documents(task.text, field=task.field, split=task.split)
    if task.documents is None:
        joined = windows(tokenizer, documents, length=read, count=task.windows)
        return [torch.tensor(window) for window in joined]
    own = task.bos == "document"
    ids = first_documents(tokenizer, documents, length=read, count=task.documents, bos=own)
    first = tokenizer.bos_token_id if task.bos == "window" else None
    return ids if first is None else [piece if piece[0] == first else piece[: read - 1] for piece in ids]


def doublings(trained: int, to: int) -> list[int]:
    """L/2, L, 2L ... the target, in tokens."""
    lengths = [min(trained // 2, to)]
    while lengths[-1] < to:
        lengths.append(min(2 * lengths[-1], to))
    return lengths


def _resolved(lengths: Sequence[Length] | None, trained: int, to: int) -> list[int]:
    """The lengths in tokens, ascending: those given, or doublings up to the target."""
    if lengths is None:
        return doublings(trained, to)
    resolved = sorted({relative_length(length, trained) for length in lengths})
    if resolved[0] < 2:
        raise RopepatchError(
            f"lengths must be at least 2 tokens, got {resolved[0]}", hint="the first is never scored"
        )
    if resolved[-1] > to:
        raise RopepatchError(
            f"lengths go to {resolved[-1]}, beyond the target of {to}", hint=f"--to {resolved[-1]}"
        )
    return resolved
