"""The tasks of an evaluation: their settings, and the measurement that returns rows of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, pairwise, product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropepatch.data.haystack import KINDS, QUOTE, Haystack
from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import (
    Bos,
    cut_windows,
    digest,
    first_documents,
    stream_texts,
    text_digest,
)
from ropepatch.data.tiny.tales import Tale, held_out_tales
from ropepatch.errors import RopepatchError, argument
from ropepatch.evaluation.harness import RULER, run_tasks, task_manager
from ropepatch.evaluation.perplexity import LossCurve, check_windows, perplexity
from ropepatch.evaluation.results import Row, row_of
from ropepatch.evaluation.retrieval import (
    Retrieval,
    ask,
    chat_parts,
    plan_haystacks,
)
from ropepatch.files import shipped
from ropepatch.model.architectures import BOS_IN_EACH_WINDOW
from ropepatch.progress import Advance, passes, unseen
from ropepatch.settings import (
    Count,
    Length,
    Registry,
    Settings,
    Several,
    Text,
    Whole,
    named_in,
    relative_length,
)

TALES = "held-out tales"  # the text for tiny if none is given
ONE_PASS = "One pass over each piece; its first N tokens give the loss at length N."
SLIDING = (
    "At length N, windows of N tokens slide over each piece, {stride} tokens at a time; each token counts "
    "once, in the first window that contains it."
)
BEGINNINGS: dict[Bos, str] = {
    "window": "A beginning-of-sequence token stands before each document and begins each window.",
    "document": "A beginning-of-sequence token stands before each document.",
    "none": "No beginning-of-sequence token is added.",
}
DEPTHS = 5  # bins of depth in a figure
DOCUMENTS = 64  # of a text, at most, for prompts
LONG_PERPLEXITY = "ropepatch_long_perplexity"  # a task in eval/tasks
SHORTEST_RULER = 2048  # tokens; some of its tasks never finish a shorter prompt
SMALLEST_RULER = 8000  # tokens of a vocabulary, likewise
OUTSIDE = (
    64  # tokens of RULER's prompts that it does not count: the answer's first words
)


@dataclass(frozen=True)
class Goal:
    """What a task is prepared for: a model by its name, its tokenizer, and lengths in tokens.

    Attributes:
        model: The name of the model.
        tokenizer: Its tokenizer.
        trained: Its original length.
        to: The target length.
        family: Its model type.
    """

    model: str
    tokenizer: PreTrainedTokenizerBase
    trained: int
    to: int
    family: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class Data:
    """What a task measures, made and checked before a model is loaded, and the same for all models.

    Attributes:
        task: The name of the task.
        parameters: All settings that determine the measurement, with the digest of its content.
        floor: The rows of the floor, the least possible loss, if it is known.
    """

    task: str
    parameters: Mapping[str, Any]
    floor: list[Row] | None = None

    def measure(
        self,
        model: PreTrainedModel,
        keep: Path | None = None,
        advance: Advance = unseen,
    ) -> list[Row]:
        """Measure a model.

        Args:
            model: On its device, patched or not.
            keep: A folder from which an interrupted measurement resumes.
            advance: A callback of (done, total).
        """
        raise NotImplementedError


class Task(Settings):
    """A task of an evaluation; its fields are its settings in a suite."""

    name: ClassVar[str]

    def prepare(self, goal: Goal) -> Data:
        """Make and check the data for a model and a target length."""
        raise NotImplementedError

    def with_text(self, source: dict[str, Any]) -> Task:
        """The task with another text, field and split, if it uses a text; see `PerplexityTask`."""
        return self

    def limited(self, limit: int) -> Task:
        """The task with at most ``limit`` pieces of text, prompts, or documents."""
        return self

    def at_most(self, setting: str, limit: int) -> Task:
        """The task with a setting no greater than a limit; a setting of None has no limit."""
        return self.model_copy(
            update={setting: min(limit, getattr(self, setting) or limit)}
        )

    @classmethod
    def method(cls, parameters: Mapping[str, Any]) -> str:
        """The method of the measurement, in sentences."""
        return ""


def doublings(trained: int, to: int) -> list[int]:
    """The lengths L/2, L, 2L ... up to the target length, in tokens; L is the original length."""
    lengths = [min(trained // 2, to)]
    while lengths[-1] < to:
        lengths.append(min(2 * lengths[-1], to))
    return lengths


def resolved(lengths: Sequence[Length] | None, goal: Goal) -> list[int]:
    """The lengths of a task in tokens, ascending; doublings up to the target length if it sets none."""
    if lengths is None:
        return doublings(goal.trained, goal.to)
    tokens = sorted({relative_length(length, goal.trained) for length in lengths})
    if tokens[0] < 2:
        raise RopepatchError(
            f"lengths must be at least 2 tokens, got {tokens[0]}",
            hint="the first is never scored",
        )
    if tokens[-1] > goal.to:
        raise RopepatchError(
            f"lengths go to {tokens[-1]}, beyond the target length of {goal.to}",
            hint=argument("to", tokens[-1]),
        )
    return tokens


# Perplexity


class PerplexityTask(Task):
    """Measure loss and perplexity on text.

    Args:
        text: A file, a folder, a `datasets` id or a saved dataset; None for the text of the command line, or
            for the stories of tiny.
        field: The column or key that contains the text of a document.
        split: The split of a dataset.
        windows: Join the documents and use at most N windows, spread over all of them; None for all.
        documents: Do not join the documents; use the first N that have the greatest length.
        lengths: The lengths to measure, in tokens; None for L/2, L, 2L ... the target length, where L is the
            original length.
        stride: Slide windows of each length over pieces of twice the greatest length, N tokens at a time;
            None for one pass, which gives every length at once.
        bos: Put the beginning-of-sequence token at the start of each `window` and document, of each
            `document`, or nowhere, `none`; by default where the model's family needs it.
        gain: Also measure the gain from tokens beyond the original length, with a second pass.
    """

    name: ClassVar[str] = "perplexity"

    text: Text | None = None
    field: Text = "text"
    split: Text = "test"
    windows: Count | None = 24
    documents: Count | None = None
    lengths: Several[Length] | None = None
    stride: Count | None = None
    bos: Bos | None = None
    gain: bool = False

    def check(self) -> None:
        """Refuse settings that cannot be combined."""
        if self.gain and self.stride is not None:
            raise RopepatchError(
                "gain cannot be combined with stride", hint="leave one of them out"
            )

    def prepare(self, goal: Goal) -> Texts:
        """Prepare the text as token ids, in pieces of one length."""
        first = goal.tokenizer.bos_token_id
        bos: Bos = self.bos or "document"
        if self.bos is None and first is not None and goal.family in BOS_IN_EACH_WINDOW:
            bos = "window"
        lengths = resolved(self.lengths, goal)
        size = lengths[-1]
        if self.stride is not None:
            size *= 2
            if self.lengths is None:
                lengths = [n for n in lengths if n > self.stride] or lengths[-1:]
            check_windows(lengths[0], self.stride)
        tales = self._tales(goal, size) if self.text is None else []
        pieces = [(number, tale.ids) for number, tale in enumerate(tales)]
        if self.text is not None:
            pieces = self._pieces(self.text, goal.tokenizer, size, bos)
        documents, ids = zip(*pieces, strict=True)
        parameters = self.model_dump() | {
            "text": self.text or TALES,
            "bos": bos,
            "lengths": lengths,
            "pieces": len(ids),
            "tokens": sum(map(len, ids)),
            "digest": digest(ids),
        }
        texts = Texts(
            task=self.name,
            parameters=parameters,
            ids=ids,
            documents=documents,
            trained=goal.trained,
            first=first if bos == "window" else None,
        )
        if not tales or self.stride is not None:
            return texts
        exact = LossCurve(tuple(-tale.log_probs()[1:] for tale in tales))
        return replace(texts, floor=texts.rows(exact))

    def with_text(self, source: dict[str, Any]) -> Task:
        """The task with another text."""
        return self.model_copy(update=source)

    def limited(self, limit: int) -> Task:
        """The task with at most ``limit`` windows, or documents if they are not joined."""
        return self.at_most("windows" if self.documents is None else "documents", limit)

    def _tales(self, goal: Goal, size: int) -> list[Tale]:
        check_text(self.text, goal.model)
        if self.bos == "none":
            raise RopepatchError(
                "the stories of tiny need bos, its beginning-of-sequence token",
                hint=f"add {argument('text')}",
            )
        count = self.documents or self.windows or 24
        return held_out_tales(goal.tokenizer, length=size, count=count)

    def _pieces(
        self, text: str, tokenizer: PreTrainedTokenizerBase, size: int, bos: Bos
    ) -> list[tuple[int, Tensor]]:
        """The document and the tokens of each piece, beginning-of-sequence token included."""
        documents = stream_documents(text, field=self.field, split=self.split)
        if self.documents is None:
            joined = cut_windows(
                tokenizer, documents, length=size, count=self.windows, bos=bos
            )
            return [(document, torch.tensor(window)) for document, window in joined]
        cut = first_documents(
            tokenizer, documents, length=size, count=self.documents, bos=bos != "none"
        )
        return list(enumerate(cut))

    @classmethod
    def method(cls, parameters: Mapping[str, Any]) -> str:
        """The amount of text, the protocol and the intervals, in sentences."""
        of = parameters
        words = [
            f"{of['pieces']:,} pieces of {of['text']}, {of['tokens']:,} tokens in total.",
            SLIDING.format(stride=of["stride"]) if of["stride"] else ONE_PASS,
            BEGINNINGS[of["bos"]],
            "Intervals: 95 %, Student's t over documents.",
        ]
        return " ".join(words)


@dataclass(frozen=True, eq=False, kw_only=True)
class Texts(Data):
    """Pieces of text of one length.

    Attributes:
        ids: The token ids [T] of each piece.
        documents: The document of each piece, the cluster of intervals.
        trained: The original length of the model in tokens.
        first: A token that begins each window, if any.
    """

    ids: Sequence[Tensor]
    documents: Sequence[int]
    trained: int
    first: int | None

    def measure(
        self,
        model: PreTrainedModel,
        keep: Path | None = None,
        advance: Advance = unseen,
    ) -> list[Row]:
        """The loss by length and by position, and the gain; of sliding windows only the loss by length."""
        windows: list[int | None] = [None]
        stride = self.parameters["stride"]
        if stride is not None:
            windows = self.parameters["lengths"]
        elif self.parameters["gain"] and len(self.ids[0]) > self.trained:
            windows.append(self.trained)
        curves = []
        parts = passes(advance, [self.parameters["tokens"]] * len(windows))
        for window, part in zip(windows, parts, strict=True):
            curve = perplexity(
                model,
                None,
                self.ids,
                window=window,
                stride=window and (stride or max(1, window // 2)),
                bos=False,
                first=self.first,
                keep=keep,
                split=True,
                progress=part,
            )
            curves.append(curve.of_documents(self.documents))
        if stride is not None:
            return [
                row_of("loss", {"length": window}, curve.between(0, len(self.ids[0])))
                for window, curve in zip(windows, curves, strict=True)
            ]
        rows = self.rows(curves[0])
        if len(curves) > 1:
            gains = map(torch.sub, curves[1].nll, curves[0].nll)
            gain = replace(curves[0], nll=tuple(gains))
            beyond = [edge for edge in self._edges if edge >= self.trained]
            rows += by_position("gain", gain, beyond)
        return rows

    def rows(self, curve: LossCurve) -> list[Row]:
        """The losses of one pass by length, and by position."""
        lengths = {*self.parameters["lengths"]}
        if self.trained < max(lengths):
            lengths.add(self.trained)  # for the short-context cost
        by_length = [
            row_of("loss", {"length": n}, curve.at(n)) for n in sorted(lengths)
        ]
        return by_length + by_position("loss", curve, self._edges)

    @property
    def _edges(self) -> list[int]:
        """The edges of position bins: half octaves around the original length, from an eighth of it."""
        end = self.parameters["lengths"][-1]
        marks = {round(self.trained * 2 ** (half / 2)) for half in range(-6, 100)}
        return [0, *sorted(mark for mark in marks if 1 < mark < end), end]


def by_position(measure: str, curve: LossCurve, edges: Sequence[int]) -> list[Row]:
    """The mean between each two neighbouring edges of positions."""
    return [
        row_of(measure, {"begin": begin, "end": end}, curve.between(begin, end))
        for begin, end in pairwise(edges)
    ]


def check_text(text: str | None, model: str | None) -> None:
    """Refuse a missing text; only tiny has one of its own."""
    if text is None and model != "tiny":
        raise RopepatchError(
            f"{argument('text')} is missing",
            hint=f"add {argument('text', 'FILE')}: a text or JSONL file, a folder, or a `datasets` id",
        )


# Retrieval


class RetrievalTask(Task):
    """Measure retrieval from long prompts.

    Args:
        kinds: The kinds of questions; None for `quote`, `number` and `sentence` in a text, else `number`,
            `sentence`, `chain` and `fact`, without those that the tokenizer cannot write or the original
            length is too short for; `passkey` if keys is 1.
        lengths: The lengths of the prompts, in tokens; None for L/2, L, 2L ... the target length, without
            those too short for the keys. L is the original length.
        haystacks: The number of prompts; None for 10, or 20 of each length if keys is 1.
        keys: Questions of each kind per prompt and length; None for 8, or 1 for tiny, which cannot
            distinguish several keys.
        seed: The random seed of the prompts.
        text: The text around the keys: a file, a folder, a `datasets` id or a saved dataset; None for the
            built-in filler, or for the text of the command line if quotes are asked.
        field: The column or key that contains the text of a document.
        split: The split of a dataset.
        form: plain for a plain text prompt, chat for the chat template of the model.
    """

    name: ClassVar[str] = "retrieval"

    kinds: Several[Annotated[str, named_in(KINDS)]] | None = None
    lengths: Several[Length] | None = None
    haystacks: Count | None = None
    keys: Count | None = None
    seed: Whole = 0
    text: Text | None = None
    field: Text = "text"
    split: Text = "test"
    form: Literal["plain", "chat"] = "plain"

    def prepare(self, goal: Goal) -> Prompts:
        """Prepare the prompts, at the lengths that have room for the keys."""
        keys = self.keys or (1 if goal.model == "tiny" else 8)
        count = self.haystacks or (20 if keys == 1 else 10)
        wanted = resolved(self.lengths, goal)
        within = wanted[0]
        # Kinds that do not fit into the original length would not count.
        if self.lengths is None:
            within = max((n for n in wanted if n <= goal.trained), default=within)
        plan, left_out = plan_haystacks(
            goal.tokenizer,
            self.kinds or (("passkey",) if keys == 1 else None),
            within,
            lengths=wanted,
            count=count,
            keys=keys,
            seed=self.seed,
            texts=self._texts(),
            chat=self.form == "chat",
        )
        lengths, haystacks, error = plan.feasible(goal.tokenizer)
        if error is not None and (self.lengths is not None or not lengths):
            raise error
        parameters = self.model_dump() | {
            "lengths": lengths,
            "haystacks": plan.count,
            "keys": keys,
            "kinds": list(plan.kinds),
            "digest": digest(haystack.ids for haystack in haystacks),
        }
        if left_out:
            parameters["left_out"] = left_out
        return Prompts(task=self.name, parameters=parameters, haystacks=haystacks)

    def _texts(self) -> list[str] | None:
        """The first documents of the text around the keys."""
        if self.text is None:
            return None
        texts = stream_texts(self.text, field=self.field, split=self.split)
        return list(islice(texts, DOCUMENTS))

    def with_text(self, source: dict[str, Any]) -> Task:
        """The task with another text, if it quotes one."""
        quotes = QUOTE in (self.kinds or ())
        return self.model_copy(update=source) if quotes else self

    def limited(self, limit: int) -> Task:
        """The task with at most ``limit`` prompts, and at most 10 if it sets no number."""
        least = min(limit, self.haystacks or 10)
        return self.model_copy(update={"haystacks": least})

    @classmethod
    def method(cls, parameters: Mapping[str, Any]) -> str:
        """The questions, and the criterion of a correct answer, in sentences."""
        of = parameters
        kinds = "; ".join(f"{kind}: {KINDS[kind].title}" for kind in of["kinds"])
        absent = "; ".join(
            f"{kind} ({reason})" for kind, reason in of.get("left_out", {}).items()
        )
        form = " in the model's chat template" if of["form"] == "chat" else ""
        around = of["text"] or "the built-in filler"
        words = [
            f"{of['haystacks']:,} prompts of {around}{form}, seed {of['seed']}, with {of['keys']} "
            f"question{'s' * (of['keys'] > 1)} of each kind at every length. {kinds}.",
            f"Not measured: {absent}." if absent else "",
            "An answer is correct if greedy decoding gives it, to the last token. Intervals: 95 %; Wilson's "
            "for the accuracy, with the design effect of prompts; Student's t over prompts for the log-prob.",
        ]
        return " ".join(filter(None, words))


@dataclass(frozen=True, eq=False, kw_only=True)
class Prompts(Data):
    """Long prompts with their questions."""

    haystacks: Sequence[Haystack]

    def measure(
        self,
        model: PreTrainedModel,
        keep: Path | None = None,
        advance: Advance = unseen,
    ) -> list[Row]:
        """The accuracy and the log-prob by kind and length, and the accuracy by depth."""
        found = ask(model, self.haystacks, keep=keep, split=True, progress=advance)
        return retrieval_rows(found)


def retrieval_rows(retrieval: Retrieval) -> list[Row]:
    """The accuracy and the log-prob by kind and length, and the accuracy by depth; of quotes both by half.

    A single kind also gets rows by length only; several kinds are never pooled.
    """
    rows = []
    for length, kind in product(retrieval.lengths, retrieval.kinds):
        places: list[dict[str, Any]] = [{"kind": kind, "length": length}]
        if len(retrieval.kinds) == 1:
            places.insert(0, {"length": length})
        for at in places:
            rows.append(row_of("found", at, retrieval.found(length, kind)))
            rows.append(row_of("log_prob", at, retrieval.log_prob(length, kind)))
        bins = 2 if kind == QUOTE else DEPTHS  # the far half and the near half
        for number in range(bins):
            between = number / bins, (number + 1) / bins
            at = places[0] | {"depth": round(sum(between) / 2, 3)}
            with suppress(RopepatchError):  # no needle there
                found = retrieval.found(length, kind, between)
                rows.append(row_of("found", at, found))
                if kind == QUOTE:
                    log_prob = retrieval.log_prob(length, kind, between)
                    rows.append(row_of("log_prob", at, log_prob))
    return rows


# lm-eval


class LmEvalTask(Task):
    """Run tasks of lm-eval.

    Args:
        tasks: The names of tasks, in `eval/tasks` or in lm-eval.
        metadata: Metadata for the tasks. `max_seq_lengths` defaults to the target length, for RULER's tasks to
            L/2, L, 2L ... that length, from 2,048 on. L is the original length. RULER's tasks have documents
            of their own at each length.
        limit: At most N documents of each task; None for all.
        form: plain for plain text prompts, chat for the chat template, where the tokenizer has one.
    """

    name: ClassVar[str] = "lm-eval"

    tasks: Several[Text]
    metadata: dict[str, Any] = Field(default_factory=dict)
    limit: Count | None = None
    form: Literal["plain", "chat"] = "plain"

    def prepare(self, goal: Goal) -> Documents:
        """Check the names of the tasks, and prepare their metadata."""
        if LONG_PERPLEXITY in self.tasks and not self.metadata.get("text"):
            raise RopepatchError(
                f"{LONG_PERPLEXITY} needs text",
                hint=f"{argument('text', 'FILE')}, or metadata: {{text: FILE}} in the suite",
            )
        metadata = {"max_seq_lengths": [goal.to]} | self.metadata
        form = self.form if goal.tokenizer.chat_template else "plain"
        asked = self.metadata.get("max_seq_lengths")
        of_ruler = [name.startswith(RULER) for name in self.tasks]
        lengths = _lengths_of_ruler(goal, asked) if any(of_ruler) else None
        parameters = self.model_dump() | {
            "metadata": metadata,
            "max_length": goal.to,
            "lengths": lengths if all(of_ruler) else None,
            "form": form,
        }
        # An unknown name is an error before hours of other measurements
        task_manager(self.tasks, shipped("eval/tasks"), {})
        if "text" in metadata:
            place = {
                key: metadata[key] for key in ("field", "split") if key in metadata
            }
            parameters["digest"] = text_digest(stream_texts(metadata["text"], **place))
        return Documents(
            task=self.name, parameters=parameters, tokenizer=goal.tokenizer
        )

    def with_text(self, source: dict[str, Any]) -> Task:
        """The task with another text in its metadata."""
        return self.model_copy(update={"metadata": self.metadata | source})

    def limited(self, limit: int) -> Task:
        """The task with at most ``limit`` documents of each task."""
        return self.at_most("limit", limit)

    @classmethod
    def method(cls, parameters: Mapping[str, Any]) -> str:
        """The number of documents and the intervals, in sentences."""
        count = parameters.get("limit")
        limit = f", {count:,} documents each" if count else ""
        chat = parameters.get("form") == "chat"
        form = ", in the model's chat template" if chat else ""
        return (
            f"Tasks of lm-eval{limit}{form}; intervals: 95 %, of shares Wilson's, "
            "else Student's t over documents."
        )


def _lengths_of_ruler(goal: Goal, asked: Sequence[Length] | None) -> list[int]:
    """The lengths of RULER's prompts, if lm-eval can make them; shorter ones may never end, nor heed Ctrl-C."""
    lengths = resolved(asked, goal)
    if asked is None:
        lengths = [n for n in lengths if n >= SHORTEST_RULER] or lengths[-1:]
    if lengths[0] < SHORTEST_RULER or len(goal.tokenizer) < SMALLEST_RULER:
        raise RopepatchError(
            f"lm-eval cannot make RULER's prompts of {lengths[0]} tokens with a vocabulary of "
            f"{len(goal.tokenizer)}, expected at least {SHORTEST_RULER} and {SMALLEST_RULER}",
            hint="use longer ones, up to a longer target, or the task retrieval",
        )
    return lengths


