"""The tasks of an evaluation: their settings, and the measurement that returns rows of results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, islice, product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropepatch.data.haystack import KINDS, Haystacks
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
from ropepatch.evaluation.curves import LossCurve
from ropepatch.evaluation.intervals import Mean
from ropepatch.evaluation.perplexity import check_windows, perplexity, windows
from ropepatch.evaluation.results import (
    Row,
    rows_by_length,
    rows_by_position,
    rows_of,
)
from ropepatch.evaluation.retrieval import Retrieval, ask, chat_parts
from ropepatch.files import shipped
from ropepatch.model.architectures import BOS_IN_EACH_WINDOW
from ropepatch.progress import Advance, passes
from ropepatch.settings import (
    Count,
    Length,
    Registry,
    Settings,
    Several,
    Text,
    Whole,
    named_in,
    refuse_unknown,
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
NORMAL = 1.959964  # standard errors from a mean to the ends of its 95 % interval


@dataclass(frozen=True, eq=False)
class Measurement:
    """A task prepared for one model and one target length.

    Args:
        task: Its settings.
        parameters: All settings that determine the measurement, for the result.
        run: Returns the rows of the result. It takes the model; its tokenizer; a folder from which an
            interrupted measurement resumes, or None; and a callback of (done, total).
        floor: The rows of the floor, the least possible loss, if it is known.
        reads: The number of sequences by their length in tokens; None if unknown.
    """

    task: Task
    parameters: Mapping[str, Any]
    run: Callable[
        [PreTrainedModel, PreTrainedTokenizerBase, Path | None, Advance], list[Row]
    ]
    floor: list[Row] | None = None
    reads: Mapping[int, float] | None = None


class Task(Settings):
    """A task of an evaluation; its fields are its settings in a suite."""

    name: ClassVar[str]
    title: ClassVar[str] = ""
    identity: ClassVar[
        tuple[str, ...]
    ] = ()  # parameters that identify a measurement, quoted in summaries

    def prepare(
        self,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        trained: int,
        to: int,
        family: str = "",
    ) -> Measurement:
        """Prepare the task for a model of original length ``trained`` and target length ``to``, in tokens.

        ``family`` is its model type.
        """
        raise NotImplementedError

    def with_text(self, text: str, field: str, split: str) -> Task:
        """The task with another text, if it uses one; see `PerplexityTask`."""
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
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The JSON schema of the task in a suite, with its name."""
        written = super().__get_pydantic_json_schema__(core, handler)
        written["properties"] = {"task": {"const": cls.name}} | written["properties"]
        written["required"] = ["task", *written.get("required", [])]
        return written

    @classmethod
    def method(cls, parameters: Mapping[str, Any]) -> str:
        """The method of the measurement, in sentences."""
        return ""


def bos_of(family: str, tokenizer: PreTrainedTokenizerBase) -> Bos:
    """Where a family of models needs its beginning-of-sequence token."""
    in_windows = family in BOS_IN_EACH_WINDOW and tokenizer.bos_token_id is not None
    return "window" if in_windows else "document"


