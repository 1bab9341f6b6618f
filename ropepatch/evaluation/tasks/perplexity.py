"""Perplexity as a task: a text is read, and every length, stretch of positions and document has its loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import cut_windows, digest, first_documents
from ropepatch.data.tiny.tales import Tale, held_out_tales
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.curves import LossCurve
from ropepatch.evaluation.perplexity import perplexity
from ropepatch.evaluation.protocols import Disjoint, OnePass, Protocol, Sliding, Truncated
from ropepatch.evaluation.results import Row, rows_by_length, rows_by_position
from ropepatch.evaluation.tasks.task import Advance, Task, resolved
from ropepatch.settings import Count, Length, OneOf, Several, Text, relative_length

TALES = "held-out tales"  # what tiny reads where no text is given
PROTOCOLS = {
    "one-pass": "Each piece is read once; its first N tokens give the figure at length N.",
    "sliding": (
        "At length N, windows of N tokens move over each piece, {stride} tokens at a time; each token "
        "counts once, in the first window that holds it."
    ),
    "truncated": "At length N, the first N tokens of each piece are read.",
    "disjoint": "At length N, each piece is cut into windows of N tokens that share nothing.",
}
BOS = {
    "document": "A beginning-of-sequence token stands before each document.",
    "window": "A beginning-of-sequence token stands before each window.",
    "none": "No beginning-of-sequence token is added.",
}


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
        read: Tokens of a piece of text, over which windows slide or lie side by side; None for twice the
            greatest length. Only of `sliding` and `disjoint`.
        protocol: `one-pass`, which gives every length at once, or `sliding`, `truncated` or `disjoint`, where
            the lengths are those of the window and each is a pass of its own.
        stride: Tokens from one window to the next, with `sliding`.
        bos: Where the beginning-of-sequence token goes: before each `document`, each `window`, or `none`.
        gain: Also measure what the tokens beyond the trained context bring; by a further pass.
    """

    name: ClassVar[str] = "perplexity"
    title: ClassVar[str] = "Perplexity"
    identity: ClassVar[tuple[str, ...]] = ("protocol", "stride", "bos", "text", "digest", "pieces", "read")
    derived: ClassVar[tuple[str, ...]] = ("lengths", "digest", "tokens", "pieces")

    text: Text | None = None
    field: Text = "text"
    split: Text = "test"
    windows: Count | None = 24
    documents: Count | None = None
    lengths: Several[Length] | None = None
    read: Length | None = None
    protocol: Annotated[str, OneOf(PROTOCOLS)] = "one-pass"
    stride: Count | None = None
    bos: Annotated[str, OneOf(BOS)] = "document"
    gain: bool = False

    def check(self) -> None:
        """Refuse settings that the protocol does not have."""
        if (self.stride is not None) != (self.protocol == "sliding"):
            raise RopepatchError(
                f"protocol {self.protocol} with stride {self.stride}", hint="sliding takes a stride: 256, say"
            )
        if self.read is not None and self.protocol not in ("sliding", "disjoint"):
            raise RopepatchError(f"read needs the protocol sliding or disjoint, got {self.protocol}")
        if self.gain and self.protocol != "one-pass":
            raise RopepatchError(f"gain needs the protocol one-pass, got {self.protocol}")
        if self.bos == "window" and self.protocol == "one-pass":
            raise RopepatchError("bos window needs a protocol with windows, got one-pass")
        if self.bos != "document" and self.documents is None:
            raise RopepatchError(
                f"bos {self.bos} needs documents that are not joined", hint="documents: 10, or --documents 10"
            )

    def prepare(
        self, model: str, tokenizer: PreTrainedTokenizerBase, *, trained: int, to: int
    ) -> PerplexityMeasurement:
        """The text as token ids.

        Raises:
            RopepatchError: No such text, or one that is too short.
        """
        lengths = resolved(self.lengths, trained, to)
        if self.stride is not None and self.lengths is None:
            lengths = [length for length in lengths if length > self.stride] or lengths[-1:]
        whole = self.protocol in ("one-pass", "truncated")
        read = relative_length(self.read, trained) if self.read else lengths[-1] if whole else 2 * lengths[-1]
        if read < lengths[-1]:
            raise RopepatchError(
                f"read is {read} tokens, less than a window of {lengths[-1]}", hint="raise read"
            )
        floor = None
        if self.text is None:
            tales = self._tales(model, tokenizer, read)
            pieces = list(enumerate(tale.ids for tale in tales))
            if self.protocol == "one-pass":
                floor = LossCurve(tuple(-tale.log_probs()[1:] for tale in tales))
        else:
            pieces = self._pieces(self.text, tokenizer, read)
        sources, ids = (list(part) for part in zip(*pieces, strict=True))
        parameters = self.model_dump() | {
            "text": self.text or TALES,
            "lengths": lengths,
            "read": read,
            "pieces": len(ids),
            "tokens": sum(map(len, ids)),
            "digest": digest(ids),
        }
        return PerplexityMeasurement(self, ids, sources, lengths, trained, parameters, floor)

    def with_text(self, text: str, field: str, split: str) -> PerplexityTask:
        """The same on another text."""
        return self.model_copy(update={"text": text, "field": field, "split": split})

    def limited(self, limit: int) -> PerplexityTask:
        """The same with at most so many windows, or documents if these are not joined."""
        count = "windows" if self.documents is None else "documents"
        return self.model_copy(update={count: min(limit, getattr(self, count) or limit)})

    def _tales(self, model: str, tokenizer: PreTrainedTokenizerBase, read: int) -> list[Tale]:
        check_text(self.text, model)
        if self.bos == "none":
            raise RopepatchError(
                "the tales of tiny begin with its beginning-of-sequence token", hint="give --text"
            )
        return held_out_tales(tokenizer, length=read, count=self.documents or self.windows or 24)

    def _pieces(self, text: str, tokenizer: PreTrainedTokenizerBase, read: int) -> list[tuple[int, Tensor]]:
        """Of each piece its document, and its tokens: all of one length, which counts that of `bos`."""
        documents = stream_documents(text, field=self.field, split=self.split)
        if self.documents is None:
            joined = cut_windows(tokenizer, documents, length=read, count=self.windows)
            return [(document, torch.tensor(window)) for document, window in joined]
        own = self.bos == "document"
        pieces = first_documents(tokenizer, documents, length=read, count=self.documents, bos=own)
        first = tokenizer.bos_token_id if self.bos == "window" else None
        cut = [piece if first is None or piece[0] == first else piece[: read - 1] for piece in pieces]
        return list(enumerate(cut))

    @classmethod
    def reads(cls, parameters: Mapping[str, Any]) -> dict[int, float]:
        """Its pieces, or their windows; a gain takes windows of the trained context on top, not counted."""
        read, pieces, stride = (parameters[key] for key in ("read", "pieces", "stride"))
        if parameters["protocol"] in ("one-pass", "truncated"):
            return {read: pieces}
        return {length: pieces * read / (stride or length) for length in parameters["lengths"]}

    @classmethod
    def method(cls, parameters: Mapping[str, Any]) -> str:
        """How much text, by which protocol, with which intervals."""
        pieces = f"{parameters['pieces']:,} pieces of" if "pieces" in parameters else "Text:"
        tokens = f", {parameters['tokens']:,} tokens in all" if "tokens" in parameters else ""
        protocol = str(parameters.get("protocol", ""))
        words = [
            f"{pieces} {parameters.get('text', 'text')}{tokens}.",
            PROTOCOLS.get(protocol, protocol).format(stride=parameters.get("stride")),
            BOS.get(str(parameters.get("bos", "")), ""),
            "Intervals: 95 %, Student's t over the documents from which the pieces are.",
        ]
        return " ".join(filter(None, words))


