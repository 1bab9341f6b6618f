"""Perplexity as a task: a text is read, and every length, stretch of positions and document has its loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropepatch.data.documents import GeneratedDocument
from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import digest, first_documents, windows
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import Comparison
from ropepatch.evaluation.curves import LossCurve
from ropepatch.evaluation.perplexity import perplexity
from ropepatch.evaluation.protocols import Disjoint, OnePass, Protocol, Sliding, Truncated
from ropepatch.evaluation.results import Row, by_document, by_length, by_position, loss_row
from ropepatch.evaluation.table import Drawing, Metric, Table
from ropepatch.evaluation.tasks.losses import nats_cell, perplexity_cell, stretch_table, training_sentences
from ropepatch.evaluation.tasks.task import Advance, Column, Say, Tables, Task, resolved
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
    columns: ClassVar[Mapping[str, Column]] = {"Nats per token": nats_cell, "Perplexity": perplexity_cell}
    greater_is_better: ClassVar[bool] = False
    ranks: ClassVar[Literal["loss", "retrieval"] | None] = "loss"
    identity: ClassVar[tuple[str, ...]] = ("protocol", "stride", "bos", "text", "digest", "pieces", "read")
    quoted: ClassVar[tuple[str, ...]] = ("nats", "interval")
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
            pieces = [tale.ids for tale in tales]
            if self.protocol == "one-pass":
                floor = LossCurve(tuple(-tale.log_probs()[1:] for tale in tales))
        else:
            pieces = self._pieces(self.text, tokenizer, read)
        parameters = self.model_dump() | {
            "text": self.text or TALES,
            "lengths": lengths,
            "read": read,
            "pieces": len(pieces),
            "tokens": sum(map(len, pieces)),
            "digest": digest(pieces),
        }
        return PerplexityMeasurement(self, pieces, lengths, trained, parameters, floor)

    def with_text(self, text: str, field: str, split: str) -> PerplexityTask:
        """The same on another text."""
        return self.model_copy(update={"text": text, "field": field, "split": split})

    def limited(self, limit: int) -> PerplexityTask:
        """The same with at most so many windows, or documents if these are not joined."""
        count = "windows" if self.documents is None else "documents"
        return self.model_copy(update={count: min(limit, getattr(self, count) or limit)})

    def _tales(self, model: str, tokenizer: PreTrainedTokenizerBase, read: int) -> list[GeneratedDocument]:
        check_text(self.text, model)
        if self.bos == "none":
            raise RopepatchError(
                "the tales of tiny begin with its beginning-of-sequence token", hint="give --text"
            )
        return held_out_tales(tokenizer, length=read, count=self.documents or self.windows or 24)

    def _pieces(self, text: str, tokenizer: PreTrainedTokenizerBase, read: int) -> list[Tensor]:
        """Pieces of a text, all of the same length, which counts the token that `bos` puts before them."""
        documents = stream_documents(text, field=self.field, split=self.split)
        if self.documents is None:
            joined = windows(tokenizer, documents, length=read, count=self.windows)
            return [torch.tensor(window) for window in joined]
        own = self.bos == "document"
        pieces = first_documents(tokenizer, documents, length=read, count=self.documents, bos=own)
        first = tokenizer.bos_token_id if self.bos == "window" else None
        if first is None:
            return pieces
        return [piece if piece[0] == first else piece[: read - 1] for piece in pieces]

    @classmethod
    def reads(cls, parameters: Mapping[str, Any]) -> dict[int, float]:
        """Its pieces, or their windows; a gain takes windows of the trained context on top, not counted."""
        read, pieces, stride = (parameters[key] for key in ("read", "pieces", "stride"))
        if parameters["protocol"] in ("one-pass", "truncated"):
            return {read: pieces}
        return {length: pieces * read / (stride or length) for length in parameters["lengths"]}

    @classmethod
    def setup(cls, comparison: Comparison) -> str:
        """The text, its pieces and the protocol."""
        of = comparison.parameters
        protocol = "" if of["protocol"] == "one-pass" else f", {of['protocol']}"
        return f"{of['text']}, {of['pieces']} x {of['read']} tokens{protocol}"

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
            "Intervals: 95 %, from drawing whole documents again with replacement.",
        ]
        return " ".join(filter(None, words))

    @classmethod
    def short_tables(cls, comparison: Comparison) -> list[Table]:
        """Perplexity by length; in one pass also the loss, and what was gained, by stretch of positions."""
        one_pass = comparison.parameters["protocol"] == "one-pass"
        caption = "Perplexity of the first" if one_pass else "Perplexity with windows of"
        tables = [cls.by_length(comparison, caption, perplexity_cell)]
        if one_pass:
            trained, end = comparison.trained, comparison.lengths()[-1]
            spans = [(0, min(trained, end))]
            while spans[-1][1] < end:
                spans.append((spans[-1][1], min(2 * spans[-1][1], end)))
            tables.append(stretch_table(comparison, "Nats per token, positions", "by_position", spans))
            gained = "Nats gained from beyond the trained context"
            if comparison.rows("gain"):
                tables.append(stretch_table(comparison, gained, "gain", spans[1:]))
        return tables

    @classmethod
    def drawings(cls, comparison: Comparison) -> list[Drawing]:
        """Perplexity by length, the loss and the gain by position."""
        bands = "bands: 95 % intervals"
        drawings = [
            Drawing("perplexity", "by_length", f"Perplexity by length, on a logarithmic axis; {bands}"),
            Drawing("positions", "by_position", f"Mean loss of the tokens at these positions; {bands}"),
            Drawing(
                "gain",
                "gain",
                "What a token gains from the context beyond the trained one; below 0 that context does harm",
            ),
        ]
        return [drawing for drawing in drawings if comparison.rows(drawing.kind)]

    @classmethod
    def sentence(cls, comparison: Comparison, length: int, rows: Mapping[str, Row], *, best: bool) -> str:
        """The loss and the perplexity of each."""
        (first, row), *others = rows.items()
        nats, ppl = nats_cell(row), perplexity_cell(row)
        doubt = f" (95 % interval {nats.detail})" if nats.detail else ""
        reads = f"{first} reads best:" if best else f"{first} loses"
        figures = [
            f"{reads} {nats.text} nats per token{doubt}, a perplexity of {ppl.text}",
            *(
                f"{name}, {nats_cell(row).text}, a perplexity of {perplexity_cell(row).text}"
                for name, row in others
            ),
        ]
        text = comparison.parameters.get("text", "text")
        return f"Over {length:,} tokens of {text}, {'; '.join(figures)}."

    @classmethod
    def remarks(cls, comparison: Comparison, length: int) -> list[str]:
        """What every adaptation brought, document by document, and what no model can beat."""
        floor = () if comparison.floor is None else comparison.floor.tables["by_length"]
        bounds = [f"No model can be below {row['nats']:.3f}." for row in floor if row["length"] == length]
        return [*training_sentences(comparison), *bounds]

    @classmethod
    def metric(cls, parameters: Mapping[str, Any], length: int, row: Row) -> Metric:
        """The perplexity, or the loss where no number holds it."""
        text, keys = str(parameters.get("text", "text")), ("protocol", "stride", "bos")
        settings = {key: parameters[key] for key in keys if parameters.get(key) is not None}
        kind, key = ("loss", "nats") if row["perplexity"] is None else ("perplexity", "perplexity")
        name = f"{kind} at {length:,} tokens"
        return Metric((text, text), kind, name, row[key], {"length": length} | settings)


@dataclass(frozen=True, eq=False)
class PerplexityMeasurement:
    """A text to read, as token ids."""

    task: PerplexityTask
    pieces: Sequence[Tensor]  # of the same length
    lengths: Sequence[int]
    trained: int
    parameters: Mapping[str, Any]
    floor: LossCurve | None

    def run(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        keep: Path | None,
        advance: Advance,
        say: Say = lambda line: None,
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


def check_text(text: str | None, model: str | None) -> None:
    """Refuse to read nothing.

    Raises:
        RopepatchError: No text, for a model that has none of its own.
    """
    if text is None and model != "tiny":
        raise RopepatchError(
            "--text is missing", hint="--text FILE, a folder, a JSONL file or a `datasets` id"
        )