def doublings(trained: int, to: int) -> list[int]:
    """The lengths L/2, L, 2L ... up to the target length, in tokens; L is the original length."""
    lengths = [min(trained // 2, to)]
    while lengths[-1] < to:
        lengths.append(min(2 * lengths[-1], to))
    return lengths


def resolved(lengths: Sequence[Length] | None, trained: int, to: int) -> list[int]:
    """The lengths of a task in tokens, ascending; doublings up to the target length if it sets none."""
    if lengths is None:
        return doublings(trained, to)
    tokens = sorted({relative_length(length, trained) for length in lengths})
    if tokens[0] < 2:
        raise RopepatchError(
            f"lengths must be at least 2 tokens, got {tokens[0]}",
            hint="the first is never scored",
        )
    if tokens[-1] > to:
        raise RopepatchError(
            f"lengths go to {tokens[-1]}, beyond the target length of {to}",
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
    title: ClassVar[str] = "Perplexity"
    identity: ClassVar[tuple[str, ...]] = (
        "stride",
        "bos",
        "text",
        "digest",
        "pieces",
        "tokens",
    )

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

    def prepare(
        self,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        trained: int,
        to: int,
        family: str = "",
    ) -> Measurement:
        """Prepare the text as token ids, in pieces of one length."""
        bos = self.bos or bos_of(family, tokenizer)
        lengths = resolved(self.lengths, trained, to)
        if self.stride is not None and self.lengths is None:
            lengths = [length for length in lengths if length > self.stride] or lengths[
                -1:
            ]
        check_windows(lengths[0] if self.stride else None, self.stride)
        size = 2 * lengths[-1] if self.stride else lengths[-1]
        tales = [] if self.text is not None else self._tales(model, tokenizer, size)
        pieces = [(number, tale.ids) for number, tale in enumerate(tales)]
        if self.text is not None:
            pieces = self._pieces(self.text, tokenizer, size, bos)
        documents, ids = zip(*pieces, strict=True)
        # Also the original length, for the short-context cost.
        known = sorted({*lengths, *([trained] if trained < lengths[-1] else [])})
        edges = _edges(trained, lengths[-1])

        def of_one_pass(curve: LossCurve) -> list[Row]:
            return rows_by_length(curve, known) + rows_by_position(curve, edges)

        # Window and stride of each pass over the text.
        limits: list[tuple[int | None, int | None]] = [(None, None)]
        if self.stride is not None:
            limits = [(length, self.stride) for length in lengths]
        elif self.gain and size > trained:
            limits.append((trained, max(1, trained // 2)))
        sizes = [
            [len(window.ids) for piece in ids for window in windows(0, piece, *limit)]
            for limit in limits
        ]

        def read(
            model: Any, keep: Path | None, advances: Iterator[Advance]
        ) -> list[LossCurve]:
            """The loss curve of each pass."""
            curves = []
            for (window, stride), advance in zip(limits, advances, strict=False):
                options: dict[str, Any] = {
                    "keep": keep,
                    "split": True,
                    "progress": advance,
                }
                options |= {
                    "bos": False,
                    "first": tokenizer.bos_token_id if bos == "window" else None,
                }
                curve = perplexity(
                    model, None, ids, window=window, stride=stride, **options
                )
                curves.append(curve.of_documents(documents))
            return curves

        def run(
            model: Any, tokenizer: Any, keep: Path | None, advance: Advance
        ) -> list[Row]:
            curves = read(model, keep, passes(advance, [*map(sum, sizes)]))
            if self.stride is not None:
                losses = [curve.between(0, size) for curve in curves]
                at = zip(lengths, losses, strict=True)
                return rows_of([("loss", {"length": size}, loss) for size, loss in at])
            curve, *limited = curves
            if not limited:
                return of_one_pass(curve)
            beyond = [edge for edge in edges if edge >= trained]
            gained = rows_by_position(curve.gain_over(*limited), beyond, "gain")
            return of_one_pass(curve) + gained

        parameters = self.model_dump() | {
            "text": self.text or TALES,
            "bos": bos,
            "lengths": lengths,
            "pieces": len(ids),
            "tokens": sum(map(len, ids)),
            "digest": digest(ids),
        }
        exact = LossCurve(tuple(-tale.log_probs()[1:] for tale in tales))
        floor = of_one_pass(exact) if tales and not self.stride else None
        reads = Counter(chain(*sizes))
        return Measurement(self, parameters, run, floor, reads)

    def with_text(self, text: str, field: str, split: str) -> PerplexityTask:
        """The task with another text."""
        return self.model_copy(update={"text": text, "field": field, "split": split})

    def limited(self, limit: int) -> Task:
        """The task with at most ``limit`` windows, or documents if they are not joined."""
        return self.at_most("windows" if self.documents is None else "documents", limit)

    def _tales(
        self, model: str, tokenizer: PreTrainedTokenizerBase, size: int
    ) -> list[Tale]:
        check_text(self.text, model)
        if self.bos == "none":
            raise RopepatchError(
                "the stories of tiny need bos, its beginning-of-sequence token",
                hint=f"add {argument('text')}",
            )
        return held_out_tales(
            tokenizer, length=size, count=self.documents or self.windows or 24
        )

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
        options: dict[str, Any] = {
            "length": size,
            "count": self.documents,
            "bos": bos != "none",
        }
        return list(enumerate(first_documents(tokenizer, documents, **options)))

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


def _edges(trained: int, end: int) -> list[int]:
    """The edges of position bins: half octaves around the original length, from an eighth of it."""
    marks = {round(trained * 2 ** (half / 2)) for half in range(-6, 100)}
    return [0, *sorted(mark for mark in marks if 1 < mark < end), end]


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
        kinds: The kinds of questions; None for `number`, `sentence`, `chain` and `fact`, unless the tokenizer
            cannot write them or the original length is too short, or for `passkey` if keys is 1.
        lengths: The lengths of the prompts, in tokens; None for L/2, L, 2L ... the target length, without
            those too short for the keys. L is the original length.
        haystacks: The number of prompts; None for 10, or 20 of each length if keys is 1.
        keys: Questions of each kind per prompt and length; None for 8, or 1 for tiny, which cannot
            distinguish several keys.
        seed: The random seed of the prompts.
        text: The text around the keys: a file, a folder, a `datasets` id or a saved dataset; None for the
            built-in filler.
        field: The column or key that contains the text of a document.
        split: The split of a dataset.
        form: plain for a plain text prompt, chat for the chat template of the model.
    """

    name: ClassVar[str] = "retrieval"
    title: ClassVar[str] = "Retrieval"
    identity: ClassVar[tuple[str, ...]] = (
        "kinds",
        "haystacks",
        "keys",
        "seed",
        "text",
        "form",
    )

    kinds: Several[Annotated[str, named_in(KINDS)]] | None = None
    lengths: Several[Length] | None = None
    haystacks: Count | None = None
    keys: Count | None = None
    seed: Whole = 0
    text: Text | None = None
    field: Text = "text"
    split: Text = "test"
    form: Literal["plain", "chat"] = "plain"
    # Of prompts, also for the default, which depends on the model
    _limit: int | None = None

    def check(self) -> None:
        """Refuse unknown and duplicate kinds."""
        refuse_unknown(self.kinds or (), KINDS, "kind")
        if self.kinds is not None and len(set(self.kinds)) < len(self.kinds):
            raise RopepatchError(
                f"kinds must differ, got {list(self.kinds)}", hint="leave one out"
            )

    def prepare(
        self,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        trained: int,
        to: int,
        family: str = "",
    ) -> Measurement:
        """Prepare the prompts, at the lengths that have room for the keys."""
        keys = self.keys or (1 if model == "tiny" else 8)
        texts = None
        if self.text is not None:
            documents = stream_documents(self.text, field=self.field, split=self.split)
            texts = [
                document
                for document in islice(documents, DOCUMENTS)
                if isinstance(document, str)
            ]
            if not texts:
                raise RopepatchError(
                    f"{self.text} contains token ids, expected text",
                    hint="use a text, or leave it out",
                )
        count = self.haystacks or (20 if keys == 1 else 10)
        wanted = resolved(self.lengths, trained, to)
        settings: dict[str, Any] = {
            "lengths": wanted,
            "count": min(count, self._limit or count),
            "keys": keys,
            "seed": self.seed,
            "texts": texts,
            "chat": chat_parts(tokenizer) if self.form == "chat" else ("", " "),
        }
        kinds, left_out = (
            self.kinds or (("passkey",) if keys == 1 else None),
            dict[str, str](),
        )
        if (
            kinds is None
        ):  # those that fit into the original length; others would not count
            most = (
                wanted[0]
                if self.lengths
                else max((n for n in wanted if n <= trained), default=wanted[0])
            )
            plan, left_out = Haystacks.by_default(tokenizer, most, **settings)
        else:
            plan = Haystacks(**settings, kinds=kinds)
        lengths, haystacks, error = plan.feasible(tokenizer)
        if error is not None and (self.lengths is not None or not lengths):
            raise error
        parameters = self.model_dump() | {
            "lengths": lengths,
            "haystacks": plan.count,
            "keys": keys,
            "kinds": list(plan.kinds),
            "digest": digest(haystack.ids for haystack in haystacks),
            **({"left_out": left_out} if left_out else {}),
        }

        def run(
            model: Any, tokenizer: Any, keep: Path | None, advance: Advance
        ) -> list[Row]:
            return retrieval_rows(
                ask(model, haystacks, keep=keep, split=True, progress=advance)
            )

        # And up to one whole prompt per length, as a check.
        reads = dict.fromkeys(lengths if keys == 1 else lengths[-1:], plan.count + 1)
        return Measurement(self, parameters, run, reads=reads)

    def limited(self, limit: int) -> Task:
        """The task with at most ``limit`` prompts."""
        limited = self.model_copy()
        limited._limit = limit
        return limited

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


def retrieval_rows(retrieval: Retrieval) -> list[Row]:
    """The accuracy and the log-prob by kind and length, and the accuracy by depth.

    A single kind also gets rows by length only; several kinds are never pooled.
    """
    measured: list[tuple[str, dict[str, Any], Mean]] = []
    for length, kind in product(retrieval.lengths, retrieval.kinds):
        places: list[dict[str, Any]] = [{"kind": kind, "length": length}]
        if len(retrieval.kinds) == 1:
            places.insert(0, {"length": length})
        found, log_prob = (
            retrieval.found(length, kind),
            retrieval.log_prob(length, kind),
        )
        for at in places:
            measured += [("found", at, found), ("log_prob", at, log_prob)]
        asked = [
            a.depth for a in retrieval.answers if (a.length, a.kind) == (length, kind)
        ]
        for number in range(DEPTHS):
            depths = number / DEPTHS, (number + 1) / DEPTHS
            if any(depths[0] < depth <= depths[1] for depth in asked):
                at_depth = places[0] | {"depth": round(sum(depths) / 2, 3)}
                found = retrieval.found(length, kind, depths)
                measured.append(("found", at_depth, found))
    return rows_of(measured)


# lm-eval


NEEDED = (  # metadata that tasks in eval/tasks require
    ("ropepatch_long_perplexity", "text"),
)


class LmEvalTask(Task):
    """Run tasks of lm-eval.

    Args:
        tasks: The names of tasks, in `eval/tasks` or in lm-eval.
        metadata: Metadata for the tasks; `max_seq_lengths` defaults to the target length.
        limit: At most N documents of each task; None for all.
    """

    name: ClassVar[str] = "lm-eval"
    title: ClassVar[str] = "lm-eval"
    identity: ClassVar[tuple[str, ...]] = ("tasks", "limit", "max_length")

    tasks: Several[Text]
    metadata: dict[str, Any] = Field(default_factory=dict)
    limit: Count | None = None

    def prepare(
        self,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        trained: int,
        to: int,
        family: str = "",
    ) -> Measurement:
        """Prepare the metadata of the tasks."""
        if find_spec("lm_eval") is None:
            raise RopepatchError(
                "tasks of lm-eval need lm-eval", hint='pip install "ropepatch[eval]"'
            )
        for task, key in NEEDED:
            if task in self.tasks and not self.metadata.get(key):
                given = f"{argument('text', 'FILE')}, or " if key == "text" else ""
                hint = f"{given}metadata: {{{key}: {key.upper()}}} in the suite"
                raise RopepatchError(f"{task} needs {key}", hint=hint)
        from ropepatch.evaluation.harness import check_tasks

        check_tasks(self.tasks, shipped("eval/tasks"))
        metadata = {"max_seq_lengths": [to]} | self.metadata
        parameters = self.model_dump() | {"metadata": metadata, "max_length": to}
        if "text" in metadata:
            place = {
                key: metadata[key] for key in ("field", "split") if key in metadata
            }
            parameters["digest"] = text_digest(stream_texts(metadata["text"], **place))

        def run(
            model: Any, tokenizer: Any, keep: Path | None, advance: Advance
        ) -> list[Row]:
            from ropepatch.evaluation.harness import run_tasks

            options: dict[str, Any] = {
                "metadata": metadata,
                "limit": self.limit,
                "max_length": to,
            }
            return [
                _row(score)
                for score in run_tasks(
                    model,
                    tokenizer,
                    self.tasks,
                    include_path=shipped("eval/tasks"),
                    **options,
                )
            ]

        return Measurement(self, parameters, run)

    def with_text(self, text: str, field: str, split: str) -> LmEvalTask:
        """The task with another text in its metadata."""
        source = {"text": text, "field": field, "split": split}
        return self.model_copy(update={"metadata": self.metadata | source})

    def limited(self, limit: int) -> Task:
        """The task with at most ``limit`` documents of each task."""
        return self.at_most("limit", limit)

    @classmethod
    def method(cls, parameters: Mapping[str, Any]) -> str:
        """The number of documents and the intervals, in sentences."""
        limit = (
            f", {parameters['limit']:,} documents each"
            if parameters.get("limit")
            else ""
        )
        return f"Tasks of lm-eval{limit}; intervals: 95 %, of shares Wilson's, else from its standard errors."


def _row(score: Mapping[str, Any]) -> Row:
    """A score with its interval: Wilson's for a share of answers, else from lm-eval's standard error."""
    value, error = score["value"], score["stderr"]
    low = high = None
    if score["answers"]:
        low, high = Mean.of(
            [(answer, 1) for answer in score["answers"]], share=True
        ).interval()
    elif value is not None and error is not None:
        low, high = value - NORMAL * error, value + NORMAL * error
    return Row(
        measure=score["metric"],
        at={"task": score["task"], "version": score["version"]},
        value=value,
        low=low,
        high=high,
        n=score["n"] or 0,
    )


TASKS: Registry[Task] = Registry("task", (PerplexityTask, RetrievalTask, LmEvalTask))


def task_of(name: str) -> type[Task]:
    """The task class of a result."""
    return TASKS.find(name)
