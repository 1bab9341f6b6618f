"""Perplexity as a task: a text is read, and every length, stretch of positions and document has its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import cut_windows, digest, first_documents
from ropepatch.data.tiny.tales import Tale, held_out_tales
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.curves import LossCurve
from ropepatch.evaluation.perplexity import perplexity
from ropepatch.evaluation.results import Row, rows_by_length, rows_by_position
from ropepatch.evaluation.tasks.task import Advance, Measurement, Task, resolved
from ropepatch.evaluation.windows import check_windows
from ropepatch.settings import Count, Length, Several, Text

TALES = "held-out tales"  # what tiny reads where no text is given
ONE_PASS = "Each piece is read once; its first N tokens give the figure at length N."
SLIDING = (
    "At length N, windows of N tokens move over each piece, {stride} tokens at a time; each token counts "
    "once, in the first window that holds it."
)


class PerplexityTask(Task):
    """Read text.

    Args:
        text: A file, a folder, a `datasets` id or a saved set; None for the text of the command line, or for
            the tales of tiny.
        field: The column or key of a document's text.
        split: The split of a `datasets` id or a saved set.
        windows: Join the documents and read at most so many windows, spread over all; None for all.
        documents: Do not join, but read so many: the first that have the greatest length.
        lengths: The lengths that get a figure, in tokens; None for L/2, L, 2L ... the target.
        stride: Slide windows of each length over pieces of twice the greatest, so many tokens at a time; None
            for one pass, which gives every length at once.
        bos: Put the beginning-of-sequence token before each document.
        gain: Also measure what the tokens beyond the trained context bring; by a further pass.
    """

    name: ClassVar[str] = "perplexity"
    title: ClassVar[str] = "Perplexity"
    identity: ClassVar[tuple[str, ...]] = ("stride", "bos", "text", "digest", "pieces", "tokens")
    derived: ClassVar[tuple[str, ...]] = ("lengths", "digest", "tokens", "pieces")

    text: Text | None = None
    field: Text = "text"
    split: Text = "test"
    windows: Count | None = 24
    documents: Count | None = None
    lengths: Several[Length] | None = None
    stride: Count | None = None
    bos: bool = True
    gain: bool = False

    def check(self) -> None:
        """Refuse settings that exclude each other."""
        if self.gain and self.stride is not None:
            raise RopepatchError("gain is of one pass, got a stride", hint="leave one of them out")
        if not self.bos and self.documents is None:
            raise RopepatchError(
                "without bos documents cannot be joined", hint="documents: 10, or --documents 10"
            )

    def prepare(
        self, model: str, tokenizer: PreTrainedTokenizerBase, *, trained: int, to: int
    ) -> Measurement:
        """The text as token ids."""
        lengths = resolved(self.lengths, trained, to)
        if self.stride is not None and self.lengths is None:
            lengths = [length for length in lengths if length > self.stride] or lengths[-1:]
        check_windows(lengths[0] if self.stride else None, self.stride)
        read = 2 * lengths[-1] if self.stride else lengths[-1]
        log_probs = None
        if self.text is None:
            tales = self._tales(model, tokenizer, read)
            found = [(number, tale.ids) for number, tale in enumerate(tales)]
            log_probs = LossCurve(tuple(-tale.log_probs()[1:] for tale in tales))
        else:
            found = self._pieces(self.text, tokenizer, read)
        sources, ids = zip(*found, strict=True)
        pieces = _Pieces(ids, sources, lengths, trained)
        parameters = self.model_dump() | {
            "text": self.text or TALES,
            "lengths": lengths,
            "pieces": len(ids),
            "tokens": sum(map(len, ids)),
            "digest": digest(ids),
        }
        floor = None if log_probs is None or self.stride else pieces.rows(log_probs)

        def run(model: Any, tokenizer: Any, keep: Path | None, advance: Advance) -> list[Row]:
            def read(window: int | None = None, stride: int | None = None) -> LossCurve:
                options: dict[str, Any] = {"keep": keep, "split": True, "progress": advance}
                curve = perplexity(model, tokenizer, pieces.ids, window=window, stride=stride, **options)
                return curve.of_documents(pieces.sources)

            return self._rows(pieces, read)

        return Measurement(self, parameters, run, floor)

    def _rows(self, pieces: _Pieces, read: Callable[..., LossCurve]) -> list[Row]:
        """The losses by length, of one pass also by position."""
        if self.stride is not None:
            return [
                Row.of("loss", {"length": length}, read(length, self.stride).between(0, pieces.size).loss)
                for length in pieces.lengths
            ]
        curve = read()
        rows = pieces.rows(curve)
        if self.gain and pieces.size > pieces.trained:
            limited = read(pieces.trained, max(1, pieces.trained // 2))
            beyond = [edge for edge in pieces.edges if edge >= pieces.trained]
            rows += rows_by_position(curve.gain_over(limited), beyond, "gain")
        return rows

    def with_text(self, text: str, field: str, split: str) -> PerplexityTask:
        """The same on another text."""
        return self.model_copy(update={"text": text, "field": field, "split": split})

    def limited(self, limit: int) -> PerplexityTask:
        """The same with at most so many windows, or documents if these are not joined."""
        count = "windows" if self.documents is None else "documents"
        return self.model_copy(update={count: min(limit, getattr(self, count) or limit)})

    def _tales(self, model: str, tokenizer: PreTrainedTokenizerBase, read: int) -> list[Tale]:
        check_text(self.text, model)
        if not self.bos:
            raise RopepatchError(
                "the tales of tiny begin with its beginning-of-sequence token", hint="give --text"
            )
        return held_out_tales(tokenizer, length=read, count=self.documents or self.windows or 24)

    def _pieces(self, text: str, tokenizer: PreTrainedTokenizerBase, read: int) -> list[tuple[int, Tensor]]:
        """Of each piece its document, and its tokens: all of one length, beginning-of-sequence included."""
        documents = stream_documents(text, field=self.field, split=self.split)
        if self.documents is None:
            joined = cut_windows(tokenizer, documents, length=read, count=self.windows)
            return [(document, torch.tensor(window)) for document, window in joined]
        return [
            *enumerate(first_documents(tokenizer, documents, length=read, count=self.documents, bos=self.bos))
        ]

    @classmethod
    def reads(cls, parameters: Mapping[str, Any]) -> dict[int, float]:
        """Its pieces, or their windows; a gain takes windows of the trained context on top, not counted."""
        stride, pieces, tokens = (parameters[key] for key in ("stride", "pieces", "tokens"))
        if stride is None:
            return {tokens // pieces: pieces}
        return dict.fromkeys(parameters["lengths"], tokens / stride)

    @classmethod
    def method(cls, parameters: Mapping[str, Any]) -> str:
        """How much text, in one pass or by windows, with which intervals."""
        pieces = f"{parameters['pieces']:,} pieces of" if "pieces" in parameters else "Text:"
        tokens = f", {parameters['tokens']:,} tokens in all" if "tokens" in parameters else ""
        stride, bos = parameters.get("stride"), parameters.get("bos", True)
        words = [
            f"{pieces} {parameters.get('text', 'text')}{tokens}.",
            SLIDING.format(stride=stride) if stride else ONE_PASS,
            "A beginning-of-sequence token stands before each document."
            if bos
            else "No beginning-of-sequence token is added.",
            "Intervals: 95 %, Student's t over the documents from which the pieces are.",
        ]
        return " ".join(words)


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Pieces of text, all of one length.

    Attributes:
        ids: Of each its token ids.
        sources: Of each the index of its document.
        lengths: Those that get a figure, in tokens.
        trained: The context of the model, in tokens.
    """

    ids: Sequence[Tensor]
    sources: tuple[int, ...]
    lengths: Sequence[int]
    trained: int

    @property
    def size(self) -> int:
        """How many tokens each has."""
        return len(self.ids[0])

    def rows(self, curve: LossCurve) -> list[Row]:
        """The losses of one pass; also at the trained context, for the short-context cost."""
        lengths = sorted({*self.lengths, *([self.trained] if self.trained < self.lengths[-1] else [])})
        return rows_by_length(curve, lengths) + rows_by_position(curve, self.edges)

    @property
    def edges(self) -> list[int]:
        """Of the stretches of positions: half octaves around the trained context, from an 8th of it."""
        end = self.lengths[-1]
        marks = {round(self.trained * 2 ** (half / 2)) for half in range(-6, 100)}
        return [0, *sorted(mark for mark in marks if 1 < mark < end), end]


def check_text(text: str | None, model: str | None) -> None:
    """Refuse to read nothing."""
    if text is None and model != "tiny":
        raise RopepatchError(
            "--text is missing", hint="--text FILE, a folder, a JSONL file or a `datasets` id"
        )