@dataclass(frozen=True, eq=False, kw_only=True)
class Documents(Data):
    """Documents that lm-eval reads itself."""

    tokenizer: PreTrainedTokenizerBase

    def measure(
        self,
        model: PreTrainedModel,
        keep: Path | None = None,
        advance: Advance = unseen,
    ) -> list[Row]:
        """The metrics of every task."""
        lengths, metadata = self.parameters["lengths"], self.parameters["metadata"]
        if lengths is None:
            return self._run(model, metadata)
        rows = []
        for length in lengths:
            counted = length - self._outside
            measured = self._run(model, metadata | {"max_seq_lengths": [counted]})
            rows += [
                replace(row, measure=str(length))
                for row in measured
                if row.measure == str(counted)
            ]
        return rows

    @property
    def _outside(self) -> int:
        """Tokens of RULER's prompts that it does not count."""
        if self.parameters["form"] == "plain":
            return OUTSIDE
        template = "".join(chat_parts(self.tokenizer))
        return OUTSIDE + len(self.tokenizer.encode(template))

    def _run(self, model: PreTrainedModel, metadata: Mapping[str, Any]) -> list[Row]:
        of = self.parameters
        return run_tasks(
            model,
            self.tokenizer,
            of["tasks"],
            include_path=shipped("eval/tasks"),
            metadata=metadata,
            limit=of["limit"],
            max_length=of["max_length"],
            chat=of["form"] == "chat",
        )


TASKS: Registry[Task] = Registry("task", (PerplexityTask, RetrievalTask, LmEvalTask))
