"""Retrieval as a task: the share of answers found and their log-probability, by length, kind and depth."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from transformers import PreTrainedTokenizerBase

from ropepatch.data.haystack import KINDS, Haystacks
from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import digest
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.results import Row
from ropepatch.evaluation.retrieval import Retrieval, ask, chat_parts
from ropepatch.evaluation.tasks.task import Advance, Measurement, Task, resolved
from ropepatch.settings import Count, Length, OneOf, Several, Text, Whole, expected

DEPTHS = 5  # stretches of depth that a figure tells apart
DOCUMENTS = 64  # of a text, from which haystacks are made


class RetrievalTask(Task):
    """Ask for what stands in a long text.

    Args:
        kinds: The kinds of questions; None for `number` and `sentence`, or `passkey` where keys is 1.
        lengths: The lengths of the prompts, in tokens; None for L/2, L, 2L ... the target, without those that
            have no room for the keys.
        haystacks: How many long texts, each read once; None for 10, or 20 of each length where keys is 1.
        keys: Questions of each kind, haystack and length; None for 8, or 1 for tiny, which cannot tell keys
            apart.
        seed: From which haystacks are drawn.
        text: What stands around the keys: a file, a folder, a `datasets` id or a saved set; None for
            ropepatch's own filler.
        field: The column or key of a document's text.
        split: The split of a `datasets` id or a saved set.
        form: Whether a prompt is plain text, or a message in the model's own chat template.
    """

    name: ClassVar[str] = "retrieval"
    title: ClassVar[str] = "Retrieval"
    identity: ClassVar[tuple[str, ...]] = ("kinds", "haystacks", "keys", "seed", "text", "form")
    derived: ClassVar[tuple[str, ...]] = ("lengths", "digest")

    kinds: Several[Annotated[str, OneOf(KINDS)]] | None = None
    lengths: Several[Length] | None = None
    haystacks: Count | None = None
    keys: Count | None = None
    seed: Whole = 0
    text: Text | None = None
    field: Text = "text"
    split: Text = "test"
    form: Annotated[Literal["plain", "chat"], expected("plain or chat")] = "plain"

    def check(self) -> None:
        """Refuse a kind that is named twice."""
        if self.kinds is not None and len(set(self.kinds)) < len(self.kinds):
            raise RopepatchError(f"kinds must differ, got {list(self.kinds)}", hint="leave one out")

    def prepare(
        self, model: str, tokenizer: PreTrainedTokenizerBase, *, trained: int, to: int
    ) -> Measurement:
        """The haystacks, at the lengths that have room for the keys."""
        keys = self.keys or (1 if model == "tiny" else 8)
        texts = None
        if self.text is not None:
            documents = stream_documents(self.text, field=self.field, split=self.split)
            texts = [document for document in islice(documents, DOCUMENTS) if isinstance(document, str)]
            if not texts:
                raise RopepatchError(
                    f"{self.text} holds token ids, expected texts", hint="give texts, or leave it out"
                )
        plan = Haystacks(
            lengths=resolved(self.lengths, trained, to),
            count=self.haystacks or (20 if keys == 1 else 10),
            keys=keys,
            kinds=self.kinds or (("passkey",) if keys == 1 else ("number", "sentence")),
            seed=self.seed,
            texts=texts,
            chat=chat_parts(tokenizer) if self.form == "chat" else ("", " "),
        )
        lengths, reason = plan.feasible(tokenizer)
        if reason is not None and (self.lengths is not None or not lengths):
            raise reason
        haystacks = list(plan.at(lengths).make(tokenizer))
        parameters = self.model_dump() | {
            "lengths": lengths,
            "haystacks": plan.count,
            "keys": keys,
            "kinds": list(plan.kinds),
            "digest": digest(haystack.ids for haystack in haystacks),
        }

        def run(model: Any, tokenizer: Any, keep: Path | None, advance: Advance) -> list[Row]:
            return retrieval_rows(ask(model, haystacks, keep=keep, split=True, progress=advance))

        return Measurement(self, parameters, run)

    def limited(self, limit: int) -> RetrievalTask:
        """The same with at most so many haystacks."""
        return self.model_copy(update={"haystacks": min(limit, self.haystacks or limit)})

    @classmethod
    def reads(cls, parameters: Mapping[str, Any]) -> dict[int, float]:
        """Its haystacks, of every length with one key, and one whole prompt more of each as a check."""
        lengths = parameters["lengths"] if parameters["keys"] == 1 else parameters["lengths"][-1:]
        return dict.fromkeys(lengths, parameters["haystacks"] + 1)

    @classmethod
    def method(cls, parameters: Mapping[str, Any]) -> str:
        """What is asked, and what counts."""
        of = parameters
        kinds = "; ".join(f"{kind}: {KINDS[kind].title}" for kind in of["kinds"] if kind in KINDS)
        form = " in the model's chat template" if of["form"] == "chat" else ""
        around = of["text"] or "ropepatch's own filler"
        return (
            f"{of['haystacks']:,} haystacks of {around}{form}, seed {of['seed']}, each read once and asked "
            f"{of['keys']} question{'s' * (of['keys'] > 1)} of each kind at every length. {kinds}. An answer "
            "is found if greedy decoding would give it, to the last token. Intervals: 95 %; Wilson's for the "
            "share found, with the design effect of haystacks; Student's t over haystacks for "
            "log-probabilities."
        )


def retrieval_rows(retrieval: Retrieval) -> list[Row]:
    """The share found and the log-probability by length, also by kind; the share found by depth."""
    rows = []
    for length in retrieval.lengths:
        rows.append(Row.of("found", {"length": length}, retrieval.found(length)))
        rows.append(Row.of("log_prob", {"length": length}, retrieval.log_prob(length)))
        for kind in retrieval.kinds:
            at: dict[str, int | float | str] = {"kind": kind, "length": length}
            rows.append(Row.of("found", at, retrieval.found(length, kind)))
            rows.append(Row.of("log_prob", at, retrieval.log_prob(length, kind)))
        for number in range(DEPTHS):
            depths = number / DEPTHS, (number + 1) / DEPTHS
            if any(a.length == length and depths[0] < a.depth <= depths[1] for a in retrieval.answers):
                middle = round(sum(depths) / 2, 3)
                at_depth = {"length": length, "depth": middle}
                rows.append(Row.of("found", at_depth, retrieval.found(length, depths=depths)))
    return rows