@dataclass(frozen=True, eq=False)
class PerplexityMeasurement:
    """A text to read, as token ids."""

    task: PerplexityTask
    pieces: Sequence[Tensor]  # of the same length
    sources: Sequence[int]  # of each piece the index of its document
    lengths: Sequence[int]
    trained: int
    parameters: Mapping[str, Any]
    floor_curve: LossCurve | None

    def run(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        keep: Path | None,
        advance: Advance,
    ) -> list[Row]:
        """The losses by length and position."""

        def read(protocol: Protocol) -> LossCurve:
            curve = perplexity(
                model,
                tokenizer,
                self.pieces,
                protocol=protocol,
                bos=self.task.bos,  # type: ignore[arg-type]  # checked by its settings
                keep=keep,
                split=True,
                progress=advance,
            )
            return curve.of_documents(self.sources)

        if self.task.protocol == "one-pass":
            curve = read(OnePass())
            rows = self._rows(curve)
            if self.task.gain and self.lengths[-1] > self.trained:
                limited = read(Sliding(self.trained, max(1, self.trained // 2)))
                beyond = [edge for edge in self.edges if edge >= self.trained]
                rows += rows_by_position(curve.gain_over(limited), beyond, "gain")
            return rows
        end = len(self.pieces[0]) + 1
        return [
            Row.of("loss", {"length": length}, read(self._protocol(length)).between(0, end).loss)
            for length in self.lengths
        ]

    def _protocol(self, window: int) -> Sliding | Truncated | Disjoint:
        if self.task.protocol == "sliding":
            assert self.task.stride is not None  # the task has checked it
            return Sliding(window, self.task.stride)
        return Truncated(window) if self.task.protocol == "truncated" else Disjoint(window)

    def _rows(self, curve: LossCurve) -> list[Row]:
        """What one pass gives; the trained context is among the lengths, for the short-context cost."""
        lengths = sorted({*self.lengths, *([self.trained] if self.trained < self.lengths[-1] else [])})
        return rows_by_length(curve, lengths) + rows_by_position(curve, self.edges)

    @property
    def floor(self) -> list[Row] | None:
        """What no model can beat, where that is known."""
        return None if self.floor_curve is None else self._rows(self.floor_curve)

    @property
    def edges(self) -> list[int]:
        """Of the stretches of positions: half octaves around the trained context, from an 8th of it."""
        end = self.lengths[-1]
        marks = {round(self.trained * 2 ** (half / 2)) for half in range(-6, 100)}
        return [0, *sorted(mark for mark in marks if 1 < mark < end), end]


def check_text(text: str | None, model: str | None) -> None:
    """Refuse to read nothing.

    Raises:
        RopepatchError: No text, for a model that has none of its own.
    """
    if text is None and model != "tiny":
        raise RopepatchError(
            "--text is missing", hint="--text FILE, a folder, a JSONL file or a `datasets` id"
        )
